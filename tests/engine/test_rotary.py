"""By how much keys turn: every kind of rotary embedding is told from the others by what it does."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from coldpage.engine.model.layer_keys import layer_keys
from coldpage.engine.model.model import LoadedModel, describe_model, load_model
from coldpage.engine.model.random_model import SMALL, random_model
from coldpage.engine.model.rotary import Frequencies, measure_frequencies, turn_back
from coldpage.kernels.cold.numbers import phase_steps
from tests.engine.arena import make_tiny
from tests.engine.real_models import gemma_file
from tests.engine.tiny_tokenizers import byte_level

pytestmark = pytest.mark.usefixtures("one_thread")

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TURN = 1 << 32


def described(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The weights in another type; frequencies stay in float32, as when a file is loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return describe_model(model.eval(), byte_level(), "tiny", b"weights")


def turns_of(theta: float, head_dim: int) -> Frequencies:
    """By the definition of rotary embedding."""
    radians = theta ** (-2 * np.arange(head_dim // 2) / head_dim)
    turns: Frequencies = np.rint(radians * TURN / (2 * math.pi)).astype(np.uint32)
    return turns


def assert_turns(found: Frequencies | None, expected: Frequencies) -> None:
    """Models compute them in float32."""
    assert found is not None
    assert found.dtype == np.uint32
    np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=1e-6, atol=1)


def llama(**rope: Any) -> PreTrainedModel:
    parameters = {"rope_theta": 10_000.0, **rope}
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=2, rope_parameters=parameters, **COMMON)
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss"])
def test_full_rotary_embedding_is_found(family: str, dtype: torch.dtype) -> None:
    for found in measure_frequencies(described(make_tiny(family), dtype)):
        assert_turns(found, turns_of(10_000.0, 8))


def test_a_model_made_for_measurements_has_them() -> None:
    model = random_model(SMALL, torch.device("cpu"), torch.bfloat16)
    for found in measure_frequencies(model):
        assert_turns(found, turns_of(10_000.0, 16))


def test_layers_of_one_model_may_differ() -> None:
    """Gemma 3's sliding layers have frequencies of their own."""
    sliding, _, full, last = measure_frequencies(described(make_tiny("gemma3")))
    assert_turns(sliding, turns_of(10_000.0, 8))
    assert_turns(last, turns_of(10_000.0, 8))
    assert full is not None
    assert_turns(full, turns_of(1_000_000.0, 8))


def test_scaled_frequencies_are_the_ones_in_use() -> None:
    (found, _) = measure_frequencies(described(llama(rope_type="linear", factor=4.0)))
    assert_turns(found, np.rint(turns_of(10_000.0, 16) / 4).astype(np.uint32))


def test_a_factor_on_sine_and_cosine_is_no_turn() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    model = described(llama(**yarn))
    assert model.model.model.rotary_emb.attention_scaling > 1.1
    (found, _) = measure_frequencies(model)
    assert found is not None
    assert found[0] == pytest.approx(TURN / (2 * math.pi), rel=3e-7)
    assert found[-1] < turns_of(10_000.0, 16)[-1] / 3


def partial_phi() -> PreTrainedModel:
    return PhiForCausalLM(PhiConfig(partial_rotary_factor=0.5, **COMMON))


def partial_stablelm() -> PreTrainedModel:
    return StableLmForCausalLM(
        StableLmConfig(num_key_value_heads=4, partial_rotary_factor=0.25, **COMMON)
    )


def interleaved() -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**COMMON))


def of_two_lengths() -> PreTrainedModel:
    """Frequencies that another length of text changes."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    }
    return llama(**parameters)


@pytest.mark.parametrize("make", [partial_phi, partial_stablelm, interleaved, of_two_lengths])
def test_other_forms_are_told_once_and_left_alone(make: Any, caplog: Any) -> None:
    model = described(make())
    before = {name: b.clone() for name, b in model.model.named_buffers() if "inv_freq" in name}
    assert before
    with caplog.at_level(logging.INFO, "coldpage.engine.model.rotary"):
        assert measure_frequencies(model) == (None, None)
    (message,) = caplog.messages
    assert message.startswith("tiny: the keys of layers 0, 1 are turned")
    after = dict(model.model.named_buffers())
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())


def test_positions_that_are_added_to_the_input_are_another_form(caplog: Any) -> None:
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=97, bos_token_id=1, eos_token_id=2, **sizes)
    with caplog.at_level(logging.INFO, "coldpage.engine.model.rotary"):
        assert measure_frequencies(described(GPT2LMHeadModel(config))) == (None, None)
    assert len(caplog.messages) == 1


def test_a_layer_without_positions_has_nothing_to_turn_back(caplog: Any) -> None:
    config = SmolLM3Config(num_key_value_heads=2, no_rope_layers=[1, 0], **COMMON)
    with caplog.at_level(logging.INFO, "coldpage.engine.model.rotary"):
        first, second = measure_frequencies(described(SmolLM3ForCausalLM(config)))
    assert first is not None
    assert second is None
    assert caplog.messages == []


def test_another_models_frequencies_are_not_taken() -> None:
    """The candidate is compared with what the layer does."""
    model = described(make_tiny("llama"))
    with torch.no_grad():
        model.model.model.rotary_emb.register_buffer("original_inv_freq", torch.rand(4))
    for found in measure_frequencies(model):
        assert_turns(found, turns_of(10_000.0, 8))


def test_keys_turn_back_to_one_position() -> None:
    """Equal tokens have equal keys in the first layer, wherever they stand."""
    model = described(make_tiny("llama"))
    (frequencies, _) = measure_frequencies(model)
    assert frequencies is not None
    positions = torch.arange(100, 140)
    seen = layer_keys(model.model, 2, torch.full((40,), 7), positions)[0].keys.numpy()
    back = turn_back(seen, frequencies, 100)
    assert np.abs(seen - seen[:, :1]).max() > 0.1
    np.testing.assert_allclose(back, np.repeat(back[:, :1], 40, axis=1), atol=2e-5)
    start = layer_keys(model.model, 2, torch.tensor([7]), torch.tensor([0]))[0].keys.numpy()
    np.testing.assert_allclose(back[:, :1], start, atol=2e-5)
    assert np.abs(turn_back(seen, frequencies, 101)[:, :1] - start).max() > 0.01


def test_keys_turn_back_by_what_codecs_turn_them() -> None:
    """Far in a text, where products have more than 32 bits."""
    frequencies = turns_of(10_000.0, 16)
    keys = np.random.default_rng(0).standard_normal((2, 16, 16)).astype(np.float32)
    phases = phase_steps(frequencies, 7_000, 16) * (2 * math.pi / TURN)
    cosine, sine = np.cos(phases), np.sin(phases)
    low, high = keys[..., :8], keys[..., 8:]
    expected = np.concatenate([low * cosine + high * sine, high * cosine - low * sine], axis=-1)
    np.testing.assert_allclose(turn_back(keys, frequencies, 7_000 * 16), expected, atol=1e-5)


@pytest.mark.model
@pytest.mark.timeout(600)  # a first run converts GGUF files
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_models(dtype: torch.dtype) -> None:
    for found in measure_frequencies(load_model(None, dtype)):
        assert_turns(found, turns_of(100_000.0, 64))
    gemma = load_model(gemma_file(), dtype)
    for layer, found in zip(gemma.layers, measure_frequencies(gemma), strict=True):
        is_full = layer.sliding_window_tokens is None
        assert_turns(found, turns_of(1_000_000.0 if is_full else 10_000.0, 256))


def test_keys_are_what_a_layer_gives_its_cache() -> None:
    """Beside transformers' own cache, over a window that is shorter than the text."""
    model = make_tiny("gemma3")
    ids = torch.arange(3, 43)
    mine = layer_keys(model, 4, ids, torch.arange(40))
    with torch.inference_mode():
        theirs = model(input_ids=ids[None], use_cache=True).past_key_values
    for index in (2,):  # the others keep their window only
        assert torch.equal(mine[index].keys, theirs.layers[index].keys[0])
        assert torch.equal(mine[index].values, theirs.layers[index].values[0])
    window = theirs.layers[3].keys.shape[2]
    assert torch.equal(mine[3].keys[:, -window:], theirs.layers[3].keys[0])
