"""Decode attention by its definition, in float64: what the kernel is compared with."""

from __future__ import annotations

import torch

from coldpage.kernels.decode_plan import AttentionOptions, DecodeBatch, DecodeResult
from coldpage.kernels.kv_types import KVPages
from coldpage.kernels.packing import unpack

__all__ = ["decode_attention_reference"]


def decode_attention_reference(
    query: torch.Tensor,
    keys: KVPages,
    values: KVPages,
    batch: DecodeBatch,
    options: AttentionOptions,
    *,
    sink_logits: torch.Tensor | None = None,
    want_lse: bool = False,
    want_mass: bool = False,
) -> DecodeResult:
    """See ``decode_attention``, but for the types: all of it is float64, and ``items`` are not
    used. Holes may hold anything, NaN too."""
    num_rows, num_heads, head_dim = query.shape
    block, group = keys.tokens_per_block, num_heads // keys.num_kv_heads
    position = torch.arange(batch.tables.shape[1] * block, device=query.device)
    slots = batch.tables.repeat_interleave(block, 1)
    length = batch.num_tokens[:, None]
    live = (slots >= 0) & (position < length)
    if options.window is not None:
        inside = position >= length - options.window
        live &= inside | (position < options.num_sink_tokens)
    key, value = (_live_vectors(p, slots, position % block, live, group) for p in (keys, values))
    score = torch.einsum("bhd,bnhd->bhn", query.double(), key) * options.scale
    if options.softcap is not None:
        score = options.softcap * torch.tanh(score / options.softcap)
    score = score.masked_fill(~live[:, None], float("-inf"))
    lse = torch.logsumexp(score, -1)
    if sink_logits is not None:
        with_sink = torch.logaddexp(lse, sink_logits.double())
        lse = torch.where(length > 0, with_sink, lse)
    weights = torch.exp(score - lse[..., None]).masked_fill(~live[:, None], 0.0)
    out = torch.einsum("bhn,bnhd->bhd", weights, value)
    mass = weights.sum(1).view(num_rows, -1, block).sum(-1)
    return DecodeResult(
        out.view(num_rows, num_heads, head_dim),
        lse if want_lse or want_mass else None,
        mass if want_mass else None,
    )


def _live_vectors(
    pages: KVPages, slots: torch.Tensor, offsets: torch.Tensor, live: torch.Tensor, group: int
) -> torch.Tensor:
    """[batch, positions, heads, head_dim] float64, 0 where nothing is live."""
    at = (slots.clamp(min=0).long(), offsets.expand_as(slots))
    scales = None if pages.scales is None else pages.scales[at]
    vectors = unpack(pages.values[at].flatten(-2), scales, pages.kv_type, torch.float64)
    vectors = vectors.masked_fill(~live[..., None, None], 0.0)
    return vectors.repeat_interleave(group, 2)
