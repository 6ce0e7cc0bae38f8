"""``coldpage quality``: every codec on a real model and real text, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from coldpage.bench.quality.document import check_document, replace_generated
from coldpage.bench.quality.evaluation import CodecQuality, evaluate
from coldpage.bench.quality.models import find_model
from coldpage.bench.quality.options import QualityOptions
from coldpage.bench.quality.settings import CodecSetting
from coldpage.bench.quality.study import STUDIED_CODECS, stored_key_means, study_settings
from coldpage.bench.quality.summary import Summary
from coldpage.bench.quality.texts import load_texts
from coldpage.codecs import ModelPages, close_codec, codec_names, create_codec
from coldpage.engine.model.calibration import stored_or_made
from coldpage.engine.model.cold_codecs import model_pages
from coldpage.engine.model.model import LoadedModel, load_model
from coldpage.engine.stage_progress import StageProgress
from coldpage.errors import ConfigurationError

__all__ = ["run_quality"]


def run_quality(options: QualityOptions, console: Console) -> None:
    """Measure, print the tables, and write what is asked for. Blocks for minutes. Raises
    ColdpageError.
    """
    _check_options(options)
    _check_names(options.codecs)
    texts = load_texts(options.text)
    source = find_model(options.model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with StageProgress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("loading the model", total=None)

        def say(line: str, steps: int = 0) -> None:
            progress.update(task, description=line, advance=steps)

        model = load_model(source, torch.float32, say)
        calibration = stored_or_made(model, say)
        pages = model_pages(model, options.evaluation.tokens_per_block, calibration)
        settings, refusals = _settings(options, model, pages, say)
        evaluations = [options.evaluation_of(num_tokens) for num_tokens in options.context_tokens]
        num_steps = sum(its.num_steps(len(texts), len(settings)) for its in evaluations)
        progress.update(task, total=num_steps)
        results: dict[int, list[CodecQuality]] = {}
        for its in evaluations:
            results[its.num_tokens] = evaluate(
                model, pages, settings, texts, its, partial(say, steps=1)
            )
    summary = Summary(options, model, calibration, results, refusals)
    summary.show(console)
    if options.json_path is not None:
        summary.append_rows(options.json_path)
    if options.document is not None:
        replace_generated(options.document, options.command, summary.markdown())


def _check_options(options: QualityOptions) -> None:
    """Before minutes are spent."""
    if options.is_study and options.num_recent_blocks:
        raise ConfigurationError(
            "--study has settings of its own for newest blocks: leave --recent-blocks out"
        )
    if options.document is not None:
        check_document(options.document, options.command)
    if options.json_path is not None:
        _check_rows(options.json_path)


def _check_rows(path: Path) -> None:
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigurationError(f"--json: can not write to {path}: {error.strerror}") from error


def _check_names(specs: Sequence[str]) -> None:
    """Also that of a list whose layer groups nobody knows yet."""
    for spec in specs:
        names = {part.rpartition("=")[2].strip() for part in spec.split(",")}
        if not names <= set(codec_names()):
            create_codec(spec, {})


def _settings(
    options: QualityOptions, model: LoadedModel, pages: ModelPages, say: Callable[[str], None]
) -> tuple[list[CodecSetting], list[str]]:
    """What to evaluate; and why some do not go with the model, where nobody asked for them."""
    if options.is_study:
        names = options.codecs or STUDIED_CODECS
        say("what keys are on average, as they are stored")
        settings = study_settings(names, stored_key_means(model))
    else:
        specs = options.codecs or codec_names()
        settings = [_by_name(spec, options.num_recent_blocks) for spec in specs]
    taken, refusals = [], []
    for setting in settings:
        try:
            close_codec(setting.make(pages))
        except ConfigurationError as error:
            if options.codecs:
                raise
            refusals.append(f"{setting.name}: {error}")
        else:
            taken.append(setting)
    return taken, refusals


def _by_name(spec: str, num_recent_blocks: int) -> CodecSetting:
    return CodecSetting(
        spec, lambda pages: create_codec(spec, pages), num_recent_blocks=num_recent_blocks
    )
