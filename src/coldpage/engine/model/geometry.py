"""What pages must hold, measured on the loaded model rather than guessed from its configuration.

A short pass records what each layer gives to its cache and to attention, and what comes out is
compared with the model's own attention. A model that needs anything else is refused.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from coldpage.engine.attention.dense_attention import plain_attention
from coldpage.engine.attention.paged_attention import with_sinks
from coldpage.engine.attention.stateless_layer import StatelessLayer
from coldpage.errors import ModelError

__all__ = ["LayerGeometry", "cache_argument", "measure_layers"]

# Arguments that change what attention computes and that paged attention does not know.
_UNSUPPORTED_ATTENTION: Final = ("softcap", "sinks", "position_bias", "attention_bias")
_PROBE_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one attention layer keeps for each token, and how far back it looks (None: to the
    start)."""

    num_kv_heads: int
    head_dim: int
    sliding_window_tokens: int | None


def cache_argument(model: Any) -> str:
    """The name under which this model's ``forward`` takes the cache: ``cache`` in transformers
    5.24, before it ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@dataclass
class _Seen:
    """What one layer gave to the cache and to attention in the probe."""

    shapes: list[tuple[torch.Size, torch.Size]] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    unsupported: set[str] = field(default_factory=set)


class _ProbeLayer(StatelessLayer):  # type: ignore[no-untyped-call]
    def __init__(self, seen: _Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.shapes.append((key_states.shape, value_states.shape))
        return key_states, value_states


_PROBE: Final[ContextVar[list[_Seen]]] = ContextVar("coldpage_probe")


def _probe_attention(
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
    layer_index: Any = module.layer_idx
    seen = _PROBE.get()[layer_index]
    seen.windows.append(sliding_window)
    seen.unsupported.update(n for n in _UNSUPPORTED_ATTENTION if kwargs.get(n) is not None)
    if s_aux is not None:
        out, lse = plain_attention(query, key, value, is_causal=True, scale=scaling)
        return with_sinks(out, lse, s_aux[:, None]).transpose(1, 2), None
    # The operator of the model's own attention, as a rule: in half precision another one may differ
    # by more than what is looked for.
    groups = query.shape[1] // key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        is_causal=True,
        scale=scaling,
    )
    return out.transpose(1, 2), None


def measure_layers(model: Any, name: str) -> tuple[LayerGeometry, ...]:
    """Runs a few tokens through plain causal attention, and compares with the model's own
    attention."""
    kind = type(model).__name__
    refusal = f"the model {name} ({kind}) can not be served from paged attention"
    num_layers = model.config.get_text_config().num_hidden_layers
    seen = [_Seen() for _ in range(num_layers)]
    own_attention = model.config._attn_implementation
    token_ids = torch.arange(1, 1 + _PROBE_TOKENS, device=model.device)[None]
    probe: dict[str, Any] = {cache_argument(model): Cache(layers=[_ProbeLayer(s) for s in seen])}
    probe["position_ids"] = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    context = _PROBE.set(seen)
    try:
        with torch.inference_mode():
            expected = model(input_ids=token_ids, use_cache=False).logits
            AttentionInterface.register("coldpage_probe", _probe_attention)
            model.set_attn_implementation("coldpage_probe")
            probed = model(input_ids=token_ids, use_cache=True, **probe).logits
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        IndexError,
        KeyError,
        NotImplementedError,
    ) as error:
        raise ModelError(f"{refusal}: {error}") from error
    finally:
        _PROBE.reset(context)
        model.set_attn_implementation(own_attention)
    layers = [_geometry(layer, f"{refusal}: layer {i}") for i, layer in enumerate(seen)]
    # Half precision rounds in another order; what this check is for (other masks or biases) differs
    # by far more.
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    scale = max(1.0, float(expected.float().abs().max()))
    # Written so that NaN is refused.
    if not float((probed - expected).abs().max()) <= tolerance * scale:
        raise ModelError(f"{refusal}: its attention is not plain causal attention")
    return tuple(layers)


def _geometry(seen: _Seen, refusal: str) -> LayerGeometry:
    if len(seen.shapes) != 1 or len(seen.windows) != 1:
        raise ModelError(
            f"{refusal} is not an attention layer with a key-value cache of its own "
            "(it may be recurrent or shared)"
        )
    if seen.unsupported:
        raise ModelError(
            f"{refusal} needs {', '.join(sorted(seen.unsupported))}, which is not supported yet"
        )
    key, value = seen.shapes[0]
    if key != value:
        raise ModelError(
            f"{refusal} has keys and values of different sizes, which is not supported yet"
        )
    return LayerGeometry(
        num_kv_heads=key[1], head_dim=key[3], sliding_window_tokens=seen.windows[0]
    )
