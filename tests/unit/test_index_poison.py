"""The wrapper tells a codec that consumes its index array from one that reads it later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from coldpage.codecs.base import ColdPageCodec, PoolGroupDesc
from coldpage.device.base import MemoryKind, Stream
from coldpage.device.simulated import SimulatedDevice
from coldpage.testing.index_poison import IndexPoisoningCodec
from coldpage.types import PAGE_INDEX_PAIR, LifeCycleId, MemAddress, PageIndexLocation

_PAGE_BYTES = 64


class _PromptCodec(ColdPageCodec):
    """One pool at one place; copies pages."""

    codec_id = "prompt"

    def __init__(self, hot_base: int, location: PageIndexLocation) -> None:
        self.hot_base = hot_base
        self.location = location

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        pass

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        return _PAGE_BYTES

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        return self.location

    def encode(self, life_cycle_id: Any, dst_base: Any, page_indices: Any, stream: Stream) -> None:
        self.copy(dst_base, self.hot_base, page_indices, stream)

    def decode(self, life_cycle_id: Any, src_base: Any, page_indices: Any, stream: Stream) -> None:
        self.copy(self.hot_base, src_base, page_indices, stream)

    def copy(self, dst_base: int, src_base: int, pairs: Any, stream: Stream) -> None:
        dst = dst_base + pairs["dst"].astype(np.int64) * _PAGE_BYTES
        src = src_base + pairs["src"].astype(np.int64) * _PAGE_BYTES
        stream.copy(dst, src, np.full(len(dst), _PAGE_BYTES))


class _LateCodec(_PromptCodec):
    """Reads the array only when its work runs."""

    def copy(self, dst_base: int, src_base: int, pairs: Any, stream: Stream) -> None:
        stream.launch(
            lambda: self.seen.extend(pairs["dst"].tolist()),
            reads=(),
            writes=(),
        )

    @property
    def seen(self) -> list[int]:
        return self.__dict__.setdefault("_seen", [])


def _pairs() -> Any:
    return np.array([(3, 1), (2, 0)], dtype=PAGE_INDEX_PAIR)


@pytest.mark.parametrize("location", PageIndexLocation)
def test_a_prompt_codec_works_and_the_callers_array_is_left_alone(
    location: PageIndexLocation,
) -> None:
    device = SimulatedDevice()
    hot, cold = (device.allocate(4 * _PAGE_BYTES, MemoryKind.DEVICE) for _ in range(2))
    hot.array[:] = np.arange(4).repeat(_PAGE_BYTES)
    stream = device.create_stream("a")
    codec = IndexPoisoningCodec(_PromptCodec(hot.address, location))
    pairs = _pairs()
    codec.encode(LifeCycleId(0), cold.address, pairs, stream)
    codec.decode(LifeCycleId(0), cold.address, np.flip(pairs), stream)
    stream.synchronize()
    assert cold.array[3 * _PAGE_BYTES] == 1
    assert cold.array[2 * _PAGE_BYTES] == 0
    np.testing.assert_array_equal(pairs, _pairs())


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_a_late_codec_sees_zeros(call: str) -> None:
    device = SimulatedDevice()
    stream = device.create_stream("a")
    late = _LateCodec(0, PageIndexLocation.HOST)
    base = MemAddress(0)
    getattr(IndexPoisoningCodec(late), call)(LifeCycleId(0), base, _pairs(), stream)
    stream.synchronize()
    assert late.seen == [0, 0]
