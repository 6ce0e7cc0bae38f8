"""The packed buffers of one kind of page as a codec moves them on a GPU, of any formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from coldpage.kernels.cold.formats import ColdFormat, PackedBuffers
from coldpage.kernels.cold.gpu import GpuBuffers, pack_pages_gpu, unpack_pages_gpu

__all__ = ["GpuPages", "current_device"]

# Programs that pack and that unpack: about as many as keep the link busy, since more would only
# take from what decodes meanwhile. Measured on an H200, see docs/PERFORMANCE.md.
_PROGRAMS: Final[dict[ColdFormat, tuple[int, int]]] = {
    ColdFormat.INT8: (12, 20),
    ColdFormat.FP8: (10, 20),
    ColdFormat.INT4_TOKEN: (24, 20),
    ColdFormat.INT4_CHANNEL: (12, 32),
    ColdFormat.TURBO4: (42, 58),
    ColdFormat.TURBO3: (60, 54),
    ColdFormat.INT4_BLOCK: (64, 24),
}


def current_device() -> torch.device:
    """Torch's current GPU; where there is none, kernels run under the interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class GpuPages:
    """Tables of the buffers, in memory of torch's current device. Making one may wait for the
    current stream; kernels may use it until it is dropped and they have run.
    """

    def __init__(self, buffers: Sequence[PackedBuffers]) -> None:
        device = current_device()
        self._kinds = tuple((GpuBuffers(it, device), *_PROGRAMS[it.cold_format]) for it in buffers)

    def pack(self, cold_base: int, pairs: int, num_pages: int, ordinals: int | None) -> None:
        """Enqueue on torch's current stream: for each index pair (dst: cold page, src: hot slot)
        the packed buffers of the cold page are written. All but ``num_pages`` are addresses;
        ``ordinals`` may be None where no keys are turned.
        """
        for buffers, num_programs, _ in self._kinds:
            pack_pages_gpu(buffers, cold_base, pairs, num_pages, ordinals, num_programs)

    def unpack(self, cold_base: int, pairs: int, num_pages: int, ordinals: int | None) -> None:
        """The inverse, of pairs (dst: hot slot, src: cold page)."""
        for buffers, _, num_programs in self._kinds:
            unpack_pages_gpu(buffers, cold_base, pairs, num_pages, ordinals, num_programs)
