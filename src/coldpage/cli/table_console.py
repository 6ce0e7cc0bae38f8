"""Where commands that measure print their tables."""

from __future__ import annotations

from typing import Final

from rich.console import Console

__all__ = ["table_console"]

# Wide enough for the widest table.
_FILE_COLUMNS: Final = 200


def table_console() -> Console:
    """Of the terminal's own width; where the output is a file, so wide that no table is folded."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_COLUMNS)
