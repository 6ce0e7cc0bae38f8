"""One call of a packed codec as work: on threads of the host, or as kernels of a GPU.

The kernels of both live in ``coldpage.kernels.cold``, which loads numba, or torch and Triton, with
the first page that needs them.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from coldpage.codecs.base import PageIndexPairs
from coldpage.codecs.packed_page import PackedPage
from coldpage.device.base import PageParts, Stream
from coldpage.device.copies import page_copies, run_copies
from coldpage.types import PAGE_INDEX_PAIR, ByteRange, DeviceArray, Int32Array, MemAddress

if TYPE_CHECKING:
    from coldpage.kernels.cold.gpu_pages import GpuPages

__all__ = ["Direction", "GpuTables", "PackedCall", "prepare_page"]

_PAIR_BYTES: Final = PAGE_INDEX_PAIR.itemsize
_ORDINAL_BYTES: Final = 4
# Of parts that are copied beside packed ones, which are few.
_NUM_COPY_PROGRAMS: Final = 4


class Direction(enum.Enum):
    """Which way pages go."""

    TO_COLD = "encode"
    TO_HOT = "decode"


class GpuTables:
    """What a GPU needs of the pages of a codec, made once and kept until it closes."""

    def __init__(self) -> None:
        self._pages: dict[int, GpuPages] = {}

    def of(self, page: PackedPage) -> GpuPages:
        """New ones are made on torch's current device, which may wait for its current stream."""
        found = self._pages.get(id(page))
        if found is None:
            from coldpage.kernels.cold.gpu_pages import GpuPages

            found = self._pages[id(page)] = GpuPages(page.buffers)
        return found

    def close(self) -> None:
        """Free the tables. Nothing may be in flight."""
        self._pages.clear()


@dataclass(frozen=True, slots=True)
class PackedCall:
    """Pages that go from hot to cold, or back. Cold pages are numbered from ``cold_base`` on.

    ``pairs`` and ``ordinals`` are read when the work runs. ``ordinals`` are None unless some keys
    are turned back.
    """

    page: PackedPage
    direction: Direction
    cold_base: MemAddress
    pairs: DeviceArray
    ordinals: DeviceArray | None

    def submit(self, stream: Stream, tables: GpuTables) -> None:
        """Enqueue everything by one submission. Raises SubmissionError."""
        if self.page.is_all_copied:
            stream.copy_pages(self._copied_parts(), self.pairs)
        elif stream.runs_kernels:
            stream.launch_kernels(lambda: self._launch_kernels(tables))
        else:
            stream.launch(self.run, reads=self._reads, writes=self._writes)

    # ------------------------------------------------------------------ on the host

    def run(self) -> None:
        """Do the work now, on threads of the host; blocks."""
        from coldpage.kernels.cold import cpu

        pairs, ordinals = self._load_pairs(), self._load_ordinals()
        move = cpu.pack_pages if self._is_to_cold else cpu.unpack_pages
        for buffers in self.page.buffers:
            turned = ordinals if buffers.frequencies is not None else None
            move(buffers, self.cold_base, pairs, turned)
        if self.page.has_copied:
            run_copies(page_copies(self._copied_parts(), pairs))

    def _load_pairs(self) -> PageIndexPairs:
        raw = ctypes.string_at(self.pairs.address, self.pairs.size * _PAIR_BYTES)
        return np.frombuffer(raw, PAGE_INDEX_PAIR)

    def _load_ordinals(self) -> Int32Array | None:
        if self.ordinals is None:
            return None
        raw = ctypes.string_at(self.ordinals.address, self.ordinals.size * _ORDINAL_BYTES)
        return np.frombuffer(raw, np.dtype("<i4"))

    def _reads(self) -> list[ByteRange]:
        indices = [ByteRange(self.pairs.address, self.pairs.size * _PAIR_BYTES)]
        if self.ordinals is not None:
            num_bytes = self.ordinals.size * _ORDINAL_BYTES
            indices.append(ByteRange(self.ordinals.address, num_bytes))
        return [*indices, *self._ranges("src", is_hot=self._is_to_cold)]

    def _writes(self) -> list[ByteRange]:
        return self._ranges("dst", is_hot=not self._is_to_cold)

    def _ranges(self, side: str, *, is_hot: bool) -> list[ByteRange]:
        indices = self._load_pairs()[side].astype(np.int64)
        if is_hot:
            return self.page.hot_ranges(indices)
        return self.page.cold_ranges(self.cold_base, indices)

    # ------------------------------------------------------------------ on a GPU

    def _launch_kernels(self, tables: GpuTables) -> None:
        pages = tables.of(self.page)
        move = pages.pack if self._is_to_cold else pages.unpack
        ordinals = None if self.ordinals is None else int(self.ordinals.address)
        move(int(self.cold_base), int(self.pairs.address), self.pairs.size, ordinals)
        if self.page.has_copied:
            from coldpage.kernels.page_copy import PagePart, copy_part

            parts = self._copied_parts()
            columns = (
                parts.dst_base,
                parts.dst_stride_bytes,
                parts.src_base,
                parts.src_stride_bytes,
                parts.num_bytes,
            )
            for part in zip(*(column.tolist() for column in columns), strict=True):
                copy_part(
                    int(self.pairs.address), self.pairs.size, PagePart(*part), _NUM_COPY_PROGRAMS
                )

    @property
    def _is_to_cold(self) -> bool:
        return self.direction is Direction.TO_COLD

    def _copied_parts(self) -> PageParts:
        if self._is_to_cold:
            return self.page.parts_to_cold(self.cold_base)
        return self.page.parts_to_hot(self.cold_base)


def prepare_page(page: PackedPage, stream: Stream, tables: GpuTables) -> None:
    """Do once, for a page of which something is packed, what its first call would else wait for.
    Blocks.
    """

    def make_tables() -> None:
        tables.of(page)

    if stream.runs_kernels:
        stream.launch_kernels(make_tables)
        return
    from coldpage.kernels.cold import cpu

    for buffers in page.buffers:
        cpu.compile_for(buffers)
