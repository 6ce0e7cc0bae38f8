"""A model whose attention runs over hot pages: one forward pass for given indices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coldpage.engine.attention.attention import (
    CURRENT_CACHE,
    PagedCache,
    PagedLayer,
    register_attention,
)
from coldpage.engine.attention.attention_choice import choose_attention
from coldpage.engine.attention.paged_attention import LayerPages, PagedAttention, Scratch
from coldpage.engine.attention.step_plan import GroupPlan
from coldpage.engine.forward.hot_pages import PageSource, layer_pages
from coldpage.engine.model.geometry import cache_argument
from coldpage.engine.model.model import LoadedModel
from coldpage.types import LayerGroupId, LayerId

__all__ = ["LayerGroup", "PagedModel"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose pages share slots, so one plan is for all of them."""

    layer_group_id: LayerGroupId
    layers: tuple[PagedLayer, ...]

    def __post_init__(self) -> None:
        assert all(layer.pages.window == self.pages.window for layer in self.layers), (
            "a layer group mixes sliding windows"
        )

    @property
    def pages(self) -> LayerPages:
        """Of the first layer, in which the others are alike."""
        return self.layers[0].pages

    @property
    def attention(self) -> PagedAttention:
        """What plans for the group."""
        return self.layers[0].attention


class PagedModel:
    """Switches ``model`` to paged attention, after which it runs in no other way."""

    def __init__(self, model: LoadedModel, manager: PageSource) -> None:
        self._model: Any = model.model
        self.device: torch.device = model.model.device
        self.dtype = model.dtype
        self.tokens_per_block = manager.tokens_per_block
        scratch = Scratch(model.dtype, self.device)
        attention_of: dict[int, PagedAttention] = {}  # by head size
        layers = []
        layers_of: dict[LayerGroupId, list[PagedLayer]] = {}
        for index, geometry in enumerate(model.layers):
            layer_id = LayerId(index)
            head_dim = geometry.head_dim
            if head_dim not in attention_of:
                attention_of[head_dim] = choose_attention(
                    self.device, model.dtype, head_dim, scratch
                )
            layer = PagedLayer(layer_pages(model, manager, layer_id), attention_of[head_dim])
            layers.append(layer)
            layers_of.setdefault(manager.layer_group_of(layer_id), []).append(layer)
        self.groups = tuple(LayerGroup(group, tuple(own)) for group, own in layers_of.items())
        self._cache = PagedCache(layers)
        self._cache_argument = cache_argument(self._model)
        self._model.set_attn_implementation(register_attention())

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kept_rows: torch.Tensor | None,
        plans: Sequence[GroupPlan],
    ) -> torch.Tensor:
        """Enqueues one pass over the packed row [1, total], with a plan for each group, all on the
        device: the logits [rows, vocab] of ``kept_rows``, or of all, there and in the model's type.
        New K and V are then in their pages.
        """
        for plan, group in zip(plans, self.groups, strict=True):
            for layer in group.layers:
                layer.plan = plan
        is_on_gpu = self.device.type == "cuda"
        # Kernels are launched on the current device, wherever their tensors are.
        place = torch.cuda.device(self.device) if is_on_gpu else contextlib.nullcontext()
        token = CURRENT_CACHE.set(self._cache)
        try:
            with place, torch.inference_mode():
                logits: torch.Tensor = self._model(
                    input_ids=token_ids,
                    position_ids=positions,
                    logits_to_keep=0 if kept_rows is None else kept_rows,
                    use_cache=True,
                    **{self._cache_argument: self._cache},
                ).logits[0]
        finally:
            CURRENT_CACHE.reset(token)
            for layer in self._cache.paged_layers:
                layer.plan = None
        return logits
