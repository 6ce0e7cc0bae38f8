"""The wrapper tells a codec that consumes its index array from one that reads it later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from coldpage.codecs.base import ColdPageCodec, PoolGroupDesc
from coldpage.device.base import MemoryKind, Stream
from coldpage.device.simulated import SimulatedDevice
from coldpage.testing.example_codecs import PositionCodec
from coldpage.testing.index_poison import IndexPoisoningCodec
from coldpage.types import (
    PAGE_INDEX_PAIR,
    DeviceArray,
    LifeCycleId,
    MemAddress,
    PageIndexLocation,
)

_PAGE_BYTES = 64


class _PromptCodec(ColdPageCodec):
    """One pool at one place; copies pages."""

    codec_id = "prompt"

    def __init__(self, hot_base: int) -> None:
        self.hot_base = hot_base
        self.seen: list[Any] = []
        self.num_closed = 0

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        pass

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        return _PAGE_BYTES

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        return PageIndexLocation.HOST

    def encode(
        self, life_cycle_id: Any, dst_base: Any, pairs: Any, stream: Stream, ordinals: Any
    ) -> None:
        self.copy(dst_base, self.hot_base, pairs, stream, ordinals)

    def decode(
        self, life_cycle_id: Any, src_base: Any, pairs: Any, stream: Stream, ordinals: Any
    ) -> None:
        self.copy(self.hot_base, src_base, pairs, stream, ordinals)

    def copy(self, dst_base: int, src_base: int, pairs: Any, stream: Stream, ordinals: Any) -> None:
        dst = dst_base + pairs["dst"].astype(np.int64) * _PAGE_BYTES
        src = src_base + pairs["src"].astype(np.int64) * _PAGE_BYTES
        stream.copy(dst, src, np.full(len(dst), _PAGE_BYTES))

    def close(self) -> None:
        self.num_closed += 1


class _LateCodec(_PromptCodec):
    """Reads the arrays only when its work runs."""

    needs_positions = True

    def copy(self, dst_base: int, src_base: int, pairs: Any, stream: Stream, ordinals: Any) -> None:
        stream.launch(
            lambda: self.seen.append((pairs["dst"].tolist(), ordinals.tolist())),
            reads=(),
            writes=(),
        )


class _DeviceCodec(_PromptCodec):
    """Notes which arrays it was given."""

    def copy(self, dst_base: int, src_base: int, pairs: Any, stream: Stream, ordinals: Any) -> None:
        self.seen.append((pairs, ordinals))


def _pairs() -> Any:
    return np.array([(3, 1), (2, 0)], dtype=PAGE_INDEX_PAIR)


def test_a_prompt_codec_works_and_the_callers_array_is_left_alone() -> None:
    device = SimulatedDevice()
    hot, cold = (device.allocate(4 * _PAGE_BYTES, MemoryKind.DEVICE) for _ in range(2))
    hot.array[:] = np.arange(4).repeat(_PAGE_BYTES)
    stream = device.create_stream("a")
    codec = IndexPoisoningCodec(_PromptCodec(hot.address))
    pairs = _pairs()
    codec.encode(LifeCycleId(0), cold.address, pairs, stream, None)
    codec.decode(LifeCycleId(0), cold.address, np.flip(pairs), stream, None)
    stream.synchronize()
    assert cold.array[3 * _PAGE_BYTES] == 1
    assert cold.array[2 * _PAGE_BYTES] == 0
    np.testing.assert_array_equal(pairs, _pairs())


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_a_late_codec_sees_zeros(call: str) -> None:
    device = SimulatedDevice()
    stream = device.create_stream("a")
    late = _LateCodec(0)
    base, ordinals = MemAddress(0), np.array([7, 8], np.int32)
    getattr(IndexPoisoningCodec(late), call)(LifeCycleId(0), base, _pairs(), stream, ordinals)
    stream.synchronize()
    assert late.seen == [([0, 0], [0, 0])]
    assert ordinals.tolist() == [7, 8], "the caller's array is left alone"


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_device_arrays_pass_through(call: str) -> None:
    """They belong to the stream, on which only the manager can say when they are free."""
    device = SimulatedDevice()
    stream = device.create_stream("a")
    codec = _DeviceCodec(0)
    pairs, ordinals = DeviceArray(MemAddress(4096), 2), DeviceArray(MemAddress(8192), 2)
    getattr(IndexPoisoningCodec(codec), call)(
        LifeCycleId(0), MemAddress(0), pairs, stream, ordinals
    )
    assert codec.seen == [(pairs, ordinals)]


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_what_the_host_has_of_device_arrays_is_lent(call: str) -> None:
    device = SimulatedDevice()
    stream = device.create_stream("a")
    codec = _DeviceCodec(0)
    host = _pairs(), np.array([7, 8], np.int32)
    pairs, ordinals = (DeviceArray(MemAddress(4096), 2, array) for array in host)
    getattr(IndexPoisoningCodec(codec), call)(
        LifeCycleId(0), MemAddress(0), pairs, stream, ordinals
    )
    ((lent_pairs, lent_ordinals),) = codec.seen
    assert (lent_pairs, lent_ordinals) == (pairs, ordinals)
    assert lent_pairs.host.tolist() == [(0, 0), (0, 0)]
    assert lent_ordinals.host.tolist() == [0, 0]
    assert host[0].tolist() == [(3, 1), (2, 0)], "the caller's array is left alone"
    assert host[1].tolist() == [7, 8], "the caller's array is left alone"


def test_it_passes_for_the_codec_within() -> None:
    codec = PositionCodec(PageIndexLocation.DEVICE)
    codec.version, codec.parameters = 3, "x=1"
    wrapper = IndexPoisoningCodec(codec)
    for name in ("codec_id", "version", "parameters", "is_lossless", "needs_positions"):
        assert getattr(wrapper, name) == getattr(codec, name)
    closed = _PromptCodec(0)
    IndexPoisoningCodec(closed).close()
    assert closed.num_closed == 1
