"""New keys and values go into their pages, packed on the way, in one launch.

    key, value       [num_tokens, kv_heads, head_dim], any strides, f32, f16 or bf16
    slots, offsets   [num_tokens] int32: the page of each token and its place there; slot < 0: none
    pages            KVPages of K and of V, each of its own type

A program takes some *chunks* of K or of V: parts of the vectors (``kv_types``), the same one of
tokens that are neighbours. The rotation of ``turbo4`` is two products with half of the Hadamard
matrix, whose other half is the same up to sign, and gives the two halves of the bytes as it is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from coldpage.kernels.kv_types import KVPages
from coldpage.kernels.packing import pack
from coldpage.kernels.packing_tiles import (
    IS_PLAIN,
    IS_Q8_0,
    IS_TURBO4,
    Chunks,
    chunks_of,
    pack_q8_tile,
    pack_turbo4_tile,
)
from coldpage.kernels.rotation import rotation

__all__ = ["write_pages", "write_pages_reference"]

# Numbers a program writes: few for a step of decoding, where only the time of one program counts.
_SMALL_TILE: Final = 2048
_LARGE_TILE: Final = 8192
_LARGE_FROM: Final = 128 * _LARGE_TILE  # numbers of one side: large tiles then fill a GPU
_MIN_DOT_ROWS: Final = 16

_DOT_TYPES: Final = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit  # type: ignore[untyped-decorator]
def _rotated_halves(  # type: ignore[no-untyped-def]
    source,
    number_stride,
    is_row,
    rotation_ptr,
    HALF: tl.constexpr,
    DOT: tl.constexpr,
):
    """The halves of rotated groups that begin at ``source`` [rows], times sqrt(group)."""
    column = tl.arange(0, HALF)
    # The left half of the matrix; the right one differs in the signs of its lower rows.
    corner = rotation_ptr + column[:, None] * (2 * HALF) + column[None, :]
    upper = tl.load(corner)
    lower = tl.load(corner + HALF * 2 * HALF)
    at = source[:, None] + column[None, :] * number_stride
    first = tl.load(at, mask=is_row[:, None], other=0).to(DOT)
    second = tl.load(at + HALF * number_stride, mask=is_row[:, None], other=0).to(DOT)
    even = tl.dot(first, upper, input_precision="ieee")
    odd = tl.dot(second, lower, input_precision="ieee")
    return even + odd, even - odd


@triton.jit  # type: ignore[untyped-decorator]
def _write_side(  # type: ignore[no-untyped-def]
    tokens,
    tensors,
    strides,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of rows, a chunk each."""
    slots, offsets, num_tokens = tokens
    source, values, scales, rotation_ptr = tensors
    KIND: tl.constexpr = CHUNKS[0]
    NUMBERS: tl.constexpr = CHUNKS[1]
    WIDTH: tl.constexpr = CHUNKS[2]
    PER_VECTOR: tl.constexpr = CHUNKS[3]
    NUM_HEADS: tl.constexpr = CHUNKS[4]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row % num_tokens
    chunk = row // num_tokens % PER_VECTOR
    head = row // num_tokens // PER_VECTOR
    is_row = head < NUM_HEADS
    slot = tl.load(slots + token, mask=is_row, other=-1)
    offset = tl.load(offsets + token, mask=is_row, other=0)
    is_written = slot >= 0
    slot = slot.to(tl.int64)
    source += token.to(tl.int64) * strides[0] + head * strides[1]
    source += chunk * NUMBERS * strides[2]
    values += slot * strides[3] + offset * strides[4] + head * strides[5] + chunk * strides[6]
    # Loads are masked by is_row, so that they need not wait for the slots. Stores are turned: where
    # no numbers are neighbours in memory, the threads of a warp are, and rows are tokens.
    if KIND == IS_TURBO4:
        low, high = _rotated_halves(source, strides[2], is_row, rotation_ptr, WIDTH // 2, DOT)
        packed, scale = pack_turbo4_tile(low, high)
        to = values[None, :] + tl.arange(0, WIDTH // 2)[:, None] * strides[7]
        tl.store(to, tl.trans(packed), mask=is_written[None, :])
    else:
        column = tl.arange(0, WIDTH)
        is_number = column < NUMBERS
        at = source[:, None] + column[None, :] * strides[2]
        numbers = tl.load(at, mask=is_row[:, None] & is_number[None, :], other=0)
        if KIND == IS_Q8_0:
            numbers, scale = pack_q8_tile(numbers.to(tl.float32))
        elif numbers.dtype != values.dtype.element_ty:
            numbers = numbers.to(tl.float32).to(values.dtype.element_ty)
        to = values[None, :] + column[:, None] * strides[7]
        tl.store(to, tl.trans(numbers), mask=is_written[None, :] & is_number[:, None])
    if KIND != IS_PLAIN:
        scales += slot * strides[8] + offset * strides[9] + head * strides[10]
        tl.store(scales + chunk, scale, mask=is_written)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _write_kernel(  # type: ignore[no-untyped-def]
    slots,
    offsets,
    num_tokens,
    key_tensors,
    key_strides,
    value_tensors,
    value_strides,
    KEY: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Of each side: ``tensors`` are source, values, scales, rotation; ``strides`` those of the
    source's tokens, heads and numbers, all five of values, and those of the scales' slots, tokens
    and heads.
    """
    tokens = (slots, offsets, num_tokens)
    if tl.program_id(1) == 0:
        _write_side(tokens, key_tensors, key_strides, KEY, KEY_ROWS, DOT)
    else:
        _write_side(tokens, value_tensors, value_strides, VALUE, VALUE_ROWS, DOT)


def write_pages(
    keys: KVPages,
    values: KVPages,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Store each token's vectors at ``[slot, offset]`` of both sides; those without a slot are not
    stored. Enqueues one launch, whose shape depends on the shapes alone, so a CUDA graph can hold
    it. No two tokens may share a place.
    """
    num_tokens = key.shape[0]
    assert value.shape[0] == num_tokens and slots.shape == offsets.shape == (num_tokens,)
    assert slots.dtype == offsets.dtype == torch.int32 and slots.is_contiguous()
    assert offsets.is_contiguous() and key.dtype == value.dtype
    if num_tokens == 0:
        return
    dot_dtype = _dot_dtype(key)
    key_side = _side(keys, key, dot_dtype)
    value_side = _side(values, value, dot_dtype)
    _write_kernel[(max(key_side.num_tiles, value_side.num_tiles), 2)](
        slots,
        offsets,
        num_tokens,
        key_side.tensors,
        key_side.strides,
        value_side.tensors,
        value_side.strides,
        KEY=key_side.chunks,
        KEY_ROWS=key_side.rows,
        VALUE=value_side.chunks,
        VALUE_ROWS=value_side.rows,
        DOT=_DOT_TYPES[dot_dtype],
        # The reference rounds after every product and every sum.
        enable_fp_fusion=False,
    )


def write_pages_reference(
    keys: KVPages,
    values: KVPages,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """The same in plain torch; waits for the device."""
    is_written = slots >= 0
    place = slots[is_written].long(), offsets[is_written].long()
    for pages, x in ((keys, key), (values, value)):
        packed, scales = pack(x[is_written], pages.kv_type)
        pages.values[place] = packed.reshape(-1, *pages.values.shape[2:])
        if pages.scales is not None and scales is not None:
            pages.scales[place] = scales


def _dot_dtype(x: torch.Tensor) -> torch.dtype:
    # Triton's interpreter takes products of bf16 for products of their bits.
    return x.dtype if x.is_cuda else torch.float32


class _Side(NamedTuple):
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    chunks: Chunks
    rows: int  # of a tile
    num_tiles: int


def _side(pages: KVPages, x: torch.Tensor, dot_dtype: torch.dtype) -> _Side:
    kv_type, stored, scales = pages
    num_tokens, num_heads, head_dim = x.shape
    assert (num_heads, head_dim) == (pages.num_kv_heads, pages.head_dim)
    chunks = chunks_of(kv_type, num_heads, head_dim)
    is_large = x.numel() >= _LARGE_FROM
    rows = max((_LARGE_TILE if is_large else _SMALL_TILE) // chunks.width, _MIN_DOT_ROWS)
    num_tiles = triton.cdiv(num_tokens * num_heads * chunks.per_vector, rows)
    strides = x.stride() + stored.stride()
    if scales is None:  # the kernel reads neither scales nor rotation
        return _Side((x, stored, stored, stored), (*strides, 0, 0, 0), chunks, rows, num_tiles)
    assert scales.stride(3) == 1
    matrix = rotation(chunks.numbers, x.device, dot_dtype) if kv_type.is_rotated else stored
    strides += scales.stride()[:3]
    return _Side((x, stored, scales, matrix), strides, chunks, rows, num_tiles)
