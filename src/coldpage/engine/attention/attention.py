"""Attention over pages, for transformers models that are otherwise unchanged.

A step packs the new tokens of many sequences into one row. ``PagedLayer`` (what the model takes for
its cache) writes K and V into pages; ``attend`` (what the model takes for its attention function)
attends to them: to the items of one token together, and to each longer item by itself.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from coldpage.engine.attention.paged_attention import LayerPages, PagedAttention, Scoring
from coldpage.engine.attention.stateless_layer import StatelessLayer
from coldpage.engine.attention.step_plan import GroupPlan
from coldpage.kernels.rotation import rotate, rotate_back

__all__ = [
    "ATTENTION_NAME",
    "CURRENT_CACHE",
    "PagedCache",
    "PagedLayer",
    "attend",
    "register_attention",
]

ATTENTION_NAME: Final = "coldpage_paged"


class PagedLayer(StatelessLayer):  # type: ignore[no-untyped-call]
    """One layer's pages as the model's cache layer. ``plan`` is set for the time of a step."""

    is_compileable = False

    def __init__(self, pages: LayerPages, attention: PagedAttention) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pages = pages
        self.attention = attention
        self.plan: GroupPlan | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the packed row's K and V ([1, kv_heads, total, head_dim]) into pages and returns
        what attention reads of them."""
        assert self.plan is not None, "the model ran outside a step"
        return self.attention.write(self.pages, self.plan.write, key_states, value_states)


class PagedCache(Cache):
    """The model's cache of one step: a ``PagedLayer`` per layer."""

    def __init__(self, layers: list[PagedLayer]) -> None:
        super().__init__(layers=list(layers))
        self.paged_layers = layers


# The attention function is not handed the cache, so a step publishes it here for the time of the
# model's forward.
CURRENT_CACHE: Final[ContextVar[PagedCache]] = ContextVar("coldpage_current_cache")


def register_attention() -> str:
    """Makes ``attend`` known to transformers (again is harmless) and returns its name.

    The mask interface does not know the name, so models build no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, attend)
    return ATTENTION_NAME


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, total, head_dim] packed queries, and what ``PagedLayer.update`` returned -> [1,
    total, heads, head_dim], and no weights. ``s_aux`` is what transformers calls sinks."""
    layer_index: Any = module.layer_idx
    layer = CURRENT_CACHE.get().paged_layers[layer_index]
    assert layer.plan is not None and attention_mask is None
    assert sliding_window == layer.pages.window
    query = rotate(query, layer.pages.keys.kv_type)
    out = _attend_row(layer, layer.plan, query, key, value, Scoring(scaling, s_aux))
    return rotate_back(out, layer.pages.values.kv_type), None


def _attend_row(
    layer: PagedLayer,
    plan: GroupPlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """All items of the packed row, in stored space. [1, total, heads, head_dim]"""
    attention, pages = layer.attention, layer.pages
    if plan.decode is None and len(plan.chunks) == 1:
        out = attention.attend_chunk(pages, plan.chunks[0], query, key, value, scoring)
        return out.transpose(1, 2)
    if not plan.chunks:
        return attention.attend_decode(pages, plan, query[0].transpose(0, 1), scoring)[None]
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    if plan.decode_rows is not None:
        rows = plan.decode_rows
        decoding = query[0].transpose(0, 1)[rows]
        out[0, rows] = attention.attend_decode(pages, plan, decoding, scoring)
    for chunk in plan.chunks:
        span = slice(chunk.row, chunk.row + chunk.num_tokens)
        attended = attention.attend_chunk(
            pages, chunk, query[:, :, span], key[:, :, span], value[:, :, span], scoring
        )
        out[:, span] = attended.transpose(1, 2)
    return out
