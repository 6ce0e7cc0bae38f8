"""The lossless default codec against copying byte by byte, on both devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpage.codecs import (
    ColdPageCodec,
    LifeCycleDesc,
    PoolDesc,
    PoolGroupDesc,
    create_default_cold_page_codec,
)
from coldpage.copy_engine import copy_slots
from coldpage.device.base import Device, MemoryKind
from coldpage.device.host import HostDevice, HostStream
from coldpage.device.simulated import SimulatedDevice
from coldpage.errors import CodecError, SubmissionError, UsageError
from coldpage.pools import MemoryPool
from coldpage.testing.index_poison import IndexPoisoningCodec
from coldpage.types import (
    PAGE_INDEX_PAIR,
    LayerGroupId,
    LifeCycleId,
    PageClass,
    PageIndexLocation,
    PoolGroupIndex,
    PoolIndex,
)

_NUM_SLOTS = 6


@dataclass(frozen=True)
class _Group:
    """A hot pool group: what its pools' slots take, and its life cycles."""

    slot_bytes: tuple[int, ...]
    life_cycles: tuple[int, ...]


# Two life cycles share the first group; the second has one pool; the third unaligned sizes.
_GROUPS = (_Group((64, 16), (1, 3)), _Group((48,), (0,)), _Group((7, 1, 13), (2,)))


class _Rig:
    """Hot pools full of different bytes, and a configured codec."""

    def __init__(self, device: Device, groups: Sequence[_Group] = _GROUPS) -> None:
        self.device = device
        self.stream = device.create_stream("codec")
        self.groups = groups
        self.pools = [
            [MemoryPool(device, _NUM_SLOTS, size, MemoryKind.DEVICE) for size in group.slot_bytes]
            for group in groups
        ]
        rng = np.random.default_rng(5)
        for pools in self.pools:
            for pool in pools:
                pool.array[:] = rng.integers(0, 256, pool.array.shape)
        # The wrapper overwrites the index pairs as soon as a call returns.
        self.codec: ColdPageCodec = IndexPoisoningCodec(create_default_cold_page_codec())
        self.codec.configure(self.describe())

    def describe(self) -> list[PoolGroupDesc]:
        return [
            PoolGroupDesc(
                PoolGroupIndex(index),
                _NUM_SLOTS,
                tuple(
                    PoolDesc(PoolIndex(i), pool.base_address, pool.slot_bytes)
                    for i, pool in enumerate(self.pools[index])
                ),
                tuple(
                    LifeCycleDesc(LifeCycleId(lc), LayerGroupId(lc), PageClass.BODY, ())
                    for lc in group.life_cycles
                ),
            )
            for index, group in enumerate(self.groups)
        ]

    def page(self, group: int, slot: int) -> bytes:
        """A hot page: the contributions of all pools, one after another."""
        return b"".join(pool.array[slot].tobytes() for pool in self.pools[group])

    def everything(self) -> list[list[npt.NDArray[np.uint8]]]:
        return [[pool.array.copy() for pool in pools] for pools in self.pools]

    def close(self) -> None:
        self.stream.synchronize()
        for pools in self.pools:
            for pool in pools:
                pool.close()
        self.device.close()
        if isinstance(self.device, SimulatedDevice):
            assert not self.device.violations


def _device(is_simulated: bool) -> Device:
    if is_simulated:
        return SimulatedDevice(2, raise_on_violation=True, arena_bytes=1 << 18)
    return HostDevice()


@pytest.fixture(params=[False, True], ids=["host", "simulated"])
def rig(request: pytest.FixtureRequest) -> Iterator[_Rig]:
    rig = _Rig(_device(request.param))
    yield rig
    rig.close()


def _pairs(dst: Sequence[int], src: Sequence[int]) -> npt.NDArray[np.void]:
    pairs = np.empty(len(dst), PAGE_INDEX_PAIR)
    pairs["dst"], pairs["src"] = dst, src
    return pairs


@settings(max_examples=40)
@given(
    is_simulated=st.booleans(),
    groups=st.lists(
        st.lists(st.integers(1, 70), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3
    ),
    data=st.data(),
)
def test_pages_go_out_and_come_back_byte_for_byte(
    is_simulated: bool, groups: list[tuple[int, ...]], data: st.DataObject
) -> None:
    rig = _Rig(_device(is_simulated), [_Group(sizes, (i,)) for i, sizes in enumerate(groups)])
    group = data.draw(st.integers(0, len(groups) - 1))
    life_cycle = LifeCycleId(group)
    order = st.permutations(range(_NUM_SLOTS))
    count = data.draw(st.integers(0, _NUM_SLOTS))
    hot, cold, back = (data.draw(order)[:count] for _ in range(3))
    before = rig.everything()
    pages = [rig.page(group, slot) for slot in hot]

    page_bytes = rig.codec.query_cold_page_bytes(life_cycle)
    assert page_bytes == sum(groups[group])
    cold_pool = MemoryPool(rig.device, _NUM_SLOTS, page_bytes, MemoryKind.PINNED)
    cold_pool.array[:] = 0xCC
    rig.codec.encode(life_cycle, cold_pool.base_address, _pairs(cold, hot), rig.stream, None)
    rig.stream.synchronize()
    for slot in range(_NUM_SLOTS):
        expected = pages[cold.index(slot)] if slot in cold else b"\xcc" * page_bytes
        assert cold_pool.array[slot].tobytes() == expected

    for pool in rig.pools[group]:
        pool.array[:] = 0x11
    rig.codec.decode(life_cycle, cold_pool.base_address, _pairs(back, cold), rig.stream, None)
    rig.stream.synchronize()
    for slot in range(_NUM_SLOTS):
        expected = pages[back.index(slot)] if slot in back else b"\x11" * page_bytes
        assert rig.page(group, slot) == expected
    for other, pools in enumerate(rig.pools):
        for pool, was in zip(pools, before[other], strict=True):
            assert other == group or np.array_equal(pool.array, was)
    cold_pool.close()
    rig.close()


def test_life_cycles_of_one_group_read_alike_and_are_one_batch(rig: _Rig) -> None:
    codec = rig.codec
    classes = [codec.get_batching_layer_group_id(LifeCycleId(lc)) for lc in range(4)]
    assert classes == [0, 1, 2, 1]
    sizes = [codec.query_cold_page_bytes(LifeCycleId(lc)) for lc in range(4)]
    assert sizes == [48, 80, 21, 80]
    cold = MemoryPool(rig.device, 2, 80, MemoryKind.PINNED)
    for slot, life_cycle in enumerate((1, 3)):
        codec.encode(
            LifeCycleId(life_cycle), cold.base_address, _pairs([slot], [4]), rig.stream, None
        )
    rig.stream.synchronize()
    assert cold.array[0].tobytes() == cold.array[1].tobytes() == rig.page(0, 4)
    cold.close()


def test_indices_are_consumed_on_the_host(rig: _Rig) -> None:
    for life_cycle in range(4):
        location = rig.codec.query_page_index_location(LifeCycleId(life_cycle))
        assert location is PageIndexLocation.HOST


def test_one_call_is_one_submission() -> None:
    device = SimulatedDevice(arena_bytes=1 << 18)
    rig = _Rig(device)
    cold = MemoryPool(device, _NUM_SLOTS, 80, MemoryKind.PINNED)
    slots = range(_NUM_SLOTS)
    rig.codec.encode(LifeCycleId(1), cold.base_address, _pairs(slots, slots), rig.stream, None)
    assert device.counts.submissions == 1
    assert device.counts.executed_ops == 0, "it does not synchronise"
    rig.stream.synchronize()
    cold.close()
    rig.close()


def test_a_rejected_submission_leaves_both_sides_alone() -> None:
    device = SimulatedDevice(arena_bytes=1 << 18)
    rig = _Rig(device)
    cold = MemoryPool(device, 1, 80, MemoryKind.PINNED)
    before = cold.array.copy()
    device.fail_next_submission("codec")
    with pytest.raises(SubmissionError):
        rig.codec.encode(LifeCycleId(1), cold.base_address, _pairs([0], [0]), rig.stream, None)
    rig.stream.synchronize()
    assert np.array_equal(cold.array, before)
    rig.codec.encode(LifeCycleId(1), cold.base_address, _pairs([0], [0]), rig.stream, None)
    rig.stream.synchronize()
    assert cold.array[0].tobytes() == rig.page(0, 0)
    cold.close()
    rig.close()


class _Recorder(HostStream):
    """Takes copies down and does none."""

    def __init__(self) -> None:
        self.copies: list[tuple[npt.NDArray[np.int64], ...]] = []

    def copy(self, *arrays: npt.NDArray[np.int64]) -> None:
        self.copies.append(tuple(array.copy() for array in arrays))
        assert all(array.flags.c_contiguous for array in arrays)


def test_descriptors_are_one_a_page_and_pool_in_whole_arrays() -> None:
    """Also where addresses need 64 bits although indices have 32: nothing is copied here."""
    codec = create_default_cold_page_codec()
    pools = (PoolDesc(PoolIndex(0), 1 << 40, 1 << 21), PoolDesc(PoolIndex(1), 1 << 42, 100))  # type: ignore[arg-type]
    life_cycle = LifeCycleDesc(LifeCycleId(0), LayerGroupId(0), PageClass.BODY, ())
    codec.configure([PoolGroupDesc(PoolGroupIndex(0), 1 << 20, pools, (life_cycle,))])
    stream = _Recorder()
    base, page = 1 << 44, (1 << 21) + 100
    codec.encode(LifeCycleId(0), base, _pairs([5000, 1], [6000, 2]), stream, None)  # type: ignore[arg-type]
    codec.decode(LifeCycleId(0), base, _pairs([6000, 2], [5000, 1]), stream, None)  # type: ignore[arg-type]
    expected = {
        (base + cold * page + offset, pool.base_address + hot * pool.slot_bytes, pool.slot_bytes)
        for cold, hot in ((5000, 6000), (1, 2))
        for pool, offset in zip(pools, (0, 1 << 21), strict=True)
    }
    (cold, hot, size), (hot_again, cold_again, size_again) = stream.copies
    for arrays in ((cold, hot, size), (cold_again, hot_again, size_again)):
        assert set(zip(*(array.tolist() for array in arrays), strict=True)) == expected
        for array in arrays:
            assert (array.shape, array.dtype) == ((4,), np.int64)


# ---------------------------------------------------------------------- misuse


def test_an_unconfigured_codec_says_so() -> None:
    device = SimulatedDevice(arena_bytes=1 << 16)
    stream = device.create_stream("codec")
    codec = create_default_cold_page_codec()
    sentence = "^codec concat does not know life cycle 2: configure it with its pool group first$"
    for query in (
        codec.query_cold_page_bytes,
        codec.get_batching_layer_group_id,
        codec.query_page_index_location,
    ):
        with pytest.raises(UsageError, match=sentence):
            query(LifeCycleId(2))
    for transform in (codec.encode, codec.decode):
        with pytest.raises(UsageError, match=sentence):
            transform(LifeCycleId(2), 4096, _pairs([0], [0]), stream, None)  # type: ignore[arg-type]
    assert device.counts.submissions == 0
    device.close()


def test_a_pool_group_without_life_cycles_is_refused() -> None:
    group = PoolGroupDesc(PoolGroupIndex(3), 1, (), ())
    with pytest.raises(CodecError, match=r"^pool group 3 has no life cycle: leave it out$"):
        create_default_cold_page_codec().configure([group])


def test_it_names_its_format() -> None:
    codec = create_default_cold_page_codec()
    assert (codec.codec_id, codec.version, codec.is_lossless) == ("concat", 1, True)
    assert not codec.is_consumed
    assert create_default_cold_page_codec() is not codec


# ---------------------------------------------------------------------- copies without a codec


@given(data=st.data(), is_simulated=st.booleans())
@settings(max_examples=20)
def test_raw_copies_move_whole_pages_in_every_pool(data: st.DataObject, is_simulated: bool) -> None:
    rig = _Rig(_device(is_simulated))
    moved = data.draw(st.permutations(range(_NUM_SLOTS)))
    count = data.draw(st.integers(0, _NUM_SLOTS // 2))
    src, dst = moved[:count], moved[count : 2 * count]
    pages = [rig.page(2, slot) for slot in range(_NUM_SLOTS)]
    arrays = (np.array(dst, np.int32), np.array(src, np.int32))
    copy_slots(rig.pools[2], arrays[0], rig.pools[2], arrays[1], rig.stream)
    rig.stream.synchronize()
    for to, source in zip(dst, src, strict=True):
        pages[to] = pages[source]
    assert [rig.page(2, slot) for slot in range(_NUM_SLOTS)] == pages
    rig.close()


def test_raw_copies_between_pools_of_different_slots_are_a_bug(rig: _Rig) -> None:
    slots = np.array([0], np.int32)
    with pytest.raises(AssertionError, match="pools of different slot sizes"):
        copy_slots(rig.pools[0][:1], slots, rig.pools[1], slots, rig.stream)
    with pytest.raises(ValueError, match="shorter"):
        copy_slots(rig.pools[0], slots, rig.pools[0][:1], slots, rig.stream)
