"""Copies of pages on the simulated device, which learns their ranges when they run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.device.base import MemoryKind, PageParts, Stream
from coldpage.device.simulated import SimulatedDevice, ViolationKind
from coldpage.errors import DeviceError
from coldpage.testing.device_kit_pages import index_pairs
from coldpage.types import DeviceArray, MemAddress

_PAGE_BYTES = 64
_NUM_SLOTS = 16
_RACE, _NO_MEMORY = ViolationKind.RACE, ViolationKind.OUT_OF_BOUNDS

_Pairs = npt.NDArray[np.void]


class _Scene:
    """Pages of two parts on two sides, pairs in device memory, and two streams."""

    def __init__(self, seed: int = 0) -> None:
        self.device = SimulatedDevice(seed, arena_bytes=1 << 20)
        self.hot, self.cold = (
            self.device.allocate(2 * _NUM_SLOTS * _PAGE_BYTES, kind)
            for kind in (MemoryKind.DEVICE, MemoryKind.PINNED)
        )
        self.index = self.device.allocate(256, MemoryKind.DEVICE)
        self.index.array[:] = 0
        self.a = self.device.create_stream("a")
        self.b = self.device.create_stream("b")

    def parts(self, *, stride: int = _PAGE_BYTES, num_bytes: int = _PAGE_BYTES) -> PageParts:
        """Of pages that go from hot to cold."""
        starts = np.array([0, _NUM_SLOTS * _PAGE_BYTES])
        strides = np.full(2, _PAGE_BYTES)
        return PageParts(
            starts + self.cold.address,
            np.full(2, stride),
            starts + self.hot.address,
            strides,
            np.full(2, num_bytes),
        )

    def upload(self, stream: Stream, pairs: _Pairs) -> None:
        stream.upload(self.index.address, np.frombuffer(pairs.tobytes(), np.uint8))

    def copy(
        self, stream: Stream, size: int, host: _Pairs | None = None, parts: PageParts | None = None
    ) -> None:
        stream.copy_pages(parts or self.parts(), DeviceArray(self.index.address, size, host))

    def write_cold(self, stream: Stream, slot: int) -> None:
        address = MemAddress(self.cold.address + slot * _PAGE_BYTES)
        stream.upload(address, np.zeros(_PAGE_BYTES, np.uint8))

    def write_hot(self, stream: Stream, slot: int) -> None:
        address = MemAddress(self.hot.address + slot * _PAGE_BYTES)
        stream.upload(address, np.zeros(_PAGE_BYTES, np.uint8))

    def finish(self) -> list[ViolationKind]:
        self.a.synchronize()
        self.b.synchronize()
        for memory in (self.hot, self.cold, self.index):
            memory.free()
        self.device.close()
        return [violation.kind for violation in self.device.violations]


_PAIRS = index_pairs([3, 0], [1, 2])


def _pairs_not_there_yet(s: _Scene) -> None:
    s.upload(s.b, _PAIRS)
    s.copy(s.a, 2)


def _pairs_gone_too_early(s: _Scene) -> None:
    s.upload(s.a, _PAIRS)
    s.copy(s.a, 2)
    s.upload(s.b, index_pairs([5, 6], [7, 8]))


def _pages_that_are_being_written(s: _Scene) -> None:
    s.write_hot(s.b, 2)
    s.upload(s.a, _PAIRS)
    s.copy(s.a, 2)


def _pages_that_are_used_too_early(s: _Scene) -> None:
    s.upload(s.a, _PAIRS)
    s.copy(s.a, 2)
    s.write_cold(s.b, 3)


def _one_slot_for_two_pages(s: _Scene) -> None:
    s.upload(s.a, index_pairs([3, 3], [1, 2]))
    s.copy(s.a, 2)


def _slots_that_overlap(s: _Scene) -> None:
    s.upload(s.a, index_pairs([3, 4], [1, 2]))
    s.copy(s.a, 2, parts=s.parts(stride=_PAGE_BYTES - 1))


def _pages_onto_others_that_move(s: _Scene) -> None:
    down = s.parts()
    within = PageParts(
        down.src_base,
        down.src_stride_bytes,
        down.src_base,
        down.src_stride_bytes,
        down.num_bytes,
    )
    s.upload(s.a, index_pairs([1, 2], [2, 3]))
    s.copy(s.a, 2, parts=within)


@pytest.mark.parametrize(
    "program",
    [
        _pairs_not_there_yet,
        _pairs_gone_too_early,
        _pages_that_are_being_written,
        _pages_that_are_used_too_early,
        _one_slot_for_two_pages,
        _slots_that_overlap,
        _pages_onto_others_that_move,
    ],
)
def test_a_race_is_found_whatever_the_schedule(program: Callable[[_Scene], None]) -> None:
    for seed in range(8):
        scene = _Scene(seed)
        program(scene)
        assert set(scene.finish()) == {_RACE}
        assert all("test_simulated_pages.py" in str(v) for v in scene.device.violations)


def _all_on_one_stream(s: _Scene) -> None:
    s.write_hot(s.a, 2)
    s.upload(s.a, _PAIRS)
    s.copy(s.a, 2, _PAIRS)
    s.upload(s.a, index_pairs([5], [7]))
    s.copy(s.a, 1)
    s.write_cold(s.a, 3)


def _ordered_by_events(s: _Scene) -> None:
    s.upload(s.b, _PAIRS)
    s.a.wait(s.b.record())
    s.copy(s.a, 2)
    s.b.wait(s.a.record())
    s.write_cold(s.b, 3)
    s.upload(s.b, _PAIRS)


def _pages_elsewhere(s: _Scene) -> None:
    s.upload(s.a, _PAIRS)
    s.copy(s.a, 2)
    s.write_cold(s.b, 4)
    s.write_hot(s.b, 0)


def _one_page_for_two_slots(s: _Scene) -> None:
    s.upload(s.a, index_pairs([3, 4], [1, 1]))
    s.copy(s.a, 2)


def _no_pages(s: _Scene) -> None:
    s.copy(s.a, 0)
    s.upload(s.b, _PAIRS)


@pytest.mark.parametrize(
    "program",
    [
        _all_on_one_stream,
        _ordered_by_events,
        _pages_elsewhere,
        _one_page_for_two_slots,
        _no_pages,
    ],
)
def test_what_is_ordered_or_apart_is_silent(program: Callable[[_Scene], None]) -> None:
    for seed in range(20):
        scene = _Scene(seed)
        program(scene)
        assert scene.finish() == []


@pytest.mark.parametrize("pairs", [index_pairs([2 * _NUM_SLOTS], [0]), index_pairs([0], [-1])])
def test_slots_that_do_not_exist_are_found_and_nothing_is_copied(pairs: _Pairs) -> None:
    scene = _Scene()
    before = scene.cold.array.copy()
    scene.upload(scene.a, pairs)
    scene.copy(scene.a, 1)
    scene.a.synchronize()
    assert np.array_equal(scene.cold.array, before)
    assert scene.finish() == [_NO_MEMORY]


def test_host_pairs_that_are_other_ones_are_found() -> None:
    scene = _Scene()
    scene.upload(scene.a, _PAIRS)
    host = _PAIRS.copy()
    scene.copy(scene.a, 2, host)
    host[...] = np.zeros((), host.dtype)  # consumed by the call: no matter
    scene.a.synchronize()
    scene.copy(scene.a, 2, index_pairs([3, 1], [1, 2]))
    with pytest.raises(DeviceError, match="the pairs on the host are other ones"):
        scene.a.synchronize()
