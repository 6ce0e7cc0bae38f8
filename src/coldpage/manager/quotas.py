"""From quotas to slots: at the start as the configuration says, later as the levels are used."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from coldpage.config import KVCacheManagerConfig
from coldpage.layout import ColdLayout, HotLayout, Partition, slot_counts
from coldpage.pools import LevelPools
from coldpage.types import HalfOpenRange, PageClass

__all__ = ["Quotas", "Weights", "max_sequence_tokens"]

# Shares by pool group; their sum does not matter.
Weights = Sequence[Fraction | int | float]


def max_sequence_tokens(
    layout: HotLayout,
    level: LevelPools,
    tokens_per_block: int,
    max_utilization: float,
    *,
    is_growing: bool = False,
) -> int:
    """The longest sequence whose live blocks fit the level at ``max_utilization``. Of whole blocks,
    so the newest are those of its class RECENT. ``is_growing``: also while it gets its last block,
    when a window still sees one block more.
    """
    has_sinks = PageClass.SINK in layout.page_classes
    limits = {group: group.max_locked_slots(max_utilization) for group in level.groups}
    groups_of = [
        [level.group_of(life_cycle) for life_cycle in layout.life_cycles_of(g.layer_group_id)]
        for g in layout.layer_groups
    ]

    def fits(num_blocks: int) -> bool:
        used = dict.fromkeys(limits, 0)
        history_length = (num_blocks - is_growing) * tokens_per_block
        for layer_group, groups in zip(layout.layer_groups, groups_of, strict=True):
            first, body, recent = groups
            stale = layer_group.stale_blocks(history_length, tokens_per_block)
            live = num_blocks - len(stale)
            num_sinks = int(has_sinks and num_blocks > 0 and 0 not in stale)
            start = max(num_sinks, num_blocks - layout.num_recent_blocks)
            seen_no_more = HalfOpenRange(max(start, stale.start), min(num_blocks, stale.stop))
            num_recent = num_blocks - start - len(seen_no_more)
            used[first] += num_sinks
            used[recent] += num_recent
            used[body] += live - num_sinks - num_recent
        return all(used[group] <= limit for group, limit in limits.items())

    low, high = 0, 1
    while fits(high) and high < 1 << 24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * tokens_per_block


class Quotas:
    """Divides the quota of each level of one manager."""

    def __init__(self, config: KVCacheManagerConfig, layout: HotLayout, num_scratch: int) -> None:
        """``num_scratch`` slots of each hot pool group are taken out of the hot quota."""
        self._partition = Partition(
            layout,
            config.tokens_per_block,
            initial_pool_ratio=config.initial_pool_ratio,
            typical_step=config.typical_step,
            constraints=config.constraints,
        )
        self._slot_bytes = [sum(pools) for pools in layout.slot_bytes]
        self._scratch_bytes = num_scratch * sum(self._slot_bytes)
        self._floors = self._partition.hot_floors
        if config.constraints:
            # The most that a resume may lock is a part of the level.
            utilization = Fraction(config.max_util_for_resume)
            self._floors = tuple(-(-floor // utilization) for floor in self._floors)

    def hot_slots(self, quota_bytes: int, byte_weights: Weights | None = None) -> tuple[int, ...]:
        """Slots by hot pool group. Raises ConfigurationError when the quota is too small."""
        what = "the hot tier"
        if self._scratch_bytes:
            what += f" (less {self._scratch_bytes:,} bytes for changing between codecs)"
        weights = byte_weights or self._partition.hot_byte_weights()
        rest = quota_bytes - self._scratch_bytes
        return slot_counts(rest, self._slot_bytes, weights, self._floors, what)

    def cold_slots(
        self,
        quota_bytes: int,
        cold: ColdLayout,
        stride_bytes: Sequence[int],
        name: str,
        byte_weights: Weights | None = None,
    ) -> tuple[int, ...]:
        """Slots by pool group of a cold level, whose slots take ``stride_bytes``. Raises
        ConfigurationError when the quota is too small.
        """
        weights = byte_weights or self._partition.cold_byte_weights(cold, stride_bytes)
        return slot_counts(
            quota_bytes, stride_bytes, weights, [1] * len(stride_bytes), f"the {name} tier"
        )
