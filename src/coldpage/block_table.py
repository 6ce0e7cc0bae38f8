"""From the logical to the physical: which page holds which block of a sequence, by layer group."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.types import NO_PAGE, Int32Array

__all__ = ["BlockTable"]

_INITIAL_BLOCKS: Final = 16


def _without_gaps(pages: Int32Array) -> Int32Array:
    found: Int32Array = pages[pages != NO_PAGE]
    return found


class BlockTable:
    """``pages[layer_group, block]``, NO_PAGE where the block has none: it is stale, missing, or a
    hole, which ``is_hole`` marks.
    """

    def __init__(self, num_layer_groups: int) -> None:
        self._pages: Int32Array = np.zeros((num_layer_groups, _INITIAL_BLOCKS), np.int32)
        self._is_hole: npt.NDArray[np.bool_] = np.zeros(self._pages.shape, np.bool_)
        self.num_blocks = 0

    @property
    def num_layer_groups(self) -> int:
        """Rows."""
        return int(self._pages.shape[0])

    @property
    def pages(self) -> Int32Array:
        """A writable view [num_layer_groups, num_blocks]."""
        return self._pages[:, : self.num_blocks]

    @property
    def is_hole(self) -> npt.NDArray[np.bool_]:
        """Blocks that are to have no page: a writable view [num_layer_groups, num_blocks]."""
        return self._is_hole[:, : self.num_blocks]

    def append(self, pages: Int32Array) -> None:
        """Add blocks at the end: ``pages`` is [num_layer_groups, num_new_blocks]."""
        new_size = self.num_blocks + pages.shape[1]
        if new_size > self._pages.shape[1]:
            self._grow(max(new_size, 2 * self._pages.shape[1]))
        self._pages[:, self.num_blocks : new_size] = pages
        self.num_blocks = new_size

    def _grow(self, num_columns: int) -> None:
        added = ((0, 0), (0, num_columns - self._pages.shape[1]))
        self._pages = np.pad(self._pages, added)
        self._is_hole = np.pad(self._is_hole, added)

    def cut(self, num_blocks: int) -> Int32Array:
        """Shorten to ``num_blocks`` blocks; returns the pages cut off, NO_PAGE left out."""
        removed: Int32Array = self._pages[:, num_blocks : self.num_blocks].ravel().copy()
        self._pages[:, num_blocks : self.num_blocks] = NO_PAGE
        self._is_hole[:, num_blocks : self.num_blocks] = False
        self.num_blocks = num_blocks
        return _without_gaps(removed)

    def take(self, layer_group: int, start: int, stop: int) -> Int32Array:
        """Leave the blocks [start, stop) of a layer group without pages; returns the pages
        they had.
        """
        removed = self.pages[layer_group, start:stop].copy()
        self.pages[layer_group, start:stop] = NO_PAGE
        return _without_gaps(removed)

    def make_holes(self, entries: npt.NDArray[np.bool_]) -> Int32Array:
        """Turn the entries [num_layer_groups, num_blocks] into holes; returns the pages
        they had.
        """
        removed = self.pages[entries]
        self.pages[entries] = NO_PAGE
        self.is_hole[entries] = True
        return _without_gaps(removed)

    def live_pages(self, num_blocks: int | None = None) -> Int32Array:
        """Every page of the sequence, or of its first ``num_blocks`` blocks, [num_pages]."""
        return _without_gaps(self.pages[:, :num_blocks].ravel())

    def copy(self) -> BlockTable:
        """An independent table with the same pages and holes."""
        other = BlockTable(self._pages.shape[0])
        other.append(self.pages)
        other.is_hole[:] = self.is_hole
        return other
