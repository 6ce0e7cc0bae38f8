"""Real models on paged attention: greedy text equal to generate's, token by token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coldpage.engine.forward.runner import LogitsWanted, ModelRunner, StepItem
from coldpage.engine.model.model import LoadedModel, load_model, model_cache_directory
from coldpage.engine.model.texts import documentation_tokens
from tests.engine.arena import Arena, Table
from tests.engine.real_models import gemma_file

TOKENS_PER_BLOCK = 16
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.model,
    pytest.mark.timeout(600),
]  # a first run converts GGUF files


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(None if request.param == "smollm2" else gemma_file(), torch.float32)


def paged(loaded: LoadedModel, num_tokens: int) -> tuple[ModelRunner, list[Table]]:
    """A runner of a model object of its own, and tables of two sequences in shuffled slots."""
    sizes = TOKENS_PER_BLOCK * loaded.dtype.itemsize
    layers = [
        (layer.sliding_window_tokens, *[sizes * layer.num_kv_heads * layer.head_dim] * 2)
        for layer in loaded.layers
    ]
    num_blocks = -(-num_tokens // TOKENS_PER_BLOCK)
    arena = Arena(layers, 2 * num_blocks + 3, TOKENS_PER_BLOCK)
    rng = np.random.default_rng(0)
    slots = [rng.permutation(arena.num_slots) for _ in range(arena.num_groups)]
    tables = [Table([s[i * num_blocks :][:num_blocks] for s in slots]) for i in range(2)]
    return ModelRunner(copy.copy(loaded), arena), tables


def test_greedy_text_equals_generate(loaded: LoadedModel) -> None:
    # Gemma's window is 512 tokens: the longer prompt runs out of it.
    prompts = documentation_tokens(loaded.tokenizer, [560, 60])
    model: Any = loaded.model
    num_new = 32 if loaded.name.startswith("SmolLM2") else 16
    outs = [
        model.generate(
            torch.from_numpy(prompt).long()[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_new,
            eos_token_id=-1,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for prompt in prompts
    ]
    own_attention = model.config._attn_implementation
    try:
        runner, tables = paged(loaded, 600)
        rows = []
        for prompt, table in zip(prompts, tables, strict=True):
            for start in range(0, len(prompt), 256):
                item = StepItem(table, start, prompt[start : start + 256], LogitsWanted.LAST)
                (row,) = runner.forward([item])
            rows.append(row)
        generated: list[list[int]] = [[], []]
        for step in range(num_new):
            for tokens, row, out in zip(generated, rows, outs, strict=True):
                assert row is not None
                torch.testing.assert_close(row, out.logits[step], rtol=0, atol=1e-4)
                tokens.append(int(row[0].argmax()))
            rows = runner.forward(
                [
                    StepItem(t, len(p) + step, np.array(g[-1:], np.int32), LogitsWanted.LAST)
                    for t, p, g in zip(tables, prompts, generated, strict=True)
                ]
            )
    finally:
        model.set_attn_implementation(own_attention)
    assert generated == [
        o.sequences[0, len(p) :].tolist() for o, p in zip(outs, prompts, strict=True)
    ]


def test_the_second_load_converts_nothing(loaded: LoadedModel) -> None:
    lines: list[str] = []
    source = None if loaded.name.startswith("SmolLM2") else gemma_file()
    again = load_model(source, torch.float32, lines.append)
    assert lines == [f"loading {loaded.name} in float32 on cpu"]
    assert again.fingerprint == loaded.fingerprint
    assert Path(model_cache_directory()).is_dir()
