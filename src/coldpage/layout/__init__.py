"""Pure integers: layers to layer groups to pools to pool groups, per level, and quotas to slot
counts. No memory is touched here.
"""

from coldpage.layout.groups import (
    BufferPlacement,
    ColdLayout,
    HotLayout,
    LayerGroup,
    LifeCycle,
    cold_layout,
    hot_layout,
)
from coldpage.layout.partition import Partition, slot_counts

__all__ = [
    "BufferPlacement",
    "ColdLayout",
    "HotLayout",
    "LayerGroup",
    "LifeCycle",
    "Partition",
    "cold_layout",
    "hot_layout",
    "slot_counts",
]
