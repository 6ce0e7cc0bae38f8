"""A small model whose sequences are saved and restored, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
)
from coldpage.config import CacheTierConfig
from coldpage.snapshot import Origin
from coldpage.testing.pattern_engine import PatternEngine, PatternSequence
from coldpage.types import LayerId

PER_BLOCK = 4
MIB = 1 << 20
ORIGIN = Origin(tokenizer="words", dtype="float32")


def layers(*windows: int | None, token_bytes: int = 64) -> tuple[AttentionLayerConfig, ...]:
    buffers = tuple(BufferConfig(role, PER_BLOCK * token_bytes) for role in ("key", "value"))
    return tuple(
        AttentionLayerConfig(LayerId(i), buffers, window) for i, window in enumerate(windows)
    )


CONFIG = KVCacheManagerConfig(
    PER_BLOCK, (DeviceTierConfig(MIB),), layers(None, None), 1.0, b"model" * 6 + b"xx"
)
WINDOWED = replace(CONFIG, layers=layers(None, 9, 9, None))


def with_tiers(config: KVCacheManagerConfig, *tiers: CacheTierConfig) -> KVCacheManagerConfig:
    return replace(config, cache_tiers=tiers)


def written(
    engine: PatternEngine, tokens: range | list[int], *, committed: int | None = None
) -> PatternSequence:
    """A suspended sequence with these tokens, all of them written."""
    sequence = engine.create(list(tokens))
    assert sequence.resume()
    rest = list(tokens)[sequence.cache.history_length :]
    for start in range(0, len(rest), 16):
        assert sequence.step(rest[start : start + 16], num_committed=committed)
    sequence.cache.suspend()
    return sequence


def contents(manager: KVCacheManager, cache: KVCache) -> list[npt.NDArray[np.uint8]]:
    """The bytes of every written position that has a page, by layer and role."""
    assert cache.resume()
    cache.synchronize()
    assert not cache.missing_blocks()
    found = []
    for layer in manager.config.layers:
        slots = cache.page_indices(manager.layer_group_of(layer.layer_id))
        for buffer in layer.buffers:
            array = manager.hot_array(layer.layer_id, buffer.role)[np.maximum(slots, 0)].copy()
            array[slots < 0] = 0xEE
            tokens = array.reshape(slots.size * PER_BLOCK, -1)
            found.append(tokens[: cache.history_length])
    cache.suspend()
    return found


def assert_same(first: list[npt.NDArray[np.uint8]], second: list[npt.NDArray[np.uint8]]) -> None:
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
