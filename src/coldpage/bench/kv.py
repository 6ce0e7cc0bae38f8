"""Managers and caches of a real model's geometry, without the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from coldpage.bench.arena import prepared
from coldpage.codecs import ColdPageCodec
from coldpage.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DeviceTierConfig,
    KVCacheManagerConfig,
)
from coldpage.device.base import Device
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCache
from coldpage.types import BufferRole, Int32Array, LayerId

__all__ = [
    "LLAMA_8B",
    "SMOLLM2_135M",
    "TINY_LLAMA",
    "TOKENS_PER_BLOCK",
    "Geometry",
    "evict_all",
    "make_manager",
    "tokens_of",
    "write_cache",
]

TOKENS_PER_BLOCK: Final = 16
_ROLES: Final = (BufferRole("key"), BufferRole("value"))


@dataclass(frozen=True, slots=True)
class Geometry:
    """The cache of a model: ``buffer_bytes`` of K, and as many of V, a layer and block."""

    name: str
    num_layers: int
    buffer_bytes: int

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers: one page."""
        return self.num_layers * len(_ROLES) * self.buffer_bytes


# 16-bit numbers: 3 KV heads of 64, 2 of 16, and 8 of 128.
SMOLLM2_135M: Final = Geometry("SmolLM2-135M", 30, TOKENS_PER_BLOCK * 3 * 64 * 2)
TINY_LLAMA: Final = Geometry("tiny", 3, TOKENS_PER_BLOCK * 2 * 16 * 2)
LLAMA_8B: Final = Geometry("8B", 32, TOKENS_PER_BLOCK * 8 * 128 * 2)


def make_manager(
    geometry: Geometry,
    num_hot_blocks: int,
    *cold_tiers: CacheTierConfig,
    device: Device | None = None,
    codec: ColdPageCodec | None = None,
) -> KVCacheManager:
    """A manager of full attention layers, whose hot level holds that many blocks; all its memory is
    ready.
    """
    layers = tuple(
        AttentionLayerConfig(
            LayerId(i), tuple(BufferConfig(role, geometry.buffer_bytes) for role in _ROLES)
        )
        for i in range(geometry.num_layers)
    )
    hot = DeviceTierConfig(num_hot_blocks * geometry.block_bytes)
    tiers = (hot, *cold_tiers)
    config = KVCacheManagerConfig(TOKENS_PER_BLOCK, tiers, layers, 1.0, b"no model")
    if device is None:
        return KVCacheManager(config, codec=codec)
    with prepared(device):
        manager = KVCacheManager(config, device=device, codec=codec)
    manager.poll()  # the levels take what is ready
    return manager


def tokens_of(num_tokens: int, seed: int) -> Int32Array:
    """Tokens that no other seed below 2,000 begins with."""
    return np.arange(num_tokens, dtype=np.int32) + np.int32(seed * 1_000_003)


def write_cache(manager: KVCacheManager, num_blocks: int, seed: int) -> KVCache:
    """A suspended cache of ``num_blocks`` committed blocks, whose tokens depend on the seed."""
    kv_cache = manager.create_kv_cache()
    assert kv_cache.resume() and kv_cache.resize(num_blocks * manager.tokens_per_block)
    kv_cache.synchronize()
    kv_cache.commit(tokens_of(num_blocks * manager.tokens_per_block, seed))
    kv_cache.suspend()
    return kv_cache


def evict_all(manager: KVCacheManager) -> None:
    """Send everything hot and suspended to the colder levels, and wait until it is there."""
    filler = manager.create_kv_cache()
    assert filler.resume()
    # A disk may need longer than the manager waits at a time.
    while not filler.resize(manager.num_hot_blocks * manager.tokens_per_block):
        manager.wait_for_progress(0.05)
        manager.poll()
    filler.close()
    manager.finish_transfers()
    manager.poll()
    manager.finish_transfers()
