"""Which attention serves the pages of a device."""

from __future__ import annotations

import torch

from coldpage.engine.attention.dense_attention import dense_attention
from coldpage.engine.attention.dense_pages import DensePages
from coldpage.engine.attention.paged_attention import PagedAttention, Scratch

__all__ = ["choose_attention", "follows_tables"]


def follows_tables(device: torch.device) -> bool:
    """Whether kernels for pages run on ``device``, which read block tables themselves."""
    return device.type == "cuda"


def choose_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, scratch: Scratch
) -> PagedAttention:
    """The attention for pages on ``device``, of a model of this type with heads of this size."""
    dense = dense_attention(device, dtype, head_dim)
    if not follows_tables(device):
        return DensePages(dense, scratch, dtype)
    # Only here: a machine without a GPU may have no Triton.
    from coldpage.engine.attention.kernel_pages import KernelPages

    return KernelPages(dense, scratch, dtype)
