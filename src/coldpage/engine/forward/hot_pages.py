"""The hot pools as tensors, in the memory where they are."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from coldpage.device.base import DeviceBytes
from coldpage.engine.attention.paged_attention import LayerPages
from coldpage.engine.model.model import KEY_ROLE, VALUE_ROLE, LoadedModel
from coldpage.kernels.kv_types import page_views
from coldpage.types import BufferRole, LayerGroupId, LayerId

__all__ = ["PageSource", "hot_pages", "layer_pages"]


class PageSource(Protocol):
    """What a runner reads of the manager."""

    @property
    def tokens_per_block(self) -> int:
        """Positions of one block."""
        ...

    def hot_array(self, layer_id: LayerId, role: BufferRole) -> npt.NDArray[np.uint8] | DeviceBytes:
        """The hot pool's bytes of one buffer, no copy. [num_slots, buffer_bytes]"""
        ...

    def layer_group_of(self, layer_id: LayerId) -> LayerGroupId:
        """The layer group whose pages hold this layer."""
        ...


def hot_pages(
    manager: PageSource, layer_id: LayerId, role: BufferRole, device: torch.device
) -> torch.Tensor:
    """``hot_array`` as a uint8 tensor, valid as long. The pool must lie on ``device``."""
    array = manager.hot_array(layer_id, role)
    if isinstance(array, DeviceBytes):
        pages = torch.as_tensor(array, device=device)
        # Of a pool on another device this makes a copy, without a word.
        assert pages.data_ptr() == array.address, "the hot pool is not on the model's device"
        return pages
    assert device.type == "cpu", "the hot pool is not on the model's device"
    return torch.from_numpy(array)


def layer_pages(model: LoadedModel, manager: PageSource, layer_id: LayerId) -> LayerPages:
    """Keys and values of one layer as views of the pool, valid as long."""
    geometry = model.layers[layer_id]
    keys, values = (
        page_views(
            hot_pages(manager, layer_id, role, model.model.device),
            kv_type,
            manager.tokens_per_block,
            geometry.num_kv_heads,
            geometry.head_dim,
            is_value=role == VALUE_ROLE,
        )
        for role, kv_type in ((KEY_ROLE, model.hot_types.key), (VALUE_ROLE, model.hot_types.value))
    )
    return LayerPages(keys, values, geometry.sliding_window_tokens)
