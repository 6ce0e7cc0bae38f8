"""``coldpage quality``: what it refuses in one sentence, and what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from coldpage.bench.quality.document import section_marks
from coldpage.bench.quality.texts import load_texts, text_pieces
from coldpage.cli.commands import coldpage
from coldpage.codecs import codec_names
from coldpage.engine.model import calibration
from coldpage.engine.model.model import load_model
from coldpage.engine.model.random_model import ModelGeometry, write_random_model


def run(*arguments: str) -> Result:
    return CliRunner().invoke(coldpage, ["quality", *arguments])


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 64, which every codec packs."""
    path = tmp_path_factory.mktemp("model")
    sizes = ModelGeometry(
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        hidden_size=64,
        intermediate_size=64,
        vocab_size=320,
        context_tokens=4096,
        weight_deviation=0.2,
    )
    write_random_model(path, sizes)
    return path


@pytest.fixture(autouse=True)
def own_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the user's, nor one for the user to find."""
    monkeypatch.setattr(calibration, "model_cache_directory", lambda: tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--codec", "zip"], f"there is no codec 'zip': choose one of {', '.join(codec_names())}"),
        (["--codec", "int8,0=zip"], "a layer group can have one of"),
        (["gone"], "there is no model 'gone': give smollm2, gemma3, a Hugging Face directory or"),
        (["--text", "gone.txt"], "there is no text in 'gone.txt'"),
        (["--write", "gone.md"], "the document gone.md can not be read"),
        (["--json", "/gone/rows"], "can not write to /gone/rows: No such file or directory"),
        (["--study", "--recent-blocks", "4"], "--study has settings of its own for newest blocks"),
    ],
)
def test_what_can_not_be_is_one_sentence_at_once(arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("coldpage: ") and sentence in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


@pytest.mark.parametrize("flag", [("--tokens", "many"), ("--tokens", "0"), ("--places", "0")])
def test_numbers_are_numbers(flag: tuple[str, str]) -> None:
    result = run(*flag)
    assert result.exit_code == 2 and f"Invalid value for '{flag[0]}'" in result.stderr


def test_a_text_that_is_too_short_is_one_sentence(small_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a few words")
    result = run(str(small_model), "--codec", "concat", "--text", str(text))
    assert result.exit_code == 2
    assert "the text short.txt has" in result.stderr and "a longer text" in result.stderr


def test_the_table_is_printed_appended_and_written(small_model: Path, tmp_path: Path) -> None:
    rows, document = tmp_path / "rows.jsonl", tmp_path / "page.md"
    flags = f"{small_model} --codec concat --codec int8 --codec int4-block --tokens 256,512"
    flags += " --places 1 --needles 0 --repeats 2"
    begin, end = section_marks(f"coldpage quality {flags}")
    document.write_text(f"{begin}\n{end}\n")
    result = run(*flags.split(), "--json", str(rows), "--write", str(document))
    assert result.exit_code == 0, result.output
    written = document.read_text()
    lines = [line for line in written.splitlines() if line.startswith("| ")]
    names = [line.split("|")[1].strip() for line in lines]
    assert names == 2 * ["codec", "concat", "int8", "int4-block"]
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(records) == 2 * 3 * 3
    assert {record["num_tokens"] for record in records} == {256, 512}
    own = {
        (record["codec"], record["num_tokens"]): record
        for record in records
        if record["text"] == "all"
    }
    for tokens in (256, 512):
        concat, int8, worst = (own[name, tokens] for name in ("concat", "int8", "int4-block"))
        assert concat["kl_mean"] == 0.0 and concat["top1"] == 1.0
        assert 0.0 < int8["kl_mean"] < worst["kl_mean"] / 20
        assert (concat["ratio_to_bf16"], int8["ratio_to_bf16"]) == (1.0, 66 / 128)
        assert f"{int8['perplexity']:.3f}" in written
        assert f"{int8['perplexity']:.3f}" in result.stdout
    assert "256 tokens" in written and "512 tokens" in written


def test_recent_blocks_are_left_as_they_are(small_model: Path, tmp_path: Path) -> None:
    flags = f"{small_model} --codec int4-block --tokens 256 --places 1 --needles 0 --repeats 0"
    divergences = []
    for number, recent in enumerate(("", " --recent-blocks 8")):
        rows = tmp_path / f"rows{number}.jsonl"
        result = run(*(flags + recent).split(), "--json", str(rows))
        assert result.exit_code == 0, result.output
        assert ("the newest 8 blocks are kept whole" in result.stdout) == bool(recent)
        record = json.loads(rows.read_text().splitlines()[0])
        assert record["num_recent_blocks"] == (8 if recent else 0)
        assert (" --recent-blocks 8" in record["command"]) == bool(recent)
        divergences.append(record["kl_mean"])
    assert 0.0 < divergences[1] < divergences[0]
    result = run(*flags.split(), "--recent-blocks", "16")
    assert "int4-block keeps all 16 blocks of 256 tokens as they are" in result.stderr


@pytest.mark.model
@pytest.mark.timeout(600)  # a first run converts the file, and compiles
def test_smollm2_keeps_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One is made, and its name is in the table; neither codec takes anything out of keys.
    monkeypatch.setattr(calibration, "_MAX_TOKENS", 300)
    rows = tmp_path / "rows.jsonl"
    flags = "--codec concat --codec int8 --tokens 512 --places 1 --needles 1 --repeats 1 --verbose"
    result = run(*flags.split(), "--json", str(rows))
    assert result.exit_code == 0, result.output
    concat, int8 = (
        record
        for record in map(json.loads, rows.read_text().splitlines())
        if record["text"] == "all"
    )
    assert concat["kl_mean"] == 0.0 and concat["perplexity"] == concat["lossless_perplexity"]
    assert 0.0 < int8["kl_mean"] < 2e-4 and int8["top1"] > 0.98
    assert int8["key_cosine"] > 0.9998 and int8["ratio_to_bf16"] == pytest.approx(66 / 128)
    (needle,) = int8["needles"]
    assert needle["is_right"] and needle["answer"] in needle["lossless"]
    assert needle["own"] in result.stdout
    model = load_model(None, torch.float32)
    for text in load_texts("committed"):
        assert len(text_pieces(model.tokenizer, text, 3, 4096 + 257)) == 3
