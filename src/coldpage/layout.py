"""Pure integers: layers to layer groups to pools to pool groups, per level, and quotas to slot
counts.

No memory is touched here. A pool-group index means something only together with its level, so the
two representations have classes of their own: ``HotLayout`` and ``ColdLayout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coldpage.config import AttentionLayerConfig, BufferConfig
from coldpage.errors import ConfigurationError
from coldpage.types import (
    BufferId,
    HalfOpenRange,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = [
    "TYPICAL_SEQUENCE_TOKENS",
    "BufferPlacement",
    "ColdLayout",
    "HotLayout",
    "LayerGroup",
    "LifeCycle",
    "cold_layout",
    "cold_slot_counts",
    "hot_layout",
    "hot_slot_counts",
]

# The length of the sequence that decides how a quota is shared between full and sliding-window
# groups.
TYPICAL_SEQUENCE_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose pages go stale together."""

    layer_group_id: LayerGroupId
    layer_ids: tuple[LayerId, ...]
    sliding_window_tokens: int | None
    num_sink_tokens: int

    def stale_blocks(self, history_length: int, tokens_per_block: int) -> HalfOpenRange:
        """Blocks that no query at ``history_length`` or later can see. A query at ``p`` sees
        positions ``p - window < i <= p`` and the sink tokens.
        """
        if self.sliding_window_tokens is None:
            return HalfOpenRange(0, 0)
        start = -(-self.num_sink_tokens // tokens_per_block)
        stop = max(0, history_length - self.sliding_window_tokens + 1) // tokens_per_block
        return HalfOpenRange(start, max(start, stop))

    def live_blocks(self, num_tokens: int, tokens_per_block: int) -> int:
        """How many blocks a sequence of ``num_tokens`` keeps in this group."""
        num_blocks = -(-num_tokens // tokens_per_block)
        return num_blocks - len(self.stale_blocks(num_tokens, tokens_per_block))


@dataclass(frozen=True, slots=True)
class BufferPlacement:
    """Where a buffer lies in its page: the pool, and the offset in that pool's slot."""

    buffer_id: BufferId
    pool_index: PoolIndex
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LifeCycle:
    """The stable internal key of a kind of page, and the layout of its hot page."""

    life_cycle_id: LifeCycleId
    layer_group_id: LayerGroupId
    hot_pool_group: PoolGroupIndex
    buffers: tuple[BufferPlacement, ...]


@dataclass(frozen=True, slots=True)
class HotLayout:
    """The hot representation: ``slot_bytes[pool_group][pool]``, and where each life cycle's pages
    live.
    """

    layer_groups: tuple[LayerGroup, ...]
    life_cycles: tuple[LifeCycle, ...]
    slot_bytes: tuple[tuple[int, ...], ...]

    def page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        """Bytes of one hot page over all its pools."""
        return sum(self.slot_bytes[self.life_cycles[life_cycle_id].hot_pool_group])


@dataclass(frozen=True, slots=True)
class ColdLayout:
    """The cold representation of one level: one pool a group, ``slot_bytes[pool_group]``."""

    pool_group_of: tuple[PoolGroupIndex, ...]  # by life cycle
    slot_bytes: tuple[int, ...]


def _place_buffers(
    layers: Sequence[AttentionLayerConfig],
) -> tuple[tuple[BufferPlacement, ...], tuple[int, ...]]:
    """Coalesce the buffers of equal size into one pool, layers in order, a layer's buffers
    adjacent.
    """
    sizes = sorted({b.num_bytes for layer in layers for b in layer.buffers}, reverse=True)
    filled = [0] * len(sizes)
    placements: list[BufferPlacement] = []

    def place(layer: AttentionLayerConfig, buffer: BufferConfig) -> None:
        pool = sizes.index(buffer.num_bytes)
        buffer_id = BufferId(layer.layer_id, buffer.role)
        placements.append(
            BufferPlacement(buffer_id, PoolIndex(pool), filled[pool], buffer.num_bytes)
        )
        filled[pool] += buffer.num_bytes

    for layer in layers:
        for buffer in layer.buffers:
            place(layer, buffer)
    return tuple(placements), tuple(filled)


def hot_layout(layers: Sequence[AttentionLayerConfig]) -> HotLayout:
    """Group layers by window and sinks; groups whose slots have equal pool sizes share a hot pool
    group.
    """
    by_kind: dict[tuple[int | None, int], list[AttentionLayerConfig]] = {}
    for layer in layers:
        by_kind.setdefault((layer.sliding_window_tokens, layer.num_sink_tokens), []).append(layer)
    layer_groups: list[LayerGroup] = []
    life_cycles: list[LifeCycle] = []
    slot_bytes: list[tuple[int, ...]] = []
    for (window, sinks), members in by_kind.items():
        group_id = LayerGroupId(len(layer_groups))
        layer_groups.append(LayerGroup(group_id, tuple(m.layer_id for m in members), window, sinks))
        placements, pool_bytes = _place_buffers(members)
        if pool_bytes not in slot_bytes:
            slot_bytes.append(pool_bytes)
        pool_group = PoolGroupIndex(slot_bytes.index(pool_bytes))
        life_cycles.append(
            LifeCycle(LifeCycleId(len(life_cycles)), group_id, pool_group, placements)
        )
    return HotLayout(tuple(layer_groups), tuple(life_cycles), tuple(slot_bytes))


def cold_layout(cold_page_bytes: Sequence[int]) -> ColdLayout:
    """Life cycles with equal cold pages share a cold pool group. ``cold_page_bytes`` is by life
    cycle.
    """
    slot_bytes = tuple(dict.fromkeys(cold_page_bytes))
    return ColdLayout(
        tuple(PoolGroupIndex(slot_bytes.index(b)) for b in cold_page_bytes), slot_bytes
    )


def _typical_slots(layout: HotLayout, tokens_per_block: int) -> list[int]:
    """Slot-count weight by life cycle: the live blocks of a sequence of typical length."""
    groups = layout.layer_groups
    return [
        max(1, groups[lc.layer_group_id].live_blocks(TYPICAL_SEQUENCE_TOKENS, tokens_per_block))
        for lc in layout.life_cycles
    ]


def hot_slot_counts(layout: HotLayout, quota_bytes: int, tokens_per_block: int) -> tuple[int, ...]:
    """Slots by hot pool group that fit the quota, shared as a typical sequence needs them.

    Raises ConfigurationError when a pool group can not hold its pages of one block.
    """
    weights = _typical_slots(layout, tokens_per_block)
    total = 0
    group_weight = [0] * len(layout.slot_bytes)
    pages_of_block = [0] * len(layout.slot_bytes)
    for weight, lc in zip(weights, layout.life_cycles, strict=True):
        total += weight * layout.page_bytes(lc.life_cycle_id)
        group_weight[lc.hot_pool_group] += weight
        pages_of_block[lc.hot_pool_group] += 1
    # Whole numbers: a sum of rounded shares may come out a slot short.
    counts = tuple(quota_bytes * w // total for w in group_weight)
    if any(count < pages for count, pages in zip(counts, pages_of_block, strict=True)):
        block = sum(layout.page_bytes(lc.life_cycle_id) for lc in layout.life_cycles)
        needed = max(
            -(-total * pages // w) for pages, w in zip(pages_of_block, group_weight, strict=True)
        )
        raise ConfigurationError(
            f"the hot tier of {quota_bytes:,} bytes can not hold one block of {tokens_per_block} "
            f"tokens: a block takes {block:,} bytes; give it at least {needed:,} bytes"
        )
    return counts


def cold_slot_counts(
    hot: HotLayout,
    cold: ColdLayout,
    slot_stride_bytes: Sequence[int],
    quota_bytes: int,
    tokens_per_block: int,
) -> tuple[int, ...]:
    """Slots by cold pool group within the quota, keeping the slot-count proportions of the layer
    groups.

    ``slot_stride_bytes`` is what a slot really takes on the medium, by cold pool group. Raises
    ConfigurationError when a pool group would get no slot at all.
    """
    weights = [0] * len(cold.slot_bytes)
    for lc, weight in zip(hot.life_cycles, _typical_slots(hot, tokens_per_block), strict=True):
        weights[cold.pool_group_of[lc.life_cycle_id]] += weight
    total = sum(w * stride for w, stride in zip(weights, slot_stride_bytes, strict=True))
    counts = tuple(quota_bytes * w // total for w in weights)
    if min(counts) < 1:
        needed = max(-(-total // w) for w in weights)
        raise ConfigurationError(
            f"a cold tier of {quota_bytes:,} bytes can not hold one page of each kind; "
            f"give it at least {needed:,} bytes, or leave the tier out"
        )
    return counts
