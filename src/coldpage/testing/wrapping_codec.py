"""A codec that is another codec, for those that change one thing about it."""

from __future__ import annotations

from collections.abc import Sequence

from coldpage.codecs.base import (
    BlockOrdinals,
    CodecErrors,
    ColdPageCodec,
    PageIndices,
    PoolGroupDesc,
)
from coldpage.device.base import Stream
from coldpage.types import LifeCycleId, MemAddress, PageIndexLocation

__all__ = ["WrappingCodec"]


class WrappingCodec(ColdPageCodec):
    """Passes every call on. Its pages are those of the wrapped codec, under the same name."""

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

    def prepare(self, stream: Stream) -> None:
        """As the wrapped codec."""
        self._codec.prepare(stream)

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """As the wrapped codec."""
        self._codec.encode(life_cycle_id, dst_base, page_indices, stream, block_ordinals)

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """As the wrapped codec."""
        self._codec.decode(life_cycle_id, src_base, page_indices, stream, block_ordinals)

    def measured_errors(self) -> tuple[CodecErrors, ...]:
        """As the wrapped codec."""
        return self._codec.measured_errors()

    def close(self) -> None:
        """As the wrapped codec."""
        self._codec.close()
