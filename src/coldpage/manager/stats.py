"""Immutable snapshots of a manager's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coldpage.codecs import CodecErrors
from coldpage.layout import HotLayout
from coldpage.manager.quotas import max_sequence_tokens
from coldpage.pools import LevelPools, PoolGroup
from coldpage.types import CacheTier, LifeCycleId

__all__ = [
    "CodecStats",
    "LevelStats",
    "ManagerStats",
    "PoolGroupStats",
    "group_stats",
    "level_stats",
]


@dataclass(frozen=True, slots=True)
class PoolGroupStats:
    """One pool group of one level. Its place in the level says nothing about other levels."""

    life_cycles: tuple[LifeCycleId, ...]
    slot_bytes: int
    total_slots: int
    ready_slots: int  # fewer than in total while the device prepares the memory
    used_slots: int
    peak_used_slots: int  # since the last ``take_peak_stats`` of the level
    quarantined_slots: int
    dropped_pages: int  # whose only copy was here, since the start


@dataclass(frozen=True, slots=True)
class LevelStats:
    """One level at one moment. A slot holds one page; a block has a page in every layer group."""

    name: str
    tier: CacheTier
    codec: str  # empty on the hot level
    total_bytes: int
    used_bytes: int
    total_slots: int
    ready_slots: int  # fewer than in total while the device prepares the memory
    used_slots: int
    quarantined_slots: int
    dropped_pages: int
    capacity_tokens: int
    state: str  # "ok"; of a disk that fails "read_only" or "off"
    pool_groups: tuple[PoolGroupStats, ...]


@dataclass(frozen=True, slots=True)
class CodecStats:
    """What a lossy codec of the manager has lost, by layer group, as far as it checks."""

    codec: str  # its id, or with all its parameters where two have one id
    errors: tuple[CodecErrors, ...]


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """All levels and counters at one moment, safe to hand to any thread."""

    levels: tuple[LevelStats, ...]
    num_pages: int
    num_committed_blocks: int
    moved_pages: Mapping[str, int]  # by path, such as "hot-host"
    moved_bytes: Mapping[str, int]
    totals: Mapping[str, int]
    codecs: tuple[CodecStats, ...]  # of those that check what they lose
    codec_failures: Mapping[tuple[str, str], int]  # by codec, and call of it that raised


def group_stats(level: LevelPools, layout: HotLayout) -> tuple[PoolGroupStats, ...]:
    """The numbers of each pool group, in the level's own order."""

    def lives_in(group: PoolGroup) -> tuple[LifeCycleId, ...]:
        ids = [lc.life_cycle_id for lc in layout.life_cycles]
        return tuple(i for i in ids if level.group_of(i) is group)

    return tuple(
        PoolGroupStats(
            lives_in(group),
            group.slot_bytes,
            group.slots.num_slots,
            group.slots.num_ready,
            group.slots.num_used,
            group.slots.peak_used,
            group.slots.num_quarantined,
            group.slots.num_dropped,
        )
        for group in level.groups
    )


def level_stats(level: LevelPools, layout: HotLayout, tokens_per_block: int) -> LevelStats:
    """The level's numbers now."""
    groups: Sequence[PoolGroupStats] = group_stats(level, layout)
    return LevelStats(
        level.name,
        level.tier,
        level.codec_name,
        sum(g.total_slots * g.slot_bytes for g in groups),
        sum(g.used_slots * g.slot_bytes for g in groups),
        sum(g.total_slots for g in groups),
        sum(g.ready_slots for g in groups),
        sum(g.used_slots for g in groups),
        sum(g.quarantined_slots for g in groups),
        sum(g.dropped_pages for g in groups),
        max_sequence_tokens(layout, level, tokens_per_block, 1.0),
        level.state.value,
        tuple(groups),
    )
