"""Where the pages of a sequence lie on disk."""

from __future__ import annotations

import numpy as np

from coldpage.block_table import BlockTable
from coldpage.sequence.context import DiskBlob
from coldpage.storage import Storage
from coldpage.types import BlockOrdinal, LifeCycleId

__all__ = ["find_disk_blobs"]


def find_disk_blobs(storage: Storage, blocks: BlockTable) -> list[DiskBlob]:
    """Every cold blob of the sequence on every disk level, by level, layer group and block."""
    table, found = storage.table, []
    for level in storage.levels:
        if not level.is_disk:
            continue
        is_here = (table.present[blocks.pages] & level.bit) != 0
        for layer_group, block in np.argwhere(is_here).tolist():
            page = blocks.pages[layer_group, block]
            life_cycle = LifeCycleId(int(table.life_cycle[page]))
            pool = level.group_of(life_cycle).disk
            path, offset = pool.payload_location(int(table.slot[level.level, page]))
            is_only = int(table.present[page]) == int(level.bit)
            found.append(DiskBlob(life_cycle, BlockOrdinal(block), path, offset, is_only))
    return found
