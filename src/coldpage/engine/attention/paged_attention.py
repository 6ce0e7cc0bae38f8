"""What attention over pages is: one interface, an implementation for each kind of device.

Vectors of packed or other types than the model's lose something when they are stored. Attention
then reads the new tokens as they were stored too, so that a result does not depend on which tokens
were computed together. *Stored space* is where such vectors lie: rotated, for the types that are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from coldpage.engine.attention.step_plan import ChunkPlan, GroupPlan, ItemSpan, Write
from coldpage.kernels.kv_types import KVPages

__all__ = ["LayerPages", "PagedAttention", "Scoring", "Scratch", "with_sinks"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """One layer's hot pages and what its attention sees of them."""

    keys: KVPages
    values: KVPages
    window: int | None  # tokens; None: all before

    def reads_back(self, dtype: torch.dtype) -> bool:
        """Whether a page holds other numbers than a model of this type makes."""
        return any(pages.values.dtype != dtype for pages in (self.keys, self.values))


class Scoring(NamedTuple):
    """How a layer weighs positions. ``sinks`` are logits [heads] that take part in the softmax of
    each query and bring no value."""

    scale: float | None  # None: 1 / sqrt(head_dim)
    sinks: torch.Tensor | None


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention [..., head_dim] with the log-sum-exp [...] of its scores, as it is where sinks of
    logits [...] take part, which is exact."""
    if sinks is None:
        return out
    return (out * torch.sigmoid(lse - sinks.float())[..., None]).to(out.dtype)


class Scratch:
    """Memory that gathers reuse from layer to layer and step to step. It grows to the largest seen,
    and that is what a step needs beyond the pages."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, *shape: int) -> torch.Tensor:
        """A contiguous tensor of this shape, valid until the next call."""
        wanted = math.prod(shape)
        if self._buffer.shape[0] < wanted:
            self._buffer = self._buffer.new_empty(wanted)
        return self._buffer[:wanted].view(shape)


class PagedAttention(Protocol):
    """Attention of every layer with heads of one size. Queries come and results go in stored space:
    of the keys, and of the values."""

    def plan(self, pages: LayerPages, items: list[ItemSpan]) -> GroupPlan:
        """A step's indices for the layers of one group, the first of which has ``pages``. Pure; in
        host memory."""
        ...

    def write(
        self, pages: LayerPages, write: Write, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new vectors [1, kv_heads, total, head_dim] in their pages; returns what
        ``attend_chunk`` is to be given of them."""
        ...

    def attend_decode(
        self, pages: LayerPages, plan: GroupPlan, query: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """[num_items, heads, head_dim] -> the same: the items of one token. Their own K and V are
        written."""
        ...

    def attend_chunk(
        self,
        pages: LayerPages,
        plan: ChunkPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """[1, heads, num_tokens, head_dim] -> the same: one item of several tokens. ``key`` and
        ``value`` are those tokens' part of what ``write`` returned."""
        ...
