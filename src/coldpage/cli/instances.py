"""What the instances of a disk tier hold, told without opening or changing any of them, and their
removal.
"""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from coldpage.errors import StorageError
from coldpage.store import InstanceIdentity, InstanceInfo, list_instances, slot_bytes_of
from coldpage.store.format import SECTOR_BYTES, SlotHeader, parse_header
from coldpage.store.instance import LOCK_NAME
from coldpage.store.sidecar import SIDECAR_NAME, read_sidecar

__all__ = ["InstanceReport", "look_at_instances", "remove_instance"]

_POOL_FILES: Final = "pool-*.slots"
_HEADER_BYTES_AT: Final = slice(8, 12)  # of a slot's header: how long it is
_MAX_HEADER_BYTES: Final = 1 << 20
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """One instance, in numbers. ``num_damaged`` slots have a header that is neither good nor blank;
    None where an index was read instead of the headers.
    """

    instance_id: str
    directory: str
    model: str  # the beginning of its fingerprint; empty: unknown
    codec: str
    num_blocks: int
    num_tokens: int
    num_pages: int
    disk_bytes: int  # that the files take
    oldest: str  # when the oldest page was written, ISO 8601, UTC; empty: no page
    num_damaged: int | None
    locked_by: str  # process and command; empty: nobody

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {name: getattr(self, name) for name in self.__slots__}


class _Tally:
    """Counts pages, and the blocks they belong to."""

    def __init__(self) -> None:
        self.tokens_of: dict[bytes, int] = {}
        self.num_pages = 0
        self.oldest_ns: int | None = None
        self.num_damaged: int | None = 0

    def add(self, key: bytes, num_tokens: int, written_ns: int) -> None:
        if not any(key):
            return  # nobody can ask for it
        self.tokens_of[key] = num_tokens
        self.num_pages += 1
        self.oldest_ns = written_ns if self.oldest_ns is None else min(self.oldest_ns, written_ns)


def look_at_instances(path: Path) -> list[InstanceReport]:
    """A report of every instance below ``path``. Raises StorageError when it can not be read."""
    if not path.is_dir():
        raise StorageError(f"there is no directory {path}")
    try:
        return [_look_at(info) for info in list_instances(path)]
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path} can not be read ({error.strerror or error})") from error


def _look_at(info: InstanceInfo) -> InstanceReport:
    identity, pools = _identity_of(info), sorted(info.directory.glob(_POOL_FILES))
    pools = [pool for pool in pools if pool.is_file() and not pool.is_symlink()]
    tally = _Tally()
    has_index = (info.directory / SIDECAR_NAME).is_file() and identity is not None
    index = read_sidecar(info.directory, identity.digest) if has_index and identity else None
    if index is not None:
        tally.num_damaged = None
        names = ("key", "num_tokens", "write_number")
        for row in zip(*(index.entries[name].tolist() for name in names), strict=True):
            tally.add(*row)
    else:
        for pool in pools:
            _scan(pool, tally)
    holder = info.holder
    who = f"process {holder.pid} ({holder.command})" if holder else "another process"
    return InstanceReport(
        info.instance_id,
        str(info.directory),
        "" if identity is None else identity.model_fingerprint.hex()[:16],
        "" if identity is None else identity.codec,
        len(tally.tokens_of),
        sum(tally.tokens_of.values()),
        tally.num_pages,
        sum(pool.stat().st_blocks * 512 for pool in pools),
        "" if tally.oldest_ns is None else _time(tally.oldest_ns),
        tally.num_damaged,
        who if info.is_locked else "",
    )


def _time(written_ns: int) -> str:
    return datetime.fromtimestamp(written_ns / _NS, UTC).isoformat(timespec="seconds")


def _identity_of(info: InstanceInfo) -> InstanceIdentity | None:
    said = info.identity or {}
    try:
        return InstanceIdentity(
            bytes.fromhex(str(said["model_fingerprint"])), str(said["codec"]), str(said["geometry"])
        )
    except (KeyError, ValueError):
        return None


def _scan(pool: Path, tally: _Tally) -> None:
    """Count what the headers of a file say. Its slots are as long as its first good one says."""
    with open(pool, "rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        at, step, is_known = 0, SECTOR_BYTES, False
        while at + SECTOR_BYTES <= num_bytes:
            head = os.pread(file.fileno(), SECTOR_BYTES, at)
            found = _parse(file.fileno(), at, head)
            if found is not None:
                stride, header = found
                if not is_known:
                    step, is_known = stride, True
                tally.add(header.name.key, len(header.name.tokens), header.write_number)
            elif is_known and any(head):
                tally.num_damaged = (tally.num_damaged or 0) + 1
            at += step


def _parse(fd: int, at: int, head: bytes) -> tuple[int, SlotHeader] | None:
    """The slot's size and its header, if there is a good one at this place."""
    header_bytes = int.from_bytes(head[_HEADER_BYTES_AT], "little")
    if not SECTOR_BYTES <= header_bytes <= _MAX_HEADER_BYTES or header_bytes % SECTOR_BYTES:
        return None
    if header_bytes > SECTOR_BYTES:
        head += os.pread(fd, header_bytes - SECTOR_BYTES, at + SECTOR_BYTES)
    if len(head) < header_bytes:
        return None
    parsed = parse_header(np.frombuffer(bytearray(head), np.uint8))
    if parsed is None:
        return None
    stride = slot_bytes_of(parsed[0])
    return (stride, parsed[1]) if parsed[1].slot * stride == at else None


def remove_instance(directory: Path) -> bool:
    """Remove an instance's files and its directory, unless somebody has it open: then False.

    Raises StorageError when something in it can not be removed, or is not coldpage's.
    """
    try:
        return _remove(directory)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{directory} can not be removed ({error.strerror or error})") from error


def _remove(directory: Path) -> bool:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory / LOCK_NAME, flags, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        files = [entry for entry in directory.iterdir() if entry.name != LOCK_NAME]
        odd = [f for f in files if not stat.S_ISREG(f.stat(follow_symlinks=False).st_mode)]
        if odd:
            raise StorageError(f"{odd[0]} is not of coldpage: nothing was removed")
        for file in files:
            file.unlink()
        # Last, while it is held: whoever waits for it sees that its name has gone.
        (directory / LOCK_NAME).unlink()
        directory.rmdir()
    finally:
        os.close(fd)
    return True
