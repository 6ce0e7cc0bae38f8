"""Layers to layer groups to life cycles, and life cycles to the pool groups of each level.

A pool-group index means something only together with its level, so the two representations have
classes of their own: ``HotLayout`` and ``ColdLayout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coldpage.config import AttentionLayerConfig, BufferConfig
from coldpage.types import (
    BlockOrdinal,
    BufferId,
    HalfOpenRange,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    PageClass,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = [
    "BufferPlacement",
    "ColdLayout",
    "HotLayout",
    "LayerGroup",
    "LifeCycle",
    "cold_layout",
    "hot_layout",
]


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
    """The stable internal key of a kind of page, a layer group and a page class, and the layout of
    its hot page.
    """

    life_cycle_id: LifeCycleId
    layer_group_id: LayerGroupId
    page_class: PageClass
    hot_pool_group: PoolGroupIndex
    buffers: tuple[BufferPlacement, ...]


@dataclass(frozen=True, slots=True)
class HotLayout:
    """The hot representation: ``slot_bytes[pool_group][pool]``, and where each life cycle's pages
    live. The newest ``num_recent_blocks`` full blocks of a sequence, and the one after them, are
    of the class RECENT; with 0 there is no such class.
    """

    layer_groups: tuple[LayerGroup, ...]
    life_cycles: tuple[LifeCycle, ...]
    slot_bytes: tuple[tuple[int, ...], ...]
    num_recent_blocks: int = 0

    def page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        """Bytes of one hot page over all its pools."""
        return sum(self.slot_bytes[self.life_cycles[life_cycle_id].hot_pool_group])

    @property
    def num_classes(self) -> int:
        """How many life cycles each layer group has."""
        return len(self.life_cycles) // len(self.layer_groups)

    @property
    def page_classes(self) -> tuple[PageClass, ...]:
        """The classes that every layer group has, in the order of their life cycles."""
        return tuple(lc.page_class for lc in self.life_cycles[: self.num_classes])

    def life_cycle_of(
        self,
        layer_group_id: LayerGroupId,
        block_ordinal: BlockOrdinal,
        *,
        is_recent: bool = False,
    ) -> LifeCycleId:
        """The life cycle of a block's page in a layer group. A first block is a sink first of all,
        and nothing is recent where there is no such class.
        """
        classes = self.page_classes
        wanted = PageClass.RECENT if is_recent and PageClass.RECENT in classes else PageClass.BODY
        if block_ordinal == 0 and PageClass.SINK in classes:
            wanted = PageClass.SINK
        return LifeCycleId(len(classes) * layer_group_id + classes.index(wanted))

    def life_cycles_of(
        self, layer_group_id: LayerGroupId
    ) -> tuple[LifeCycleId, LifeCycleId, LifeCycleId]:
        """Those of a layer group's first block, of its others, and of the newest of those: some are
        the same where classes are.
        """
        return (
            self.life_cycle_of(layer_group_id, BlockOrdinal(0)),
            self.life_cycle_of(layer_group_id, BlockOrdinal(1)),
            self.life_cycle_of(layer_group_id, BlockOrdinal(1), is_recent=True),
        )

    def layer_groups_of(self, pool_group: PoolGroupIndex) -> tuple[LayerGroupId, ...]:
        """The layer groups whose pages live in a hot pool group."""
        return tuple(
            dict.fromkeys(
                lc.layer_group_id for lc in self.life_cycles if lc.hot_pool_group == pool_group
            )
        )


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


def hot_layout(
    layers: Sequence[AttentionLayerConfig],
    *,
    separate_sinks: bool = False,
    num_recent_blocks: int = 0,
) -> HotLayout:
    """Group layers by window and sinks; groups whose slots have equal pool sizes share a hot pool
    group.

    A layer group is one life cycle; with ``separate_sinks`` that of the first block's pages comes
    before it, and with ``num_recent_blocks`` that of the newest blocks' pages after it. Their hot
    pages are alike, so a page that changes its class stays where it is.
    """
    classes = (
        *((PageClass.SINK,) if separate_sinks else ()),
        PageClass.BODY,
        *((PageClass.RECENT,) if num_recent_blocks else ()),
    )
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
        for page_class in classes:
            life_cycle_id = LifeCycleId(len(life_cycles))
            life_cycles.append(
                LifeCycle(life_cycle_id, group_id, page_class, pool_group, placements)
            )
    return HotLayout(tuple(layer_groups), tuple(life_cycles), tuple(slot_bytes), num_recent_blocks)


def cold_layout(cold_page_bytes: Sequence[int]) -> ColdLayout:
    """Life cycles with equal cold pages share a cold pool group. ``cold_page_bytes`` is by life
    cycle.
    """
    slot_bytes = tuple(dict.fromkeys(cold_page_bytes))
    return ColdLayout(
        tuple(PoolGroupIndex(slot_bytes.index(b)) for b in cold_page_bytes), slot_bytes
    )
