"""Which blocks of a sequence have their pages, which lack them, and which are holes on purpose."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coldpage.block_table import BlockTable
from coldpage.sequence.context import DroppedBlocks, SequenceContext
from coldpage.types import NO_PAGE, BlockOrdinal, HalfOpenRange, Int32Array

__all__ = ["Coverage"]

_Entries = npt.NDArray[np.bool_]  # [num_layer_groups, num_blocks]


class Coverage:
    """Questions about one block table, pure, and the few changes that follow from them."""

    def __init__(self, context: SequenceContext, table: BlockTable) -> None:
        self._context = context
        self._table = table

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks that many positions touch."""
        return -(-num_tokens // self._context.tokens_per_block)

    def lacking(self, history_length: int) -> _Entries:
        """Entries that should have a page at that history and have none."""
        lacking: _Entries = self._table.pages == NO_PAGE
        if not lacking.any():  # asked for each block that a sequence grows by
            return lacking
        lacking &= ~self._table.is_hole
        for layer_group, group in enumerate(self._context.layer_groups):
            stale = group.stale_blocks(history_length, self._context.tokens_per_block)
            lacking[layer_group, stale.start : stale.stop] = False
        return lacking

    def missing(self, history_length: int) -> _Entries:
        """Entries of the history whose contents are lost, as far as blocks are written."""
        is_missing = self._context.storage.table.is_missing[self._table.pages]
        return (is_missing | self.lacking(history_length))[:, : self.num_blocks(history_length)]

    def whole_and_cut(self, positions: HalfOpenRange, history_length: int) -> DroppedBlocks:
        """The blocks that lie wholly in a range of written positions, and those cut in part. The
        last block is whole only when it is full: it would still be written to.
        """
        per_block = self._context.tokens_per_block
        start, stop = max(0, positions.start), min(positions.stop, history_length)
        if start >= stop:
            return DroppedBlocks((), ())
        first, last = -(-start // per_block), stop // per_block
        touched = range(start // per_block, self.num_blocks(stop))
        return DroppedBlocks(
            tuple(BlockOrdinal(b) for b in touched if first <= b < last),
            tuple(BlockOrdinal(b) for b in touched if not first <= b < last),
        )

    def make_holes(self, entries: _Entries) -> Int32Array:
        """Turn entries of the first blocks into holes; returns the pages they had."""
        padded = np.zeros(self._table.pages.shape, np.bool_)
        padded[:, : entries.shape[1]] = entries
        return self._table.make_holes(padded)

    def leave_missing_tail(self, history_length: int) -> Int32Array:
        """Let go of a lost last page that others share and of which this sequence can recompute
        only a part, and return it: theirs may be longer.
        """
        per_block = self._context.tokens_per_block
        entries = self._table.pages[:, history_length // per_block :][:, :1]
        if history_length % per_block == 0:
            entries = entries[:, :0]
        return self._leave_missing_shared(entries)

    def leave_missing_after_holes(self) -> Int32Array:
        """Let go of lost pages after a hole that others share, and return them: what this sequence
        recomputes there is not what their tokens say.
        """
        is_hole = self._table.is_hole.any(axis=0)
        if not is_hole.any():
            return np.zeros(0, np.int32)
        return self._leave_missing_shared(self._table.pages[:, int(is_hole.argmax()) :])

    def _leave_missing_shared(self, entries: Int32Array) -> Int32Array:
        table = self._context.storage.table
        is_shared = (table.num_refs[entries] > 1) | (table.node[entries] != 0)
        is_left = table.is_missing[entries] & is_shared
        left: Int32Array = entries[is_left]
        entries[is_left] = NO_PAGE
        return left

    def fill_from(self, history_length: int) -> _Entries:
        """The block that position ``history_length`` falls into, and all after it, will be written:
        they can be no holes. Returns what they were, for ``reopen_holes``.
        """
        tail = self._table.is_hole[:, history_length // self._context.tokens_per_block :]
        before = tail.copy()
        tail[:] = False
        return before

    def reopen_holes(self, before: _Entries) -> None:
        """Undo ``fill_from``; the table has as many blocks as it had then."""
        self._table.is_hole[:, self._table.num_blocks - before.shape[1] :] = before
