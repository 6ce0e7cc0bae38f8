"""The codec seam: a hot page over one or more pools <-> one fixed-size opaque cold page.

A codec is a representation transform; compressing is optional. It never sees disk addresses: every
base address it gets can be reached by the device. See docs/CODECS.md.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Stream
from coldpage.types import (
    BufferId,
    LayerGroupId,
    LifeCycleId,
    MemAddress,
    PageIndexLocation,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = [
    "BufferDesc",
    "ColdPageCodec",
    "LifeCycleDesc",
    "PageIndexPairs",
    "PoolDesc",
    "PoolGroupDesc",
]

PageIndexPairs = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class BufferDesc:
    """One buffer of a hot page: where it lies in its pool's slot."""

    buffer_id: BufferId
    pool_index: PoolIndex
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LifeCycleDesc:
    """A life cycle of the pool group, with the buffers of its pages in layout order."""

    life_cycle_id: LifeCycleId
    layer_group_id: LayerGroupId
    buffers: tuple[BufferDesc, ...]


@dataclass(frozen=True, slots=True)
class PoolDesc:
    """A hot pool: page ``slot`` has its contribution at ``base_address + slot * slot_bytes``."""

    pool_index: PoolIndex
    base_address: MemAddress
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class PoolGroupDesc:
    """A hot pool group: pools that share slot ids, and the life cycles whose pages live there."""

    pool_group_index: PoolGroupIndex
    num_slots: int
    pools: tuple[PoolDesc, ...]
    life_cycles: tuple[LifeCycleDesc, ...]


class ColdPageCodec(abc.ABC):
    """Transforms pages between the hot and the cold representation.

    One manager consumes one codec.
    """

    # Names the cold format in keys and on disk: together they decide whether a stored blob can be
    # read.
    codec_id: str
    version: int = 1
    is_lossless: bool = False
    # Set by the manager that takes the codec, for good.
    is_consumed: bool = False

    @abc.abstractmethod
    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        """Learn every hot pool group, in index order.

        Called exactly once. Raises CodecError to refuse.
        """

    @abc.abstractmethod
    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        """The fixed size of a cold page of this life cycle; it is also the stride between cold
        pages. Zero is failure.
        """

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        """The smallest life cycle whose pages encode and decode exactly alike; itself disables
        batching.
        """
        return life_cycle_id

    @abc.abstractmethod
    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        """Where ``encode`` and ``decode`` want ``page_indices``."""

    @abc.abstractmethod
    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndexPairs,
        stream: Stream,
    ) -> None:
        """Enqueue hot -> cold for each pair ``(dst, src)``: hot slot ``src`` becomes the cold page
        at ``dst_base + dst * cold_page_bytes``.

        ``page_indices`` is a PAGE_INDEX_PAIR array [num_pages], valid until the call returns
        (HOST). Does not synchronise. Raises SubmissionError when it could not enqueue; then it has
        enqueued nothing.
        """

    @abc.abstractmethod
    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndexPairs,
        stream: Stream,
    ) -> None:
        """Enqueue cold -> hot for each pair ``(dst, src)``: the cold page at ``src_base + src *
        cold_page_bytes`` becomes hot slot ``dst``. Contract as ``encode``.
        """
