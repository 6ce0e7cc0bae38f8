"""A packed page decoded again on the GPU, beside the hot page that it was made from.

Everything is enqueued; results come back in page-locked memory, and are there some time later.
Numbers that were 0 do not count: a page that tokens have not filled yet holds them behind these.

    pairs    [1] of two int32 (dst: cold page, src: hot slot), loaded as one int64
    buffers  [num_buffers, 3] int64: hot base address, hot stride, address of what was restored
    squares  [num_buffers, 2] f32: squared lengths of the difference and of the hot numbers, in
             page-locked memory
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from coldpage.kernels.cold.formats import PackedBuffers
from coldpage.kernels.cold.gpu import NUMBER_TYPES
from coldpage.kernels.cold.gpu_pages import GpuPages, current_device

__all__ = ["GpuCheck", "squares_reference"]

# Checks on their way; one more is left out.
_MAX_RUNNING: Final = 32
_TILE_NUMBERS: Final = 1024


@triton.jit(do_not_specialize=["pairs"])
def _swap_kernel(pairs, swapped):  # type: ignore[no-untyped-def]
    """What was encoded from src to dst is to be decoded from dst."""
    pair = tl.load(pairs.to(tl.pointer_type(tl.int64)))
    tl.store(swapped, ((pair >> 32) & 0xFFFFFFFF) | (pair << 32))


@triton.jit(do_not_specialize=["pairs", "squares"])  # type: ignore[untyped-decorator]
def _squares_kernel(  # type: ignore[no-untyped-def]
    pairs,
    buffers,
    squares,
    num_numbers,
    NUMBER: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a buffer."""
    buffer = tl.program_id(0)
    slot = tl.load(pairs.to(tl.pointer_type(tl.int64))) >> 32
    entry = buffers + buffer * 3
    hot = (tl.load(entry) + slot * tl.load(entry + 1)).to(tl.pointer_type(NUMBER))
    restored = tl.load(entry + 2).to(tl.pointer_type(NUMBER))
    difference = tl.zeros([TILE], tl.float32)
    length = tl.zeros([TILE], tl.float32)
    for start in range(0, num_numbers, TILE):
        index = start + tl.arange(0, TILE)
        is_there = index < num_numbers
        was = tl.load(hot + index, mask=is_there, other=0.0).to(tl.float32)
        now = tl.load(restored + index, mask=is_there, other=0.0).to(tl.float32)
        lost = tl.where(was != 0.0, now - was, 0.0)
        difference += lost * lost
        length += was * was
    tl.store(squares + buffer * 2, tl.sum(difference, 0))
    tl.store(squares + buffer * 2 + 1, tl.sum(length, 0))


def squares_reference(was: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """The squared lengths of the difference and of ``was``, f32 [2], of numbers [num_numbers]."""
    was, now = was.float(), now.float()
    lost = torch.where(was != 0.0, now - was, 0.0)
    return torch.stack([lost.square().sum(), was.square().sum()])


@dataclass(slots=True)
class _Running:
    """A check that was enqueued: the row of its result, and who asked."""

    row: int
    tag: int
    event: Any


class GpuCheck:
    """Room for one hot page of one kind in memory of torch's current device, and for results.
    Making one may wait for the current stream.
    """

    def __init__(self, buffers: Sequence[PackedBuffers]) -> None:
        device = current_device()
        self._is_gpu = device.type == "cuda"
        self._cold_page_bytes = max(it.cold_page_bytes for it in buffers)
        self._shapes = [(it.shape, it.hot_base.size) for it in buffers]
        sizes = [it.hot_base.size * it.shape.num_bytes for it in buffers]
        self._rooms = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        restored, tables = [], []
        for it, room in zip(buffers, self._rooms, strict=True):
            places = room.data_ptr() + np.arange(it.hot_base.size) * it.shape.num_bytes
            strides = np.zeros_like(it.hot_stride_bytes)
            restored.append(replace(it, hot_base=places, hot_stride_bytes=strides))
            columns = np.stack([it.hot_base, it.hot_stride_bytes, places], 1)
            tables.append(torch.from_numpy(columns).to(device))
        self._pages, self._tables = GpuPages(restored), tables
        self._swapped = torch.empty(1, dtype=torch.int64, device=device)
        num_buffers = sum(count for _, count in self._shapes)
        # Kernels write there. Of a copy torch would note the stream, and to free what was copied on
        # a stream that is gone by then ends the process.
        self._squares = torch.empty(_MAX_RUNNING, num_buffers, 2, pin_memory=self._is_gpu)
        self._free = list(range(_MAX_RUNNING))
        self._running: deque[_Running] = deque()

    def warm_up(self) -> None:
        """Compile, by packing and checking one page that stays in this room, what packing,
        unpacking and checking pages of this kind will need. Enqueues on torch's current stream.
        """
        device = self._swapped.device
        cold = torch.empty(self._cold_page_bytes, dtype=torch.uint8, device=device)
        nothing = torch.zeros(1, dtype=torch.int64, device=device)  # a pair, and an ordinal
        for room in self._rooms:
            room.zero_()
        self._pages.pack(cold.data_ptr(), nothing.data_ptr(), 1, nothing.data_ptr())
        _swap_kernel[(1,)](nothing.data_ptr(), self._swapped)
        self._pages.unpack(cold.data_ptr(), self._swapped.data_ptr(), 1, nothing.data_ptr())
        tables = [torch.stack([t[:, 2], t[:, 1] * 0, t[:, 2]], 1) for t in self._tables]
        self._launch_squares(nothing.data_ptr(), tables, 0)

    def enqueue(self, cold_base: int, pair: int, ordinal: int | None, tag: int) -> bool:
        """Enqueue the check of one page on torch's current stream, behind the kernels that packed
        it; ``pair`` and ``ordinal`` are addresses. False when too many are on their way already.
        """
        if not self._free:
            return False
        if self._is_gpu and self._running:  # perhaps on another stream, and the room is one
            torch.cuda.current_stream().wait_event(self._running[-1].event)
        _swap_kernel[(1,)](pair, self._swapped)
        self._pages.unpack(cold_base, self._swapped.data_ptr(), 1, ordinal)
        row = self._free.pop()
        self._launch_squares(pair, self._tables, row)
        self._running.append(_Running(row, tag, self._event()))
        return True

    def _launch_squares(self, pair: int, tables: Sequence[torch.Tensor], row: int) -> None:
        first = 0
        for (shape, count), table in zip(self._shapes, tables, strict=True):
            _squares_kernel[(count,)](
                pair,
                table,
                self._squares[row, first:],
                shape.num_numbers,
                NUMBER=NUMBER_TYPES[shape.number_type][0],
                TILE=_TILE_NUMBERS,
            )
            first += count

    def _event(self) -> Any:
        """After what is enqueued now; None where that is done at once."""
        if not self._is_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take_results(self) -> list[tuple[int, tuple[float, float]]]:
        """Those of checks that have ended, with their tags: the squared lengths of what a page has
        lost and of the page. Waits for nothing.
        """
        found: list[tuple[int, tuple[float, float]]] = []
        while self._running and self._has_ended(self._running[0]):
            ended = self._running.popleft()
            difference, length = self._squares[ended.row].sum(0).tolist()
            found.append((ended.tag, (difference, length)))
            self._free.append(ended.row)
        return found

    def _has_ended(self, running: _Running) -> bool:
        return running.event is None or bool(running.event.query())
