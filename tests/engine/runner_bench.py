"""A tiny model twice: as transformers has it, and run by a runner over pages in an arena."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from coldpage.engine.forward.runner import LogitsWanted, ModelRunner, StepItem
from coldpage.engine.model.geometry import LayerGeometry
from coldpage.engine.model.hot_types import HotTypes
from coldpage.engine.model.model import LoadedModel
from tests.engine.arena import TOKENS_PER_BLOCK, Arena, Table, make_tiny

NUM_SLOTS = 80
CPU = torch.device("cpu")


class Bench:
    """A tiny model twice: as transformers has it, and run by a runner over an arena."""

    def __init__(
        self,
        kind: str,
        seed: int = 0,
        fill: int = 0xFF,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        *,
        tokens_per_block: int = TOKENS_PER_BLOCK,
        head_dim: int = 8,
        types: HotTypes | None = None,
        num_slots: int = NUM_SLOTS,
        **of_runner: Any,
    ) -> None:
        self.device = device
        self.tokens_per_block = tokens_per_block
        self.reference: PreTrainedModel = make_tiny(kind, head_dim=head_dim).to(device, dtype)
        config = self.reference.config
        kinds = (
            getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        )
        windows = [config.sliding_window if t == "sliding_attention" else None for t in kinds]
        layers = tuple(LayerGeometry(config.num_key_value_heads, head_dim, w) for w in windows)
        self.windows = list(dict.fromkeys(windows))
        types = types or HotTypes.plain(dtype)
        num_vectors = tokens_per_block * config.num_key_value_heads
        key_bytes, value_bytes = (
            num_vectors * t.vector_bytes(head_dim) for t in (types.key, types.value)
        )
        layer_bytes = [(w, key_bytes, value_bytes) for w in windows]
        self.arena = Arena(layer_bytes, num_slots, tokens_per_block, fill, device)
        loaded = LoadedModel(
            model=copy.deepcopy(self.reference),
            tokenizer=None,  # type: ignore[arg-type]  # a runner sees token ids only
            name=kind,
            context_tokens=512,
            dtype=dtype,
            layers=layers,
            eos_token_ids=frozenset(),
            hot_types=types,
            fingerprint=b"",
        )
        self.runner = ModelRunner(loaded, self.arena, **of_runner)
        self.loaded = loaded
        rng = np.random.default_rng(seed)
        self._free = [list(rng.permutation(num_slots)) for _ in self.windows]

    def table(self, num_tokens: int) -> Table:
        """A block table of shuffled slots for a sequence of at most ``num_tokens``."""
        num_blocks = -(-num_tokens // self.tokens_per_block)
        return Table([np.array([free.pop() for _ in range(num_blocks)]) for free in self._free])

    def own_logits(self, tokens: np.ndarray) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.from_numpy(tokens).long()[None].to(self.device)
            return self.reference(input_ids=ids).logits[0].float().cpu()

    def prefill(self, table: Table, tokens: np.ndarray, chunk: int | None = None) -> torch.Tensor:
        parts = []
        step = chunk or len(tokens)
        for start in range(0, len(tokens), step):
            (logits,) = self.runner.forward(
                [StepItem(table, start, tokens[start : start + step], LogitsWanted.ALL)]
            )
            assert logits is not None
            parts.append(logits)
        return torch.cat(parts)


def text(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 97, num_tokens).astype(np.int32)


def assert_close(ours: torch.Tensor | None, theirs: torch.Tensor) -> None:
    assert ours is not None and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
