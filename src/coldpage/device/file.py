"""One preallocated file, read and written past the page cache where possible."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import queue
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.errors import StorageError

__all__ = ["DIRECT_ALIGNMENT", "MAX_TRANSFERS", "BlockFile", "Buffer"]

_log = logging.getLogger(__name__)

# What O_DIRECT asks of addresses, offsets and lengths on disks with 4 KiB sectors.
DIRECT_ALIGNMENT: Final = 4096

# Reads of one file in the kernel at once, and as many writes, whatever the number of threads: eight
# O_DIRECT reads of 64 KiB in flight saturate a local SSD; more only add latency.
MAX_TRANSFERS: Final = 8

# The kernel refuses more buffers in one preadv or pwritev (IOV_MAX).
_MAX_BUFFERS: Final = 1024

# One-dimensional bytes.
Buffer = memoryview | npt.NDArray[np.uint8]


class BlockFile:
    """A file of exactly ``num_bytes``, mode 0600, whose space is taken when it is opened or grows.

    With ``is_direct``, buffers must have addresses, lengths and offsets that are multiples of
    ``DIRECT_ALIGNMENT``. Any thread may read and write, ``MAX_TRANSFERS`` each way at a time.
    Ranges in flight at once must not overlap.
    A subclass injects faults by overriding ``_read_some`` and ``_write_some``.
    """

    def __init__(self, path: str | Path, num_bytes: int) -> None:
        """Open or create the file. Raises StorageError, and leaves no new file, when it can not."""
        assert num_bytes > 0, "a block file holds at least one block"
        assert num_bytes % DIRECT_ALIGNMENT == 0, "a block file holds whole blocks"
        self.path = Path(path)
        self.num_bytes = num_bytes
        self.is_direct = False
        self._read_turns = _turns()
        self._write_turns = _turns()
        is_new = not self.path.exists()
        self._fd = self._open(0)
        try:
            self._take_space(0, num_bytes)
            self._try_direct()
        except BaseException:
            self.close()
            if is_new:
                self.path.unlink(missing_ok=True)
            raise

    def readv(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill the [n] byte buffers from ``offset`` on; blocks. Raises OSError on any failure."""
        self._transfer(offset, buffers, is_write=False)

    def writev(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the [n] byte buffers at ``offset``; blocks. After OSError the range may be torn."""
        self._transfer(offset, buffers, is_write=True)

    def resize(self, num_bytes: int) -> None:
        """Cut off the end, or take the space for more, which reads as zeros; blocks.

        Nothing may be in flight on what is cut off. Raises StorageError, changing nothing, when
        there is no room.
        """
        assert num_bytes > 0, "a block file holds at least one block"
        assert num_bytes % DIRECT_ALIGNMENT == 0, "a block file holds whole blocks"
        try:
            self._take_space(self.num_bytes, num_bytes)
        except StorageError:
            os.ftruncate(self._fd, self.num_bytes)  # a part of the space may have been taken
            raise
        self.num_bytes = num_bytes

    def sync(self) -> None:
        """Block until completed writes survive a power cut. Raises OSError if they may not."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        """One system call: how many bytes it read."""
        return os.preadv(self._fd, buffers, offset)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        """One system call: how many bytes it wrote."""
        return os.pwritev(self._fd, buffers, offset)

    def _transfer(self, offset: int, buffers: Sequence[Buffer], *, is_write: bool) -> None:
        left = [b if isinstance(b, memoryview) else b.data for b in buffers if len(b)]
        assert offset >= 0, "an offset into the file"
        assert offset + sum(map(len, left)) <= self.num_bytes, "a range inside the file"
        transfer = self._write_some if is_write else self._read_some
        turns = self._write_turns if is_write else self._read_turns
        while left:
            turns.get()
            try:
                num_moved = transfer(left[:_MAX_BUFFERS], offset)
            finally:
                turns.put(None)
            if self.is_direct:
                # The next call must start aligned too: move a torn block again, whole.
                num_moved -= num_moved % DIRECT_ALIGNMENT
            if num_moved == 0:
                verb = "write to" if is_write else "read from"
                raise OSError(errno.EIO, f"{verb} {self.path} stopped at byte {offset:,}")
            offset += num_moved
            left = _skip(left, num_moved)

    def _open(self, extra_flags: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | extra_flags
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise StorageError(self._open_sentence(error)) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StorageError(f"{self.path} is no regular file: remove it or choose another path")
        return fd

    def _open_sentence(self, error: OSError) -> str:
        parent = self.path.parent
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return f"the directory {parent} does not exist: create it or choose another path"
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            return (
                f"{self.path} is not writable ({error.strerror}): "
                "change its owner or mode, or choose another path"
            )
        if error.errno == errno.ELOOP:
            return f"{self.path} is a symbolic link: remove it or choose another path"
        return f"{self.path} can not be opened ({error.strerror}): choose another path"

    def _take_space(self, taken_bytes: int, num_bytes: int) -> None:
        try:
            os.fchmod(self._fd, 0o600)
            if os.fstat(self._fd).st_size > num_bytes:
                os.ftruncate(self._fd, num_bytes)
            if num_bytes > taken_bytes:
                os.posix_fallocate(self._fd, taken_bytes, num_bytes - taken_bytes)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise StorageError(
                    f"{self.path.parent} has no room for {num_bytes:,} bytes "
                    f"({error.strerror}): free some space, make the disk tier smaller, "
                    "or choose another path"
                ) from error
            raise StorageError(
                f"{self.path} can not be sized to {num_bytes:,} bytes ({error.strerror}): "
                "choose another path"
            ) from error

    def _try_direct(self) -> None:
        """Switch to O_DIRECT when one block survives a real read and write through it."""
        buffered_fd = self._fd
        try:
            self._fd = self._open(os.O_DIRECT)
        except StorageError as error:
            self._log_buffered(error)
            return
        self.is_direct = True
        with mmap.mmap(-1, DIRECT_ALIGNMENT) as probe, memoryview(probe) as block:
            try:
                os.preadv(self._fd, [block], 0)
                os.pwritev(self._fd, [block], 0)  # what was there: the file may hold pages
            except OSError as error:
                self.is_direct = False
                os.close(self._fd)
                self._fd = buffered_fd
                self._log_buffered(error)
                return
        os.close(buffered_fd)

    def _log_buffered(self, error: OSError) -> None:
        _log.warning(
            "%s has no O_DIRECT (%s): the page cache is used, and counts as memory",
            self.path,
            error,
        )


def _turns() -> queue.SimpleQueue[None]:
    """Whoever takes one may call the kernel, and puts it back. A semaphore of Python's takes thirty
    times as long.
    """
    turns: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(MAX_TRANSFERS):
        turns.put(None)
    return turns


def _skip(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The buffers without their first ``num_bytes`` bytes."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []
