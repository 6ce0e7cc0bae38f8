"""Hot pages of one context, laid out as the engine's manager lays them out, with room for the same
pages when they come back from a codec.

Each layer group has slots in three parts: the context as it was computed, the context as it came
back, and the blocks behind it, which every continuation writes anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.codecs import PoolDesc, PoolGroupDesc, describe_life_cycles
from coldpage.config import AttentionLayerConfig
from coldpage.device.base import Device, MemoryKind
from coldpage.layout import HotLayout, hot_layout
from coldpage.types import (
    BufferRole,
    HalfOpenRange,
    Int32Array,
    LayerGroupId,
    LayerId,
    MemAddress,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = ["NOTHING", "BlockTable", "HotStore"]

NOTHING: Final = HalfOpenRange(0, 0)
# Not a number in every float type, so that a page which a codec has not written shows.
_POISON: Final = 0xFF


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The slots of a sequence's blocks by layer group, -1 where the window has left a block."""

    slots: tuple[Int32Array, ...]

    def page_indices(self, layer_group_id: LayerGroupId) -> Int32Array:
        """See PageTable."""
        return self.slots[layer_group_id]


class HotStore:
    """Room for a context of up to ``max_blocks`` blocks, twice, and for ``num_tail_blocks`` behind
    it. The memory ends with the device, or with ``free``.
    """

    def __init__(
        self,
        device: Device,
        layers: tuple[AttentionLayerConfig, ...],
        tokens_per_block: int,
        max_blocks: int,
        num_tail_blocks: int,
    ) -> None:
        self.device = device
        self.layers = layers
        self.tokens_per_block = tokens_per_block
        self.max_blocks = max_blocks
        self.num_tail_blocks = num_tail_blocks
        self._layout = hot_layout(layers)
        self._group_of = {
            layer: group.layer_group_id
            for group in self._layout.layer_groups
            for layer in group.layer_ids
        }
        self._memories = [
            [
                device.allocate(self._num_slots(PoolGroupIndex(group)) * size, MemoryKind.DEVICE)
                for size in sizes
            ]
            for group, sizes in enumerate(self._layout.slot_bytes)
        ]

    # ------------------------------------------------------------------ what a runner reads

    def hot_array(self, layer_id: LayerId, role: BufferRole) -> npt.NDArray[np.uint8]:
        """See PageSource."""
        life_cycle = self._layout.life_cycles[self._group_of[layer_id]]
        (place,) = (
            b
            for b in life_cycle.buffers
            if b.buffer_id.layer_id == layer_id and b.buffer_id.role == role
        )
        pool_group = life_cycle.hot_pool_group
        rows = self._memories[pool_group][place.pool_index].array.reshape(
            self._num_slots(pool_group), -1
        )
        return rows[:, place.offset_bytes : place.offset_bytes + place.num_bytes]

    def layer_group_of(self, layer_id: LayerId) -> LayerGroupId:
        """See PageSource."""
        return self._group_of[layer_id]

    def table(
        self, num_blocks: int, restored: HalfOpenRange = NOTHING, *, is_whole: bool = False
    ) -> BlockTable:
        """A sequence of so many blocks of context, of which those in ``restored`` came back from a
        codec. ``is_whole``: also the blocks that nothing behind the context can see.
        """
        tables = []
        for group in self.layer_groups:
            slots = np.full(num_blocks, -1, np.int32)
            live = self.live_ordinals(group, num_blocks)
            if is_whole:
                live = np.arange(num_blocks, dtype=np.int32)
            came_back = (live >= restored.start) & (live < restored.stop)
            slots[live] = np.where(
                came_back, self.restored_slots(group, live), self.original_slots(group, live)
            )
            tail = self._first_slot(group) + 2 * self.max_blocks + np.arange(self.num_tail_blocks)
            tables.append(np.concatenate([slots, tail.astype(np.int32)]))
        return BlockTable(tuple(tables))

    # ------------------------------------------------------------------ what a codec is given

    @property
    def layer_groups(self) -> tuple[LayerGroupId, ...]:
        """Of the model's layers, in order."""
        return tuple(group.layer_group_id for group in self._layout.layer_groups)

    def live_ordinals(self, layer_group_id: LayerGroupId, num_blocks: int) -> Int32Array:
        """The blocks of so long a context that what follows can see: those that a sequence keeps.
        [num_live]
        """
        group = self._layout.layer_groups[layer_group_id]
        stale = group.stale_blocks(num_blocks * self.tokens_per_block, self.tokens_per_block)
        ordinals = np.arange(num_blocks, dtype=np.int32)
        return ordinals[(ordinals < stale.start) | (ordinals >= stale.stop)]

    def original_slots(self, layer_group_id: LayerGroupId, ordinals: Int32Array) -> Int32Array:
        """Where these blocks of the context were computed."""
        return (ordinals + self._first_slot(layer_group_id)).astype(np.int32)

    def restored_slots(self, layer_group_id: LayerGroupId, ordinals: Int32Array) -> Int32Array:
        """Where they come back."""
        return (ordinals + self._first_slot(layer_group_id) + self.max_blocks).astype(np.int32)

    def layout(self, *, separates_sinks: bool, num_recent_blocks: int = 0) -> HotLayout:
        """With life cycles of their own for the first block's pages and the newest blocks', or not;
        the bytes are alike.
        """
        return hot_layout(
            self.layers, separate_sinks=separates_sinks, num_recent_blocks=num_recent_blocks
        )

    def describe(self, layout: HotLayout) -> list[PoolGroupDesc]:
        """The hot pool groups in index order, with the life cycles of ``layout``."""
        return [
            PoolGroupDesc(
                PoolGroupIndex(group),
                self._num_slots(PoolGroupIndex(group)),
                tuple(
                    PoolDesc(PoolIndex(pool), MemAddress(memory.address), size)
                    for pool, (memory, size) in enumerate(zip(memories, sizes, strict=True))
                ),
                describe_life_cycles(layout, PoolGroupIndex(group)),
            )
            for group, (memories, sizes) in enumerate(
                zip(self._memories, self._layout.slot_bytes, strict=True)
            )
        ]

    def poison_restored(self) -> None:
        """Overwrite what came back. Nothing may be in flight."""
        for group in self.layer_groups:
            pool_group = self._layout.life_cycles[group].hot_pool_group
            first = self._first_slot(group) + self.max_blocks
            for memory in self._memories[pool_group]:
                rows = memory.array.reshape(self._num_slots(pool_group), -1)
                rows[first : first + self.max_blocks] = _POISON

    def free(self) -> None:
        """Give the memory back. Nothing may be in flight, and nobody reads an array again."""
        for memories in self._memories:
            for memory in memories:
                memory.free()

    # ------------------------------------------------------------------ slots

    @property
    def _group_slots(self) -> int:
        """Of each layer group."""
        return 2 * self.max_blocks + self.num_tail_blocks

    def _num_slots(self, pool_group: PoolGroupIndex) -> int:
        return len(self._layout.layer_groups_of(pool_group)) * self._group_slots

    def _first_slot(self, layer_group_id: LayerGroupId) -> int:
        """Layer groups that share a hot pool group have their slots one after another."""
        pool_group = self._layout.life_cycles[layer_group_id].hot_pool_group
        rank = self._layout.layer_groups_of(pool_group).index(layer_group_id)
        return rank * self._group_slots
