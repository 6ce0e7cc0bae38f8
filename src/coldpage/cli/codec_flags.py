"""``--host-codec``, ``--disk-codec`` and ``--recent-blocks``: how pages lie in the cold tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from coldpage.codecs import codec_names, create_codec
from coldpage.errors import ConfigurationError

__all__ = ["check_codec_tiers", "codec_flags", "recent_blocks_flag"]

_DEFAULT_CODEC: Final = "concat"
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _checked(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is None or value in codec_names():
        return value
    try:
        create_codec(value, {}).close()
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from error
    return value


class _HostCodec(click.Option):
    """Its help has the names that there are, also those of other packages."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        self.help = (
            "How pages are kept in host memory: a codec, or one with others for some layer groups, "
            f"such as turbo4 or int8,1=concat. Codecs: {', '.join(codec_names())}. The built-in "
            "ones but concat hold more tokens in the same memory and change answers after a "
            "restore a little."
        )
        return super().get_help_record(ctx)


def recent_blocks_flag(text: str) -> Callable[[_Command], _Command]:
    """``--recent-blocks``, as ``num_recent_blocks``. ``text``: what it says of itself."""
    return click.option(
        "--recent-blocks",
        "num_recent_blocks",
        metavar="BLOCKS",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help=text,
    )


def codec_flags(command: _Command) -> _Command:
    """Adds them to a command, which gets them as ``host_codec``, ``disk_codec`` and
    ``num_recent_blocks``.
    """
    host = click.option(
        "--host-codec",
        cls=_HostCodec,
        metavar="CODEC",
        default=_DEFAULT_CODEC,
        show_default=True,
        callback=_checked,
    )
    disk = click.option(
        "--disk-codec",
        metavar="CODEC",
        callback=_checked,
        help="The same on disk, such as --host-codec concat --disk-codec turbo4. [default: as "
        "--host-codec, so that pages are copied from one to the other]",
    )
    recent = recent_blocks_flag(
        "How many of a conversation's newest full blocks, and with them the one that is not full, "
        "built-in codecs leave as they are, until it has grown past them. They take the room of "
        "hot ones, and change answers after a restore less."
    )
    return host(disk(recent(command)))


def check_codec_tiers(
    host_codec: str, disk_codec: str | None, *, has_host: bool, has_disk: bool
) -> None:
    """Raises ``ConfigurationError`` for a codec whose tier is left out. A host codec goes without
    a host tier where the disk's follows it.
    """
    if disk_codec is not None and not has_disk:
        raise ConfigurationError(
            f"--disk-codec {disk_codec}: there is no disk tier (--disk none): leave one of them out"
        )
    if host_codec != _DEFAULT_CODEC and not has_host and (disk_codec is not None or not has_disk):
        both = "" if has_disk else " and no disk tier (--disk none)"
        raise ConfigurationError(
            f"--host-codec {host_codec}: there is no host tier (--host none){both}: "
            "leave one of them out"
        )
