"""A codec wrapper that finds a codec which reads its host arrays after its call returned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from coldpage.codecs.base import BlockOrdinals, ColdPageCodec, PageIndices, PoolGroupDesc
from coldpage.device.base import Stream
from coldpage.types import LifeCycleId, MemAddress, PageIndexLocation

__all__ = ["IndexPoisoningCodec"]

_Array = TypeVar("_Array")


class IndexPoisoningCodec(ColdPageCodec):
    """Passes on copies of index pairs and ordinals that lie on the host, and overwrites them when
    the codec call returns. Late work then sees pairs (0, 0): valid slots, so nothing crashes, and
    wrong bytes.

    Arrays in device memory belong to the manager's streams, and pass through.
    """

    def __init__(self, codec: ColdPageCodec) -> None:
        self._codec = codec
        self.codec_id = codec.codec_id
        self.version = codec.version
        self.parameters = codec.parameters
        self.is_lossless = codec.is_lossless
        self.needs_positions = codec.needs_positions

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        """As the wrapped codec."""
        self._codec.configure(pool_groups)

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        """As the wrapped codec."""
        return self._codec.query_cold_page_bytes(life_cycle_id)

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        """As the wrapped codec."""
        return self._codec.get_batching_layer_group_id(life_cycle_id)

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        """As the wrapped codec."""
        return self._codec.query_page_index_location(life_cycle_id)

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """As the wrapped codec, with host arrays that do not outlive the call."""
        with _lend(page_indices) as pairs, _lend(block_ordinals) as ordinals:
            self._codec.encode(life_cycle_id, dst_base, pairs, stream, ordinals)

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """As the wrapped codec, with host arrays that do not outlive the call."""
        with _lend(page_indices) as pairs, _lend(block_ordinals) as ordinals:
            self._codec.decode(life_cycle_id, src_base, pairs, stream, ordinals)

    def close(self) -> None:
        """As the wrapped codec."""
        self._codec.close()


@contextlib.contextmanager
def _lend(array: _Array) -> Iterator[_Array]:
    """A copy of a numpy array, overwritten at the end; anything else as it is."""
    if not isinstance(array, np.ndarray):
        yield array
        return
    lent = array.copy()
    try:
        yield lent
    finally:
        lent[...] = np.zeros((), dtype=lent.dtype)
