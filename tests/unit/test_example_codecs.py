"""What is special about each example codec; the conformance kit tries the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from coldpage.codecs import ColdPageCodec, create_default_cold_page_codec
from coldpage.device.simulated import SimulatedDevice
from coldpage.errors import ConfigurationError
from coldpage.testing.codec_rig import CodecRig, HotGroupShape
from coldpage.testing.example_codecs import (
    PADDING_BYTE,
    CoarseCodec,
    DeviceIndexCodec,
    PaddingCodec,
    PositionCodec,
    SlowCodec,
)
from coldpage.testing.page_codec import Strided
from coldpage.types import LifeCycleId, PageIndexLocation

_ZERO = LifeCycleId(0)
_SHAPES = (HotGroupShape((40, 100), (0,)), HotGroupShape((11,), (1,)))
_ONE = np.array([1], np.int32)

_rigs: list[CodecRig] = []


@pytest.fixture(autouse=True)
def _close_rigs() -> Iterator[None]:
    yield
    while _rigs:
        _rigs.pop().close()


def _rig(
    codec: ColdPageCodec, device: SimulatedDevice | None = None, *, has_sinks: bool = False
) -> CodecRig:
    rig = CodecRig(
        codec,
        SimulatedDevice() if device is None else device,
        _SHAPES,
        lambda rng, size: rng.integers(0, 256, size, np.uint8),
        has_sinks=has_sinks,
    )
    _rigs.append(rig)
    return rig


def test_padding_lies_behind_every_part_and_has_its_value() -> None:
    rig = _rig(PaddingCodec(64))
    assert rig.configured.cold_page_bytes == (64 + 128, 64)
    area = rig.new_area(_ZERO)
    rig.encode(_ZERO, area, [2], [5], _ONE)
    rig.finish()
    page, blob = rig.load(_ZERO, [5])[0], area.pages[2]
    np.testing.assert_array_equal(blob[:40], page[:40])
    np.testing.assert_array_equal(blob[64:164], page[40:])
    assert (blob[40:64] == PADDING_BYTE).all()
    assert (blob[164:] == PADDING_BYTE).all()
    assert rig.configured.name == "padding v1 alignment=64"


def test_padding_to_one_byte_is_concatenation() -> None:
    assert _rig(PaddingCodec(1)).configured.cold_page_bytes == (140, 11)
    with pytest.raises(ConfigurationError, match="an alignment of 0 bytes: use at least 1"):
        PaddingCodec(0)


@pytest.mark.parametrize(
    "make_codec", [DeviceIndexCodec, lambda: PositionCodec(PageIndexLocation.DEVICE)]
)
def test_pairs_are_read_in_device_memory_when_the_work_runs(
    make_codec: Callable[[], ColdPageCodec],
) -> None:
    """They are uploaded on the same stream just before, so that nobody knew them earlier."""
    device, codec = SimulatedDevice(), make_codec()
    rig = _rig(codec, device)
    assert rig.configured.any_device_indices
    area = rig.new_area(_ZERO)
    before = device.counts.submissions
    rig.encode(_ZERO, area, [2, 7], [5, 1], np.array([0, 0], np.int32))
    num_arrays = 2 if codec.needs_positions else 1
    # One upload and one overwriting of each array, and between them one launch of the codec.
    assert device.counts.submissions - before == 2 * num_arrays + 1
    assert device.counts.executed_ops == 0
    rig.finish()
    rig.decode(_ZERO, area, [9, 8], [7, 2], np.array([0, 0], np.int32))
    rig.finish()
    np.testing.assert_array_equal(rig.load(_ZERO, [9, 8]), rig.load(_ZERO, [1, 5]))


def test_a_page_under_another_ordinal_is_noise() -> None:
    rig = _rig(PositionCodec())
    area = rig.new_area(_ZERO)
    rig.encode(_ZERO, area, [0], [5], _ONE)
    for slot, ordinal in ((6, 1), (7, 2), (8, 1 + (1 << 16)), (9, (1 << 31) - 1)):
        rig.decode(_ZERO, area, [slot], [0], np.array([ordinal], np.int32))
    rig.finish()
    page = rig.load(_ZERO, [5])[0]
    np.testing.assert_array_equal(rig.load(_ZERO, [6])[0], page)
    for slot in (7, 8, 9):
        assert np.mean(rig.load(_ZERO, [slot])[0] == page) < 0.1


def test_a_coarse_page_has_half_the_size_and_does_not_get_coarser() -> None:
    rig = _rig(CoarseCodec())
    odd = LifeCycleId(1)
    assert rig.configured.cold_page_bytes == (70, 6)
    assert not rig.configured.codec.is_lossless
    area = rig.new_area(odd)
    rig.store(odd, [0], np.arange(0x12, 0x1D, dtype=np.uint8)[None])
    rig.encode(odd, area, [3], [0], _ONE)
    rig.decode(odd, area, [1], [3], _ONE)
    rig.encode(odd, area, [4], [1], _ONE)
    rig.finish()
    assert area.pages[3].tolist() == [0x11] * 5 + [0x10]
    assert rig.load(odd, [1])[0].tolist() == [0x10] * 11
    np.testing.assert_array_equal(area.pages[3], area.pages[4])


def test_sinks_that_stay_whole_are_a_class_with_a_size_of_its_own() -> None:
    rig = _rig(CoarseCodec(keeps_sinks=True), has_sinks=True)
    assert rig.configured.cold_page_bytes == (140, 70, 11, 6)
    assert rig.configured.representative.tolist() == [0, 1, 2, 3]
    assert rig.configured.identity == "coarse/1/nibbles sinks=bytes"
    assert _rig(CoarseCodec(), has_sinks=True).configured.representative.tolist() == [0, 0, 2, 2]


def test_a_slow_codec_waits_on_the_stream_before_it_touches_anything() -> None:
    device = SimulatedDevice()
    rig = _rig(SlowCodec(create_default_cold_page_codec(), 0.02), device)
    assert rig.configured.name == "concat v1"
    area = rig.new_area(_ZERO)
    before = rig.snapshot()
    rig.encode(_ZERO, area, [0], [5], _ONE)
    start = time.perf_counter()
    assert device.step(1) == 1
    assert time.perf_counter() - start >= 0.02
    rig.check_nothing_changed(before)
    rig.finish()
    np.testing.assert_array_equal(area.pages[0], rig.load(_ZERO, [5])[0])


def test_strided_pieces_name_exactly_their_bytes() -> None:
    ranges = Strided(1000, 10).ranges(np.array([3, 0]))
    assert [(r.address, r.num_bytes) for r in ranges] == [(1030, 10), (1000, 10)]
