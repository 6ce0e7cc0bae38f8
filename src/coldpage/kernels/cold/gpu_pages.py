"""The packed buffers of one kind of page as a codec moves them on a GPU, of any formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from coldpage.kernels.cold.formats import PackedBuffers
from coldpage.kernels.cold.gpu import GpuBuffers, pack_pages_gpu, unpack_pages_gpu

__all__ = ["PACK_PROGRAMS", "UNPACK_PROGRAMS", "GpuPages", "current_device"]

# So many keep the link busy; more would only take from what decodes meanwhile.
PACK_PROGRAMS: Final = 32
UNPACK_PROGRAMS: Final = 32


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
        self._kinds = tuple(GpuBuffers(it, device) for it in buffers)

    def pack(self, cold_base: int, pairs: int, num_pages: int, ordinals: int | None) -> None:
        """Enqueue on torch's current stream: for each index pair (dst: cold page, src: hot slot)
        the packed buffers of the cold page are written. All but ``num_pages`` are addresses;
        ``ordinals`` may be None where no keys are turned.
        """
        for buffers in self._kinds:
            pack_pages_gpu(buffers, cold_base, pairs, num_pages, ordinals, PACK_PROGRAMS)

    def unpack(self, cold_base: int, pairs: int, num_pages: int, ordinals: int | None) -> None:
        """The inverse, of pairs (dst: hot slot, src: cold page)."""
        for buffers in self._kinds:
            unpack_pages_gpu(buffers, cold_base, pairs, num_pages, ordinals, UNPACK_PROGRAMS)
