"""Packing and unpacking pages on a CPU: GB/s of hot bytes, beside copying those bytes.

python -m benchmarks codecs_cpu
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.rows import Row, timed_ms
from coldpage.kernels.cold import cpu
from coldpage.kernels.cold.formats import ColdFormat, KVShape, NumberType, PackedBuffers
from coldpage.kernels.kv_types import Q8_0, TURBO4, KVType
from coldpage.kernels.packing import pack
from coldpage.types import PAGE_INDEX_PAIR

__all__ = ["run"]

REPETITIONS = 7
GOAL_GB_PER_S = {ColdFormat.INT8: 1.5, ColdFormat.FP8: 1.5}
OTHER_GOAL_GB_PER_S = 0.4
# Formats whose keys leave out position and mean; the others take keys and values as they are.
TURNED = (ColdFormat.INT4_CHANNEL, ColdFormat.TURBO4, ColdFormat.TURBO3)
# What torch has of its own of these, for hot pages.
TORCH_TYPES = {ColdFormat.INT8: Q8_0, ColdFormat.TURBO4: TURBO4}


@dataclass(frozen=True)
class _Geometry:
    name: str
    shape: KVShape
    num_layers: int
    num_pages: int


SMOLLM2 = _Geometry("SmolLM2-135M", KVShape(3, 16, 64, NumberType.BF16), 30, 256)
GEOMETRIES = (
    _Geometry("8B model", KVShape(8, 16, 128, NumberType.BF16), 32, 64),
    SMOLLM2,
    replace(SMOLLM2, shape=SMOLLM2.shape._replace(number_type=NumberType.F32)),
)


class _Pages:
    """One buffer a layer, all pages of a geometry, hot and packed, in any order."""

    def __init__(self, geometry: _Geometry, cold_format: ColdFormat) -> None:
        shape, num_layers, num_pages = geometry.shape, geometry.num_layers, geometry.num_pages
        rng = np.random.default_rng(0)
        numbers = rng.standard_normal((num_pages, num_layers, shape.num_numbers), np.float32)
        if shape.number_type is NumberType.BF16:
            self.hot = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy()
        else:
            self.hot = numbers
        buffer_bytes = cold_format.buffer_bytes(shape)
        self.cold = np.zeros((num_pages, num_layers * buffer_bytes), np.uint8)
        layers = np.arange(num_layers)
        frequencies = means = None
        if cold_format in TURNED:
            half = shape.head_dim // 2
            turns = 10_000.0 ** (-np.arange(half) / half) / (2 * np.pi)
            frequencies = np.tile((turns * 2.0**32).astype(np.uint32), (num_layers, 1))
            means = rng.standard_normal(
                (num_layers, shape.num_kv_heads, shape.head_dim), np.float32
            )
        self.buffers = PackedBuffers(
            cold_format,
            shape,
            self.hot.ctypes.data + layers * self.hot.strides[1],
            np.full(num_layers, self.hot.strides[0]),
            layers * buffer_bytes,
            self.cold.strides[0],
            frequencies,
            means,
        )
        self.pairs = np.empty(num_pages, PAGE_INDEX_PAIR)
        self.pairs["dst"], self.pairs["src"] = (
            rng.permutation(num_pages),
            rng.permutation(num_pages),
        )
        self.ordinals = np.arange(num_pages, dtype=np.int32)
        cpu.compile_for(self.buffers)

    def pack(self) -> None:
        cpu.pack_pages(self.buffers, self.cold.ctypes.data, self.pairs, self.ordinals)

    def unpack(self) -> None:
        back = self.pairs.copy()
        back["dst"], back["src"] = self.pairs["src"], self.pairs["dst"]
        cpu.unpack_pages(self.buffers, self.cold.ctypes.data, back, self.ordinals)

    def pack_by_torch(self, kv_type: KVType) -> None:
        """A page at a time, without a place for the result."""
        shape = self.buffers.shape
        for slot in self.pairs["src"]:
            raw = torch.from_numpy(self.hot[slot])
            numbers = raw.view(torch.bfloat16) if raw.dtype is torch.int16 else raw
            pack(numbers.view(-1, shape.head_dim), kv_type)


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    num_threads = torch.get_num_threads()
    os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)


def _samples(work: Callable[[], object]) -> list[float]:
    work()
    return [timed_ms(work) for _ in range(REPETITIONS)]


def _rows_of(pages: _Pages, where: str, works: dict[str, Callable[[], object]]) -> Iterator[Row]:
    """One a work, beside copies of the same bytes."""
    target = np.empty_like(pages.hot)
    copies = _samples(lambda: np.copyto(target, pages.hot))
    cold_format = pages.buffers.cold_format
    for what, work in works.items():
        samples = _samples(work)
        ours, rival = (pages.hot.nbytes / 1e6 / statistics.median(ms) for ms in (samples, copies))
        yield Row(
            f"{what} {cold_format.value}",
            f"{where}: {ours:.2f} GB/s of hot bytes, memcpy {rival:.1f}",
            "memcpy of them",
            samples,
            copies,
            f">= {GOAL_GB_PER_S.get(cold_format, OTHER_GOAL_GB_PER_S)} GB/s a core",
            notes={"hot_gb_per_s": round(ours, 3), "memcpy_gb_per_s": round(rival, 3)},
        )


def run(is_quick: bool) -> list[Row]:
    """The goals are those of one core."""
    rows: list[Row] = []
    for geometry, cold_format in itertools.product(GEOMETRIES[: 1 if is_quick else 3], ColdFormat):
        pages = _Pages(geometry, cold_format)
        where = f"{geometry.name}, {geometry.shape.number_type.value}"
        if cold_format in TURNED:
            where += ", keys turned back"
        works: dict[str, Callable[[], object]] = {"pack": pages.pack, "unpack": pages.unpack}
        kv_type = TORCH_TYPES.get(cold_format)
        if kv_type is not None:
            by_torch = functools.partial(pages.pack_by_torch, kv_type)
            works[f"torch, as {kv_type.name}, without moving: pack"] = by_torch
        with _one_core():
            rows += _rows_of(pages, f"{where}, 1 core", works)
        num_cores = len(os.sched_getaffinity(0))
        if num_cores > 1:
            rows += _rows_of(pages, f"{where}, {num_cores} cores", {"pack": pages.pack})
    return rows
