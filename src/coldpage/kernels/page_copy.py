"""Copies of scattered pages by index pairs: a few programs that read one side and write the other.

    pairs      [num_pages] of two int32 (dst, src) in device memory, loaded as one int64
    page s     ``num_bytes`` at ``base + s * stride``, on each side; either side may be host memory
               that is mapped for the device

A page is seen as vectors of 16 bytes, or less where addresses, strides or sizes ask for it; a tile
is some vectors of one page, or some small pages. Each program takes every n-th tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import torch
import triton
import triton.language as tl

__all__ = ["PagePart", "copy_part", "copy_part_reference"]

# A tile: 512 threads with eight vectors of 16 bytes each in flight.
_TILE_BYTES: Final = 64 * 1024
_NUM_WARPS: Final = 16
_VECTOR_BYTES: Final = 16
_UNIT_OF: Final[dict[int, tuple[Any, int]]] = {  # by alignment: the unit, and units of a vector
    16: (tl.int32, 4),
    8: (tl.int32, 2),
    4: (tl.int32, 1),
    2: (tl.int16, 1),
    1: (tl.int8, 1),
}


@dataclass(frozen=True, slots=True)
class PagePart:
    """One part of the pages on both sides, as addresses and bytes."""

    dst_base: int
    dst_stride_bytes: int
    src_base: int
    src_stride_bytes: int
    num_bytes: int

    @property
    def alignment_bytes(self) -> int:
        """What all addresses and sizes are multiples of, up to a vector."""
        places = (self.dst_base, self.dst_stride_bytes, self.src_base, self.src_stride_bytes)
        return gcd(_VECTOR_BYTES, self.num_bytes, *places)


# What one call has and the next has not: Triton would compile once more for a number that happens
# to be 1, or a multiple of 16. What alignment there is comes as a constant.
_VARYING: Final = ("pairs", "dst_base", "src_base", "num_pages")


@triton.jit(do_not_specialize=_VARYING)  # type: ignore[untyped-decorator]
def _copy_kernel(  # type: ignore[no-untyped-def]
    pairs,
    dst_base,
    dst_stride,
    src_base,
    src_stride,
    num_vectors,
    num_pages,
    UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE_VECTORS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
):
    """Strides and sizes are in vectors of VECTOR units; the addresses are plain integers."""
    pair_ptr = pairs.to(tl.pointer_type(tl.int64))
    # An address that was an integer has lost its alignment: without it loads are 4 bytes wide.
    dst_ptr = tl.multiple_of(dst_base.to(tl.pointer_type(UNIT)), ALIGNMENT)
    src_ptr = tl.multiple_of(src_base.to(tl.pointer_type(UNIT)), ALIGNMENT)
    tiles_per_page = tl.cdiv(num_vectors, TILE_VECTORS)
    num_tiles = tl.cdiv(num_pages, TILE_PAGES) * tiles_per_page
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        page = (tile // tiles_per_page) * TILE_PAGES + tl.arange(0, TILE_PAGES)
        pair = tl.load(pair_ptr + page, mask=page < num_pages, other=0)
        dst = (pair & 0xFFFFFFFF) * dst_stride * VECTOR
        src = (pair >> 32) * src_stride * VECTOR
        first = (tile % tiles_per_page) * TILE_VECTORS * VECTOR
        unit = first + tl.arange(0, TILE_VECTORS * VECTOR)
        mask = (page < num_pages)[:, None] & (unit < num_vectors * VECTOR)[None, :]
        values = tl.load(src_ptr + src[:, None] + unit[None, :], mask=mask)
        tl.store(dst_ptr + dst[:, None] + unit[None, :], values, mask=mask)


def copy_part(pairs: int, num_pages: int, part: PagePart, num_programs: int) -> Any:
    """Enqueue the copy of one part of all pages on torch's current stream, and return what Triton
    compiled. ``pairs`` is the address of the index pairs.
    """
    alignment = part.alignment_bytes
    unit, vector = _UNIT_OF[alignment]
    num_vectors = part.num_bytes // alignment
    tile_vectors = min(_TILE_BYTES // alignment, triton.next_power_of_2(num_vectors))
    if alignment < _VECTOR_BYTES:  # a thread holds as many units, whatever their size
        tile_vectors = min(tile_vectors, _TILE_BYTES // _VECTOR_BYTES)
    tile_pages = max(1, _TILE_BYTES // _VECTOR_BYTES // tile_vectors)
    num_tiles = triton.cdiv(num_pages, tile_pages) * triton.cdiv(num_vectors, tile_vectors)
    return _copy_kernel[(min(num_programs, num_tiles),)](
        pairs,
        part.dst_base,
        part.dst_stride_bytes // alignment,
        part.src_base,
        part.src_stride_bytes // alignment,
        num_vectors,
        num_pages,
        UNIT=unit,
        ALIGNMENT=alignment,
        VECTOR=vector,
        TILE_VECTORS=tile_vectors,
        TILE_PAGES=tile_pages,
        num_warps=_NUM_WARPS,
    )


def copy_part_reference(
    dst: torch.Tensor, src: torch.Tensor, pairs: torch.Tensor, part: PagePart
) -> None:
    """The same on bytes [num_bytes] that begin at the part's two base addresses; ``pairs`` is
    int32 [num_pages, 2].
    """
    span = torch.arange(part.num_bytes, dtype=torch.int64)
    to = pairs[:, :1].to(torch.int64) * part.dst_stride_bytes + span
    source = pairs[:, 1:].to(torch.int64) * part.src_stride_bytes + span
    dst[to] = src[source]
