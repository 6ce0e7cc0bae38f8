"""The part of a document that a command writes: between two comments that name the command."""

from __future__ import annotations

import os
from pathlib import Path

from coldpage.errors import ConfigurationError

__all__ = ["check_document", "replace_generated", "section_marks"]


def section_marks(command: str) -> tuple[str, str]:
    """The comments around what ``command`` writes. A comment can not hold two dashes."""
    name = " ".join(word.removeprefix("--") for word in command.split())
    return f"<!-- begin: {name} -->", f"<!-- end: {name} -->"


def replace_generated(path: Path, command: str, text: str) -> None:
    """Put ``text`` where ``command`` has its place. Raises ConfigurationError, changing nothing,
    where there is no such place, or more than one.
    """
    before, after = _around(path, command)
    path.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


def check_document(path: Path, command: str) -> None:
    """Before minutes are spent. Raises as ``replace_generated`` does."""
    _around(path, command)
    if not os.access(path, os.W_OK):
        raise ConfigurationError(f"the document {path} can not be written")


def _around(path: Path, command: str) -> tuple[str, str]:
    """The document up to the first comment, and from the second on."""
    begin, end = section_marks(command)
    try:
        document = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the document {path} can not be read: {error}") from error
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ConfigurationError(
            f"{path} has no place for this table: write the lines {begin} and {end} once each"
        )
    first, stop = document.index(begin) + len(begin), document.index(end)
    if stop < first:
        raise ConfigurationError(f"{path} has the line {end} before {begin}: exchange them")
    return document[:first], document[stop:]
