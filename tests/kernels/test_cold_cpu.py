"""Packed pages made and read on a CPU, against the reference."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from coldpage.kernels.cold import cpu, cpu_compile
from coldpage.kernels.cold.cpu_pages import PACKERS, UNPACKERS
from coldpage.kernels.cold.formats import FORMATS, ColdFormat, KVShape, NumberType
from coldpage.kernels.cold.reference import pack_buffer, unpack_buffer
from coldpage.types import PAGE_INDEX_PAIR
from tests.kernels.cold_pages import (
    LLAMA_8B,
    SMOLLM2,
    UNTOUCHED,
    from_hot,
    levels_of,
    make_pages,
    parameters_of,
    to_hot,
)
from tests.kernels.turbo_groups import check_norms

SHAPES = {
    "8b": LLAMA_8B,
    "smollm2": SMOLLM2,
    "f32": SMOLLM2._replace(number_type=NumberType.F32),
    "f16": SMOLLM2._replace(number_type=NumberType.F16),
    "block of 32, head of 256": KVShape(2, 32, 256, NumberType.BF16),
    "head of 80": KVShape(2, 16, 80, NumberType.F32),
    "head of 96": KVShape(1, 8, 96, NumberType.BF16),
    "block of 128": KVShape(1, 128, 64, NumberType.BF16),
    "head of 8": KVShape(1, 1, 8, NumberType.F16),
}
DTYPES = {
    NumberType.BF16: torch.bfloat16,
    NumberType.F16: torch.float16,
    NumberType.F32: torch.float32,
}
CASES = [
    pytest.param(cold_format, shape, is_keys, id=f"{cold_format.value}, {name}, {is_keys}")
    for cold_format in FORMATS.values()
    for name, shape in SHAPES.items()
    for is_keys in (False, True)
    if cold_format.refusal(shape) is None
]

ROTATED_CASES = [case for case in CASES if case.values[0].is_rotated]


def pack(pages):
    cpu.pack_pages(pages.buffers, pages.cold_base, pages.pairs, pages.ordinals)


def unpack(pages):
    cpu.unpack_pages(pages.buffers, pages.cold_base, pages.back, pages.ordinals)


def all_buffers(pages):
    return np.ndindex(pages.pairs.size, pages.buffers.hot_base.size)


@pytest.mark.parametrize(("cold_format", "shape", "is_keys"), CASES)
def test_packed_buffers_are_the_references_up_to_ties(cold_format, shape, is_keys):
    pages = make_pages(cold_format, shape, is_keys=is_keys)
    pack(pages)
    num_different = 0
    for i, b in all_buffers(pages):
        numbers = from_hot(pages.hot_buffer(i, b), shape)
        expected = pack_buffer(numbers, cold_format, shape, **pages.keys(i, b))
        num_different += num_ties(pages.packed_buffer(i, b), expected, cold_format, shape)
    assert num_different <= 0.01 * shape.num_numbers * len(list(all_buffers(pages)))


def num_ties(found, expected, cold_format, shape):
    """How many codes differ, after a check that none does by more than a step, parameters by no
    more than their last bit, and the padding not at all. The norm of a rotated group with another
    code is another, see ``check_norms``."""
    used_bytes = cold_format.code_bytes(shape) + 2 * cold_format.num_parameters(shape)
    assert not found[used_bytes:].any()
    assert found.size == expected.size
    steps = levels_of(found, cold_format, shape) - levels_of(expected, cold_format, shape)
    assert np.abs(steps).max() <= 1
    parameters = [parameters_of(x, cold_format, shape) for x in (found, expected)]
    if cold_format is ColdFormat.INT4_BLOCK:
        scales = [x.view(np.float32) for x in parameters]
        assert scales[0] == pytest.approx(scales[1], rel=1e-6)
    else:
        # A product in f32 may lie on the other side of an f16.
        bits = [x.view(np.int16).astype(int) for x in parameters]
        ulps = np.abs(bits[0] - bits[1])
        if cold_format.is_rotated:
            ulps = ulps[~steps.reshape(ulps.size, -1).any(-1)]
        assert ulps.max() <= 1
    return np.count_nonzero(steps)


@pytest.mark.parametrize(("cold_format", "shape", "is_keys"), CASES)
def test_hot_numbers_are_the_references(cold_format, shape, is_keys):
    pages = make_pages(cold_format, shape, is_keys=is_keys)
    pack(pages)
    for i, b in all_buffers(pages):
        pages.hot_buffer(i, b)[:] = 0
    unpack(pages)
    step = {NumberType.BF16: 2.0**-8, NumberType.F16: 2.0**-11, NumberType.F32: 1e-6}
    for i, b in all_buffers(pages):
        found = from_hot(pages.hot_buffer(i, b), shape)
        packed = pages.packed_buffer(i, b)
        expected = unpack_buffer(packed, cold_format, shape, **pages.keys(i, b))
        # Sums of a vector are rounded in another order.
        slack = 2e-6 * np.abs(expected).max(axis=-1, keepdims=True)
        limit = np.abs(expected) * step[shape.number_type] + slack
        assert (np.abs(found - expected) <= limit).all()


@pytest.mark.parametrize(("cold_format", "shape", "is_keys"), ROTATED_CASES)
def test_norms_are_those_of_the_codes(cold_format, shape, is_keys):
    pages = make_pages(cold_format, shape, is_keys=is_keys)
    pack(pages)
    for i, b in all_buffers(pages):
        numbers, packed = from_hot(pages.hot_buffer(i, b), shape), pages.packed_buffer(i, b)
        check_norms(packed, numbers, cold_format, shape, pages.keys(i, b), slack=2e-6)


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_vectors_of_zeros_are_the_references(cold_format):
    pages = make_pages(cold_format, SMOLLM2, num_pages=1, num_buffers=1)
    numbers = from_hot(pages.hot_buffer(0, 0), SMOLLM2)
    numbers[1, 3:7] = 0
    pages.hot_buffer(0, 0)[:] = to_hot(numbers, NumberType.BF16)
    pack(pages)
    levels = [
        levels_of(packed, cold_format, SMOLLM2)[1, 3:7]
        for packed in (pages.packed_buffer(0, 0), pack_buffer(numbers, cold_format, SMOLLM2))
    ]
    assert np.array_equal(*levels)
    if cold_format.is_rotated:
        norms = parameters_of(pages.packed_buffer(0, 0), cold_format, SMOLLM2).reshape(3, 16)
        assert not norms[1, 3:7].any() and norms[1, [2, 7]].all()


@pytest.mark.parametrize("cold_format", [ColdFormat.INT8, ColdFormat.FP8])
@pytest.mark.parametrize("number_type", NumberType)
def test_hot_numbers_are_rounded_to_nearest_even(cold_format, number_type):
    """Code times scale is exact in f32 in these formats, so only one rounding is left."""
    shape = KVShape(3, 16, 64, number_type)
    pages = make_pages(cold_format, shape, num_buffers=1)
    for i in range(pages.pairs.size):
        numbers = from_hot(pages.hot_buffer(i, 0), shape) * np.float32(2.0 ** (-8 * i))
        pages.hot_buffer(i, 0)[:] = to_hot(numbers, number_type)
    pack(pages)
    unpack(pages)
    for i in range(pages.pairs.size):
        exact = torch.from_numpy(unpack_buffer(pages.packed_buffer(i, 0), cold_format, shape))
        rounded = exact.to(DTYPES[number_type])
        assert np.array_equal(pages.hot_buffer(i, 0), rounded.view(torch.uint8).numpy().reshape(-1))


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_nothing_else_is_written(cold_format):
    pages = make_pages(cold_format, SMOLLM2, is_keys=True)
    hot_before = pages.hot.copy()
    pack(pages)
    assert np.array_equal(pages.hot, hot_before)
    is_packed = np.zeros(pages.cold.shape, bool)
    start = pages.buffers.cold_offset_bytes
    for b in range(start.size):
        end = start[b] + cold_format.buffer_bytes(SMOLLM2)
        is_packed[pages.pairs["dst"], start[b] : end] = True
    assert (pages.cold[~is_packed] == UNTOUCHED).all()
    cold_before = pages.cold.copy()
    unpack(pages)
    assert np.array_equal(pages.cold, cold_before)
    is_hot = np.zeros(pages.hot.shape, bool)
    is_hot[pages.pairs["src"], :, -SMOLLM2.num_bytes :] = True
    assert np.array_equal(pages.hot[~is_hot], hot_before[~is_hot])


@pytest.mark.parametrize("cold_format", FORMATS.values())
@pytest.mark.parametrize("number_type", NumberType)
def test_numbers_that_are_none_count_as_zero(cold_format, number_type):
    shape = KVShape(3, 16, 64, number_type)
    pages = make_pages(cold_format, shape, num_pages=2)
    whole = from_hot(pages.hot_buffer(0, 1), shape)
    for number in (np.nan, np.inf, -np.inf):
        broken = whole.copy()
        broken[1, 3, [5, 40]] = number
        pages.hot_buffer(0, 1)[:] = to_hot(broken, number_type)
        pack(pages)
        expected = pack_buffer(np.where(np.isfinite(broken), broken, 0), cold_format, shape)
        num_different = num_ties(pages.packed_buffer(0, 1), expected, cold_format, shape)
        assert num_different <= 0.01 * shape.num_numbers
    unpack(pages)
    assert np.isfinite(from_hot(pages.hot_buffer(0, 1), shape)).all()


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_numbers_beyond_the_parameters_are_cut_off(cold_format):
    """The largest f16 as scale, minimum or norm is too small for these."""
    shape = SMOLLM2._replace(number_type=NumberType.F32)
    pages = make_pages(cold_format, shape, num_pages=1, num_buffers=1)
    numbers = from_hot(pages.hot_buffer(0, 0), shape) * np.float32(1e8)
    pages.hot_buffer(0, 0)[:] = to_hot(numbers, NumberType.F32)
    pack(pages)
    expected = pack_buffer(numbers, cold_format, shape)
    assert num_ties(pages.packed_buffer(0, 0), expected, cold_format, shape) <= 10


def test_f16_numbers_do_not_become_infinite():
    """The code of the largest times its scale, rounded up, is 65532."""
    shape = SMOLLM2._replace(number_type=NumberType.F16)
    pages = make_pages(ColdFormat.INT8, shape, num_pages=1, num_buffers=1)
    pages.hot_buffer(0, 0).view(np.float16)[:] = [65504, -65504] * (shape.num_numbers // 2)
    before = pages.hot_buffer(0, 0).copy()
    pack(pages)
    unpack(pages)
    assert np.array_equal(pages.hot_buffer(0, 0), before)


@pytest.mark.parametrize("cold_format", FORMATS.values())
@pytest.mark.parametrize("is_keys", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e17, 1e30])
def test_extreme_numbers_give_finite_ones(cold_format, is_keys, size):
    shape = SMOLLM2._replace(number_type=NumberType.F32)
    pages = make_pages(cold_format, shape, num_pages=1, is_keys=is_keys)
    signs = np.where(np.random.default_rng(1).random(shape[:3]) < 0.5, -1.0, 1.0)
    pages.hot_buffer(0, 0)[:] = to_hot((signs * size).astype(np.float32), NumberType.F32)
    pack(pages)
    unpack(pages)
    found = from_hot(pages.hot_buffer(0, 0), shape)
    assert np.isfinite(found).all()
    if size in (0.0, 1e30) and not is_keys:
        assert not found.any()


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_equal_pages_give_equal_blobs_on_any_number_of_threads(cold_format, monkeypatch):
    blobs = []
    for num_cores in (1, 5, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=num_cores: set(range(n)))
        monkeypatch.setattr(cpu, "_MIN_SHARE_BYTES", 1)
        pages = make_pages(cold_format, SMOLLM2, num_pages=7, num_buffers=3, is_keys=True)
        pack(pages)
        packed = pages.cold.copy()
        unpack(pages)
        blobs.append((packed, pages.hot))
    for packed, hot in blobs[1:]:
        assert np.array_equal(packed, blobs[0][0])
        assert np.array_equal(hot, blobs[0][1])


def test_several_threads_may_call_at_once(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(cpu, "_MIN_SHARE_BYTES", 1)
    several = [make_pages(ColdFormat.TURBO4, SMOLLM2, num_pages=9) for _ in range(6)]
    pack(several[0])
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(pack, several[1:]))
    assert all(np.array_equal(pages.cold, several[0].cold) for pages in several)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_failure_is_raised_when_all_threads_are_done(is_first, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(cpu, "_MIN_SHARE_BYTES", 1)
    done = []

    def fail_once(buffers, pages, first, last):
        if (first == 0) == is_first:
            raise MemoryError("none left")
        time.sleep(0.2)
        done.append(last)

    monkeypatch.setitem(PACKERS, ColdFormat.INT8, fail_once)
    with pytest.raises(MemoryError, match="none left"):
        pack(make_pages(ColdFormat.INT8, SMOLLM2))
    assert done


def test_no_pages_are_no_work():
    pages = make_pages(ColdFormat.INT8, SMOLLM2)
    cpu.pack_pages(pages.buffers, 0, np.empty(0, PAGE_INDEX_PAIR), None)
    assert (pages.cold == UNTOUCHED).all()


def test_index_arrays_may_be_read_only():
    pages = make_pages(ColdFormat.TURBO4, SMOLLM2, is_keys=True)
    pages.pairs.setflags(write=False)
    pages.ordinals.setflags(write=False)
    pack(pages)
    assert (pages.cold[pages.pairs["dst"][0]] != UNTOUCHED).any()


def test_keys_that_are_turned_want_ordinals():
    pages = make_pages(ColdFormat.TURBO4, SMOLLM2, is_keys=True)
    with pytest.raises(AssertionError, match="positions"):
        cpu.pack_pages(pages.buffers, pages.cold_base, pages.pairs, None)


def test_compiling_ahead_leaves_nothing_to_compile():
    """Neither number type, shape, keys nor the number of pages make another function."""
    cold_format = ColdFormat.INT8
    cpu.compile_for(make_pages(cold_format, SMOLLM2).buffers)
    compiled = [len(move[cold_format].signatures) for move in (PACKERS, UNPACKERS)]
    assert compiled == [1, 1]
    for shape in (LLAMA_8B, SMOLLM2._replace(number_type=NumberType.F32)):
        for is_keys in (False, True):
            pages = make_pages(cold_format, shape, is_keys=is_keys)
            pack(pages)
            unpack(pages)
    assert [len(move[cold_format].signatures) for move in (PACKERS, UNPACKERS)] == [1, 1]


_COMPILE = """
import sys
from coldpage.kernels.cold import cpu
from coldpage.kernels.cold.cpu_pages import PACKERS
from coldpage.kernels.cold.formats import ColdFormat
from tests.kernels.cold_pages import SMOLLM2, make_pages
cpu.compile_for(make_pages(ColdFormat.INT8, SMOLLM2).buffers)
stats = PACKERS[ColdFormat.INT8].stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def test_compiled_functions_are_kept_for_the_next_process(tmp_path):
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _COMPILE],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": "src:."},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == [["0", "1"], ["1", "0"]]
    kept = list((tmp_path / "coldpage" / "compiled").glob("*/**/*.nbc"))
    assert len(kept) == 2


def test_a_folder_that_can_not_be_used_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert not cpu_compile._usable(tmp_path / "file" / "below")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "file/below" in caplog.text
    assert cpu_compile._usable(tmp_path / "new" / "folder")


def test_compiled_functions_of_other_sources_lie_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cpu_compile.cache_directory()
    assert found.parent == tmp_path / "coldpage" / "compiled"
    copies = tmp_path / "cold"
    copies.mkdir()
    for name in ("formats.py", "numbers.py", "cpu_rows.py"):
        (copies / name).write_text("")
    monkeypatch.setattr(cpu_compile, "__file__", str(copies / "cpu_compile.py"))
    before = cpu_compile.cache_directory()
    (copies / "cpu_rows.py").write_text("changed")
    assert len({found, before, cpu_compile.cache_directory()}) == 3
