"""``--device``: which machine a command computes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from coldpage.device.opening import AUTO_DEVICE, cuda_index
from coldpage.errors import ConfigurationError

__all__ = ["device_flag"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        cuda_index(value)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from error
    return value


def device_flag(command: _Command) -> _Command:
    """Adds the flag to a command, which gets it as ``device``: a name for ``open_device``."""
    return click.option(
        "--device",
        metavar="DEVICE",
        default=AUTO_DEVICE,
        show_default=True,
        callback=_checked,
        help="auto, cpu, cuda or cuda:N; auto: the first GPU where there is one.",
    )(command)
