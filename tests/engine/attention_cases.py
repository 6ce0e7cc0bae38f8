"""Calls of attention, and what they give by its definition."""

from __future__ import annotations

import itertools

import torch

from coldpage.engine.attention.dense_attention import BIAS_ALIGNMENT


def defined(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query at a time, in float64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.zeros(query.shape[:3], dtype=torch.float64)
    for b, h, q in itertools.product(*map(range, query.shape[:3])):
        kv = h * key.shape[1] // query.shape[1]
        scores = key[b, kv].double() @ query[b, h, q].double()
        scores = scores * (query.shape[3] ** -0.5 if scale is None else scale)
        if bias is not None:
            wide = bias.expand(query.shape[0], 1, query.shape[2], -1)
            scores = scores + wide[b, 0, q, : key.shape[2]]
        if is_causal:
            scores = scores[: q + 1]
        lse[b, h, q] = torch.logsumexp(scores, 0)
        out[b, h, q] = torch.softmax(scores, 0) @ value[b, kv, : len(scores)].double()
    return out, lse


def sides(
    dtype: torch.dtype, batch: int, heads: int, kv_heads: int, queries: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value as a model has them: heads beside each other in each position."""
    torch.manual_seed(0)
    shapes = [(batch, queries, heads, 8), (batch, keys, kv_heads, 8), (batch, keys, kv_heads, 8)]
    query, key, value = (torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes)
    return query, key, value


def bias_of(batch: int, queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Some keys masked, never all of them; rows as wide as they have to be."""
    torch.manual_seed(1)
    width = -(-keys // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    live = torch.rand(batch, 1, queries, width) < 0.6
    live[..., keys // 2] = True
    return torch.zeros(live.shape, dtype=dtype).masked_fill_(~live, float("-inf"))
