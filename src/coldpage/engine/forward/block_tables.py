"""The block tables of a decoding batch on the device, kept up to date by what changed in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from coldpage.types import Int32Array, Int64Array

__all__ = ["BlockTables", "TableChanges"]

# In the mirror: what the device holds there is not known. No slot, and not "no page" either.
_UNKNOWN: Final = -2


class TableChanges(NamedTuple):
    """Entries to write: flat places in the tables of all groups, and the slots that go there."""

    places: Int64Array
    slots: Int32Array


class BlockTables:
    """``tables`` is int32 [num_groups, max_rows, max_blocks] on the device; a row is a sequence of
    the batch, in its order. Entries beyond a row's blocks are of no meaning.

    A mirror on the host says what the device holds, so a step sends only the entries that differ: a
    sequence that keeps its row sends one for each block that it begins.
    """

    def __init__(
        self, num_groups: int, max_rows: int, max_blocks: int, device: torch.device
    ) -> None:
        shape = (num_groups, max_rows, max_blocks)
        self.tables = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._mirror: npt.NDArray[np.int32] = np.full(shape, -1, np.int32)

    @property
    def max_blocks(self) -> int:
        """Blocks that a row has room for."""
        return int(self._mirror.shape[2])

    def changes(self, rows_of_groups: Sequence[Sequence[Int32Array]]) -> TableChanges:
        """What differs from the device now; from here on the device counts as changed, so the
        result must be applied, or ``forget`` called. ``rows_of_groups`` are the slots of each
        row's blocks, for each group."""
        places, slots = [], []
        for group, rows in enumerate(rows_of_groups):
            width = max((len(row) for row in rows), default=0)
            mirror = self._mirror[group, : len(rows), :width]
            wanted = mirror.copy()
            for row, own in zip(wanted, rows, strict=True):
                row[: len(own)] = own
            # In one dimension, where numpy skips equal entries many at a time.
            differing = np.flatnonzero((wanted != mirror).ravel())
            at, column = np.divmod(differing, max(width, 1))
            new = wanted[at, column]
            mirror[at, column] = new
            places.append((group * self._mirror.shape[1] + at) * self.max_blocks + column)
            slots.append(new)
        return TableChanges(np.concatenate(places), np.concatenate(slots))

    def apply(self, places: torch.Tensor, slots: torch.Tensor) -> None:
        """Enqueues the writing of entries that are on the device."""
        if len(places):
            self.tables.view(-1).index_copy_(0, places, slots)

    def forget(self) -> None:
        """After changes that were not applied: each entry is sent when it is needed next."""
        self._mirror.fill(_UNKNOWN)
