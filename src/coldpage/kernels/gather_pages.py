"""Scattered pages become rows of numbers, unpacked, for attention that reads contiguous memory.

    slots   [num_blocks] int32, the pages in the order of their blocks
    pages   KVPages of K or of V
    out     [kv_heads, num_blocks * tokens_per_block, head_dim], any strides of heads and tokens

A program takes one part of the vectors (``kv_types``) of some tokens of a page, some times, in the
order of the pool, so that reads are contiguous; what it writes of a token is as long as a part.
Tokens that are neighbours, as those of packed values are, are turned in shared memory.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from coldpage.kernels.kv_types import KVPages
from coldpage.kernels.packing import unpack
from coldpage.kernels.packing_tiles import IS_PLAIN, IS_Q8_0, IS_TURBO4, chunks_of
from coldpage.kernels.rotation import codebook

__all__ = ["gather_pages", "gather_pages_reference"]

# Numbers a program makes: with 128 threads, up to eight loads of 16 bytes are in flight in each.
_LARGE_TILE: Final = 8192
_SMALL_TILE: Final = 2048
_LARGE_FROM: Final = 512 * _LARGE_TILE  # numbers: about four programs for each multiprocessor
_TOKENS: Final = 16  # of a group: a load where tokens of bytes are neighbours


@triton.jit(do_not_specialize=["num_groups"])  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    slots,
    values,
    value_strides,
    scales,
    scale_strides,
    book,
    out,
    out_head,
    out_token,
    num_groups,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Strides are in the order of the views. A tile is [groups, tokens, numbers of one of the
    CHUNKS], where a group is some tokens of a page."""
    KIND: tl.constexpr = CHUNKS[0]
    NUMBERS: tl.constexpr = CHUNKS[1]
    WIDTH: tl.constexpr = CHUNKS[2]
    PER_VECTOR: tl.constexpr = CHUNKS[3]
    NUM_HEADS: tl.constexpr = CHUNKS[4]
    PER_BLOCK: tl.constexpr = BLOCK // TOKENS
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    is_group = (group < num_groups)[:, None]
    chunk = group // PER_BLOCK % PER_VECTOR
    head = group // (PER_BLOCK * PER_VECTOR) % NUM_HEADS
    block = group // (PER_BLOCK * PER_VECTOR * NUM_HEADS)
    token = (group % PER_BLOCK * TOKENS)[:, None] + tl.arange(0, TOKENS)[None, :]
    slot = tl.load(slots + block, mask=group < num_groups, other=0).to(tl.int64)
    values += slot * value_strides[0] + head * value_strides[2] + chunk * value_strides[3]
    from_token = values[:, None] + token * value_strides[1]
    out += head.to(tl.int64) * out_head + block.to(tl.int64) * BLOCK * out_token + chunk * NUMBERS
    to_token = out[:, None] + token.to(tl.int64) * out_token
    if KIND != IS_PLAIN:
        scales += slot * scale_strides[0] + head * scale_strides[2] + chunk
        at = scales[:, None] + token * scale_strides[1]
        scale = tl.load(at, mask=is_group, other=0).to(tl.float32)[:, :, None]
    if KIND == IS_TURBO4:
        column = tl.arange(0, WIDTH // 2)[None, None, :]
        at = from_token[:, :, None] + column * value_strides[4]
        codes = tl.load(at, mask=is_group[:, :, None], other=0)
        low = tl.load(book + (codes & 15).to(tl.int32)) * scale
        high = tl.load(book + (codes >> 4).to(tl.int32)) * scale
        to = to_token[:, :, None] + column
        tl.store(to, low.to(out.dtype.element_ty), mask=is_group[:, :, None])
        tl.store(to + WIDTH // 2, high.to(out.dtype.element_ty), mask=is_group[:, :, None])
    else:
        column = tl.arange(0, WIDTH)[None, None, :]
        mask = is_group[:, :, None] & (column < NUMBERS)
        numbers = tl.load(from_token[:, :, None] + column * value_strides[4], mask=mask, other=0)
        if KIND == IS_Q8_0:
            numbers = numbers.to(tl.float32) * scale
        if numbers.dtype != out.dtype.element_ty:
            numbers = numbers.to(tl.float32).to(out.dtype.element_ty)
        tl.store(to_token[:, :, None] + column, numbers, mask=mask)


def gather_pages(pages: KVPages, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` with the vectors of the pages in ``slots``, all of which exist, in out's dtype;
    of rotated types as they are stored, rotated. Enqueues one launch.
    """
    kv_type, values, scales = pages
    block, num_heads, head_dim = pages.tokens_per_block, pages.num_kv_heads, pages.head_dim
    assert out.shape == (num_heads, slots.shape[0] * block, head_dim) and out.stride(2) == 1
    assert slots.dtype == torch.int32 and slots.is_contiguous()
    assert scales is None or scales.stride(3) == 1
    if out.numel() == 0:
        return
    chunks = chunks_of(kv_type, num_heads, head_dim)
    tokens = min(_TOKENS, block & -block)  # a power of two, and whole groups a block
    tile = _LARGE_TILE if out.numel() >= _LARGE_FROM else _SMALL_TILE
    groups = max(1, tile // (tokens * chunks.width))
    num_groups = slots.shape[0] * (block // tokens) * num_heads * chunks.per_vector
    _gather_kernel[(triton.cdiv(num_groups, groups),)](
        slots,
        values,
        values.stride(),
        # The kernel reads no scales of plain types.
        values if scales is None else scales,
        (0, 0, 0) if scales is None else scales.stride()[:3],
        codebook(values.device),
        out,
        *out.stride()[:2],
        num_groups,
        CHUNKS=chunks,
        BLOCK=block,
        TOKENS=tokens,
        GROUPS=groups,
    )


def gather_pages_reference(pages: KVPages, slots: torch.Tensor, out: torch.Tensor) -> None:
    """The same in plain torch."""
    index = slots.long()
    scales = None if pages.scales is None else pages.scales[index]
    vectors = unpack(pages.values[index].flatten(-2), scales, pages.kv_type, out.dtype)
    out.copy_(vectors.flatten(0, 1).transpose(0, 1))
