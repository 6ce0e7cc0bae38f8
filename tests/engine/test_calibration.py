"""Means of keys: that they are that, and that files of them are found, checked and replaced."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from coldpage.bench.quality.texts import COMMITTED, load_texts
from coldpage.engine.model import calibration
from coldpage.engine.model.calibration import (
    Calibration,
    calibrate,
    default_text,
    load_calibration,
    stored_or_made,
)
from coldpage.engine.model.layer_keys import layer_keys
from coldpage.engine.model.model import LoadedModel, load_model, model_cache_directory
from coldpage.engine.model.random_model import SMALL, ModelGeometry, random_model
from coldpage.engine.model.texts import documentation_text
from coldpage.errors import ConfigurationError, ModelError

pytestmark = pytest.mark.usefixtures("one_thread", "cache_directory")

TEXT = "a cat sat on the mat, and the mat lay on the cat. " * 40
SINKS = 16
SHORT = ModelGeometry(2, 6, 3, 8, 36, 24, 300, 256)


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models and calibrations are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return model_cache_directory()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model(SMALL, torch.device("cpu"), torch.float32)


def quiet(line: str) -> None:
    pass


def made(model: LoadedModel, text: str = TEXT) -> Calibration:
    return calibrate(model, text, quiet)


def equal(one: Calibration | None, other: Calibration) -> bool:
    return one is not None and all(
        np.array_equal(a, b) for a, b in zip(one.key_means, other.key_means, strict=True)
    )


def rotated_back(keys: torch.Tensor, radians: torch.Tensor, first: int) -> torch.Tensor:
    """The inverse of transformers' rotate_half, in f64."""
    angles = torch.arange(first, first + keys.shape[1])[:, None] * radians.double()
    cosine, sine = torch.cat([angles] * 2, 1).cos(), torch.cat([angles] * 2, 1).sin()
    low, high = keys.chunk(2, -1)
    return keys * cosine - torch.cat([-high, low], -1) * sine


@pytest.mark.parametrize("is_known", [True, False])
def test_means_are_of_every_chunk_without_its_first_tokens(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not known how keys turn, they are taken as they are."""
    model = random_model(SHORT, torch.device("cpu"), torch.float32)
    ids = torch.tensor(model.tokenizer(TEXT)["input_ids"])
    if not is_known:
        monkeypatch.setattr(calibration, "measure_frequencies", lambda model: (None, None))
    lines: list[str] = []
    result = calibrate(model, TEXT, lines.append)
    pieces = ids.split(SHORT.context_tokens)
    assert len(lines) == len(pieces) > 2
    assert lines[1] == f"calibrating random: {SHORT.context_tokens:,} of {ids.numel():,} tokens"
    assert result.num_tokens == ids.numel() - SINKS * len(pieces)
    radians = model.model.model.rotary_emb.inv_freq
    for layer in range(2):
        total = torch.zeros(3, 8, dtype=torch.float64)
        for piece in pieces:
            keys = layer_keys(model.model, 2, piece, torch.arange(piece.numel()))[layer].keys
            keys = keys[:, SINKS:].double()
            total += (rotated_back(keys, radians, SINKS) if is_known else keys).sum(1)
        mean = (total / result.num_tokens).numpy()
        assert np.abs(mean).max() > 0.001
        np.testing.assert_allclose(result.key_means[layer], mean, atol=1e-6)
        assert result.key_means[layer].dtype == np.float32


def test_what_is_stored_is_found(model: LoadedModel, cache_directory: Path) -> None:
    assert load_calibration(model) is None
    stored = made(model)
    assert stored.path.parent == cache_directory
    assert model.fingerprint.hex()[:16] in stored.name
    assert [path.name for path in cache_directory.iterdir()] == [stored.path.name]
    assert equal(load_calibration(model), stored)
    assert equal(stored_or_made(model, pytest.fail), stored)


def test_the_newest_text_counts(model: LoadedModel) -> None:
    first, second = made(model), made(model, TEXT[7:])
    assert first.path != second.path
    assert not equal(first, second)
    os.utime(first.path, ns=(1, 1))
    assert equal(load_calibration(model), second)
    again = made(model)
    os.utime(second.path, ns=(1, 1))
    assert again.path == first.path
    assert equal(load_calibration(model), first)


def test_without_one_the_default_text_is_read_once(model: LoadedModel) -> None:
    lines: list[str] = []
    first = stored_or_made(model, lines.append)
    assert lines
    assert equal(stored_or_made(model, pytest.fail), first)
    assert equal(calibrate(model, default_text(), quiet), first)


def test_another_default_text_is_read_in_place_of_the_old_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user gave stays."""
    monkeypatch.setattr(calibration, "default_text", lambda: TEXT)
    first = stored_or_made(model, quiet)
    monkeypatch.setattr(calibration, "default_text", lambda: TEXT[7:])
    assert load_calibration(model) is None
    second = stored_or_made(model, quiet)
    assert not equal(first, second)
    own = made(model, TEXT[9:])
    os.utime(second.path, ns=(1, 1))
    monkeypatch.setattr(calibration, "default_text", lambda: TEXT[11:])
    assert equal(load_calibration(model), own)


def test_another_model_has_another(model: LoadedModel) -> None:
    made(model)
    assert load_calibration(random_model(SMALL, torch.device("cpu"), torch.bfloat16)) is None
    other = random_model(SMALL, torch.device("cpu"), torch.float32, seed=1)
    assert load_calibration(other) is None


def flip_a_mean(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_a_mean, cut, empty, Path.unlink])
def test_a_damaged_file_is_made_again_with_one_line(model, damage, caplog) -> None:  # type: ignore[no-untyped-def]
    stored = stored_or_made(model, quiet)
    damage(stored.path)
    with caplog.at_level(logging.INFO, "coldpage"):
        assert equal(stored_or_made(model, quiet), stored)
    if damage is not Path.unlink:
        (message,) = caplog.messages
        assert str(stored.path) in message
        assert "it is damaged" in message
    caplog.clear()
    assert equal(stored_or_made(model, pytest.fail), stored)
    assert caplog.messages == []


def test_behind_a_damaged_file_an_older_one_is_found(model: LoadedModel) -> None:
    first, second = made(model), made(model, TEXT[7:])
    os.utime(first.path, ns=(1, 1))
    flip_a_mean(second.path)
    assert equal(load_calibration(model), first)


@pytest.mark.parametrize("what", ["version", "model", "frequencies"])
def test_files_of_something_else_are_not_taken(model, what, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    stored = made(model)
    words = {
        "version": "another version made it",
        "model": "it is of another model",
        "frequencies": "it was made for other rotary frequencies",
    }
    if what == "version":
        monkeypatch.setattr(calibration, "_VERSION", "2")
    elif what == "model":  # one whose fingerprint has the same beginning
        model = dataclasses.replace(model, fingerprint=model.fingerprint[:8] + bytes(24))
    else:
        monkeypatch.setattr(calibration, "measure_frequencies", lambda model: (None, None, None))
    assert load_calibration(model) is None
    (message,) = caplog.messages
    assert message.endswith(words[what])
    assert stored.path.exists()


def test_a_file_appears_whole_or_not_at_all(
    model: LoadedModel, cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ModelError, match=r"calibration of random can not be kept in .*No space"):
        made(model)
    assert list(cache_directory.iterdir()) == []


def test_a_text_that_is_too_short_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigurationError, match="give one of 272 or more to calibrate random on"):
        made(model, "too short")


def test_of_a_long_text_the_beginning_is_read(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_MAX_TOKENS", 1000)
    assert made(model, documentation_text()[:20_000]).num_tokens == 1000 - SINKS


def test_the_default_text_is_nothing_that_codecs_are_measured_on() -> None:
    words = default_text().split()
    measured = " ".join(" ".join(text.content.split()) for text in load_texts(COMMITTED))
    runs = [" ".join(words[start : start + 12]) for start in range(0, len(words) - 12, 6)]
    assert len(runs) > 800
    assert [run for run in runs if run in measured] == []


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_default_text_on_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough that another text has nearly the same means."""
    monkeypatch.undo()
    model = load_model(None, torch.float32)
    monkeypatch.setattr(calibration, "_store", lambda made, model, is_default: None)
    num_tokens = len(model.tokenizer(default_text())["input_ids"])
    assert 8_000 <= num_tokens <= 12_000
    monkeypatch.setattr(calibration, "_MAX_TOKENS", 2_048)
    first = calibrate(model, default_text(), quiet)
    other = calibrate(model, documentation_text()[:30_000], quiet)
    for one, another in zip(first.key_means, other.key_means, strict=True):
        assert np.linalg.norm(one - another) < 0.25 * np.linalg.norm(one)
