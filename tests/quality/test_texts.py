"""Texts to measure on, facts to find in them, and the document that gets the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coldpage.bench.quality.document import check_document, replace_generated, section_marks
from coldpage.bench.quality.needles import MAX_NEEDLES, MAX_QUESTION_TOKENS, make_needles
from coldpage.bench.quality.options import QualityOptions
from coldpage.bench.quality.settings import EvaluationOptions
from coldpage.bench.quality.study import STUDIED_CODECS, study_settings
from coldpage.bench.quality.texts import TEXT_SOURCES, Text, load_texts, text_pieces
from coldpage.codecs import KVShape, LayerVectors, NumberType, PackedCodec
from coldpage.codecs.packed import VectorFormats
from coldpage.engine.model.calibration import default_text
from coldpage.engine.model.random_model import random_tokenizer
from coldpage.errors import ConfigurationError
from coldpage.kernels.cold.formats import ColdFormat
from coldpage.types import LayerId

COMMAND = "coldpage quality --study"


@pytest.mark.parametrize("source", TEXT_SOURCES)
def test_each_source_has_text_for_places_of_4096_tokens(source: str) -> None:
    for text in load_texts(source):
        # A token of these texts is rarely longer than 3.8 characters: the real tokenizers are
        # asked where the real models are.
        assert len(text.content) > 3.8 * 3 * (4096 + 257)


def test_committed_text_is_prose_and_code_that_nothing_is_calibrated_on() -> None:
    prose, code = load_texts("committed")
    assert (prose.name, code.name) == ("prose", "code")
    compile(code.content.replace("from __future__ import annotations\n", ""), "code", "exec")
    known = set(default_text().splitlines())
    for text in (prose, code):
        long_lines = {line for line in text.content.splitlines() if len(line) > 40}
        assert len(long_lines) > 400 and not long_lines & known


def test_a_file_is_a_text_and_what_is_none_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("words")
    assert load_texts(str(file)) == (Text("notes.txt", "words"),)
    with pytest.raises(ConfigurationError, match=r"no text in 'gone\.txt'.*committed, topics"):
        load_texts("gone.txt")
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigurationError, match="or a file in UTF-8"):
        load_texts(str(file))


def test_pieces_never_overlap_and_begin_alike_however_long_they_are() -> None:
    tokenizer = random_tokenizer(320)
    text = Text("numbers", " ".join(map(str, range(3000))))
    short, long = (text_pieces(tokenizer, text, 3, n) for n in (20, 1000))
    start = tokenizer("")["input_ids"]
    assert len(start) == 1
    for one, other in zip(short, long, strict=True):
        assert one.tolist() == other[:20].tolist() and one[:1].tolist() == start
    ids = np.array(tokenizer(text.content, add_special_tokens=False)["input_ids"])
    places = [np.flatnonzero(ids == piece[1]) for piece in long]
    distance = ids.size // 3
    for index, (piece, found) in enumerate(zip(long, places, strict=True)):
        assert index * distance in found
        assert piece[1:].tolist() == ids[index * distance :][:999].tolist()
    with pytest.raises(ConfigurationError, match=r"the text numbers has .* use fewer places"):
        text_pieces(tokenizer, text, 3, distance + 2)
    assert len(text_pieces(tokenizer, text, 3, distance + 1)[2]) == distance + 1


@pytest.mark.parametrize("has_template", [True, False])
def test_a_fact_is_said_once_early_in_its_context_and_asked_for_behind_it(
    has_template: bool,
) -> None:
    tokenizer = random_tokenizer(2000)
    if not has_template:
        tokenizer.chat_template = None
    needles = make_needles(tokenizer, MAX_NEEDLES, 1024, 16)
    assert len({needle.answer for needle in needles}) == len(needles) == MAX_NEEDLES
    for needle in needles:
        context = tokenizer.decode(needle.context)
        question = tokenizer.decode(needle.question)
        assert context.count(needle.answer) == 1 and needle.answer not in question
        assert 0.02 < context.index(needle.answer) / len(context) < 0.6
        assert "?" in question and question.count("What is the") == 1
        assert needle.context.size % 16 == 0 and 700 < needle.context.size <= 1024
        assert needle.question.size <= MAX_QUESTION_TOKENS
        assert question.rstrip().endswith("assistant:" if has_template else "Answer:")
        assert needle.context[0] == tokenizer.bos_token_id
        assert needle.is_in(f"It is {needle.answer}.") and not needle.is_in("It is 1.")
    contexts = {tokenizer.decode(needle.context[:64]) for needle in needles}
    assert len(contexts) == MAX_NEEDLES


def test_a_document_gets_its_table_between_the_comments_of_the_command(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    begin, end = section_marks(COMMAND)
    assert begin == "<!-- begin: coldpage quality study -->"
    document.write_text(f"before\n\n{begin}\nold\n{end}\n\nafter\n")
    check_document(document, COMMAND)
    replace_generated(document, COMMAND, "| new |")
    assert document.read_text() == f"before\n\n{begin}\n\n| new |\n\n{end}\n\nafter\n"
    replace_generated(document, COMMAND, "| newer |")
    assert document.read_text() == f"before\n\n{begin}\n\n| newer |\n\n{end}\n\nafter\n"


def test_a_document_without_a_place_stays_as_it_is(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    begin, end = section_marks(COMMAND)
    for text in ("nothing", begin, f"{begin}\n{end}\n{begin}\n{end}", f"{end}\n{begin}"):
        document.write_text(text)
        with pytest.raises(ConfigurationError, match="coldpage quality study -->"):
            replace_generated(document, COMMAND, "new")
        assert document.read_text() == text
    with pytest.raises(ConfigurationError, match="can not be read"):
        check_document(tmp_path / "gone.md", COMMAND)


def test_a_command_is_what_was_asked_for_and_no_more() -> None:
    assert QualityOptions().command == "coldpage quality"
    options = QualityOptions(
        model="gemma3",
        codecs=("int8", "turbo4,1=int8"),
        context_tokens=(512, 4096),
        evaluation=EvaluationOptions(num_places=1, tokens_per_block=32),
        is_study=True,
        is_verbose=True,
        json_path=Path("rows.jsonl"),
        document=Path("page.md"),
    )
    assert options.command == (
        "coldpage quality gemma3 --codec int8 --codec turbo4,1=int8 --tokens 512,4096 --places 1 "
        "--block-tokens 32 --study"
    )


def test_a_study_has_every_choice_of_what_happens_to_keys() -> None:
    shape = KVShape(2, 16, 64, NumberType.F32)
    frequencies = np.arange(32, dtype=np.uint32)
    means, stored = (np.full((2, 64), value, np.float32) for value in (1, 2))
    pages = {LayerId(0): LayerVectors(shape, shape, frequencies, means)}
    # Packed as a rule without regard to what is known of keys.
    settings = study_settings(("k8v4",), {LayerId(0): stored})
    assert len({s.name for s in settings}) == len(settings) == 2 * 4 + 3
    assert [s.num_recent_blocks for s in settings] == 8 * [0] + [1, 4, 16]
    assert [s.separates_sinks for s in settings] == 4 * [True] + 4 * [False] + 3 * [True]
    # Keys that are turned back need to know where they were.
    codecs = [setting.make(pages) for setting in settings[:4]]
    assert [codec.needs_positions for codec in codecs] == [False, False, True, True]
    assert len({codec.parameters for codec in codecs}) == 4
    told = {LayerId(0): LayerVectors(shape, shape, None, stored)}
    formats = {"k8v4": VectorFormats(ColdFormat.INT8, ColdFormat.TURBO4, turns_back=True)}
    assert codecs[1].parameters == PackedCodec("k8v4", told, formats=formats).parameters
    assert codecs[3].parameters == PackedCodec("k8v4", pages, formats=formats).parameters
    assert len(study_settings(STUDIED_CODECS, {})) == len(STUDIED_CODECS) * len(settings)
    for name in ("concat", "zip"):
        with pytest.raises(ConfigurationError, match=f"the codec '{name}' leaves nothing to study"):
            study_settings((name,), {})
