"""Two attentions of the same queries over different keys become one, exactly.

    out_a, out_b   [1, heads, q, head_dim], normalised, any strides
    lse_a, lse_b   [1, heads, q] f32, any strides: the natural logarithm of each part's sum

A part whose log-sum-exp is -inf saw no key: it adds nothing, whatever its numbers are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["merge_attention", "merge_attention_reference"]

_TILE = 4096  # numbers of a program


@triton.jit(do_not_specialize=["num_heads", "num_queries"])  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    part_a,
    strides_a,
    part_b,
    strides_b,
    merged,
    strides,
    num_heads,
    num_queries,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Parts and result are (out, lse). Strides are of heads, queries and numbers of the first, and
    of heads and queries of the second."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = row // num_queries
    query = row % num_queries
    is_row = head < num_heads
    head = head.to(tl.int64)
    query = query.to(tl.int64)
    at = head * strides_a[3] + query * strides_a[4]
    lse_a = tl.load(part_a[1] + at, mask=is_row, other=0.0)
    at = head * strides_b[3] + query * strides_b[4]
    lse_b = tl.load(part_b[1] + at, mask=is_row, other=0.0)
    column = tl.arange(0, WIDTH)
    mask = is_row[:, None] & (column < HEAD_DIM)[None, :]
    at = (head * strides_a[0] + query * strides_a[1])[:, None] + column[None, :] * strides_a[2]
    out_a = tl.load(part_a[0] + at, mask=mask, other=0.0).to(tl.float32)
    at = (head * strides_b[0] + query * strides_b[1])[:, None] + column[None, :] * strides_b[2]
    out_b = tl.load(part_b[0] + at, mask=mask, other=0.0).to(tl.float32)

    largest = tl.maximum(lse_a, lse_b)
    # Where neither part saw a key, no weight may become exp(-inf + inf).
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a = tl.exp(lse_a - finite)
    weight_b = tl.exp(lse_b - finite)
    total = weight_a + weight_b
    share = 1.0 / tl.where(total > 0, total, 1.0)
    # By a choice, since zero times what a part without keys holds may be NaN.
    sums = tl.where((weight_a > 0)[:, None], out_a * (weight_a * share)[:, None], 0.0)
    sums += tl.where((weight_b > 0)[:, None], out_b * (weight_b * share)[:, None], 0.0)
    to = (head * strides[0] + query * strides[1])[:, None] + column[None, :] * strides[2]
    tl.store(merged[0] + to, sums.to(merged[0].dtype.element_ty), mask=mask)
    lse = tl.where(total > 0, finite + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(merged[1] + head * strides[3] + query * strides[4], lse, mask=is_row)


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of both parts, and its log-sum-exp f32 [1, heads, q]. The result is
    written to ``out`` (any strides; either part itself will do), or to a new tensor of the dtype
    of ``out_a``. Enqueues one launch; sums are in f32.
    """
    shape = out_a.shape
    assert len(shape) == 4 and shape[0] == 1 and out_b.shape == shape
    assert lse_a.shape == lse_b.shape == shape[:3]
    assert lse_a.dtype == lse_b.dtype == torch.float32
    if out is None:
        out = torch.empty(shape, dtype=out_a.dtype, device=out_a.device)
    assert out.shape == shape
    _, num_heads, num_queries, head_dim = shape
    lse = torch.empty(shape[:3], dtype=torch.float32, device=out.device)
    if out.numel() == 0:
        return out, lse
    width = triton.next_power_of_2(head_dim)
    rows = max(1, _TILE // width)
    _merge_kernel[(triton.cdiv(num_heads * num_queries, rows),)](
        (out_a, lse_a),
        out_a.stride()[1:] + lse_a.stride()[1:],
        (out_b, lse_b),
        out_b.stride()[1:] + lse_b.stride()[1:],
        (out, lse),
        out.stride()[1:] + lse.stride()[1:],
        num_heads,
        num_queries,
        HEAD_DIM=head_dim,
        WIDTH=width,
        ROWS=rows,
    )
    return out, lse


def merge_attention_reference(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch, in f64."""
    lses = torch.stack([lse_a, lse_b]).double()
    lse = lses.logsumexp(0)
    # Without any key, the shares of -inf - -inf are NaN and belong to nobody.
    shares = torch.where(lses.isneginf(), 0.0, (lses - lse).exp())[..., None]
    outs = torch.stack([out_a, out_b]).double()
    merged = torch.where(shares > 0, outs * shares, 0.0).sum(0)
    if out is None:
        out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    out.copy_(merged)
    return out, lse.float()
