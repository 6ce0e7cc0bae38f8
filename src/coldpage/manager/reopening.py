"""From the pages of a disk level to an index of them, and back when the level is opened again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coldpage.layout import HotLayout
from coldpage.page import DEFAULT_PRIORITY
from coldpage.pools import LevelPools
from coldpage.prefix import PrefixTree
from coldpage.storage import Storage
from coldpage.store import Recovered, SlotIndex
from coldpage.store.format import PAGE_CLASSES
from coldpage.types import Int32Array, Int64Array

__all__ = ["adopt_pages", "index_of"]


def _life_cycle_table(layout: HotLayout) -> np.ndarray:
    """The life cycle of a layer group and page class, int16; -1 where there is none."""
    table = np.full((len(layout.layer_groups), len(PAGE_CLASSES)), -1, np.int16)
    for lc in layout.life_cycles:
        table[lc.layer_group_id, PAGE_CLASSES.index(lc.page_class)] = lc.life_cycle_id
    return table


def adopt_pages(
    storage: Storage,
    tree: PrefixTree,
    layout: HotLayout,
    found_on: Sequence[tuple[LevelPools, Recovered]],
) -> int:
    """Make pages of what was found on the disk levels, warmest first, and blocks of the tree of
    them. Returns how many; the slots of all others are free.
    """
    indices, pages, is_scanned = [], [], False
    for level, found in found_on:
        indices.append(_usable(found.index, layout, level))
        pages.append(_adopt(storage, layout, level, indices[-1]))
        is_scanned |= not found.is_from_sidecar
    index = SlotIndex(
        np.concatenate([index.entries for index in indices]),
        np.concatenate([index.tokens for index in indices]),
    )
    all_pages, table = np.concatenate(pages), storage.table
    table.last_use[all_pages] = _ranks(index.entries["last_use"])
    table.clock = max(table.clock, int(all_pages.size))
    # All files together: a block may have its pages in some of them only.
    is_taken = tree.restore(index, all_pages)
    storage.copies.bury(all_pages[~is_taken])
    if is_scanned:
        tree.use_with_children(all_pages[is_taken])
    return int(np.count_nonzero(is_taken))


def _adopt(storage: Storage, layout: HotLayout, level: LevelPools, index: SlotIndex) -> Int32Array:
    """Pages of all rows, [num_rows]."""
    entries, table = index.entries, storage.table
    life_cycles = _life_cycle_table(layout)[entries["layer_group"], entries["page_class"]]
    pages = table.create(life_cycles, entries["ordinal"].astype(np.int32), DEFAULT_PRIORITY)
    slots = entries["slot"].astype(np.int32)
    for group in level.groups:
        is_here = entries["pool"] == group.index
        storage.adopt(level, group, pages[is_here], slots[is_here])
    table.priority[pages] = entries["priority"]
    table.last_use_ns[pages] = entries["last_use"].astype(np.int64)
    return pages


def _usable(index: SlotIndex, layout: HotLayout, level: LevelPools) -> SlotIndex:
    """The rows that are pages of full blocks of this layout, each in the file it belongs to."""
    entries, life_cycle_of = index.entries, _life_cycle_table(layout)
    is_full = entries["num_tokens"] == index.tokens.shape[1]
    rows = np.flatnonzero(is_full & (entries["layer_group"] < life_cycle_of.shape[0]))
    life_cycles = life_cycle_of[entries["layer_group"][rows], entries["page_class"][rows]]
    rows, life_cycles = rows[life_cycles >= 0], life_cycles[life_cycles >= 0]
    pool_of = np.array([level.group_of(lc.life_cycle_id).index for lc in layout.life_cycles])
    rows = rows[pool_of[life_cycles] == entries["pool"][rows]]
    return SlotIndex(entries[rows], index.tokens[rows])


def _ranks(values: np.ndarray) -> Int64Array:
    """The place of each value in ascending order, from 1, equal for what was used together: a clock
    of uses begins after them.
    """
    ranks: Int64Array = np.unique(values, return_inverse=True)[1].astype(np.int64) + 1
    return ranks


def index_of(storage: Storage, tree: PrefixTree, level: LevelPools) -> SlotIndex:
    """All committed pages with a good copy on a disk level."""
    table = storage.table
    columns: list[tuple[int, Int32Array, Int32Array]] = []
    for pool, group in enumerate(level.groups):
        slots = group.slots.owned().astype(np.int32)
        pages = group.slots.page[slots]
        is_good = ((table.present[pages] & level.bit) != 0) & (table.node[pages] != 0)
        columns.append((pool, slots[is_good], pages[is_good]))
    pages = np.concatenate([pages for _, _, pages in columns])
    index = tree.index_of(pages)
    entries = index.entries
    entries["pool"] = np.repeat([pool for pool, _, _ in columns], [p.size for _, _, p in columns])
    entries["slot"] = np.concatenate([slots for _, slots, _ in columns])
    entries["write_number"] = np.concatenate(
        [level.groups[pool].disk.write_numbers(slots) for pool, slots, _ in columns]
    )
    entries["last_use"], entries["priority"] = table.last_use_ns[pages], table.priority[pages]
    return index
