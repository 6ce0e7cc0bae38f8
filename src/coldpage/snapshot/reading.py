"""Restoring sequences from a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import xxhash

from coldpage.config import ReuseScope
from coldpage.errors import OutOfPagesError, SnapshotError, UsageError
from coldpage.manager import KVCacheManager
from coldpage.page import DEFAULT_PRIORITY, check_priority
from coldpage.prefix import root_key
from coldpage.sequence import KVCache, KVCacheStatus
from coldpage.snapshot.format import (
    HEAD_BYTES,
    NO_SAVED_PAGE,
    Origin,
    SavedSequence,
    SnapshotHeader,
    SnapshotIdentity,
    parse_header,
    parse_sizes,
)
from coldpage.snapshot.transfer import PageTransfer, identity_of
from coldpage.types import HalfOpenRange, Int32Array, LayerGroupId, Priority

__all__ = ["read_header", "state_read"]

# Blocks that a sequence grows by: what a sliding window has left behind is free for the next ones.
_CHUNK_BLOCKS: Final = 32
_MAX_HEADER_BYTES: Final = 1 << 30

_WORDS: Final = {
    "model": "another model",
    "tokenizer": "another tokenizer",
    "dtype": "another number type",
    "geometry": "another geometry",
    "codec": "another codec or version of it",
    "provenance": "another choice of lossy codecs",
}
_OF_ORIGIN: Final = ("tokenizer", "dtype")


def read_header(path: str | Path) -> SnapshotHeader:
    """What a file holds, for any model. Raises SnapshotError when it can not be read or is damaged.
    Pages are checked when they are restored.
    """
    path = Path(path)
    with _opened(path) as file:
        return _read_header(file, path)


def state_read(
    manager: KVCacheManager,
    path: str | Path,
    *,
    origin: Origin | None = None,
    scopes: Sequence[ReuseScope] = (ReuseScope(),),
    priority: Priority = DEFAULT_PRIORITY,
) -> list[KVCache]:
    """The sequences of a file as suspended caches, in the order they were saved. Blocks.

    Blocks that the manager has already are shared, not read. Where the hot level has no room for
    all of a sequence, or the file lacks pages of it, the longest prefix that can be had is
    restored: its ``history_length`` says so. Of a file without pages that is what the manager has;
    ``read_header`` gives the tokens to compute. Of a sequence that has outgrown a sliding window
    it is mostly all or 0 tokens: a shorter prefix needs older pages of the window, which are not
    in the file.

    Raises SnapshotError, having restored nothing, when the file is damaged, of another ``origin``
    than is passed, or of a scope that is not one of ``scopes``.
    """
    path = Path(path)
    caches: list[KVCache] = []
    check_priority(priority)
    if not all(isinstance(scope, ReuseScope) for scope in scopes):
        raise UsageError(f"scopes is {scopes!r}: give a list of ReuseScope")
    with _opened(path) as file:
        header = _read_header(file, path)
        _check_identity(manager, header, origin or Origin(), path)
        of_root = {
            root_key(manager.config.model_fingerprint, scope, manager.provenance).hex(): scope
            for scope in scopes
        }
        for saved in header.sequences:
            if saved.scope not in of_root:
                raise SnapshotError(f"{path} was saved under another salt or adapter")
        try:
            with contextlib.closing(PageTransfer(manager)) as transfer:
                pages = _FilePages(file, path, header, transfer)
                for saved in header.sequences:
                    restorer = _Restorer(manager, saved, of_root[saved.scope], priority, pages)
                    caches.append(restorer.restore())
        except BaseException:
            for cache in caches:
                cache.close()
            raise
    return caches


def _opened(path: Path) -> BinaryIO:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        return os.fdopen(fd, "rb", buffering=0)
    except OSError as error:
        raise SnapshotError(f"{path} can not be read ({error.strerror})") from error


def _read_header(file: BinaryIO, path: Path) -> SnapshotHeader:
    try:
        head = file.read(HEAD_BYTES) or b""
        num_bytes = os.fstat(file.fileno()).st_size
        total = parse_sizes(head, str(path))
        if total > min(num_bytes, _MAX_HEADER_BYTES):
            raise _truncated(path)
        rest = bytearray()
        while len(rest) < total - len(head):
            part = file.read(total - len(head) - len(rest))
            if not part:
                raise _truncated(path)
            rest += part
        header = parse_header(head + bytes(rest), str(path))
    except OSError as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{path} can not be read ({error.strerror})") from error
    if num_bytes < total + header.data_bytes:
        raise _truncated(path)
    return header


def _truncated(path: Path) -> SnapshotError:
    return SnapshotError(f"{path} is truncated: its end is missing")


def _check_identity(
    manager: KVCacheManager, header: SnapshotHeader, origin: Origin, path: Path
) -> None:
    expected, found = identity_of(manager, origin), header.identity
    names = expected.differences(found)
    if not names:
        return
    kinds = ", ".join(_difference(name, found, expected) for name in names)
    sentence = f"{path} can not be restored here: it is of {kinds}"
    if all(name in _OF_ORIGIN and not getattr(expected, name) for name in names):
        given = Origin(found.tokenizer, found.dtype)
        sentence += f"; pass origin={given} if its pages are right for this manager"
    raise SnapshotError(sentence)


def _difference(name: str, found: SnapshotIdentity, expected: SnapshotIdentity) -> str:
    there, here = getattr(found, name), getattr(expected, name)
    if name == "dtype" or (name in _OF_ORIGIN and not (there and here)):
        return f"{_WORDS[name]} ({there or 'none named'} there, {here or 'none named'} here)"
    return _WORDS[name]


class _FilePages:
    """The pages of a file, checked as they are read."""

    def __init__(
        self, file: BinaryIO, path: Path, header: SnapshotHeader, transfer: PageTransfer
    ) -> None:
        self.transfer = transfer
        self._file = file
        self._path = path
        self._entries = header.pages
        self._start = file.tell()

    def restore(self, group: LayerGroupId, places: Int32Array, slots: Int32Array) -> None:
        """Bring the pages in these places of the file to hot slots. Raises SnapshotError."""
        order = np.argsort(places, kind="stable")
        places, slots = places[order], slots[order]
        if (self._entries["layer_group"][places] != group).any():
            raise SnapshotError(f"{self._path} is damaged: a page is of another layer group")

        def fill(start: int, stop: int, pages: npt.NDArray[np.uint8]) -> None:
            wanted = places[start:stop]
            offsets = self._entries["offset"][wanted].astype(np.int64)
            cuts = np.flatnonzero(np.diff(offsets) != pages.shape[1]) + 1
            for run, part in zip(np.split(offsets, cuts), np.split(pages, cuts), strict=True):
                self._read(int(run[0]), part)
            for place, page in zip(wanted.tolist(), pages, strict=True):
                if xxhash.xxh3_64_intdigest(page.data) != int(self._entries["checksum"][place]):
                    block = int(self._entries["block"][place])
                    raise SnapshotError(
                        f"{self._path} is damaged: block {block} does not match its checksum"
                    )

        self.transfer.decode(group, slots, fill)

    def _read(self, offset: int, pages: npt.NDArray[np.uint8]) -> None:
        view = memoryview(pages.reshape(-1).data)
        try:
            self._file.seek(self._start + offset)
            while view.nbytes:
                num_bytes = self._file.readinto(view)  # type: ignore[attr-defined]
                if not num_bytes:
                    raise _truncated(self._path)
                view = view[num_bytes:]
        except OSError as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"{self._path} can not be read ({error.strerror})") from error


class _Restorer:
    """Brings one sequence back."""

    def __init__(
        self,
        manager: KVCacheManager,
        saved: SavedSequence,
        scope: ReuseScope,
        priority: Priority,
        pages: _FilePages,
    ) -> None:
        self._manager = manager
        self._saved = saved
        self._scope = scope
        self._priority = priority
        self._pages = pages
        self._per_block = manager.tokens_per_block
        if saved.pages.shape[0] != len(manager.layout.layer_groups):
            raise SnapshotError("the file is damaged: it has other layer groups")

    def restore(self) -> KVCache:
        """The longest prefix that can be had, suspended."""
        limit = min(self._saved.history_length, self._manager.max_sequence_tokens)
        target = self._longest(limit)
        while True:
            cache = self._matched(target)
            reached = self._grow(cache, target)
            if reached == target:
                return cache
            # A shorter prefix may need other pages: begin again.
            cache.close()
            target = self._longest(reached)

    def _longest(self, limit: int) -> int:
        """The most positions, up to ``limit``, all of whose live blocks are in the file or holes;
        all positions or whole blocks.
        """
        whole = [n * self._per_block for n in range(limit // self._per_block, 0, -1)]
        if limit == self._saved.history_length:
            whole = [limit, *whole]
        return next((n for n in whole if self._is_complete(n)), 0)

    def _is_complete(self, num_positions: int) -> bool:
        num_blocks = -(-num_positions // self._per_block)
        if num_blocks > self._saved.pages.shape[1]:
            return False
        lacks = (self._saved.pages == NO_SAVED_PAGE) & ~self._saved.is_hole
        return not (lacks[:, :num_blocks] & self._live(num_positions)).any()

    def _live(self, num_positions: int) -> npt.NDArray[np.bool_]:
        """Which entries [num_layer_groups, num_blocks] a sequence of that length has."""
        groups = self._manager.layout.layer_groups
        live = np.ones((len(groups), -(-num_positions // self._per_block)), np.bool_)
        for row, group in enumerate(groups):
            stale = group.stale_blocks(num_positions, self._per_block)
            live[row, stale.start : stale.stop] = False
        return live

    def _matched(self, target: int) -> KVCache:
        """What the manager has already. Not what comes after a hole, which was computed with it."""
        holes = self._saved.is_hole.any(axis=0)
        first_hole = int(holes.argmax()) if holes.any() else holes.size
        stop = min(self._saved.tokens.size, first_hole * self._per_block)
        if target == 0:
            stop = self._saved.tokens.size
        elif first_hole < holes.size:
            stop = min(stop, target)
        return self._manager.create_kv_cache(
            self._saved.tokens[:stop], scope=self._scope, priority=self._priority
        )

    def _grow(self, cache: KVCache, target: int) -> int:
        """Extend a suspended cache to ``target`` positions; it is suspended again. Returns how many
        there is room for: with fewer than ``target`` the cache is of no use.
        """
        matched = cache.num_committed_tokens
        if matched >= target:
            return target
        with contextlib.suppress(OutOfPagesError):  # what can never be is no room, too
            cache.resume()
        if cache.status is KVCacheStatus.SUSPENDED:
            return matched
        try:
            reached = self._make_room(cache, target)
            if reached == target:
                cache.synchronize()
                self._fill(cache, matched)
                cache.commit(self._saved.tokens[matched : min(target, self._saved.tokens.size)])
        except BaseException:
            cache.close()
            raise
        cache.suspend()
        return reached

    def _make_room(self, cache: KVCache, target: int) -> int:
        """Blank hot pages for as many positions as there is room for, holes left out."""
        at, step = cache.history_length, _CHUNK_BLOCKS * self._per_block
        while at < target:
            stop = min(target, (at // self._per_block) * self._per_block + step)
            if stop > cache.max_capacity or not cache.resize(stop, stop):
                if step == self._per_block:
                    break
                step = max(self._per_block, step // 2 // self._per_block * self._per_block)
                continue
            self._drop_holes(cache, at // self._per_block, stop // self._per_block)
            at = stop
        return at

    def _drop_holes(self, cache: KVCache, first: int, stop: int) -> None:
        for group, block in np.argwhere(self._saved.is_hole[:, first:stop]).tolist():
            start = (first + block) * self._per_block
            cache.drop_blocks(HalfOpenRange(start, start + self._per_block), LayerGroupId(group))

    def _fill(self, cache: KVCache, matched: int) -> None:
        """Fill the pages that are new, and those that were matched and got lost on their way."""
        groups = [LayerGroupId(row) for row in range(self._saved.pages.shape[0])]
        lost = {group: cache.missing_blocks(group) for group in groups}
        is_lacking = (self._saved.pages == NO_SAVED_PAGE).astype(np.bool_)
        hopeless = {b for group, blocks in lost.items() for b in blocks if is_lacking[group, b]}
        found = sorted({b for blocks in lost.values() for b in blocks} - hopeless)
        for group in groups:
            slots, places = cache.page_indices(group), self._saved.pages[group]
            fresh = np.arange(matched // self._per_block, slots.size)
            fresh = fresh[slots[fresh] >= 0]
            again = np.array([b for b in lost[group] if b in found], np.int64)
            blocks = np.union1d(fresh, again).astype(np.int64)
            self._pages.restore(group, places[blocks], slots[blocks])
        if found:
            cache.fill_missing(found)
