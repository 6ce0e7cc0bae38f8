"""Codecs on a small model with random weights: what nothing loses, and more and more does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from coldpage.bench.quality.evaluation import CodecQuality, evaluate
from coldpage.bench.quality.report import document_table, result_rows
from coldpage.bench.quality.settings import CodecSetting, EvaluationOptions
from coldpage.bench.quality.texts import Text, load_texts
from coldpage.codecs import ColdPageCodec, create_default_cold_page_codec
from coldpage.engine.model.cold_codecs import model_pages
from coldpage.engine.model.model import LoadedModel
from coldpage.engine.model.random_model import SMALL, random_model
from coldpage.errors import CodecError, ConfigurationError
from tests.quality.rounding_codec import RoundingCodec

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = EvaluationOptions(
    num_tokens=512, num_read_tokens=40, num_places=2, num_needles=2, num_repeats=0
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model(SMALL, torch.device("cpu"), torch.float32)


def setting(name: str, make: Callable[[], ColdPageCodec], **others: object) -> CodecSetting:
    return CodecSetting(name, lambda pages: make(), **others)  # type: ignore[arg-type]


CONCAT = setting("concat", create_default_cold_page_codec)


def run(
    model: LoadedModel, *settings: CodecSetting, options: EvaluationOptions = OPTIONS
) -> list[CodecQuality]:
    pages = model_pages(model, options.tokens_per_block)
    return evaluate(model, pages, settings, load_texts("committed"), options)


def test_concat_loses_exactly_nothing(model: LoadedModel) -> None:
    (result,) = run(model, CONCAT)
    assert set(result.tokens_of) == {"prose", "code"}
    assert result.tokens.kl.shape == (2 * 2 * 40,)
    assert (result.tokens.kl == 0.0).all() and result.tokens.top1 == 1.0
    assert result.tokens.own_perplexity == result.tokens.lossless_perplexity
    assert result.keys.relative_error == result.values.relative_error == 0.0
    assert [said.own for said in result.needles] == [said.lossless for said in result.needles]
    assert len(result.needles) == 2 and all(said.lossless for said in result.needles)


def test_the_more_is_lost_the_more_it_shows(model: LoadedModel) -> None:
    # 9 bits are sign and exponent; each further one halves what is lost.
    results = run(model, *(setting(f"{n}", lambda n=n: RoundingCodec(n)) for n in (20, 14, 11)))
    kl = [result.tokens.kl_mean for result in results]
    assert 0.0 < kl[0] < kl[1] / 10 and kl[1] < kl[2] / 4
    for role in ("keys", "values"):
        errors = [getattr(result, role).relative_error for result in results]
        assert 0.0 < errors[0] < errors[1] / 30 and errors[1] < errors[2] / 4
        cosines = [getattr(result, role).worst_cosine for result in results]
        assert 1.0 > cosines[0] > cosines[1] > cosines[2] > 0.9
    assert results[2].tokens.top1 < results[0].tokens.top1


def test_blocks_that_stay_lose_nothing(model: LoadedModel) -> None:
    def coarse() -> ColdPageCodec:
        return RoundingCodec(11)

    whole_first = setting("whole first", coarse)
    packed_first = setting("packed first", coarse, separates_sinks=False)
    some_recent = setting("some recent", coarse, num_recent_blocks=8)
    all_recent = setting("all recent", coarse, num_recent_blocks=99)
    results = run(
        model,
        *(whole_first, packed_first, some_recent, CONCAT),
        options=replace(OPTIONS, num_needles=0),
    )
    errors = {r.setting.name: r.keys.squared_error.sum() for r in results}
    assert errors["whole first"] < errors["packed first"]
    assert errors["some recent"] < errors["whole first"]
    kl = {r.setting.name: r.tokens.kl_mean for r in results}
    assert 0.0 < kl["some recent"] < kl["whole first"]
    with pytest.raises(ConfigurationError, match="keeps all 32 blocks"):
        run(model, all_recent)


def test_a_codec_that_is_not_as_lossless_as_it_says_is_found_out(model: LoadedModel) -> None:
    liar = setting("liar", lambda: RoundingCodec(20, is_lossless=True))
    with pytest.raises(CodecError, match="liar says that it is lossless, and pages come back"):
        run(model, liar)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_tokens": 500}, "500 tokens is not whole blocks of 16"),
        ({"num_tokens": 4096}, "takes 4,096 at most"),
        ({"num_places": 1000}, "1000 places of 552 are asked for"),
        ({"num_tokens": 64}, "has no room for a fact among other text"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    model: LoadedModel, changes: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        run(model, CONCAT, options=replace(OPTIONS, **changes))


def test_speed_is_of_pages_in_half_the_bytes(model: LoadedModel) -> None:
    sizes = []

    def make(pages: object) -> ColdPageCodec:
        sizes.append(pages[0].key.num_bytes)  # type: ignore[index]
        return create_default_cold_page_codec()

    options = replace(OPTIONS, num_repeats=3, num_needles=0, num_places=1)
    (result,) = run(model, CodecSetting("concat", make), options=options)
    assert sizes == [2 * 16 * 16 * 4, 2 * 16 * 16 * 2]
    speed = result.speed
    assert speed is not None and speed.ratio == 1.0
    assert speed.num_bytes == 512 * 3 * 2 * 2 * 16 * 2
    assert len(speed.encode_ms) == len(speed.decode_ms) == len(speed.copy_ms) == 3
    (row, *_) = result_rows(result)
    assert row["encode_gb_per_s"] == pytest.approx(
        speed.num_bytes / 1e6 / sorted(speed.encode_ms)[1]
    )


def test_steps_are_told_as_many_times_as_is_said(model: LoadedModel) -> None:
    options = replace(OPTIONS, num_repeats=1, num_places=1)
    lines: list[str] = []
    texts = [Text("words", "one two three four five " * 400)]
    settings = (CONCAT, setting("20 bits", lambda: RoundingCodec(20)))
    pages = model_pages(model, options.tokens_per_block)
    evaluate(model, pages, settings, texts, options, lines.append)
    assert len(lines) == options.num_steps(len(texts), len(settings)) == 3 * 3 + 2
    assert lines[1] == "words 1: concat" and lines[-1] == "speed: 20 bits"


def test_the_table_and_the_rows_say_what_was_measured(model: LoadedModel) -> None:
    results = run(model, CONCAT, setting("11 bits", lambda: RoundingCodec(11)))
    head, _, first, second = document_table(results).splitlines()
    assert head.startswith("| codec | KL mean | prose | code | KL p99 | top-1 |")
    assert first.startswith("| concat | 0 | 0 | 0 | 0 | 1 |")
    cells = [cell.strip() for cell in second.split("|")][1:-1]
    assert cells[0] == "11 bits" and float(cells[1]) == pytest.approx(
        results[1].tokens.kl_mean, rel=0.06
    )
    rows = list(result_rows(results[1]))
    assert [row["text"] for row in rows] == ["all", "prose", "code"]
    assert rows[0]["kl_mean"] == results[1].tokens.kl_mean
    assert rows[1]["kl_mean"] == results[1].tokens_of["prose"].kl_mean
    assert [said["own"] for said in rows[0]["needles"]] == [  # type: ignore[attr-defined]
        said.own for said in results[1].needles
    ]
