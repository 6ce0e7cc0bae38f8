"""Models with random weights: of any size for measurements, and a small one with files of its own
where no trained model is at hand.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coldpage.engine.model.model import LoadedModel, describe_model, offline_and_quiet
from coldpage.engine.model.placement import compute_exactly
from coldpage.engine.model.texts import documentation_text

__all__ = [
    "EIGHT_BILLION",
    "SMALL",
    "ModelGeometry",
    "random_model",
    "random_tokenizer",
    "write_random_model",
]

_START, _END = "<s>", "</s>"
_CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
# Enough text for the few merges that a small vocabulary has room for.
_TRAINING_CHARACTERS: Final = 100_000


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes of a model like Llama. ``weight_deviation`` is that of every weight matrix."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_tokens: int
    weight_deviation: float = 0.02


# Weights large enough that the next token depends on the whole text.
SMALL: Final = ModelGeometry(
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=320,
    context_tokens=4096,
    weight_deviation=0.2,
)
# The attention and the layers of an 8B Llama, 128 KiB of cache a token in half precision, with few
# words: what is measured with it is not the vocabulary.
EIGHT_BILLION: Final = ModelGeometry(
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=2048,
    context_tokens=131_072,
)


def random_model(
    geometry: ModelGeometry,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
) -> LoadedModel:
    """A model in memory. Its weights are made on ``device``, so 16 GB take seconds on a GPU; the
    same seed gives other weights on another kind of device. Raises ModelError.
    """
    compute_exactly(device)
    model = _weights(geometry, device, dtype, seed)
    tokenizer = random_tokenizer(geometry.vocab_size)
    digest = hashlib.sha256(f"random {geometry} {device.type} {seed}".encode()).digest()
    return describe_model(model, tokenizer, "random", digest)


def write_random_model(path: Path, geometry: ModelGeometry = SMALL, *, seed: int = 0) -> None:
    """A directory that ``load_model`` takes: weights in float32 and a tokenizer, no network."""
    with offline_and_quiet():
        _weights(geometry, torch.device("cpu"), torch.float32, seed).save_pretrained(path)
        random_tokenizer(geometry.vocab_size).save_pretrained(path)


def _weights(
    geometry: ModelGeometry, device: torch.device, dtype: torch.dtype, seed: int
) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_heads,
        num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.context_tokens,
        initializer_range=geometry.weight_deviation,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    build: Any = LlamaForCausalLM._from_config
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model: LlamaForCausalLM = build(config, dtype=dtype)
    return model


def random_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level pairs trained on English text: every text has tokens, and every token a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([documentation_text()[:_TRAINING_CHARACTERS]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_START} $A", special_tokens=[(_START, 0)]
    )
    make: Any = PreTrainedTokenizerFast
    result: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        bos_token=_START,
        eos_token=_END,
        chat_template=_CHAT_TEMPLATE,
    )
    return result
