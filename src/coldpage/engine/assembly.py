"""Putting the engine together: the number type, and a manager that fits a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

from coldpage.config import (
    AttentionLayerConfig,
    BatchDesc,
    CacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
)
from coldpage.device.base import Device
from coldpage.engine.model.hot_types import choose_hot_types, why_unsupported
from coldpage.engine.model.model import LoadedModel, manager_layers
from coldpage.engine.requests import TextStream
from coldpage.engine.steps import ServedModel
from coldpage.errors import ConfigurationError
from coldpage.layout import Partition, hot_layout
from coldpage.manager import KVCacheManager
from coldpage.types import Int32Array

__all__ = [
    "MAX_LOCKED_FRACTION",
    "block_bytes",
    "build_manager",
    "served_model",
    "with_hot_types",
]

# Of the hot level; the rest is what running sequences grow into.
MAX_LOCKED_FRACTION: Final = 0.97
# A conversation whose first block has no room is lost as a whole, and a first block too many takes
# the room of some packed ones. Divided for conversations of this length, those of 1,500 tokens lose
# 2 % of the room, and those of 4,096 lose 4 %; of shorter ones, fewer fit than would. Recent blocks
# share the room of first ones.
_SINK_SHARE_TOKENS: Final = 1024
_MIN_SINK_SHARE_BLOCKS: Final = 16


def with_hot_types(
    model: LoadedModel, key_name: str, value_name: str, tokens_per_block: int
) -> LoadedModel:
    """The same model whose hot pages hold keys and values in the types of these names.

    Raises ConfigurationError where its device, number type or head size does not go with them.
    """
    types = choose_hot_types(key_name, value_name, model.dtype)
    model = dataclasses.replace(model, hot_types=types)
    _require_supported(model, tokens_per_block)
    return model


def _require_supported(model: LoadedModel, tokens_per_block: int) -> None:
    head_dims = [layer.head_dim for layer in model.layers]
    device = model.model.device
    sentence = why_unsupported(model.hot_types, head_dims, tokens_per_block, model.dtype, device)
    if sentence is not None:
        raise ConfigurationError(sentence)


def block_bytes(model: LoadedModel, tokens_per_block: int) -> int:
    """Bytes of one block over all layers."""
    layers = manager_layers(model, tokens_per_block)
    return sum(buffer.num_bytes for layer in layers for buffer in layer.buffers)


def build_manager(
    model: LoadedModel,
    tiers: Sequence[CacheTierConfig],
    tokens_per_block: int,
    *,
    device: Device | None = None,
    pool_ratio: tuple[float, ...] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    keeps_sinks_apart: bool = False,
    num_recent_blocks: int = 0,
) -> KVCacheManager:
    """A manager for the model's pages. ``device`` is the model's own, as ``page_device`` opens it;
    None is host memory. ``on_progress`` is told how many slots of a disk tier that
    was not closed cleanly have been looked at, and of how many. First blocks are a class of their
    own, which codecs keep whole, where a tier's codec loses something, or ``keeps_sinks_apart``;
    so are the newest ``num_recent_blocks`` of each sequence where a codec loses something. Raises
    ConfigurationError or StorageError.
    """
    _require_supported(model, tokens_per_block)
    layers = manager_layers(model, tokens_per_block)
    codecs = [tier.codec for tier in tiers if tier.codec is not None]
    typical_step: BatchDesc | None = None
    if all(codec.is_lossless for codec in codecs):
        num_recent_blocks = 0  # all blocks come back whole
    else:
        keeps_sinks_apart = True
    if keeps_sinks_apart:
        pool_ratio = pool_ratio or _usual_ratio(layers, tokens_per_block)
        num_blocks = _MIN_SINK_SHARE_BLOCKS + num_recent_blocks
        num_tokens = max(_SINK_SHARE_TOKENS, num_blocks * tokens_per_block)
        typical_step = BatchDesc((KVCacheDesc(num_tokens, num_tokens),))
    return KVCacheManager(
        KVCacheManagerConfig(
            tokens_per_block,
            tuple(tiers),
            layers,
            MAX_LOCKED_FRACTION,
            model.page_fingerprint,
            initial_pool_ratio=pool_ratio,
            typical_step=typical_step,
            separate_sink_pages=keeps_sinks_apart,
            num_recent_blocks=num_recent_blocks,
        ),
        device=device,
        on_progress=on_progress,
    )


def _usual_ratio(
    layers: Sequence[AttentionLayerConfig], tokens_per_block: int
) -> tuple[float, ...]:
    """How the hot bytes are divided between layer groups where nobody says it."""
    weights = Partition(hot_layout(layers), tokens_per_block).layer_group_weights
    return tuple(float(weight) for weight in weights)


def served_model(
    model: LoadedModel,
    manager: KVCacheManager,
    new_text: Callable[[tuple[str, ...], Int32Array], TextStream],
) -> ServedModel:
    """What a scheduler needs to know of ``model``; ``new_text`` makes the text stream of an answer
    from its stop strings and its prompt.
    """
    return ServedModel(
        context_tokens=model.context_tokens,
        vocab_size=model.model.config.get_text_config().vocab_size,
        eos_token_ids=model.eos_token_ids,
        has_sliding_window=any(g.sliding_window_tokens is not None for g in model.layers),
        tier_names=tuple(level.name for level in manager.stats().levels),
        new_text=new_text,
    )
