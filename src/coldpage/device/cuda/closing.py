"""Closing what has several parts, of which any may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["run_all"]


def run_all(steps: Iterable[Callable[[], None]]) -> None:
    """Run every step, whatever the others raise; then raise the first failure, with the others as
    its notes.
    """
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as failure:  # raised below, when nothing is left to be closed
            failures.append(failure)
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(f"closing failed once more: {other!r}")
            for note in getattr(other, "__notes__", ()):
                first.add_note(note)
        raise first
