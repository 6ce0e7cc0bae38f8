"""Scattered pages become rows of numbers, unpacked, for attention that reads contiguous memory.

    slots   [num_blocks] int32, the pages in the order of their blocks
    pages   KVPages of K or of V
    out     [kv_heads, num_blocks * tokens_per_block, head_dim], any strides of heads and tokens

What one head has of a page is contiguous, and so is what becomes of it. A program takes some chunks
(whole vectors of a plain type, or the groups that share a scale) in the order of the pool.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from coldpage.kernels.kv_types import KVPages
from coldpage.kernels.packing import IS_PLAIN, IS_Q8_0, IS_TURBO4, chunks_of, unpack
from coldpage.kernels.rotation import codebook

__all__ = ["gather_pages", "gather_pages_reference"]

# Numbers a program makes: with 128 threads, up to eight loads of 16 bytes are in flight in each.
_LARGE_TILE: Final = 8192
_SMALL_TILE: Final = 2048
_LARGE_FROM: Final = 512 * _LARGE_TILE  # numbers: about four programs for each multiprocessor


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    slots,
    values,
    value_slot,
    value_token,
    value_head,
    scales,
    scale_slot,
    scale_token,
    scale_head,
    book,
    out,
    out_head,
    out_token,
    num_rows,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Strides are of slots, tokens and heads. A row of the tile is one of the CHUNKS."""
    KIND: tl.constexpr = CHUNKS[0]
    NUMBERS: tl.constexpr = CHUNKS[1]
    WIDTH: tl.constexpr = CHUNKS[2]
    PER_VECTOR: tl.constexpr = CHUNKS[3]
    NUM_HEADS: tl.constexpr = CHUNKS[4]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    chunk = row % PER_VECTOR
    token = row // PER_VECTOR % BLOCK
    head = row // (PER_VECTOR * BLOCK) % NUM_HEADS
    block = row // (PER_VECTOR * BLOCK * NUM_HEADS)
    slot = tl.load(slots + block, mask=is_row, other=0).to(tl.int64)
    values += slot * value_slot + token * value_token + head * value_head
    out += (
        head.to(tl.int64) * out_head
        + (block * BLOCK + token).to(tl.int64) * out_token
        + chunk * NUMBERS
    )
    if KIND != IS_PLAIN:
        at = scales + slot * scale_slot + token * scale_token + head * scale_head + chunk
        scale = tl.load(at, mask=is_row, other=0).to(tl.float32)[:, None]
    if KIND == IS_TURBO4:
        column = tl.arange(0, WIDTH // 2)
        at = (values + chunk * (WIDTH // 2))[:, None] + column[None, :]
        codes = tl.load(at, mask=is_row[:, None], other=0)
        low = tl.load(book + (codes & 15).to(tl.int32)) * scale
        high = tl.load(book + (codes >> 4).to(tl.int32)) * scale
        to = out[:, None] + column[None, :]
        tl.store(to, low.to(out.dtype.element_ty), mask=is_row[:, None])
        tl.store(to + WIDTH // 2, high.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        column = tl.arange(0, WIDTH)
        mask = is_row[:, None] & (column < NUMBERS)[None, :]
        numbers = tl.load((values + chunk * NUMBERS)[:, None] + column[None, :], mask=mask, other=0)
        if KIND == IS_Q8_0:
            numbers = numbers.to(tl.float32) * scale
        if numbers.dtype != out.dtype.element_ty:
            numbers = numbers.to(tl.float32).to(out.dtype.element_ty)
        tl.store(out[:, None] + column[None, :], numbers, mask=mask)


def gather_pages(pages: KVPages, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` with the vectors of the pages in ``slots``, all of which exist, in out's dtype;
    of rotated types as they are stored, rotated. Enqueues one launch.
    """
    kv_type, values, scales = pages
    block, num_heads, head_dim = pages.tokens_per_block, pages.num_kv_heads, pages.head_dim
    assert out.shape == (num_heads, slots.shape[0] * block, head_dim) and out.stride(2) == 1
    assert slots.dtype == torch.int32 and slots.is_contiguous() and values.stride(3) == 1
    if out.numel() == 0:
        return
    chunks = chunks_of(kv_type, num_heads, head_dim)
    tile = _LARGE_TILE if out.numel() >= _LARGE_FROM else _SMALL_TILE
    rows = max(1, tile // chunks.width)
    num_rows = out.numel() // chunks.numbers
    # The kernel reads no scales of plain types.
    scale_strides = (0, 0, 0) if scales is None else scales.stride()[:3]
    _gather_kernel[(triton.cdiv(num_rows, rows),)](
        slots,
        values,
        *values.stride()[:3],
        values if scales is None else scales,
        *scale_strides,
        codebook(values.device),
        out,
        *out.stride()[:2],
        num_rows,
        CHUNKS=chunks,
        BLOCK=block,
        ROWS=rows,
    )


def gather_pages_reference(pages: KVPages, slots: torch.Tensor, out: torch.Tensor) -> None:
    """The same in plain torch."""
    index = slots.long()
    scales = None if pages.scales is None else pages.scales[index]
    vectors = unpack(pages.values[index], scales, pages.kv_type, out.dtype)
    out.copy_(vectors.flatten(0, 1).transpose(0, 1))
