"""Committed pages that are nowhere but in memory, and end with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from coldpage.page import PageTable
from coldpage.pools import LevelPools

__all__ = ["log_unwritten", "num_committed_outside"]

_LOG = logging.getLogger(__name__)


def num_committed_outside(table: PageTable, level_bits: np.uint8) -> int:
    """Committed pages with contents, but none on these levels."""
    is_outside = (table.node != 0) & ((table.present & level_bits) == 0)
    return int(np.count_nonzero(is_outside & ~table.is_missing))


def log_unwritten(table: PageTable, levels: Sequence[LevelPools]) -> None:
    """Say how many pages a manager that is closed takes with it, where there is a disk."""
    disk_bits = np.uint8(sum(int(level.bit) for level in levels if level.is_disk))
    num_dropped = num_committed_outside(table, disk_bits) if disk_bits else 0
    if num_dropped:
        _LOG.info(
            "%d committed pages were in memory only when the manager was closed and are gone: "
            "a flush before keeps what the disk has room for",
            num_dropped,
        )
