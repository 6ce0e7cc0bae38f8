"""A session's tokens computed by the engine's model runner, with random weights."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from coldpage.bench.arena import is_gpu
from coldpage.bench.kv import LLAMA_8B, SMOLLM2_135M, TINY_LLAMA, Geometry, tokens_of
from coldpage.device.base import Device, Stream
from coldpage.engine.forward.runner import LogitsWanted, ModelRunner, StepItem
from coldpage.engine.model.random_model import EIGHT_BILLION, SMALL, ModelGeometry, random_model
from coldpage.engine.planning import prefill_chunk
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCache
from coldpage.types import Int32Array

__all__ = ["MODELS", "Prefill"]

_SMOLLM2: Final = ModelGeometry(
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=2048,
    context_tokens=131_072,
)
# By the name of the cache's geometry.
MODELS: Final = {
    LLAMA_8B.name: EIGHT_BILLION,
    SMOLLM2_135M.name: _SMOLLM2,
    TINY_LLAMA.name: SMALL,
}


class Prefill:
    """A model of the geometry whose cache ``manager`` holds, in bfloat16 on the manager's device.

    Prompts are cut into steps of ``step_tokens``.
    """

    def __init__(
        self, device: Device, geometry: Geometry, manager: KVCacheManager, step_tokens: int
    ) -> None:
        self._manager = manager
        self._step_tokens = step_tokens
        sizes = MODELS[geometry.name]
        self._vocab_size = sizes.vocab_size
        place = torch.device(device.name if is_gpu(device) else "cpu")
        self._runner = ModelRunner(random_model(sizes, place, torch.bfloat16), manager)

    def compute(self, num_tokens: int, seed: int) -> KVCache:
        """An active cache of so many committed tokens, every page written. Blocks until then."""
        tokens = tokens_of(num_tokens, seed) % self._vocab_size
        kv_cache = self._manager.create_kv_cache()
        assert kv_cache.resume() and kv_cache.resize(num_tokens), "the hot level has room for one"
        kv_cache.synchronize()
        start, per_block = 0, self._manager.tokens_per_block
        while start < num_tokens:
            chunk = prefill_chunk(start, num_tokens, self._step_tokens, per_block)
            self._run(kv_cache, start, tokens[start : chunk.stop])
            kv_cache.commit(tokens[start : chunk.stop])
            start = chunk.stop
        return kv_cache

    def next_logits(self, kv_cache: KVCache, stream: Stream | None = None) -> torch.Tensor:
        """Of one more token, which is not kept: the cache's history stays as it is. ``stream`` is
        the one that the cache was resumed with.
        """
        position = kv_cache.history_length
        assert kv_cache.resize(position + 1), "the hot level has room for one token more"
        kv_cache.synchronize()
        if stream is not None:
            stream.synchronize()  # the model computes on another
        return self._run(kv_cache, position, np.zeros(1, np.int32))

    def _run(self, kv_cache: KVCache, start: int, tokens: Int32Array) -> torch.Tensor:
        (logits,) = self._runner.forward([StepItem(kv_cache, start, tokens, LogitsWanted.LAST)])
        assert logits is not None
        return logits
