"""Tiny models with random weights, and an arena of pages that stands in for the manager's hot
pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from coldpage.device.base import DeviceBytes
from coldpage.types import BufferRole, Int32Array, LayerGroupId, LayerId, MemAddress

TOKENS_PER_BLOCK = 4


class Arena:
    """Real memory laid out as a hot level is: one slot holds all layers of a group, K and V of a
    layer adjacent.

    Layers with equal windows are a group. Memory starts as ``fill`` bytes (0xFF: NaN in every float
    type).
    """

    def __init__(
        self,
        layers: list[tuple[int | None, int, int]],
        num_slots: int,
        tokens_per_block: int,
        fill: int = 0xFF,
        device: torch.device | None = None,
    ) -> None:
        """``layers``: (window, bytes of keys, bytes of values) each. ``device``: a GPU, or host
        memory."""
        self.tokens_per_block = tokens_per_block
        self.num_slots = num_slots
        windows = list(dict.fromkeys(window for window, _, _ in layers))
        self._group_of = [LayerGroupId(windows.index(window)) for window, _, _ in layers]
        slot_bytes = [sum(k + v for w, k, v in layers if w == window) for window in windows]
        self.pools = [np.full((num_slots, n), fill, np.uint8) for n in slot_bytes]
        is_on_gpu = device is not None and device.type == "cuda"
        self.gpu_pools = [torch.from_numpy(p).to(device) for p in self.pools] if is_on_gpu else []
        self._spans: list[tuple[int, int, int]] = []  # where keys, values and what follows begin
        used = [0] * len(windows)
        for (_, key_bytes, value_bytes), group in zip(layers, self._group_of, strict=True):
            first, split = used[group], used[group] + key_bytes
            used[group] = split + value_bytes
            self._spans.append((first, split, used[group]))
        self.num_groups = len(windows)

    def hot_array(self, layer_id: LayerId, role: BufferRole) -> npt.NDArray[np.uint8] | DeviceBytes:
        begin, split, end = self._spans[layer_id]
        first, stop = (split, end) if role == "value" else (begin, split)
        group = self._group_of[layer_id]
        if self.gpu_pools:
            pool = self.gpu_pools[group]
            address = MemAddress(pool.data_ptr() + first)
            return DeviceBytes(address, self.num_slots, stop - first, pool.shape[1])
        return self.pools[group][:, first:stop]

    def layer_group_of(self, layer_id: LayerId) -> LayerGroupId:
        return self._group_of[layer_id]


class Table:
    """A block table whose slots a test chooses."""

    def __init__(self, slots: list[npt.NDArray[np.int64]]) -> None:
        self.slots = [s.astype(np.int32) for s in slots]

    def page_indices(self, layer_group_id: LayerGroupId) -> Int32Array:
        return self.slots[layer_group_id]


def make_tiny(kind: str, seed: int = 0, head_dim: int = 8) -> PreTrainedModel:
    """A model of two to four layers in f32 whose logits vary enough that a wrong key shows."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, head_dim=head_dim, **common))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, head_dim=head_dim, **common))
    elif kind == "gpt_oss":  # attention sinks, sliding windows and experts
        model = GptOssForCausalLM(
            GptOssConfig(
                num_hidden_layers=2,
                head_dim=head_dim,
                sliding_window=8,
                num_local_experts=2,
                num_experts_per_tok=1,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
                **common,
            )
        )
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    else:
        config = Gemma3TextConfig(
            num_hidden_layers=4,
            head_dim=head_dim,
            query_pre_attn_scalar=head_dim,
            sliding_window=8,
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            **common,
        )
        model = Gemma3ForCausalLM(config)
    return model.eval()
