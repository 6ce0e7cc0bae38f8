"""Files that are replaced whole or not at all, and what writers that were killed left of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from coldpage.store.sidecar import sync_directory

__all__ = ["NO_SPACE_ERRORS", "new_file"]

# Errors of the system that end when somebody frees space.
NO_SPACE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

_SUFFIX: Final = ".new"


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[tuple[BinaryIO, _Finish]]:
    """A private file that takes its name when it is finished, and is gone otherwise. What writers
    of that name left when they were killed is removed first. Raises OSError.
    """
    _remove_leftovers(path)
    fd, temporary = _create(path)
    with os.fdopen(fd, "w+b") as file:
        finish = _Finish(file, temporary, path)
        try:
            yield file, finish
        finally:
            if not finish.is_done:
                temporary.unlink(missing_ok=True)


class _Finish:
    """Makes a new file durable under its name."""

    def __init__(self, file: BinaryIO, temporary: Path, path: Path) -> None:
        self.is_done = False
        self._file = file
        self._temporary = temporary
        self._path = path

    def __call__(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self._path)
        self.is_done = True
        sync_directory(self._path.parent)


def _prefix(path: Path) -> str:
    return f".{path.name}."


def _create(path: Path) -> tuple[int, Path]:
    """A new file with a name of its own. Its lock tells others, in any process, that somebody
    writes it; where there are no locks nobody can take one to remove it either.
    """
    while True:
        fd, name = tempfile.mkstemp(_SUFFIX, _prefix(path), path.parent)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, Path(name)
        os.close(fd)  # it was taken for a leftover before it was locked


def _remove_leftovers(path: Path) -> None:
    """Remove unfinished files of that name whose writers are no more, as far as that is allowed."""
    pattern = re.compile(re.escape(_prefix(path)) + "[a-z0-9_]{8}" + re.escape(_SUFFIX))
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if pattern.fullmatch(name):
                _remove_unless_locked(path.with_name(name))


def _remove_unless_locked(leftover: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
        finally:
            os.close(fd)
