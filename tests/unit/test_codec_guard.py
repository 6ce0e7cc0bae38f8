"""A sample of encoded pages is decoded again: which, what is counted, and when somebody hears."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.codecs import NumberType, PackedCodec
from coldpage.codecs.guard import ALARM_ERRORS, CHECK_INTERVAL_PAGES, CodecGuard
from coldpage.codecs.packed import PACKED_FORMATS
from coldpage.codecs.packed_check import HostCheck
from coldpage.config import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    HostTierConfig,
    KVCacheManagerConfig,
)
from coldpage.device.host import HostDevice
from coldpage.device.simulated import SimulatedDevice
from coldpage.kernels.cold.formats import ColdFormat
from coldpage.manager import KVCacheManager
from coldpage.testing.codec_rig import NUM_SLOTS, CodecRig
from coldpage.types import BufferRole, LayerGroupId, LifeCycleId
from tests.conformance import packed_models
from tests.conformance.packed_models import (
    BLOCK,
    SMOL,
    Model,
    contents,
    numbers_of,
    split_row,
    stored,
)

_Bytes = npt.NDArray[np.uint8]
_MakeRig = Callable[..., CodecRig]

GEMMA = replace(packed_models.GEMMA, layer_groups=(0, 1))
PACKING = [name for name, formats in PACKED_FORMATS.items() if formats is not None]
_GROUP = LayerGroupId(0)


# ---------------------------------------------------------------------- counts


def test_one_page_of_so_many_is_taken() -> None:
    guard = CodecGuard("some", 10)
    taken, first = [], 0
    for num_pages in (1, 3, 6, 1, 0, 25, 4, 100):
        taken += [first + index for index in guard.take(num_pages)]
        first += num_pages
    assert taken == list(range(0, first, 10))
    assert CHECK_INTERVAL_PAGES == 1000


def test_an_interval_of_nothing_takes_nothing() -> None:
    assert not CodecGuard("some", 0).take(5000)


def test_counts_follow_what_is_reported() -> None:
    guard = CodecGuard("some", 1)
    for group in (1, 0):
        guard.watch(LayerGroupId(group), frozenset({ColdFormat.INT8}))
    for error in (0.01, 0.003, 0.005):
        guard.report(_GROUP, (error**2 * 16.0, 16.0))
    guard.report(_GROUP, (0.0, 0.0))
    first, second = guard.errors()
    assert (first.layer_group_id, second.layer_group_id) == (0, 1)
    assert (first.num_samples, first.num_not_finite) == (4, 0)
    assert first.mean_error == pytest.approx(0.018 / 4)
    assert first.max_error == pytest.approx(0.01)
    assert first.last_error == 0.0
    assert (second.num_samples, second.mean_error, second.max_error) == (0, 0.0, 0.0)


def test_what_is_not_finite_is_counted_apart(caplog: pytest.LogCaptureFixture) -> None:
    guard = CodecGuard("some", 1)
    guard.watch(_GROUP, frozenset({ColdFormat.INT4_BLOCK}))
    for squares in ((math.nan, 1.0), (1.0, math.inf), (0.04, 1.0)):
        guard.report(_GROUP, squares)
    (found,) = guard.errors()
    assert (found.num_samples, found.num_not_finite) == (3, 2)
    assert found.mean_error == found.max_error == pytest.approx(0.2)
    assert "not finite" in caplog.text


def test_what_nobody_looks_at_is_bounded() -> None:
    guard = CodecGuard("some", 1)
    guard.watch(_GROUP, frozenset({ColdFormat.INT8}))
    for _ in range(5000):
        guard.report(_GROUP, (0.0, 1.0))
    assert guard.errors()[0].num_samples < 5000


def test_too_large_an_error_is_logged_once_a_layer_group(caplog: pytest.LogCaptureFixture) -> None:
    guard = CodecGuard("int8,1=turbo4", 1)
    guard.watch(_GROUP, frozenset({ColdFormat.INT8}))
    guard.watch(LayerGroupId(1), frozenset({ColdFormat.INT8, ColdFormat.TURBO4}))
    for group in (0, 1):
        for error in (0.015, 0.12, 0.3):
            guard.report(LayerGroupId(group), (error**2, 1.0))
            guard.count()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    texts = [record.getMessage() for record in caplog.records]
    assert "codec int8,1=turbo4 loses too much of layer group 0" in texts[0]
    assert "an error of 0.12, over 0.02" in texts[0]
    assert "layer group 1" in texts[1] and "an error of 0.3, over 0.2" in texts[1]


def test_a_format_without_a_limit_never_alarms(caplog: pytest.LogCaptureFixture) -> None:
    guard = CodecGuard("some", 1)
    guard.watch(_GROUP, frozenset({ColdFormat.INT4_BLOCK, ColdFormat.INT8}))
    guard.report(_GROUP, (9.0, 1.0))
    assert guard.errors()[0].max_error == 3.0
    assert not caplog.records


# ---------------------------------------------------------------------- pages


@pytest.fixture(params=["host", "simulated"])
def make_rig(request: pytest.FixtureRequest) -> Iterator[_MakeRig]:
    rigs: list[CodecRig] = []

    def make(name: str, model: Model, interval_pages: int = 1, **options: bool) -> CodecRig:
        def gaussian(rng: np.random.Generator, num_bytes: int) -> _Bytes:
            return contents(model.number_type, rng, num_bytes)

        codec = PackedCodec(name, model.pages(), check_interval_pages=interval_pages)
        device = SimulatedDevice(1) if request.param == "simulated" else HostDevice()
        has_sinks = options.get("has_sinks", False)
        rigs.append(CodecRig(codec, device, [model.hot_group], gaussian, has_sinks=has_sinks))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def _restored(rig: CodecRig, life_cycle: int, slots: list[int]) -> tuple[_Bytes, _Bytes]:
    """Hot pages in ``slots`` before and after, one a row; they were encoded once."""
    number, there = LifeCycleId(life_cycle), [slot + 12 for slot in slots]
    cold = [NUM_SLOTS - 1 - slot for slot in slots]
    area, ordinals = rig.new_area(number), rig.ordinals(number, len(slots))
    original = rig.load(number, slots)
    rig.encode(number, area, cold, slots, ordinals)
    rig.finish()
    rig.decode(number, area, there, cold, ordinals)
    rig.finish()
    return original, rig.load(number, there)


def _vectors(rig: CodecRig, row: _Bytes, model: Model) -> npt.NDArray[np.float32]:
    """All keys and values of a hot page."""
    buffers = rig.life_cycles[0].buffers
    found = zip(split_row(row, model.hot_group, buffers), buffers, strict=True)
    return np.concatenate(
        [
            numbers_of(raw, model.shape).ravel()
            for raw, buffer in found
            if buffer.buffer_id.role in ("key", "value")
        ]
    )


@pytest.mark.parametrize("number_type", list(NumberType))
def test_errors_are_those_of_the_pages(make_rig: _MakeRig, number_type: NumberType) -> None:
    model = replace(SMOL, number_type=number_type, state_bytes=(33,))
    rig = make_rig("turbo4", model)
    errors = []
    for was, now in zip(*_restored(rig, 0, [3, 1, 7]), strict=True):
        before, after = (_vectors(rig, row, model) for row in (was, now))
        errors.append(np.linalg.norm(after - before) / np.linalg.norm(before))
    (found,) = rig.configured.codec.measured_errors()
    assert found.num_samples == 3
    assert found.mean_error == pytest.approx(np.mean(errors), rel=1e-4)
    assert found.max_error == pytest.approx(max(errors), rel=1e-4)
    assert found.last_error == pytest.approx(errors[-1], rel=1e-4)


@pytest.mark.parametrize("name", PACKING)
def test_limits_have_a_margin_over_gaussian_numbers(
    make_rig: _MakeRig, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    formats = PACKED_FORMATS[name]
    assert formats is not None
    rig = make_rig(name, replace(SMOL, head_dim=128))
    _restored(rig, 0, list(range(12)))
    (found,) = rig.configured.codec.measured_errors()
    limits = [ALARM_ERRORS[it] for it in (formats.key, formats.value)]
    if None in limits:
        assert found.max_error > 0.1
    else:
        limit = max(limit for limit in limits if limit is not None)
        assert limit / 4 < found.max_error < limit / 1.6
    assert not caplog.records


def test_samples_are_taken_across_calls_and_not_of_sinks(make_rig: _MakeRig) -> None:
    rig = make_rig("turbo4", GEMMA, 10, has_sinks=True)
    for life_cycle, count in ((0, 12), (1, 12), (3, 9), (1, 4)):
        number, slots = LifeCycleId(life_cycle), range(count)
        area, ordinals = rig.new_area(number), rig.ordinals(number, count)
        rig.encode(number, area, slots, slots, ordinals)
        rig.finish()
        rig.decode(number, area, slots, slots, ordinals)
        rig.finish()
    # Of pages 0 to 11 and 21 to 24 of group 0, 12 to 20 of group 1: pages 0 and 10, and 20.
    counts = [found.num_samples for found in rig.configured.codec.measured_errors()]
    assert counts == [2, 1]


def test_a_page_that_the_format_does_not_suit_is_heard_of(
    make_rig: _MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    """One large number, and all others just below half a step of its scale."""
    model = replace(SMOL, number_type=NumberType.F32)
    rig = make_rig("int8", model)
    numbers = np.full((NUM_SLOTS, sum(model.hot_group.pool_bytes) // 4), 0.49, np.float32)
    numbers.reshape(-1, model.head_dim)[:, 5] = 127.0
    pages = stored(numbers, NumberType.F32).reshape(NUM_SLOTS, -1)
    rig.store(LifeCycleId(0), range(NUM_SLOTS), pages)
    _restored(rig, 0, [0, 1])
    (found,) = rig.configured.codec.measured_errors()
    assert found.last_error == pytest.approx(0.49 * math.sqrt(63) / 127, rel=0.01)
    assert len(caplog.records) == 1
    assert "codec int8 loses too much of layer group 0" in caplog.text


def test_what_tokens_have_not_filled_does_not_count(
    make_rig: _MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros less the means of keys come back as something, of many tokens beside those of one."""
    rig = make_rig("turbo4", SMOL)
    pages = rig.load(LifeCycleId(0), [0, 1])
    vectors = pages.reshape(2, -1, BLOCK, 2 * SMOL.head_dim)
    vectors[0, :, 1:] = 0
    vectors[1] = 0
    rig.store(LifeCycleId(0), [0, 1], pages)
    _restored(rig, 0, [0, 1])
    (found,) = rig.configured.codec.measured_errors()
    assert found.num_samples == 2
    assert 0.05 < found.max_error < 0.13
    assert found.last_error == 0.0
    assert not caplog.records


def test_numbers_that_are_none_are_counted(make_rig: _MakeRig) -> None:
    rig = make_rig("int8", SMOL)
    page = rig.load(LifeCycleId(0), [0, 1])
    page[1, :2] = np.array([np.nan], np.float32).view(np.uint8)[2:]
    rig.store(LifeCycleId(0), [0, 1], page)
    _restored(rig, 0, [0, 1, 2])
    (found,) = rig.configured.codec.measured_errors()
    assert (found.num_samples, found.num_not_finite) == (3, 1)
    assert 0 < found.mean_error < 0.02


def test_a_check_that_fails_leaves_the_move_alone(
    make_rig: _MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*arguments: object) -> None:
        raise MemoryError("no room to decode a page")

    monkeypatch.setattr(HostCheck, "squares", no_room)
    rig = make_rig("int8", SMOL)
    for was, now in zip(*_restored(rig, 0, [3, 1, 7]), strict=True):
        before, after = (_vectors(rig, row, SMOL) for row in (was, now))
        assert 0 < np.linalg.norm(after - before) < 0.02 * np.linalg.norm(before)
    assert rig.configured.codec.measured_errors()[0].num_samples == 0
    _restored(rig, 0, [2])
    assert [record.getMessage() for record in caplog.records] == [
        "codec int8 could not check a page (logged once): MemoryError('no room to decode a page')"
    ]


# ---------------------------------------------------------------------- the manager


def test_a_managers_statistics_have_them() -> None:
    size = SMOL.shape.num_bytes
    layers = tuple(
        AttentionLayerConfig(
            layer_id, tuple(BufferConfig(BufferRole(role), size) for role in ("key", "value"))
        )
        for layer_id in SMOL.pages()
    )
    page_bytes = 4 * size
    tiers = (DeviceTierConfig(8 * page_bytes), HostTierConfig(20 * page_bytes))
    codec = PackedCodec("int8", SMOL.pages(), check_interval_pages=1)
    with KVCacheManager(KVCacheManagerConfig(16, tiers, layers), codec=codec) as manager:
        (stats,) = manager.stats().codecs
        assert (stats.codec, stats.errors[0].num_samples) == ("int8", 0)
        rng = np.random.default_rng(0)
        group = manager.layer_group_of(layers[0].layer_id)
        for first in range(0, 48 * 6, 48 * 2):
            cache = manager.create_kv_cache()
            assert cache.resume() and cache.resize(96)
            cache.synchronize()
            for layer in layers:
                for buffer in layer.buffers:
                    pages = manager.hot_array(layer.layer_id, buffer.role)
                    slots = cache.page_indices(group)
                    raw = contents(NumberType.BF16, rng, len(slots) * size)
                    pages[slots] = raw.reshape(len(slots), size)  # type: ignore[index]
            cache.commit(range(first, first + 96))
            cache.close()
        manager.finish_transfers()
        (stats,) = manager.stats().codecs
        assert stats.errors[0].num_samples == manager.stats().moved_pages["hot-host"] > 0
        assert 0.003 < stats.errors[0].mean_error < 0.012


def test_a_manager_of_lossless_codecs_has_none() -> None:
    layer = AttentionLayerConfig(0, (BufferConfig(BufferRole("key"), 4096),))  # type: ignore[arg-type]
    tiers = (DeviceTierConfig(1 << 16), HostTierConfig(1 << 16))
    with KVCacheManager(KVCacheManagerConfig(16, tiers, (layer,))) as manager:
        assert manager.stats().codecs == ()
