"""Failures that people read: one sentence on the error stream, never a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import click

from coldpage.errors import ColdpageError

__all__ = ["end_with", "failures_as_sentences"]


def end_with(sentence: str, exit_code: int = 2) -> NoReturn:
    """Prints the sentence and ends the command; status 2 where the user can change a setting."""
    click.echo(f"coldpage: {sentence}", err=True)
    raise click.exceptions.Exit(exit_code)


@contextlib.contextmanager
def failures_as_sentences() -> Iterator[None]:
    """Ends the command, status 2, on every expected failure of the block."""
    try:
        yield
    except ColdpageError as error:
        end_with(str(error))
