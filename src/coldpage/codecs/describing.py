"""Hot pages as codecs are told of them."""

from __future__ import annotations

from coldpage.codecs.base import BufferDesc, LifeCycleDesc
from coldpage.layout import HotLayout
from coldpage.types import PoolGroupIndex

__all__ = ["describe_life_cycles"]


def describe_life_cycles(
    layout: HotLayout, pool_group: PoolGroupIndex
) -> tuple[LifeCycleDesc, ...]:
    """Those of a hot pool group, with where their buffers lie in its slots."""
    return tuple(
        LifeCycleDesc(
            lc.life_cycle_id,
            lc.layer_group_id,
            lc.page_class,
            tuple(
                BufferDesc(b.buffer_id, b.pool_index, b.offset_bytes, b.num_bytes)
                for b in lc.buffers
            ),
        )
        for lc in layout.life_cycles
        if lc.hot_pool_group == pool_group
    )
