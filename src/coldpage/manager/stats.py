"""Immutable snapshots of a manager's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coldpage.types import CacheTier

__all__ = ["LevelStats", "ManagerStats"]


@dataclass(frozen=True, slots=True)
class LevelStats:
    """One level at one moment. A slot holds one page; a block has a page in every layer group."""

    name: str
    tier: CacheTier
    total_bytes: int
    used_bytes: int
    total_slots: int
    used_slots: int
    quarantined_slots: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """All levels and counters at one moment, safe to hand to any thread."""

    levels: tuple[LevelStats, ...]
    num_pages: int
    num_committed_blocks: int
    moved_pages: Mapping[str, int]  # by path, such as "hot-host"
    moved_bytes: Mapping[str, int]
    totals: Mapping[str, int]
