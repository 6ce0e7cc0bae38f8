"""Keys and values as each layer gives them to its cache, of one pass over one sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from coldpage.engine.attention.stateless_layer import StatelessLayer
from coldpage.engine.model.geometry import cache_argument

__all__ = ["LayerKeys", "layer_keys"]


class LayerKeys(NamedTuple):
    """Of one layer: each [kv_heads, tokens, head_dim] in the model's type and on its device."""

    keys: torch.Tensor
    values: torch.Tensor


class _KeepingLayer(StatelessLayer):
    """An empty cache: attention gets back what it gives, which is kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: LayerKeys | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen = LayerKeys(key_states[0], value_states[0])
        return key_states, value_states


def layer_keys(
    model: Any, num_layers: int, token_ids: torch.Tensor, positions: torch.Tensor
) -> list[LayerKeys]:
    """Runs a sequence of tokens [tokens] at these positions [tokens] through a model that is not
    switched to paged attention. Blocks. Every layer must have a cache of its own, which a model
    that ``measure_layers`` takes has.
    """
    layers = [_KeepingLayer() for _ in range(num_layers)]
    cache: dict[str, Any] = {cache_argument(model): Cache(layers=[*layers])}
    with torch.inference_mode():
        model(
            input_ids=token_ids[None].to(model.device),
            position_ids=positions[None].to(model.device),
            logits_to_keep=1,
            use_cache=True,
            **cache,
        )
    seen = [layer.seen for layer in layers if layer.seen is not None]
    assert len(seen) == num_layers, "a layer has no cache of its own"
    return seen
