"""Saving sequences to a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from coldpage.errors import ClosedError, SnapshotError, UsageError
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
from coldpage.snapshot.new_file import NO_SPACE_ERRORS, new_file
from coldpage.snapshot.transfer import PageTransfer, identity_of
from coldpage.types import NO_PAGE, Int32Array, LayerGroupId

__all__ = ["state_write"]


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
    kept, and whoever restores them computes the pages again. Lost blocks are not in the file: of a
    sequence whose first block is lost 0 tokens are restored, and ``read_header`` has them all.
    ``labels`` are kept with the sequences, for the caller.

    Raises SnapshotError when the file can not be written; its ``errno`` is the system's.
    """
    _check_call(manager, caches, labels)
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
        with new_file(path) as (file, finish):
            file.seek(header_bytes_of(header))
            if include_pages and not plan.write_pages(file):
                return None
            file.seek(0)
            file.write(pack_header(header))
            finish()
    except OSError as error:
        if isinstance(error, SnapshotError):
            raise
        raise _unwritten(path, error) from error
    return header_bytes_of(header) + plan.data_bytes


def _check_call(manager: KVCacheManager, caches: Sequence[KVCache], labels: Sequence[str]) -> None:
    for cache in caches:
        if not manager.owns(cache):
            raise UsageError(
                "a KV cache of another manager can not be saved: pass the manager that made it"
            )
        if cache.status is KVCacheStatus.CLOSED:
            raise ClosedError("a closed KV cache can not be saved: save it before it is closed")
        if cache.status is not KVCacheStatus.SUSPENDED:
            raise UsageError("only a suspended KV cache can be saved: suspend it first")
    if len(labels) > len(caches):
        raise UsageError(
            f"{len(labels)} labels were given for {len(caches)} KV caches: give each one at most"
        )


def _unwritten(path: Path, error: OSError) -> SnapshotError:
    reason = f"{path} can not be written"
    if isinstance(error, FileNotFoundError) and not os.path.exists(path.parent):
        failed = SnapshotError(f"{reason}: create the directory {path.parent} first")
    elif error.errno in NO_SPACE_ERRORS:
        failed = SnapshotError(f"{reason} ({error.strerror}): free space there or save elsewhere")
    else:
        failed = SnapshotError(f"{reason} ({error.strerror or error})")
    failed.errno = error.errno
    return failed


class _Plan:
    """Which pages go into the file, and where. Others may turn out to be lost while writing."""

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
            for group in range(pages.shape[0]):
                pages[group, cache.missing_blocks(LayerGroupId(group))] = NO_PAGE
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
            lost = np.array(cache.missing_blocks(LayerGroupId(group)), np.int64)
            lost = lost[table[group, lost] != NO_SAVED_PAGE]
            table[group, lost[~written[table[group, lost]]]] = NO_SAVED_PAGE
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
