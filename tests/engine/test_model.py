"""Loading from local files: what is measured, what identifies a model, and what is refused in a
sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import (
    BertConfig,
    BertForMaskedLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from coldpage.engine.model import geometry
from coldpage.engine.model import model as model_module
from coldpage.engine.model.geometry import LayerGeometry, measure_layers
from coldpage.engine.model.model import load_model, manager_layers, model_cache_directory
from coldpage.errors import ModelError
from tests.engine.arena import make_tiny
from tests.engine.tiny_tokenizers import byte_level

pytestmark = pytest.mark.usefixtures("one_thread")


def save(model: PreTrainedModel, directory: Path, tokenizer: bool = True) -> str:
    model.save_pretrained(directory)
    if tokenizer:
        byte_level().save_pretrained(directory)
    return str(directory)


def encoder() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=50, num_hidden_layers=1, **sizes))


def encoder_decoder() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


def recurrent() -> PreTrainedModel:
    return MambaForCausalLM(
        MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, max_position_embeddings=64)
    )


def attention_of_its_own() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(vocab_size=50, max_position_embeddings=64, **sizes))


def bidirectional() -> PreTrainedModel:
    model = make_tiny("gemma3")
    model.config.use_bidirectional_attention = True
    return model


def softcapped() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    config = Gemma2Config(vocab_size=50, num_hidden_layers=2, num_key_value_heads=1, **sizes)
    return Gemma2ForCausalLM(config)


def test_a_directory_loads_and_is_measured(kind: str, tmp_path: Path) -> None:
    lines: list[str] = []
    loaded = load_model(save(make_tiny(kind), tmp_path / "tiny-model"), torch.float32, lines.append)
    assert loaded.name == "tiny-model"
    assert lines == ["loading tiny-model in float32 on cpu"]
    assert loaded.context_tokens == 512
    assert loaded.dtype == loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    windows = [8, 8, None, 8] if kind == "gemma3" else [None, None]
    assert loaded.layers == tuple(LayerGeometry(2, 8, w) for w in windows)
    assert loaded.eos_token_ids == {1, 2}  # the tokenizer's and the generation configuration's
    assert loaded.model.config._attn_implementation == "sdpa"
    layers = manager_layers(loaded, 16)
    assert [layer.layer_id for layer in layers] == list(range(len(windows)))
    assert [layer.sliding_window_tokens for layer in layers] == windows
    assert [(b.role, b.num_bytes) for b in layers[0].buffers] == [
        ("key", 16 * 2 * 8 * 4),
        ("value", 16 * 2 * 8 * 4),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_attention_sinks_is_measured(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("gpt_oss").to(dtype)
    assert measure_layers(model, "tiny") == (LayerGeometry(2, 8, 8), LayerGeometry(2, 8, None))
    # The comparison sees them: without their weight it is refused.
    monkeypatch.setattr(geometry, "with_sinks", lambda out, lse, sinks: out)
    with pytest.raises(ModelError, match="not plain causal"):
        measure_layers(model, "tiny")


def test_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    loaded = load_model(save(make_tiny("llama"), tmp_path), torch.bfloat16)
    assert loaded.dtype == loaded.model.dtype == torch.bfloat16
    assert manager_layers(loaded, 16)[0].buffers[0].num_bytes == 16 * 2 * 8 * 2


def test_the_fingerprint_is_of_contents(tmp_path: Path) -> None:
    first = save(make_tiny("llama"), tmp_path / "a")
    fingerprint = load_model(first, torch.float32).fingerprint
    assert len(fingerprint) == 32
    shutil.copytree(first, tmp_path / "copy")
    assert load_model(str(tmp_path / "copy"), torch.float32).fingerprint == fingerprint
    others = {fingerprint, load_model(first, torch.bfloat16).fingerprint}
    model = make_tiny("llama")
    with torch.no_grad():  # one weight of the last tensor
        model.get_output_embeddings().weight[-1, -1] += 1
    others.add(load_model(save(model, tmp_path / "b"), torch.float32).fingerprint)
    tokenizer = shutil.copytree(first, tmp_path / "c") / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    others.add(load_model(str(tmp_path / "c"), torch.float32).fingerprint)
    config = shutil.copytree(first, tmp_path / "d") / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    others.add(load_model(str(tmp_path / "d"), torch.float32).fingerprint)
    assert len(others) == 5


def test_a_large_file_is_told_apart_at_both_ends(tmp_path: Path) -> None:
    digests = set()
    size = 40 << 20  # more than all samples together
    for at in (None, 0, size - 1):
        with (tmp_path / "weights").open("wb") as file:
            file.truncate(size)
            if at is not None:
                file.seek(at)
                file.write(b"x")
        digests.add(model_module._sampled_digest(tmp_path / "weights"))
    assert len(digests) == 3


def test_loading_is_offline_and_leaves_the_process_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with model_module.offline_and_quiet():
        assert constants.is_offline_mode()
    assert not constants.is_offline_mode()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "/no/such/place",
            "there is no model at '/no/such/place': give a Hugging Face directory or",
        ),
        ("meta-llama/Llama-3", "nothing is downloaded"),
    ],
)
def test_a_missing_path_is_refused(source: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_model(source, torch.float32)


def test_files_that_are_no_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"holds no model: it has no config\.json"):
        load_model(str(tmp_path), torch.float32)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is a file but not a \.gguf file"):
        load_model(str(tmp_path / "model.bin"), torch.float32)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"broken\.gguf' can not be converted"):
        load_model(str(tmp_path / "broken.gguf"), torch.float32)
    assert list(model_cache_directory().iterdir()) == []
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    with pytest.raises(ModelError, match="no weights"):
        load_model(str(tmp_path), torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(20))
    with pytest.raises(ModelError, match="can not be loaded"):
        load_model(str(tmp_path), torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_thing"}')
    with pytest.raises(ModelError, match="not one that transformers knows"):
        load_model(str(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (encoder, r"BertForMaskedLM\) is not a decoder-only language model"),
        (encoder_decoder, r"T5ForConditionalGeneration\) is not a decoder-only language model"),
        (
            attention_of_its_own,
            "layer 0 is not an attention layer with a key-value cache",
        ),
        (bidirectional, r"Gemma3ForCausalLM\) .* its attention is not plain causal attention"),
        (recurrent, r"MambaForCausalLM\) can not be served from paged attention"),
        (
            softcapped,
            r"Gemma2ForCausalLM\) can not be served .*softcap, which is not supported yet",
        ),
    ],
)
def test_models_that_paged_attention_can_not_run_are_refused(make, sentence, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match=sentence):
        load_model(save(make(), tmp_path), torch.float32)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    source = save(make_tiny("llama"), tmp_path, tokenizer=False)
    with pytest.raises(ModelError, match="no tokenizer"):
        load_model(source, torch.float32)
    byte_level().save_pretrained(source)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"the"', '"eht"'))  # the merges still make "the"
    with pytest.raises(ModelError, match="no tokenizer that loads: Token `the` out of vocabulary"):
        load_model(source, torch.float32)


def test_a_conversion_is_published_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    lines: list[str] = []

    def interrupted(gguf: Path, directory: Path) -> None:
        (directory / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model_module, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model_module._converted(gguf, "tiny", lines.append)
    assert list(model_cache_directory().iterdir()) == []

    def overtaken(gguf: Path, directory: Path) -> None:
        """Another process publishes its conversion while this one still works."""
        (directory / "config.json").write_text("ours")
        monkeypatch.setattr(
            model_module, "_convert", lambda gguf, d: (d / "config.json").write_text("theirs")
        )
        model_module._converted(gguf, "tiny", lines.append)

    monkeypatch.setattr(model_module, "_convert", overtaken)
    directory = model_module._converted(gguf, "tiny", lines.append)
    assert (directory / "config.json").read_text() == "theirs"
    assert list(model_cache_directory().iterdir()) == [directory]
    lines.clear()
    assert model_module._converted(gguf, "tiny", lines.append) == directory
    assert lines == []
