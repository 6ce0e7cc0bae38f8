"""From the logical to the physical: which page holds which block of one sequence, by life cycle."""

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
    """``pages[life_cycle, block]``, NO_PAGE where the block has none (stale, or a hole)."""

    def __init__(self, num_life_cycles: int) -> None:
        self._pages: Int32Array = np.zeros((num_life_cycles, _INITIAL_BLOCKS), np.int32)
        self.num_blocks = 0

    @property
    def pages(self) -> Int32Array:
        """A writable view [num_life_cycles, num_blocks]."""
        return self._pages[:, : self.num_blocks]

    def append(self, pages: Int32Array) -> None:
        """Add blocks at the end: ``pages`` is [num_life_cycles, num_new_blocks]."""
        new_size = self.num_blocks + pages.shape[1]
        if new_size > self._pages.shape[1]:
            grown = np.zeros(
                (self._pages.shape[0], max(new_size, 2 * self._pages.shape[1])), np.int32
            )
            grown[:, : self.num_blocks] = self.pages
            self._pages = grown
        self._pages[:, self.num_blocks : new_size] = pages
        self.num_blocks = new_size

    def cut(self, num_blocks: int) -> Int32Array:
        """Shorten to ``num_blocks`` blocks; returns the pages cut off, NO_PAGE left out."""
        removed: Int32Array = self._pages[:, num_blocks : self.num_blocks].ravel().copy()
        self._pages[:, num_blocks : self.num_blocks] = NO_PAGE
        self.num_blocks = num_blocks
        return _without_gaps(removed)

    def take(self, life_cycle: int, start: int, stop: int) -> Int32Array:
        """Leave the blocks [start, stop) of a life cycle without pages; returns the pages
        they had.
        """
        removed = self.pages[life_cycle, start:stop].copy()
        self.pages[life_cycle, start:stop] = NO_PAGE
        return _without_gaps(removed)

    def live_pages(self) -> Int32Array:
        """Every page of the sequence, [num_pages]."""
        return _without_gaps(self.pages.ravel())

    def copy(self) -> BlockTable:
        """An independent table with the same pages."""
        other = BlockTable(self._pages.shape[0])
        other.append(self.pages)
        return other

    def life_cycles(self, num_blocks: int) -> npt.NDArray[np.int16]:
        """The life cycle of each entry of ``num_blocks`` new blocks, flattened as ``append`` takes
        them.
        """
        return np.repeat(np.arange(self._pages.shape[0], dtype=np.int16), num_blocks)
