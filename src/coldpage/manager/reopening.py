"""From the pages of a disk level to an index of them, and back when the level is opened again."""

from __future__ import annotations

import numpy as np

from coldpage.layout import HotLayout
from coldpage.page import DEFAULT_PRIORITY
from coldpage.pools import LevelPools
from coldpage.prefix import PrefixTree
from coldpage.storage import Storage
from coldpage.store import Recovered, SlotIndex
from coldpage.store.format import PAGE_CLASSES
from coldpage.store.sidecar import ENTRY, fill_entry
from coldpage.types import Int32Array, Int64Array

__all__ = ["adopt_pages", "index_of"]


def _life_cycle_table(layout: HotLayout) -> np.ndarray:
    """The life cycle of a layer group and page class, int16; -1 where there is none."""
    table = np.full((len(layout.layer_groups), len(PAGE_CLASSES)), -1, np.int16)
    for lc in layout.life_cycles:
        table[lc.layer_group_id, PAGE_CLASSES.index(lc.page_class)] = lc.life_cycle_id
    return table


def adopt_pages(
    storage: Storage, tree: PrefixTree, layout: HotLayout, level: LevelPools, found: Recovered
) -> int:
    """Make pages of what was found on a disk level, and blocks of the tree of them. Returns how
    many; the slots of all others are free.
    """
    index, table = found.index, storage.table
    life_cycle_of = _life_cycle_table(layout)
    names = index.names()
    num_taken = 0
    for group in level.groups:
        rows = np.flatnonzero(index.entries["pool"] == group.index)
        entries = index.entries[rows]
        is_known = entries["layer_group"] < life_cycle_of.shape[0]
        is_known &= entries["num_tokens"] == index.tokens.shape[1]
        rows, entries = rows[is_known], entries[is_known]
        life_cycles = life_cycle_of[entries["layer_group"], entries["page_class"]]
        rows, entries = rows[life_cycles >= 0], entries[life_cycles >= 0]
        life_cycles = life_cycles[life_cycles >= 0]
        pages = table.create(life_cycles, entries["ordinal"].astype(np.int32), DEFAULT_PRIORITY)
        slots = entries["slot"].astype(np.int32)
        storage.adopt(level, group, pages, slots)
        table.priority[pages] = entries["priority"]
        table.last_use[pages] = _ranks(entries["last_use"])
        table.last_use_ns[pages] = entries["last_use"].astype(np.int64)
        is_taken = tree.restore([names[row] for row in rows.tolist()], pages)
        storage.copies.bury(pages[~is_taken])
        num_taken += int(np.count_nonzero(is_taken))
    return num_taken


def _ranks(values: np.ndarray) -> Int64Array:
    """The place of each value in ascending order, from 1: a clock of uses begins after them."""
    ranks = np.empty(values.size, np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(1, values.size + 1)
    return ranks


def index_of(storage: Storage, tree: PrefixTree, level: LevelPools, per_block: int) -> SlotIndex:
    """All committed pages with a good copy on a disk level."""
    table = storage.table
    columns: list[tuple[int, Int32Array, Int32Array]] = []
    for pool, group in enumerate(level.groups):
        slots = group.slots.owned().astype(np.int32)
        pages = group.slots.page[slots]
        is_good = ((table.present[pages] & level.bit) != 0) & (table.node[pages] != 0)
        columns.append((pool, slots[is_good], pages[is_good]))
    num_pages = sum(int(pages.size) for _, _, pages in columns)
    index = SlotIndex(np.zeros(num_pages, ENTRY), np.zeros((num_pages, per_block), np.int32))
    start = 0
    for (pool, slots, pages), group in zip(columns, level.groups, strict=True):
        rows = slice(start, start + pages.size)
        part = index.entries[rows]
        part["pool"], part["slot"] = pool, slots
        part["write_number"] = group.disk.write_numbers(slots)
        part["last_use"], part["priority"] = table.last_use_ns[pages], table.priority[pages]
        for row, name in enumerate(tree.names(pages), start=start):
            fill_entry(index, row, name)
        start += int(pages.size)
    return index
