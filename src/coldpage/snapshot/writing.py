"""Saving sequences to a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import xxhash

from coldpage.errors import SnapshotError, UsageError
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCache, KVCacheStatus
from coldpage.sequence.inspection import block_pages, scope_key
from coldpage.snapshot.format import (
    NO_SAVED_PAGE,
    PAGE_ENTRY,
    Origin,
    SavedSequence,
    SnapshotHeader,
    header_bytes_of,
    pack_header,
)
from coldpage.snapshot.transfer import PageTransfer, identity_of
from coldpage.store.sidecar import sync_directory
from coldpage.types import NO_PAGE, Int32Array, LayerGroupId

__all__ = ["state_write"]

_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def state_write(
    manager: KVCacheManager,
    caches: Sequence[KVCache],
    path: str | Path,
    *,
    include_pages: bool = True,
    origin: Origin | None = None,
    labels: Sequence[str] = (),
) -> int | None:
    """Save suspended sequences to one file, which is replaced whole or not at all, and survives a
    power cut when this returns. Blocks. Returns the bytes written, or None, having written nothing,
    when a sequence does not fit the hot level now.

    Pages that several of them share are stored once. Without ``include_pages`` only tokens are
    kept, and whoever restores them computes the pages again. ``labels`` are kept with the
    sequences, for the caller.

    Raises SnapshotError when the file can not be written.
    """
    for cache in caches:
        if cache.status is not KVCacheStatus.SUSPENDED:
            raise UsageError("only a suspended KV cache can be saved: suspend it first")
    names = [*labels, *[""] * (len(caches) - len(labels))]
    identity = identity_of(manager, origin or Origin())
    plan = _Plan(manager, caches, include_pages)
    header = SnapshotHeader(
        identity,
        include_pages,
        tuple(
            SavedSequence(
                name,
                scope_key(cache).hex(),
                cache.history_length,
                cache.tokens.copy(),
                table,
                is_hole,
            )
            for cache, name, table, is_hole in zip(
                caches, names, plan.tables, plan.holes, strict=True
            )
        ),
        plan.entries,
        plan.data_bytes,
    )
    path = Path(path)
    try:
        with _new_file(path) as (file, finish):
            file.seek(header_bytes_of(header))
            if include_pages and not plan.write_pages(file):
                return None
            file.seek(0)
            file.write(pack_header(header))
            finish()
    except OSError as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{path} can not be written ({error.strerror or error})") from error
    return header_bytes_of(header) + plan.data_bytes


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[tuple[BinaryIO, _Finish]]:
    """A private file that takes its name when it is finished, and is gone otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)  # an earlier process of this id was killed
    fd = os.open(temporary, _NEW_FILE, 0o600)
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


class _Plan:
    """Which pages go into the file, and where. Pages that are lost are found out while writing."""

    def __init__(
        self, manager: KVCacheManager, caches: Sequence[KVCache], include_pages: bool
    ) -> None:
        self._manager = manager
        self._caches = caches
        self._place: dict[tuple[int, int], int] = {}  # page and layer group -> place in the file
        self._placed: list[tuple[int, int]] = []  # layer group and block, by place
        self.tables: list[Int32Array] = []
        self.holes: list[npt.NDArray[np.bool_]] = []
        for cache in caches:
            pages = block_pages(cache)
            pages = pages[:, : -(-cache.history_length // manager.tokens_per_block)]
            table = np.full(pages.shape, NO_SAVED_PAGE, np.int32)
            if include_pages:
                self._place_pages(pages, table)
            self.tables.append(table)
            is_hole = np.zeros(pages.shape, np.bool_)
            for group in range(pages.shape[0]):
                is_hole[group, cache.holes(LayerGroupId(group))] = True
            self.holes.append(is_hole)
        self.entries = np.zeros(len(self._placed), PAGE_ENTRY)
        self.data_bytes = self._lay_out() if self._placed else 0

    def _place_pages(self, pages: Int32Array, table: Int32Array) -> None:
        for group, block in np.argwhere(pages != NO_PAGE).tolist():
            key = int(pages[group, block]), group
            if key not in self._place:
                self._place[key] = len(self._placed)
                self._placed.append((group, block))
            table[group, block] = self._place[key]

    def _lay_out(self) -> int:
        self.entries["layer_group"], self.entries["block"] = np.array(self._placed).T
        with contextlib.closing(PageTransfer(self._manager)) as transfer:
            num_groups = len(self._manager.layout.layer_groups)
            size_of = np.array([transfer.page_bytes(LayerGroupId(g)) for g in range(num_groups)])
        sizes = size_of[self.entries["layer_group"]]
        self.entries["offset"] = np.cumsum(sizes) - sizes
        return int(sizes.sum())

    def write_pages(self, file: BinaryIO) -> bool:
        """Append all pages and note their checksums; False when a sequence does not fit now."""
        written = np.zeros(len(self._placed), np.bool_)
        start = file.tell()
        with contextlib.closing(PageTransfer(self._manager)) as transfer:
            for index, cache in enumerate(self._caches):
                if not cache.resume():
                    return False
                try:
                    cache.synchronize()
                    self._forget_lost(index, cache, written)
                    for group in range(self.tables[index].shape[0]):
                        self._write_group(file, start, transfer, index, group, written)
                finally:
                    cache.suspend()
        file.truncate(start + self.data_bytes)
        return True

    def _forget_lost(self, index: int, cache: KVCache, written: npt.NDArray[np.bool_]) -> None:
        """Blocks whose contents could not be brought back are not in the file."""
        table = self.tables[index]
        for group in range(table.shape[0]):
            lost = [b for b in cache.missing_blocks(LayerGroupId(group)) if b < table.shape[1]]
            is_unsaved = ~written[np.maximum(table[group, lost], 0)]
            table[group, np.array(lost, np.int64)[is_unsaved]] = NO_SAVED_PAGE
            holes = cache.holes(LayerGroupId(group))
            self.holes[index][group, holes] = True
            table[group, holes] = NO_SAVED_PAGE

    def _write_group(
        self,
        file: BinaryIO,
        start: int,
        transfer: PageTransfer,
        index: int,
        group: int,
        written: npt.NDArray[np.bool_],
    ) -> None:
        row = self.tables[index][group]
        blocks = np.flatnonzero(row != NO_SAVED_PAGE)
        blocks = blocks[~written[row[blocks]]]
        slots = self._caches[index].page_indices(LayerGroupId(group))[blocks]
        assert slots.size == 0 or slots.min() >= 0, "a page that is ready is hot"
        places = row[blocks]
        done = 0
        for pages in transfer.encode(LayerGroupId(group), slots):
            batch = places[done : done + len(pages)]
            self.entries["checksum"][batch] = [xxhash.xxh3_64_intdigest(p.data) for p in pages]
            # New places ascend and follow each other, but for gaps that others have filled.
            cuts = np.flatnonzero(np.diff(batch) != 1) + 1
            for run, part in zip(np.split(batch, cuts), np.split(pages, cuts), strict=True):
                file.seek(start + int(self.entries["offset"][run[0]]))
                file.write(part.data)
            written[batch] = True
            done += len(pages)
