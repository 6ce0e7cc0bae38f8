"""transformers' own attention, of keys and values as hot pages would hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface

from coldpage.engine.model.hot_types import HotTypes
from coldpage.kernels.kv_types import KVType
from coldpage.kernels.packing import pack, unpack
from coldpage.kernels.rotation import rotate_back


def stored(x: torch.Tensor, kv_type: KVType) -> torch.Tensor:
    """What is left of vectors that were stored."""
    return rotate_back(unpack(*pack(x, kv_type), kv_type, x.dtype), kv_type)


@contextlib.contextmanager
def attention_of_stored(types: HotTypes) -> Iterator[None]:
    """What models use as ``sdpa`` meanwhile."""
    plain = AttentionInterface._global_mapping["sdpa"]

    def attend(module: Any, query: Any, key: Any, value: Any, *more: Any, **kwargs: Any) -> Any:
        key, value = stored(key, types.key), stored(value, types.value)
        return plain(module, query, key, value, *more, **kwargs)

    AttentionInterface.register("sdpa", attend)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", plain)
