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
from coldpage.codecs.guard import CodecGuard
from coldpage.codecs.packed_check import HostCheck
from coldpage.codecs.packed_page import PackedPage
from coldpage.device.base import PageParts, Stream
from coldpage.device.copies import page_copies, run_copies
from coldpage.types import (
    PAGE_INDEX_PAIR,
    ByteRange,
    DeviceArray,
    Int32Array,
    LayerGroupId,
    MemAddress,
)

if TYPE_CHECKING:
    from coldpage.kernels.cold.gpu_guard import GpuCheck
    from coldpage.kernels.cold.gpu_pages import GpuPages

__all__ = ["Direction", "PackedCall", "PageChecks", "PreparedPages", "prepare_page"]

_PAIR_BYTES: Final = PAGE_INDEX_PAIR.itemsize
_ORDINAL_BYTES: Final = 4
# Of parts that are copied beside packed ones, which are few.
_NUM_COPY_PROGRAMS: Final = 4


class Direction(enum.Enum):
    """Which way pages go."""

    TO_COLD = "encode"
    TO_HOT = "decode"


class PreparedPages:
    """What calls need besides the pages, made once for each and kept until the codec closes.

    What is for a GPU is made on torch's current device, which may wait for its current stream.
    """

    def __init__(self) -> None:
        self._gpu_pages: dict[PackedPage, GpuPages] = {}
        self._gpu_checks: dict[PackedPage, GpuCheck] = {}
        self._host_checks: dict[PackedPage, HostCheck] = {}

    def gpu_pages(self, page: PackedPage) -> GpuPages:
        """Tables for the kernels that pack and unpack."""
        if page not in self._gpu_pages:
            from coldpage.kernels.cold.gpu_pages import GpuPages

            self._gpu_pages[page] = GpuPages(page.buffers)
        return self._gpu_pages[page]

    def gpu_check(self, page: PackedPage) -> GpuCheck:
        """Checks packed pages on the GPU."""
        if page not in self._gpu_checks:
            from coldpage.kernels.cold.gpu_guard import GpuCheck

            self._gpu_checks[page] = GpuCheck(page.buffers)
        return self._gpu_checks[page]

    def host_check(self, page: PackedPage) -> HostCheck:
        """Checks packed pages on the host."""
        if page not in self._host_checks:
            self._host_checks[page] = HostCheck(page.buffers)
        return self._host_checks[page]

    def report_to(self, guard: CodecGuard) -> None:
        """Hand over the results of the GPU's checks that have ended."""
        for check in self._gpu_checks.values():
            for layer_group_id, squares in check.take_results():
                guard.report(LayerGroupId(layer_group_id), squares)

    def close(self) -> None:
        """Free everything. Nothing may be in flight."""
        self._gpu_pages.clear()
        self._gpu_checks.clear()
        self._host_checks.clear()


@dataclass(frozen=True, slots=True)
class PageChecks:
    """Which pages of a call are decoded again, and who hears of it."""

    pages: range
    layer_group_id: LayerGroupId
    guard: CodecGuard


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
    checks: PageChecks | None
    prepared: PreparedPages

    def submit(self, stream: Stream) -> None:
        """Enqueue everything by one submission. Raises SubmissionError."""
        if self.page.is_all_copied:
            stream.copy_pages(self._copied_parts(), self.pairs)
        elif stream.runs_kernels:
            stream.launch_kernels(self._launch_kernels)
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
        if self.checks is not None:
            try:
                self._check_on_host(self.checks, pairs, ordinals)
            except Exception as error:  # the pages are moved already
                self.checks.guard.give_up(error)

    def _check_on_host(
        self, checks: PageChecks, pairs: PageIndexPairs, ordinals: Int32Array | None
    ) -> None:
        check = self.prepared.host_check(self.page)
        for index in checks.pages:
            one = slice(index, index + 1)
            squares = check.squares(
                self.cold_base, pairs[one], None if ordinals is None else ordinals[one]
            )
            checks.guard.report(checks.layer_group_id, squares)

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

    def _launch_kernels(self) -> None:
        pages = self.prepared.gpu_pages(self.page)
        move = pages.pack if self._is_to_cold else pages.unpack
        pairs, base = int(self.pairs.address), int(self.cold_base)
        ordinals = None if self.ordinals is None else int(self.ordinals.address)
        move(base, pairs, self.pairs.size, ordinals)
        if self.page.has_copied:
            self._launch_copies(pairs)
        if self.checks is not None:
            try:
                self._check_on_gpu(self.checks, pairs, ordinals)
            except Exception as error:  # the move is enqueued already
                self.checks.guard.give_up(error)

    def _check_on_gpu(self, checks: PageChecks, pairs: int, ordinals: int | None) -> None:
        check = self.prepared.gpu_check(self.page)
        for index in checks.pages:
            ordinal = None if ordinals is None else ordinals + index * _ORDINAL_BYTES
            pair = pairs + index * _PAIR_BYTES
            check.enqueue(int(self.cold_base), pair, ordinal, checks.layer_group_id)

    def _launch_copies(self, pairs: int) -> None:
        from coldpage.kernels.page_copy import PagePart, copy_part

        for part in self._copied_parts().rows():
            copy_part(pairs, self.pairs.size, PagePart(*part), _NUM_COPY_PROGRAMS)

    @property
    def _is_to_cold(self) -> bool:
        return self.direction is Direction.TO_COLD

    def _copied_parts(self) -> PageParts:
        if self._is_to_cold:
            return self.page.parts_to_cold(self.cold_base)
        return self.page.parts_to_hot(self.cold_base)


def prepare_page(page: PackedPage, stream: Stream, prepared: PreparedPages) -> None:
    """Do once what a page's first call would else wait for. Blocks."""
    if page.has_copied:
        anywhere = page.hot_address
        for parts in (page.parts_to_cold(anywhere), page.parts_to_hot(anywhere)):
            stream.copy_pages(parts, DeviceArray(anywhere, 0))
    if page.is_all_copied:
        return

    def make() -> None:
        prepared.gpu_pages(page)
        prepared.gpu_check(page).warm_up()

    if stream.runs_kernels:
        stream.launch_kernels(make)
        return
    from coldpage.kernels.cold import cpu

    for buffers in page.buffers:
        cpu.compile_for(buffers)
