"""The products of decode attention with a tile of keys or values, as their types store them.

A tile is the vectors of some tokens for one KV head. Packed parts are turned into the numbers of a
product in registers, four bytes at a time; their scales are applied to scores and weights, which
are far fewer. Bytes of pages that exist are read also where a token is not live, so that whole
words are: its scale is not, and is 0 then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coldpage.kernels.packing import IS_PLAIN, IS_Q8_0

__all__ = ["add_values", "query_parts", "scores_of", "zero_sums"]


@triton.jit  # type: ignore[untyped-decorator]
def query_parts(query, is_head, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The query heads' parts, or halves of parts, that keys are multiplied with: a tuple of
    [numbers, heads]. ``query`` is [heads] of pointers."""
    KIND: tl.constexpr = PARTS[0]
    NUMBERS: tl.constexpr = PARTS[1]
    WIDTH: tl.constexpr = PARTS[2]
    column = tl.arange(0, WIDTH)
    parts = ()
    for part in tl.static_range(PARTS[3]):
        at = part * NUMBERS + column
        mask = is_head[None, :] & (column < NUMBERS)[:, None]
        numbers = tl.load(query[None, :] + at[:, None], mask=mask, other=0)
        parts = parts + (numbers.to(PARTS[4]),)
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def zero_sums(PARTS: tl.constexpr, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums for ``add_values``: a tuple of [numbers, heads] f32."""
    sums = ()
    for _ in tl.static_range(PARTS[3]):
        sums = sums + (tl.zeros([PARTS[2], HEADS], tl.float32),)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(codes, DOT: tl.constexpr, IS_ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """int8 as 16-bit floats, exactly. As f16, a byte behind 0x64 is 1024 more than the byte; as
    bf16, 7 bits behind 0x43 are 128 more, and the sign bit behind it is what is too much."""
    if IS_ASM:
        if DOT == tl.float16:
            result = tl.inline_asm_elementwise(
                """{
                .reg .b32 w, c, a, b;
                mov.b32 c, 0x64806480;
                xor.b32 w, $2, 0x80808080;
                prmt.b32 a, w, 0x64646464, 0x4140;
                prmt.b32 b, w, 0x64646464, 0x4342;
                sub.f16x2 $0, a, c;
                sub.f16x2 $1, b, c;
                }""",
                "=r,=r,r",
                [codes],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
        else:
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


@triton.jit  # type: ignore[untyped-decorator]
def _halves(codes, codebook, DOT: tl.constexpr, IS_ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codebook's values for the low and the high halves of bytes: as bf16, whose two bytes a
    byte permutation looks up in the eight magnitudes for four halves at a time."""
    if IS_ASM:
        # l and h: the low and high bytes of two pairs; s: 0xFF for negative halves, else 0x80.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 w, t, u, s, l, h;
            and.b32 t, $4, 0x77777777;
            prmt.b32 l, 0x7128C703, 0x2F04CFA1, t;
            prmt.b32 h, 0x3F3F3E3E, 0x40403F3F, t;
            prmt.b32 s, 0x80808080, 0x80808080, $4;
            shl.b32 s, s, 1;
            and.b32 s, s, 0x80808080;
            or.b32 h, h, s;
            prmt.b32 $0, l, h, 0x6240;
            prmt.b32 $2, l, h, 0x7351;
            shr.u32 w, $4, 16;
            shr.u32 u, t, 16;
            prmt.b32 l, 0x7128C703, 0x2F04CFA1, u;
            prmt.b32 h, 0x3F3F3E3E, 0x40403F3F, u;
            prmt.b32 s, 0x80808080, 0x80808080, w;
            shl.b32 s, s, 1;
            and.b32 s, s, 0x80808080;
            or.b32 h, h, s;
            prmt.b32 $1, l, h, 0x6240;
            prmt.b32 $3, l, h, 0x7351;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        low, high = low.to(DOT), high.to(DOT)
    else:
        low = tl.load(codebook + (codes & 15).to(tl.int32)).to(DOT)
        high = tl.load(codebook + (codes >> 4).to(tl.int32)).to(DOT)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _scale_words(scales, at, live, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole words of each token's ``NUM`` scales, since narrower ones can not be copied ahead."""
    if NUM <= 2:
        words = (tl.load(scales.to(tl.pointer_type(tl.int32)) + at // 2, mask=live, other=0),)
    else:
        wide = scales.to(tl.pointer_type(tl.int64)) + at // 4
        words = (tl.load(wide, mask=live, other=0),)
        if NUM > 4:
            words = words + (tl.load(wide + 1, mask=live, other=0),)
    return words


@triton.jit  # type: ignore[untyped-decorator]
def _scale(words, offset, part: tl.constexpr, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """[tokens] f32"""
    if NUM == 1:  # a word holds the scales of two tokens
        bits = words[0] >> (offset % 2 * 16)
    else:
        bits = words[part // 4] >> (part % 4 * 16)
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def scores_of(queries, keys, places, codebook, PARTS: tl.constexpr, IS_ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of a tile of keys with ``query_parts``: [tokens, heads] f32."""
    KIND: tl.constexpr = PARTS[0]
    WIDTH: tl.constexpr = PARTS[2]
    NUM: tl.constexpr = PARTS[3]
    page, offset, has_page, live = places
    values, strides, scales, scale_strides = keys
    column = tl.arange(0, WIDTH)
    at = values + page * strides[0] + offset * strides[1]
    if KIND == IS_PLAIN:
        mask = live[:, None] & (column < PARTS[1])[None, :]
        numbers = tl.load(at[:, None] + column[None, :], mask=mask, other=0).to(PARTS[4])
        result = tl.dot(numbers, queries[0], input_precision="ieee")
    elif KIND == IS_Q8_0:
        words = _scale_words(scales, page * scale_strides[0] + offset * scale_strides[1], live, NUM)
        for part in tl.static_range(NUM):
            to = at[:, None] + (part * strides[3] + column[None, :])
            numbers = _numbers(tl.load(to, mask=has_page[:, None], other=0), PARTS[4], IS_ASM)
            new = tl.dot(numbers, queries[part], input_precision="ieee")
            new = new * _scale(words, offset, part, NUM)[:, None]
            result = new if part == 0 else result + new
    else:
        SCALES: tl.constexpr = NUM // 2
        words = _scale_words(
            scales, page * scale_strides[0] + offset * scale_strides[1], live, SCALES
        )
        for part in tl.static_range(SCALES):
            to = at[:, None] + (part * strides[3] + column[None, :])
            codes = tl.load(to, mask=has_page[:, None], other=0)
            low, high = _halves(codes, codebook, PARTS[4], IS_ASM)
            new = tl.dot(low, queries[2 * part], input_precision="ieee")
            new = tl.dot(high, queries[2 * part + 1], new, input_precision="ieee")
            new = new * _scale(words, offset, part, SCALES)[:, None]
            result = new if part == 0 else result + new
    return result


@triton.jit  # type: ignore[untyped-decorator]
def add_values(sums, weights, values, places, codebook, PARTS: tl.constexpr, IS_ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """``sums`` and, on top, the products of a tile of values with weights [tokens, heads]."""
    KIND: tl.constexpr = PARTS[0]
    WIDTH: tl.constexpr = PARTS[2]
    NUM: tl.constexpr = PARTS[3]
    DOT: tl.constexpr = PARTS[4]
    page, offset, has_page, live = places
    pages, strides, scales, scale_strides = values
    column = tl.arange(0, WIDTH)
    at = pages + page * strides[0] + offset * strides[1]
    result = ()
    if KIND == IS_PLAIN:
        mask = live[:, None] & (column < PARTS[1])[None, :]
        numbers = tl.load(at[:, None] + column[None, :], mask=mask, other=0).to(DOT)
        product = tl.dot(tl.trans(numbers), weights.to(DOT), sums[0], input_precision="ieee")
        result = (product,)
    elif KIND == IS_Q8_0:
        words = _scale_words(scales, page * scale_strides[0] + offset * scale_strides[1], live, NUM)
        for part in tl.static_range(NUM):
            to = at[None, :] + (part * strides[3] + column[:, None] * strides[4])
            numbers = _numbers(tl.load(to, mask=has_page[None, :], other=0), DOT, IS_ASM)
            scaled = (weights * _scale(words, offset, part, NUM)[:, None]).to(DOT)
            result = result + (tl.dot(numbers, scaled, sums[part], input_precision="ieee"),)
    else:
        SCALES: tl.constexpr = NUM // 2
        words = _scale_words(
            scales, page * scale_strides[0] + offset * scale_strides[1], live, SCALES
        )
        for part in tl.static_range(SCALES):
            to = at[None, :] + (part * strides[3] + column[:, None] * strides[4])
            codes = tl.load(to, mask=has_page[None, :], other=0)
            low, high = _halves(codes, codebook, DOT, IS_ASM)
            scaled = (weights * _scale(words, offset, part, SCALES)[:, None]).to(DOT)
            result = result + (
                tl.dot(low, scaled, sums[2 * part], input_precision="ieee"),
                tl.dot(high, scaled, sums[2 * part + 1], input_precision="ieee"),
            )
    return result
