"""What tests of page kernels share: shapes, and pools whose pages are larger than a buffer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from coldpage.kernels.kv_types import KVPages, KVType, page_views
from tests.kernels.conftest import HAS_GPU

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the interpreter is off beside a GPU")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CANARY = 0xA5
BEFORE_BYTES = 32  # of a page before the buffer, and behind it
BEHIND_BYTES = 64


class Shape(NamedTuple):
    """Of pages, and how many tokens a test has."""

    head_dim: int
    tokens_per_block: int
    kv_heads: int
    num_tokens: int


SHAPES = [
    Shape(64, 16, 1, 5),
    Shape(128, 16, 8, 17),
    Shape(256, 16, 2, 20),
    Shape(128, 32, 3, 70),
    Shape(64, 16, 3, 0),
]
# Plain types take any head.
PLAIN_SHAPES = [Shape(16, 16, 2, 37), Shape(80, 16, 3, 9), *SHAPES]


def canary_pool(
    kv_type: KVType, shape: Shape, device: str, num_slots: int, *, is_value: bool
) -> tuple[torch.Tensor, KVPages]:
    """A pool full of canaries, uint8 [num_slots, page_bytes], and the views of a buffer."""
    num_bytes = shape.kv_heads * shape.tokens_per_block * kv_type.vector_bytes(shape.head_dim)
    page_bytes = BEFORE_BYTES + num_bytes + BEHIND_BYTES
    pool = torch.full((num_slots, page_bytes), CANARY, dtype=torch.uint8, device=device)
    buffers = pool[:, BEFORE_BYTES:-BEHIND_BYTES]
    return pool, _views(buffers, kv_type, shape, is_value=is_value)


def huge_pages(kv_type: KVType, shape: Shape, device: str, *, is_value: bool) -> KVPages:
    """Three pages, the last of which is more than 2^31 elements behind the first."""
    num_bytes = shape.kv_heads * shape.tokens_per_block * kv_type.vector_bytes(shape.head_dim)
    num_slots, page_bytes = 3, (2**30 + 4096) * kv_type.value_dtype.itemsize
    if device == "cpu":  # memory that nobody touched takes no room
        pool = torch.from_numpy(np.zeros((num_slots, page_bytes), np.uint8))
    else:
        pool = torch.empty((num_slots, page_bytes), dtype=torch.uint8, device=device)
    return _views(pool[:, -num_bytes:], kv_type, shape, is_value=is_value)


def _views(buffers: torch.Tensor, kv_type: KVType, shape: Shape, *, is_value: bool) -> KVPages:
    head_dim, block, heads, _ = shape
    return page_views(buffers, kv_type, block, heads, head_dim, is_value=is_value)
