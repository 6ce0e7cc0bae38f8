"""Packed pages made and read by a GPU's kernels, against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from coldpage.kernels.cold.formats import FORMATS, ColdFormat, KVShape, NumberType
from coldpage.kernels.cold.gpu import GpuBuffers, Launch, pack_pages_gpu, unpack_pages_gpu
from coldpage.kernels.cold.numbers import F16_MAX
from coldpage.kernels.cold.reference import pack_buffer, unpack_buffer
from tests.kernels.cold_pages import (
    LLAMA_8B,
    SMOLLM2,
    UNTOUCHED,
    Pages,
    from_hot,
    levels_of,
    make_pages,
    parameters_of,
)
from tests.kernels.pools import DEVICES
from tests.kernels.turbo_groups import F16_ROUNDING, check_norms

# Every format meets each of them, and each type of numbers in turn.
SHAPES = {
    "head of 64": (3, 16, 64),
    "head of 128": (2, 32, 128),
    "head of 256": (1, 16, 256),
    "head of 512": (1, 16, 512),
    "head of 96": (2, 16, 96),
    "head of 80": (1, 32, 80),
    "head of 192": (1, 16, 192),
    "block of 128": (1, 128, 64),
    "block of 24": (2, 24, 64),
    "head of 8": (1, 1, 8),
}


def _cases():
    types = cycle([NumberType.F32, NumberType.BF16, NumberType.F16])
    is_keys = cycle([True, False])
    for cold_format in FORMATS.values():
        for (name, sizes), number_type, are_keys in zip(
            SHAPES.items(), types, is_keys, strict=False
        ):
            shape = KVShape(*sizes, number_type)
            if cold_format.refusal(shape) is None:
                case = f"{cold_format.value}, {name}, {number_type.value}, {are_keys}"
                yield pytest.param(cold_format, shape, are_keys, id=case)


CASES = list(_cases())
ROTATED_CASES = [case for case in CASES if case.values[0].is_rotated]
# A small tile has half of the tokens of one head.
LONG_BLOCK = KVShape(2, 64, 64, NumberType.BF16)
SMALL_TILES = Launch(tile_numbers=2048, num_warps=4, stages=2)


class Moved:
    """Pages that a device packs and unpacks, in its memory and in memory of the host."""

    def __init__(self, pages: Pages, device: str, **launches: Launch) -> None:
        self._pages, self._is_gpu = pages, device == "cuda"
        self._hot = torch.from_numpy(pages.hot).to(device)
        self._cold = torch.from_numpy(pages.cold)
        if self._is_gpu:
            self._cold = self._cold.pin_memory()
        moved_by = self._hot.data_ptr() - pages.hot.ctypes.data
        there = replace(pages.buffers, hot_base=pages.buffers.hot_base + moved_by)
        self._buffers = GpuBuffers(there, torch.device(device), **launches)
        self._ordinals = torch.from_numpy(pages.ordinals).to(device)
        self._pairs, self._back = (
            torch.from_numpy(pairs.view(np.int32)).to(device) for pairs in (pages.pairs, pages.back)
        )

    def pack(self, num_programs: int = 3) -> None:
        self._run(pack_pages_gpu, self._pairs, num_programs)

    def unpack(self, num_programs: int = 3) -> None:
        self._run(unpack_pages_gpu, self._back, num_programs)

    def _run(self, move, pairs, num_programs):
        pages = self._pages
        self._hot.copy_(torch.from_numpy(pages.hot))
        self._cold.copy_(torch.from_numpy(pages.cold))
        # Numbers that are none are on purpose.
        with np.errstate(all="ignore"):
            move(
                self._buffers,
                self._cold.data_ptr(),
                pairs.data_ptr(),
                pages.pairs.size,
                self._ordinals.data_ptr(),
                num_programs,
            )
        if self._is_gpu:
            torch.cuda.synchronize()
        pages.hot[:] = self._hot.cpu().numpy()
        pages.cold[:] = self._cold.numpy()


def _packed(cold_format, shape, device, num_programs=3, **options):
    pages = make_pages(cold_format, shape, num_pages=2, **options)
    Moved(pages, device).pack(num_programs)
    return pages


def _all_buffers(pages):
    return np.ndindex(pages.pairs.size, pages.buffers.hot_base.size)


def _expected(pages, i, b):
    shape, cold_format = pages.buffers.shape, pages.buffers.cold_format
    numbers = from_hot(pages.hot_buffer(i, b), shape)
    return pack_buffer(numbers, cold_format, shape, **pages.keys(i, b))


def _num_ties(found, expected, cold_format, shape, device):
    """How many codes differ, after a check that none does by more than a step, and that parameters
    do by their last bits. The norm of a rotated group with another code is another, see
    ``check_norms``."""
    # A GPU's sines are fast, and turned keys are rounded before they are rotated.
    max_ulps = 8 if device == "cuda" else 1
    used_bytes = cold_format.code_bytes(shape) + 2 * cold_format.num_parameters(shape)
    assert not found[used_bytes:].any()
    levels = [levels_of(packed, cold_format, shape) for packed in (found, expected)]
    steps = levels[0] - levels[1]
    assert np.abs(steps).max() <= 1
    parameters = [parameters_of(packed, cold_format, shape) for packed in (found, expected)]
    if cold_format is ColdFormat.INT4_BLOCK:
        scales = [x.view(np.float32) for x in parameters]
        assert scales[0] == pytest.approx(scales[1], rel=1e-6)
        return np.count_nonzero(steps)
    ulps = np.abs(parameters[0].view(np.int16).astype(int) - parameters[1].view(np.int16))
    if cold_format.is_rotated:
        ulps = ulps[~steps.reshape(ulps.size, -1).any(-1)]
    assert ulps.max() <= max_ulps
    return np.count_nonzero(steps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cold_format", "shape", "is_keys"), CASES)
def test_packed_buffers_are_the_references_up_to_ties(device, cold_format, shape, is_keys):
    pages = _packed(cold_format, shape, device, is_keys=is_keys)
    num_different = 0
    for i, b in _all_buffers(pages):
        found = pages.packed_buffer(i, b)
        num_different += _num_ties(found, _expected(pages, i, b), cold_format, shape, device)
    # On a GPU turned keys are rounded before they are rotated.
    ties = 0.02 if device == "cuda" else 0.002
    assert num_different <= ties * shape.num_numbers * len(list(_all_buffers(pages)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cold_format", "shape", "is_keys"), CASES)
def test_hot_numbers_are_the_references(device, cold_format, shape, is_keys):
    pages = make_pages(cold_format, shape, num_pages=2, is_keys=is_keys)
    for i, b in _all_buffers(pages):
        pages.packed_buffer(i, b)[:] = _expected(pages, i, b)
        pages.hot_buffer(i, b)[:] = 0
    Moved(pages, device).unpack()
    step = {NumberType.BF16: 2.0**-8, NumberType.F16: 2.0**-11, NumberType.F32: 1e-6}
    # The interpreter cuts bits of bf16 off; a GPU's sines are fast, its codebooks are of f16.
    is_cut = device == "cpu" and shape.number_type is NumberType.BF16
    slack = 2e-6 if device == "cpu" else 1e-3 if cold_format.is_rotated else 1e-5
    for i, b in _all_buffers(pages):
        found = from_hot(pages.hot_buffer(i, b), shape)
        packed = pages.packed_buffer(i, b)
        expected = unpack_buffer(packed, cold_format, shape, **pages.keys(i, b))
        limit = np.abs(expected) * (step[shape.number_type] * (2 if is_cut else 1))
        limit += slack * np.abs(expected).max(axis=-1, keepdims=True)
        assert (np.abs(found - expected) <= limit).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cold_format", "shape", "is_keys"), ROTATED_CASES)
def test_norms_are_those_of_the_codes(device, cold_format, shape, is_keys):
    pages = _packed(cold_format, shape, device, is_keys=is_keys)
    # On a GPU turned keys are rounded to the type of hot pages before they are rotated.
    slack = 7 * F16_ROUNDING if device == "cuda" else 2e-6
    if cold_format is ColdFormat.TURBO4:
        slack += 2e-5  # squares of numbers are whole steps of 2**-13
    for i, b in _all_buffers(pages):
        numbers, packed = from_hot(pages.hot_buffer(i, b), shape), pages.packed_buffer(i, b)
        check_norms(packed, numbers, cold_format, shape, pages.keys(i, b), slack)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_nothing_else_is_written(device, cold_format):
    pages = make_pages(cold_format, SMOLLM2, num_pages=2, is_keys=True)
    moved = Moved(pages, device)
    hot_before = pages.hot.copy()
    moved.pack()
    assert np.array_equal(pages.hot, hot_before)
    is_packed = np.zeros(pages.cold.shape, bool)
    for i, b in _all_buffers(pages):
        start = pages.buffers.cold_offset_bytes[b]
        num_bytes = cold_format.buffer_bytes(SMOLLM2)
        is_packed[pages.pairs["dst"][i], start : start + num_bytes] = True
    assert (pages.cold[~is_packed] == UNTOUCHED).all()
    cold_before = pages.cold.copy()
    pages.hot[:] = UNTOUCHED
    moved.unpack()
    assert np.array_equal(pages.cold, cold_before)
    is_hot = np.zeros(pages.hot.shape, bool)
    is_hot[pages.pairs["src"], :, -SMOLLM2.num_bytes :] = True
    assert (pages.hot[~is_hot] == UNTOUCHED).all()
    for i, b in _all_buffers(pages):
        assert (pages.hot_buffer(i, b) != UNTOUCHED).mean() > 0.9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_programs_and_tiles_change_nothing(device, cold_format):
    blobs, numbers = [], []
    for num_programs, launch in ((1, SMALL_TILES), (7, SMALL_TILES), (1000, None)):
        pages = make_pages(cold_format, LONG_BLOCK, num_pages=2, num_buffers=1, is_keys=True)
        launches = {} if launch is None else {"pack": launch, "unpack": launch}
        moved = Moved(pages, device, **launches)
        moved.pack(num_programs)
        blobs.append(pages.cold.copy())
        moved.unpack(num_programs)
        numbers.append(pages.hot)
    assert np.array_equal(blobs[0], blobs[1])
    assert np.array_equal(numbers[0], numbers[1])
    # Tiles of another size add up in another order.
    assert (blobs[0] != blobs[2]).mean() < 0.002
    assert (numbers[0] != numbers[2]).mean() < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_a_number_that_is_none_spoils_its_group_alone(device, cold_format, odd):
    shape = SMOLLM2._replace(number_type=NumberType.F32)
    pages = make_pages(cold_format, shape, num_pages=2)
    clean = [_expected(pages, i, b).copy() for i, b in _all_buffers(pages)]
    pages.hot_buffer(0, 1).view(np.float32).reshape(shape[:3])[1, 3, 5] = odd
    Moved(pages, device).pack()
    once = pages.cold.copy()
    Moved(pages, device).pack()
    assert np.array_equal(pages.cold, once)
    is_spoilt = np.zeros(shape[:3], bool)
    if cold_format is ColdFormat.INT4_CHANNEL:
        is_spoilt[1, :, 5] = True
    elif cold_format is ColdFormat.INT4_BLOCK:
        is_spoilt[:] = True
    else:
        is_spoilt[1, 3, :] = True
    for (i, b), expected in zip(_all_buffers(pages), clean, strict=True):
        levels = [levels_of(it, cold_format, shape) for it in (pages.packed_buffer(i, b), expected)]
        is_sound = ~is_spoilt if (i, b) == (0, 1) else np.ones(shape[:3], bool)
        assert np.count_nonzero((levels[0] != levels[1])[is_sound]) <= 0.002 * shape.num_numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_zeros_come_back(device, cold_format):
    pages = make_pages(cold_format, SMOLLM2, num_pages=2)
    for i, b in _all_buffers(pages):
        pages.hot_buffer(i, b)[:] = 0
    moved = Moved(pages, device)
    moved.pack()
    for i, b in _all_buffers(pages):
        assert np.array_equal(pages.packed_buffer(i, b), _expected(pages, i, b))
        pages.hot_buffer(i, b)[:] = UNTOUCHED
    moved.unpack()
    for i, b in _all_buffers(pages):
        assert not from_hot(pages.hot_buffer(i, b), SMOLLM2).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cold_format", [ColdFormat.TURBO4, ColdFormat.TURBO3])
def test_norms_of_very_small_and_large_numbers(device, cold_format):
    """Of zeros, of numbers whose squares are 0 in f32, and of some whose squares are infinite."""
    shape = KVShape(1, 16, 64, NumberType.F32)
    pages = make_pages(cold_format, shape, num_pages=1, num_buffers=1)
    rows = np.random.default_rng(9).standard_normal((16, 64)).astype(np.float32)
    rows[:8] *= np.array([0, 1e-42, 1e-30, 1e-22, 1e17, 1e18, 1e19, 1e30], np.float32)[:, None]
    pages.hot_buffer(0, 0).view(np.float32)[:] = rows.reshape(-1)
    Moved(pages, device).pack()
    both = pages.packed_buffer(0, 0), _expected(pages, 0, 0)
    norms, expected = (parameters_of(packed, cold_format, shape) for packed in both)
    assert not norms[:4].any() and (norms[4:8] == F16_MAX).all()
    levels = [levels_of(packed, cold_format, shape).reshape(16, -1)[8:] for packed in both]
    # A GPU rotates with 11 bits, and a group with another code has another norm.
    is_same = (levels[0] == levels[1]).all(1)
    assert is_same.sum() >= 6
    assert norms[8:][is_same] == pytest.approx(expected[8:][is_same], rel=2 * F16_ROUNDING)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cold_format", "numbers"),
    [
        (ColdFormat.INT8, [127.0, -0.5, 0.5, 1.5, 2.5, -1.5, -2.5, 3.5]),
        (ColdFormat.FP8, [448.0, -448.0, 17.0, 19.0, 2.0**-9, 2.0**-10, -17.0, 3 * 2.0**-10]),
        (ColdFormat.INT4_TOKEN, [0.0, 15.0, 0.5, 1.5, 2.5, 3.5, 4.5, 13.5]),
        (ColdFormat.INT4_BLOCK, [7.0, -7.0, 0.5, 1.5, -0.5, -1.5, 2.5, 3.5]),
    ],
)
def test_ties_are_rounded_to_even(device, cold_format, numbers):
    pages = make_pages(cold_format, KVShape(1, 1, 8, NumberType.F32), num_pages=1, num_buffers=1)
    pages.hot_buffer(0, 0).view(np.float32)[:] = numbers
    Moved(pages, device).pack()
    assert np.array_equal(pages.packed_buffer(0, 0), _expected(pages, 0, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "cold_format", [ColdFormat.INT8, ColdFormat.FP8, ColdFormat.INT4_TOKEN, ColdFormat.INT4_CHANNEL]
)
def test_numbers_beyond_the_largest_scale_are_cut_short(device, cold_format):
    shape = KVShape(1, 16, 64, NumberType.F32)
    pages = make_pages(cold_format, shape, num_pages=1, num_buffers=1)
    numbers = np.random.default_rng(10).standard_normal((16, 64)).astype(np.float32)
    numbers[0, :3] = 1e9, 4e6, -1e9
    numbers[1, :2] = 2e6, 5e5
    numbers[:, 9] = -7e4  # below f16's least number, all of them
    pages.hot_buffer(0, 0).view(np.float32)[:] = numbers.reshape(-1)
    Moved(pages, device).pack()
    both = pages.packed_buffer(0, 0), _expected(pages, 0, 0)
    levels = [levels_of(packed, cold_format, shape) for packed in both]
    assert np.abs(levels[0] - levels[1]).max() <= 1
    assert np.array_equal(*(parameters_of(packed, cold_format, shape) for packed in both))


@pytest.mark.parametrize("device", DEVICES)
def test_the_last_positions_wrap_as_the_reference_does(device):
    shape = SMOLLM2._replace(number_type=NumberType.F32)
    pages = make_pages(ColdFormat.INT8, shape, num_pages=2, is_keys=True)
    pages.ordinals[:] = 2**31 - 1, 2**28 - 1
    Moved(pages, device).pack()
    for i, b in _all_buffers(pages):
        found = pages.packed_buffer(i, b)
        num_different = _num_ties(found, _expected(pages, i, b), ColdFormat.INT8, shape, device)
        assert num_different <= 0.01 * shape.num_numbers


@pytest.mark.parametrize("device", DEVICES)
def test_keys_that_are_turned_want_ordinals_and_no_pages_are_no_work(device):
    pages = make_pages(ColdFormat.INT8, SMOLLM2, is_keys=True)
    buffers = GpuBuffers(pages.buffers, torch.device(device))
    with pytest.raises(AssertionError):
        pack_pages_gpu(buffers, 0, 0, 1, None, 1)
    pack_pages_gpu(buffers, 0, 0, 0, 0, 1)
    unpack_pages_gpu(buffers, 0, 0, 0, 0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_large_pages_of_many_buffers(cold_format):
    pages = make_pages(cold_format, LLAMA_8B, num_pages=40, num_buffers=6, is_keys=True)
    moved = Moved(pages, "cuda")
    moved.pack(16)
    num_different = sum(
        _num_ties(pages.packed_buffer(i, b), _expected(pages, i, b), cold_format, LLAMA_8B, "cuda")
        for i, b in _all_buffers(pages)
    )
    assert num_different <= 0.02 * LLAMA_8B.num_numbers * 240
