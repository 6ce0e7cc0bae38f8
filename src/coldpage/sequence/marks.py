"""What the storage is told of a sequence's pages when the sequence lets go of them, by the place of
their blocks: what to evict last, and which page class each is of.
"""

from __future__ import annotations

import numpy as np

from coldpage.block_table import BlockTable
from coldpage.sequence.context import SequenceContext
from coldpage.types import NO_PAGE, Int32Array

__all__ = ["PageMarks"]


class PageMarks:
    """Marks the pages of one block table, which belongs to one sequence."""

    def __init__(self, context: SequenceContext, table: BlockTable) -> None:
        self._context = context
        self._table = table
        self._pages = context.storage.table

    def protect(self) -> None:
        """Mark the first and the newest block: eviction takes the others of this sequence before
        them. What other sequences share keeps the mark they gave it.
        """
        columns, pages = self._table.pages, self._table.live_pages()
        self._pages.is_protected[pages[self._pages.num_refs[pages] == 1]] = False
        for column in (0, self._table.num_blocks - 1):
            if self._table.num_blocks:
                pages = columns[:, column]
                self._pages.is_protected[pages[pages != NO_PAGE]] = True

    def classify(self, history_length: int) -> None:
        """Give the hot pages the classes that they have at this history. What is newest here is
        recent whoever else has it; what is no longer stays recent while another sequence holds it,
        for which it may be the newest.
        """
        num_recent = self._context.num_recent_blocks
        if not num_recent:
            return
        pages = self._table.pages
        first = max(0, history_length // self._context.tokens_per_block - num_recent)
        layer_groups, blocks = np.nonzero(pages[:, first:] != NO_PAGE)
        newest, ordinals = pages[layer_groups, first + blocks], (first + blocks).astype(np.int32)
        wanted = self._context.life_cycles(layer_groups, ordinals)
        is_body = wanted == self._context.body_life_cycle[layer_groups]
        wanted = np.where(is_body, self._context.recent_life_cycle[layer_groups], wanted)
        self._context.storage.copies.change_life_cycles(newest, wanted)
        for layer_group in range(pages.shape[0]):
            self.outgrow(layer_group, pages[layer_group, :first])

    def outgrow(self, layer_group: int, pages: Int32Array) -> Int32Array:
        """This sequence, which holds the pages of one layer group, or none, has grown past them.
        Returns them.
        """
        if self._context.num_recent_blocks:
            body = self._context.body_life_cycle[layer_group]
            is_recent = (
                self._pages.life_cycle[pages] == self._context.recent_life_cycle[layer_group]
            )
            own = pages[is_recent & (self._pages.num_refs[pages] == 1)]
            self._context.storage.copies.change_life_cycles(own, np.full(own.size, body, np.int16))
        return pages
