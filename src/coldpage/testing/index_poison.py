"""A codec wrapper that finds a codec which reads its host index array after its call returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from coldpage.codecs.base import ColdPageCodec, PoolGroupDesc
from coldpage.device.base import Stream
from coldpage.types import LifeCycleId, MemAddress, PageIndexLocation

__all__ = ["IndexPoisoningCodec"]


class IndexPoisoningCodec(ColdPageCodec):
    """Passes on copies of HOST index arrays, and overwrites them when the codec call returns.

    Late work then sees pairs (0, 0): valid slots, so nothing crashes, and wrong bytes.
    """

    def __init__(self, codec: ColdPageCodec) -> None:
        self._codec = codec
        self.codec_id = codec.codec_id
        self.version = codec.version
        self.is_lossless = codec.is_lossless

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
        page_indices: npt.NDArray[np.void],
        stream: Stream,
    ) -> None:
        """As the wrapped codec, with an index array that does not outlive the call."""
        self._call(self._codec.encode, life_cycle_id, dst_base, page_indices, stream)

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: npt.NDArray[np.void],
        stream: Stream,
    ) -> None:
        """As the wrapped codec, with an index array that does not outlive the call."""
        self._call(self._codec.decode, life_cycle_id, src_base, page_indices, stream)

    def _call(
        self,
        transform: Callable[[LifeCycleId, MemAddress, npt.NDArray[np.void], Stream], None],
        life_cycle_id: LifeCycleId,
        base: MemAddress,
        page_indices: npt.NDArray[np.void],
        stream: Stream,
    ) -> None:
        if self.query_page_index_location(life_cycle_id) is not PageIndexLocation.HOST:
            transform(life_cycle_id, base, page_indices, stream)
            return
        lent = page_indices.copy()
        try:
            transform(life_cycle_id, base, lent, stream)
        finally:
            lent[...] = np.zeros((), dtype=lent.dtype)
