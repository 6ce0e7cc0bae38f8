"""Which attention serves the pages of a device."""

from __future__ import annotations

import torch

from coldpage.engine.dense_attention import dense_attention
from coldpage.engine.dense_pages import DensePages
from coldpage.engine.paged_attention import PagedAttention, Scratch

__all__ = ["choose_attention"]


def choose_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, scratch: Scratch
) -> PagedAttention:
    """The attention for pages on ``device``, of a model of this type with heads of this size."""
    return DensePages(dense_attention(device, dtype, head_dim), scratch, dtype)
