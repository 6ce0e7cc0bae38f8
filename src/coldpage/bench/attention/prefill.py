"""Attention of a chunk of a prompt over the pages of what came before it, by the engine's own path,
beside the library's over contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from coldpage.bench.attention.decode import DTYPE, check_close
from coldpage.bench.attention.layers import (
    TOKENS_PER_BLOCK,
    Heads,
    PagedLayers,
    read_pages,
    type_names,
)
from coldpage.bench.clock import Timed, alternated
from coldpage.bench.rows import Row, median
from coldpage.engine.attention.attention_choice import choose_attention
from coldpage.engine.attention.dense_attention import dense_attention
from coldpage.engine.attention.paged_attention import Scoring, Scratch
from coldpage.engine.attention.step_plan import ItemSpan
from coldpage.engine.forward.upload import to_device
from coldpage.engine.model.hot_types import HotTypes

__all__ = ["PrefillCase", "prefill_rows"]


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """One line: the last ``num_queries`` of ``num_tokens`` attend to all before them."""

    num_queries: int
    num_tokens: int
    heads: Heads

    def __str__(self) -> str:
        return f"{self.num_queries:,} of {self.num_tokens:,} tokens, {self.heads}"

    @property
    def history(self) -> int:
        """Tokens before the chunk."""
        return self.num_tokens - self.num_queries

    @property
    def num_operations(self) -> int:
        """Of both products, masked ones left out."""
        num_pairs = self.num_queries * self.history + (
            self.num_queries * (self.num_queries + 1) // 2
        )
        return 4 * self.heads.num_heads * self.heads.head_dim * num_pairs


def prefill_rows(
    pool: torch.Tensor, case: PrefillCase, types: HotTypes, num_repeats: int
) -> list[Row]:
    """Measure: beside the library's mask, and beside the operators alone that the engine uses, on
    contiguous keys and without a merge. Raises as ``decode_rows``."""
    place, (num_heads, kv_heads, head_dim) = pool.device, case.heads
    paged = PagedLayers.make(pool, case.heads, types, case.num_tokens // TOKENS_PER_BLOCK)
    slots = torch.from_numpy(paged.slots).to(place)
    memory = torch.empty(2, 1, kv_heads, case.num_tokens, head_dim, dtype=DTYPE, device=place)
    first = paged.layers[0]
    read_pages(first.keys, slots, memory[0, 0])
    read_pages(first.values, slots, memory[1, 0])
    key, value = memory
    # As a model makes them: the heads of a position are neighbours.
    shape = (1, case.num_queries, num_heads, head_dim)
    query = torch.randn(shape, dtype=DTYPE, device=place).transpose(1, 2)
    new_key, new_value = (
        part[:, :, case.history :].transpose(1, 2).contiguous().transpose(1, 2) for part in memory
    )
    attention = choose_attention(place, DTYPE, head_dim, Scratch(DTYPE, place))
    item = ItemSpan(0, case.history, case.num_queries, paged.slots)
    (chunk,) = to_device(attention.plan(first, [item]), place).chunks
    dense, scoring = dense_attention(place, DTYPE, head_dim), Scoring(None, None)

    def attend() -> torch.Tensor:
        outs = [
            attention.attend_chunk(layer, chunk, query, new_key, new_value, scoring)
            for layer in paged.layers
        ]
        return outs[0]

    def masked() -> torch.Tensor:
        mask = causal_lower_right(case.num_queries, case.num_tokens)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def operators() -> None:
        old = slice(0, case.history)
        dense(query, key[:, :, old], value[:, :, old], scale=None)
        dense(query, new_key, new_value, is_causal=True, scale=None)

    check_close(attend(), masked(), f"attention of {case} in {type_names(types)}")
    # Long enough that the host is far ahead, and of shapes that a graph is not made for.
    ours = Timed(attend, place, num_units=len(paged.layers), is_graph=False)
    rivals = {
        "SDPA with causal_lower_right": Timed(masked, place, is_graph=False),
        "its operators alone": Timed(operators, place, is_graph=False),
    }
    samples = alternated(num_repeats, ours, *rivals.values())
    config = f"{case}, {type_names(types)}"
    return [
        Row("prefill", config, name, samples[0], rival_ms, notes=_notes(case, samples[0], rival_ms))
        for name, rival_ms in zip(rivals, samples[1:], strict=True)
    ]


def _notes(case: PrefillCase, ours_ms: list[float], rival_ms: list[float]) -> dict[str, float]:
    return {
        "num_queries": float(case.num_queries),
        "num_tokens": float(case.num_tokens),
        "us": round(1e3 * median(ours_ms), 1),
        "tflop_per_s": round(case.num_operations / 1e9 / median(ours_ms), 2),
        "rival_tflop_per_s": round(case.num_operations / 1e9 / median(rival_ms), 2),
    }
