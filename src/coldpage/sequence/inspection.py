"""What a sequence holds, for those that save it or report about it."""

from __future__ import annotations

import numpy as np

from coldpage.sequence.context import SequenceContext
from coldpage.sequence.kv_cache import KVCache
from coldpage.types import NO_PAGE, BlockKey, Int32Array

__all__ = ["belongs_to", "block_pages", "blocks_by_level", "scope_key"]


def belongs_to(cache: KVCache, context: SequenceContext) -> bool:
    """Whether the sequence is one of the manager with that context."""
    return cache._context is context


def scope_key(cache: KVCache) -> BlockKey:
    """Where the chain of the sequence's block keys begins: a digest of model, scope and
    provenance.
    """
    return cache._root


def block_pages(cache: KVCache) -> Int32Array:
    """The page of each block [num_layer_groups, num_blocks], NO_PAGE where it has none. Two caches
    that name one page share it, as long as both hold it.
    """
    cache._check_open()
    return cache._table.pages.copy()


def blocks_by_level(cache: KVCache) -> tuple[int, ...]:
    """How many blocks have their coldest page on each level; a page counts where its hottest copy
    is.
    """
    cache._check_open()
    table, pages = cache._storage.table, cache._table.pages
    num_levels = len(cache._storage.levels)
    has_page = (pages != NO_PAGE) & ~table.is_missing[pages]
    if not has_page.any():
        return (0,) * num_levels
    levels = table.level_of(pages.ravel()).reshape(pages.shape).astype(np.int64)
    # On its way to a disk level a page has no copy for a moment: count it there.
    levels = np.where(has_page, np.minimum(levels, num_levels - 1), -1).max(axis=0)
    return tuple(np.bincount(levels[levels >= 0], minlength=num_levels).tolist())
