"""Models with random weights: their sizes, that they are the same again, that their files load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coldpage.engine.assembly import block_bytes
from coldpage.engine.model.model import load_model
from coldpage.engine.model.random_model import (
    EIGHT_BILLION,
    SMALL,
    ModelGeometry,
    random_model,
    random_tokenizer,
    write_random_model,
)

CPU = torch.device("cpu")
TINY = ModelGeometry(2, 6, 3, 8, 36, 24, 300, 128)
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_model_has_the_sizes_asked_for_and_the_weights_of_its_seed() -> None:
    first, second, other = (random_model(TINY, CPU, torch.bfloat16, seed=s) for s in (1, 1, 2))
    assert [(g.num_kv_heads, g.head_dim) for g in first.layers] == [(3, 8)] * 2
    assert first.dtype == torch.bfloat16
    assert first.context_tokens == 128
    assert block_bytes(first, 4) == 4 * 2 * 2 * 3 * 8 * 2
    same, different = (
        list(map(torch.equal, first.model.parameters(), model.model.parameters()))
        for model in (second, other)
    )
    assert all(same) and not all(different)
    assert first.fingerprint == second.fingerprint != other.fingerprint


def test_a_random_model_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    random_model(TINY, CPU, torch.float32)
    assert torch.equal(torch.rand(3), expected)


def test_files_load_as_the_model_in_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_random_model(tmp_path / "model", SMALL, seed=3)
    loaded = load_model(str(tmp_path / "model"), torch.float32)
    made = random_model(SMALL, CPU, torch.float32, seed=3)
    for a, b in zip(loaded.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert loaded.layers == made.layers
    assert loaded.eos_token_ids == made.eos_token_ids == {1}
    assert loaded.tokenizer("a cache")["input_ids"] == made.tokenizer("a cache")["input_ids"]
    assert capfd.readouterr() == ("", "")


def test_every_text_has_tokens_and_comes_back() -> None:
    tokenizer = random_tokenizer(320)
    for text in ("The cache is cold.", "日本語 😀"):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 0 and max(ids) < 320
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_large_geometry_is_the_one_that_is_measured() -> None:
    g = EIGHT_BILLION
    assert 2 * g.num_layers * g.num_kv_heads * g.head_dim * 2 == 128 * 1024
    assert g.num_heads * g.head_dim == g.hidden_size
