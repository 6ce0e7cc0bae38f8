"""The products of decode attention with a tile of keys or values, as their types store them.

A tile is the vectors of some tokens for one KV head. Packed parts are turned into the numbers of a
product in registers, four bytes at a time; their scales are applied to scores and weights, which
are far fewer. Bytes of pages that exist are read also where a token is not live, so that whole
words are: its scale is not, and is 0 then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coldpage.kernels.packing_tiles import IS_PLAIN, IS_Q8_0, IS_TURBO4
from coldpage.kernels.rotation import CODE_STEPS

__all__ = [
    "add_values",
    "decayed",
    "offset_starts",
    "query_parts",
    "scores_of",
    "value_of",
    "zero_sums",
]

_OFFSET = tl.constexpr(1024.0 + 128.0)
_CODE_STEPS = tl.constexpr(CODE_STEPS)
_CODE_OFFSET = tl.constexpr(128.0 + 64.0 - 0.5)


@triton.jit
def query_parts(query, is_head, PARTS: tl.constexpr):
    """The query heads' parts, or halves of parts, that keys are multiplied with: a tuple of
    [numbers, heads]. ``query`` is [heads] of pointers."""
    NUMBERS: tl.constexpr = PARTS[1]
    WIDTH: tl.constexpr = PARTS[2]
    NUM: tl.constexpr = PARTS[3]
    DOT: tl.constexpr = PARTS[4]
    column = tl.arange(0, WIDTH)
    parts = ()
    for part in tl.static_range(NUM):
        at = part * NUMBERS + column
        mask = is_head[None, :] & (column < NUMBERS)[:, None]
        numbers = tl.load(query[None, :] + at[:, None], mask=mask, other=0)
        parts = parts + (numbers.to(DOT),)
    return parts


@triton.jit
def zero_sums(PARTS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Sums for ``add_values``: a tuple of [numbers, heads] f32, and for turbo4 behind them the sums
    of the weights that a tile's tokens had, [tokens, heads]."""
    KIND: tl.constexpr = PARTS[0]
    WIDTH: tl.constexpr = PARTS[2]
    NUM: tl.constexpr = PARTS[3]
    sums = ()
    for _ in tl.static_range(NUM):
        sums = sums + (tl.zeros([WIDTH, HEADS], tl.float32),)
    if KIND == IS_TURBO4:
        for _ in tl.static_range(NUM // 2):
            sums = sums + (tl.zeros([TOKENS, HEADS], tl.float32),)
    return sums


@triton.jit
def decayed(sums, decay, PARTS: tl.constexpr):
    """All of them times ``decay`` [heads]."""
    KIND: tl.constexpr = PARTS[0]
    NUM: tl.constexpr = PARTS[3]
    result = ()
    for part in tl.static_range(NUM + NUM // 2 if KIND == IS_TURBO4 else NUM):
        result = result + (sums[part] * decay[None, :],)
    return result


@triton.jit
def value_of(sums, part: tl.constexpr, PARTS: tl.constexpr, IS_ASM: tl.constexpr):
    """The sum of a part of the values themselves: [numbers, heads]."""
    KIND: tl.constexpr = PARTS[0]
    NUM: tl.constexpr = PARTS[3]
    result = sums[part]
    if IS_ASM and KIND == IS_TURBO4:
        weights = tl.sum(sums[NUM + part // 2], 0)
        result = (result - _CODE_OFFSET * weights[None, :]) * (1.0 / _CODE_STEPS)
    return result


@triton.jit
def offset_starts(queries, PARTS: tl.constexpr, HEADS: tl.constexpr, IS_ASM: tl.constexpr):
    """What the product of a part of int8 keys begins with, so that ``_offset_numbers`` are as good
    as the numbers: a tuple of [heads]."""
    KIND: tl.constexpr = PARTS[0]
    NUM: tl.constexpr = PARTS[3]
    starts = ()
    if KIND != IS_PLAIN:
        for part in tl.static_range(NUM):
            start = tl.zeros([HEADS], tl.float32)
            if IS_ASM:
                start = tl.sum(queries[part].to(tl.float32), 0)
                start = start * (-_OFFSET if KIND == IS_Q8_0 else -_CODE_OFFSET)
            starts = starts + (start,)
    return starts


@triton.jit
def _offset_numbers(codes, DOT: tl.constexpr, IS_ASM: tl.constexpr):
    """int8 as f16, with _OFFSET added: behind 0x64 a byte that is not signed is 1024 more."""
    if IS_ASM:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 w;
            xor.b32 w, $2, 0x80808080;
            prmt.b32 $0, w, 0x64646464, 0x4140;
            prmt.b32 $1, w, 0x64646464, 0x4342;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        result = codes.to(DOT)
    return result


@triton.jit
def _numbers(codes, DOT: tl.constexpr, IS_ASM: tl.constexpr):
    """int8 as bf16: 7 bits behind 0x43 are 128 more than they are, and the sign bit behind it is
    what the signed number is less."""
    if IS_ASM:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 m, s, a, b, c, d;
            and.b32 m, $2, 0x7F7F7F7F;
            and.b32 s, $2, 0x80808080;
            prmt.b32 a, m, 0x43434343, 0x4140;
            prmt.b32 b, m, 0x43434343, 0x4342;
            prmt.b32 c, s, 0x43434343, 0x4140;
            prmt.b32 d, s, 0x43434343, 0x4342;
            sub.bf16x2 $0, a, c;
            sub.bf16x2 $1, b, d;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        result = codes.to(DOT)
    return result


@triton.jit
def _offset_halves(codes, codebook, DOT: tl.constexpr, IS_ASM: tl.constexpr):
    """The codebook's values for the low and the high halves of bytes, times _CODE_STEPS, with
    _CODE_OFFSET added: as bf16, 7 bits behind 0x43 are 128 more than they are. A byte permutation
    looks up 64 and MAGNITUDE_STEPS, four at a time; all 7 bits are turned for negative ones."""
    if IS_ASM:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 w, t, u, s;
            and.b32 t, $4, 0x77777777;
            prmt.b32 u, 0x524C4742, 0x75685F58, t;
            prmt.b32 s, 0x80808080, 0x80808080, $4;
            and.b32 s, s, 0x7F7F7F7F;
            xor.b32 u, u, s;
            prmt.b32 $0, u, 0x43434343, 0x4240;
            prmt.b32 $2, u, 0x43434343, 0x4341;
            shr.u32 w, $4, 16;
            shr.u32 t, t, 16;
            prmt.b32 u, 0x524C4742, 0x75685F58, t;
            prmt.b32 s, 0x80808080, 0x80808080, w;
            and.b32 s, s, 0x7F7F7F7F;
            xor.b32 u, u, s;
            prmt.b32 $1, u, 0x43434343, 0x4240;
            prmt.b32 $3, u, 0x43434343, 0x4341;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = tl.load(codebook + (codes & 15).to(tl.int32)).to(DOT)
        high = tl.load(codebook + (codes >> 4).to(tl.int32)).to(DOT)
    return low, high


@triton.jit
def _scale_words(scales, at, live, NUM: tl.constexpr):
    """Whole words of each token's ``NUM`` scales, since narrower ones can not be copied ahead."""
    if NUM <= 2:
        words = (tl.load(scales.to(tl.pointer_type(tl.int32)) + at // 2, mask=live, other=0),)
    else:
        wide = scales.to(tl.pointer_type(tl.int64)) + at // 4
        words = (tl.load(wide, mask=live, other=0),)
        if NUM > 4:
            words = words + (tl.load(wide + 1, mask=live, other=0),)
    return words


@triton.jit
def _scale(words, offset, part: tl.constexpr, NUM: tl.constexpr):
    """[tokens] f32"""
    # Of one part, a word holds the scales of two tokens.
    bits = words[0] >> (offset % 2 * 16) if NUM == 1 else words[part // 4] >> (part % 4 * 16)
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scores_of(
    queries, starts, keys, strides, places, codebook, PARTS: tl.constexpr, IS_ASM: tl.constexpr
):
    """Products of a tile of keys with ``query_parts``: [tokens, heads] f32."""
    KIND: tl.constexpr = PARTS[0]
    NUMBERS: tl.constexpr = PARTS[1]
    WIDTH: tl.constexpr = PARTS[2]
    NUM: tl.constexpr = PARTS[3]
    DOT: tl.constexpr = PARTS[4]
    page, offset, live, _ = places
    has_page = page >= 0
    values, scales = keys
    column = tl.arange(0, WIDTH)
    at = values + page * strides[0] + offset * strides[1]
    if KIND == IS_PLAIN:
        mask = live[:, None] & (column < NUMBERS)[None, :]
        numbers = tl.load(at[:, None] + column[None, :], mask=mask, other=0).to(DOT)
        result = tl.dot(numbers, queries[0], input_precision="ieee")
    elif KIND == IS_Q8_0:
        words = _scale_words(scales, page * strides[5] + offset * strides[6], live, NUM)
        for part in tl.static_range(NUM):
            to = at[:, None] + (part * strides[3] + column[None, :])
            codes = tl.load(to, mask=has_page[:, None], other=0)
            new = tl.broadcast_to(starts[part][None, :], [codes.shape[0], starts[part].shape[0]])
            numbers = _offset_numbers(codes, DOT, IS_ASM)
            new = tl.dot(numbers, queries[part], new, input_precision="ieee")
            new = new * _scale(words, offset, part, NUM)[:, None]
            result = new if part == 0 else result + new
    else:
        SCALES: tl.constexpr = NUM // 2
        words = _scale_words(scales, page * strides[5] + offset * strides[6], live, SCALES)
        for part in tl.static_range(SCALES):
            to = at[:, None] + (part * strides[3] + column[None, :])
            codes = tl.load(to, mask=has_page[:, None], other=0)
            low, high = _offset_halves(codes, codebook, DOT, IS_ASM)
            start = starts[2 * part] + starts[2 * part + 1]
            new = tl.broadcast_to(start[None, :], [codes.shape[0], start.shape[0]])
            new = tl.dot(low, queries[2 * part], new, input_precision="ieee")
            new = tl.dot(high, queries[2 * part + 1], new, input_precision="ieee")
            scale = _scale(words, offset, part, SCALES)
            if IS_ASM:
                scale = scale * (1.0 / _CODE_STEPS)
            new = new * scale[:, None]
            result = new if part == 0 else result + new
    return result


@triton.jit
def _load_columns(values, slots, strides, part: tl.constexpr, PARTS: tl.constexpr):
    """A part of a tile's packed values, [numbers, tokens], by slots [blocks]. In a page it is one
    stretch, which a warp reads at once: were tokens of a tile beside each other, a thread would
    read of another page than its neighbour."""
    NUMBERS: tl.constexpr = PARTS[1]
    WIDTH: tl.constexpr = PARTS[2]
    BLOCK: tl.constexpr = PARTS[5]
    BLOCKS: tl.constexpr = slots.shape[0]
    byte = tl.arange(0, WIDTH * BLOCK)
    at = values + slots.to(tl.int64) * strides[0] + part * strides[3]
    mask = (slots >= 0)[:, None] & (byte < NUMBERS * BLOCK)[None, :]
    stretches = tl.load(at[:, None] + byte[None, :], mask=mask, other=0)
    columns = tl.permute(tl.reshape(stretches, [BLOCKS, WIDTH, BLOCK]), [1, 0, 2])
    return tl.reshape(columns, [WIDTH, BLOCKS * BLOCK])


@triton.jit
def add_values(
    sums, weights, values, strides, places, codebook, PARTS: tl.constexpr, IS_ASM: tl.constexpr
):
    """``sums`` and, on top, the products of a tile of values with weights [tokens, heads]."""
    KIND: tl.constexpr = PARTS[0]
    NUMBERS: tl.constexpr = PARTS[1]
    WIDTH: tl.constexpr = PARTS[2]
    NUM: tl.constexpr = PARTS[3]
    DOT: tl.constexpr = PARTS[4]
    page, offset, live, slots = places
    pages, scales = values
    result = ()
    if KIND == IS_PLAIN:
        column = tl.arange(0, WIDTH)
        at = pages + page * strides[0] + offset * strides[1]
        mask = live[:, None] & (column < NUMBERS)[None, :]
        numbers = tl.load(at[:, None] + column[None, :], mask=mask, other=0).to(DOT)
        product = tl.dot(tl.trans(numbers), weights.to(DOT), sums[0], input_precision="ieee")
        result = (product,)
    elif KIND == IS_Q8_0:
        words = _scale_words(scales, page * strides[5] + offset * strides[6], live, NUM)
        for part in tl.static_range(NUM):
            codes = _load_columns(pages, slots, strides, part, PARTS)
            numbers = _numbers(codes, DOT, IS_ASM)
            scaled = (weights * _scale(words, offset, part, NUM)[:, None]).to(DOT)
            result = result + (tl.dot(numbers, scaled, sums[part], input_precision="ieee"),)
    else:
        SCALES: tl.constexpr = NUM // 2
        words = _scale_words(scales, page * strides[5] + offset * strides[6], live, SCALES)
        totals = ()
        for part in tl.static_range(SCALES):
            codes = _load_columns(pages, slots, strides, part, PARTS)
            low, high = _offset_halves(codes, codebook, DOT, IS_ASM)
            scaled = (weights * _scale(words, offset, part, SCALES)[:, None]).to(DOT)
            result = result + (
                tl.dot(low, scaled, sums[2 * part], input_precision="ieee"),
                tl.dot(high, scaled, sums[2 * part + 1], input_precision="ieee"),
            )
            totals = totals + (sums[NUM + part] + scaled.to(tl.float32),)
        result = result + totals
    return result
