"""Which pages a level gives up first. A policy sees columns and page ids, and values each page."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from coldpage.page import PageTable
from coldpage.types import Int32Array, Int64Array

__all__ = ["EvictionPolicy", "PriorityLru", "least_valuable", "num_outranking"]

# Score layout, most significant first: priority 7 bits, last use 36, protected 1, depth 19.
_DEPTH_BITS: Final = 19
_USE_BITS: Final = 36
_MAX_DEPTH: Final = (1 << _DEPTH_BITS) - 1
_MAX_USE: Final = (1 << _USE_BITS) - 1


class EvictionPolicy(Protocol):
    """The value of a page to those who may want it again."""

    def score(self, table: PageTable, pages: Int32Array) -> Int64Array:
        """The value of each page, int64 [num_pages]; smaller goes first."""
        ...


def least_valuable(
    policy: EvictionPolicy, table: PageTable, pages: Int32Array, count: int
) -> Int32Array:
    """The ``count`` least valuable of ``pages``, least valuable first; all of them if there are
    fewer. A partial sort: linear in the number of candidates.
    """
    if count <= 0 or pages.size == 0:
        return pages[:0]
    scores = policy.score(table, pages)
    if count < pages.size:
        nearest = np.argpartition(scores, count - 1)[:count]
        pages, scores = pages[nearest], scores[nearest]
    return pages[np.argsort(scores, kind="stable")]


def num_outranking(
    policy: EvictionPolicy, table: PageTable, newcomers: Int32Array, residents: Int32Array
) -> int:
    """How many of ``newcomers`` should take the place of as many of ``residents``, so that the most
    valuable of both stay. ``residents`` are given least valuable first.
    """
    new_scores = np.sort(policy.score(table, newcomers))[::-1]
    old_scores = policy.score(table, residents)
    count = min(new_scores.size, old_scores.size)
    return int(np.count_nonzero(new_scores[:count] > old_scores[:count]))


class PriorityLru:
    """Lowest priority first, then least recently used. Among pages used together the deepest block
    goes first, since a prefix is of use without its end but not the reverse; the block with the
    attention sinks and the newest block go last of all.
    """

    def score(self, table: PageTable, pages: Int32Array) -> Int64Array:
        """See EvictionPolicy."""
        priority = np.clip(table.priority[pages].astype(np.int64), 0, 127)
        use = np.minimum(table.last_use[pages], _MAX_USE)
        depth = _MAX_DEPTH - np.minimum(table.ordinal[pages].astype(np.int64), _MAX_DEPTH)
        protected = table.is_protected[pages].astype(np.int64)
        high = (priority << (_USE_BITS + 1 + _DEPTH_BITS)) | (use << (1 + _DEPTH_BITS))
        score: Int64Array = high | (protected << _DEPTH_BITS) | depth
        return score
