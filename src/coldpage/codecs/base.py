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
    DeviceArray,
    Int32Array,
    LayerGroupId,
    LifeCycleId,
    MemAddress,
    PageClass,
    PageIndexLocation,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = [
    "BlockOrdinals",
    "BufferDesc",
    "CodecErrors",
    "ColdPageCodec",
    "LifeCycleDesc",
    "PageIndexPairs",
    "PageIndices",
    "PoolDesc",
    "PoolGroupDesc",
]

# A PAGE_INDEX_PAIR array [num_pages].
PageIndexPairs = npt.NDArray[np.void]
# The same for a codec that wants its indices in device memory, and the ordinals beside them.
PageIndices = PageIndexPairs | DeviceArray
BlockOrdinals = Int32Array | DeviceArray


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
    page_class: PageClass
    buffers: tuple[BufferDesc, ...]


@dataclass(frozen=True, slots=True)
class PoolDesc:
    """A hot pool: page ``slot`` has its contribution at ``base_address + slot * slot_bytes``.

    The base address holds for the life of the manager, also when the level changes its size.
    """

    pool_index: PoolIndex
    base_address: MemAddress
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class PoolGroupDesc:
    """A hot pool group: pools that share slot ids, and the life cycles whose pages live there.

    ``num_slots`` is the number at the start; slot ids run up to it, or beyond after a resize.
    """

    pool_group_index: PoolGroupIndex
    num_slots: int
    pools: tuple[PoolDesc, ...]
    life_cycles: tuple[LifeCycleDesc, ...]


@dataclass(frozen=True, slots=True)
class CodecErrors:
    """What pages of a layer group lost, of those that were decoded again as a check. An error is
    the length of the difference over the length of what was encoded.
    """

    layer_group_id: LayerGroupId
    num_samples: int
    num_not_finite: int  # samples without a number for an error, which only these two count
    mean_error: float
    max_error: float
    last_error: float


class ColdPageCodec(abc.ABC):
    """Transforms pages between the hot and the cold representation.

    One manager consumes one codec, by the call that takes it, whether that succeeds or not.
    """

    # These name the cold format in keys and on disk: together they decide whether a stored blob can
    # be read, and have 1,024 bytes at most. No other codec has the ``codec_id``; ``version`` grows
    # when bytes change their meaning; ``parameters`` is whatever else changes the bytes, such as a
    # group size.
    codec_id: str
    version: int = 1
    parameters: str = ""
    is_lossless: bool = False
    # Whether ``encode`` and ``decode`` need to know which block of its sequence each page is.
    needs_positions: bool = False
    # Set by the manager that takes the codec, for good.
    is_consumed: bool = False

    @abc.abstractmethod
    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        """Learn every hot pool group, in index order. Pages hold nothing yet.

        Called exactly once, also of codecs that are made only to be asked for their sizes: the
        pools are scratch memory then. Raises CodecError to refuse.
        """

    @abc.abstractmethod
    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        """The fixed size of a cold page of this life cycle; it is also the stride between cold
        pages. Zero is failure.
        """

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        """The smallest life cycle of the same hot pool group whose pages encode and decode exactly
        alike: same algorithm, parameters, size and bytes. The pages of any members of such a class
        may then share a call, which names the smallest. Returning the argument disables that.
        """
        return life_cycle_id

    @abc.abstractmethod
    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        """Where ``encode`` and ``decode`` want ``page_indices``; the same for a whole batching
        class.
        """

    def prepare(self, stream: Stream) -> None:  # noqa: B027 -- most codecs need nothing
        """Do now what the first call would else wait for, such as compiling. ``stream`` is one of
        the device that calls will name. May block. Called at most once, after ``configure``.
        """

    @abc.abstractmethod
    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """Enqueue hot -> cold for each pair ``(dst, src)``: hot slot ``src`` becomes the cold page
        at ``dst_base + dst * cold_page_bytes``.

        ``page_indices`` holds PAGE_INDEX_PAIRs [num_pages]. For HOST it is a numpy array, valid
        until the call returns; for DEVICE it names device memory, valid until the work enqueued
        here completes, and for use on ``stream`` only. ``block_ordinals`` [num_pages] int32 lies in
        the same place, and is None unless ``needs_positions``.

        Does not synchronise, and may use ``dst_base`` in the enqueued work only. Success means
        submitted, not done. Raises SubmissionError when it could not enqueue all of it; sources are
        untouched then, and destinations, which may be in part written, count for nothing.
        """

    @abc.abstractmethod
    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """Enqueue cold -> hot for each pair ``(dst, src)``: the cold page at ``src_base + src *
        cold_page_bytes`` becomes hot slot ``dst``. Contract as ``encode``.
        """

    def measured_errors(self) -> tuple[CodecErrors, ...]:
        """By layer group what a sample of encodes has lost, as far as it is known by now. Empty
        for a codec that does not check. For statistics: what it raises is logged and ends nothing.
        """
        return ()

    def close(self) -> None:  # noqa: B027 -- most codecs hold nothing
        """Let go of everything. Called once: when the manager closes, or could not be built. What
        it raises is logged and ends nothing.
        """
