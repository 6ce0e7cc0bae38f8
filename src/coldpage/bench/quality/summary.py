"""What one run of ``coldpage quality`` has to say: on the terminal, in a document, as rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from coldpage.bench.quality.evaluation import CodecQuality
from coldpage.bench.quality.options import QualityOptions
from coldpage.bench.quality.report import document_table, printed_table, result_rows
from coldpage.bench.rows import machine_facts
from coldpage.engine.model.calibration import Calibration
from coldpage.engine.model.model import LoadedModel

__all__ = ["Summary"]


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """``results`` by the tokens of a context, in the order of the settings; ``refusals`` are
    sentences about codecs that the model does not go with.
    """

    options: QualityOptions
    model: LoadedModel
    calibration: Calibration
    results: Mapping[int, Sequence[CodecQuality]]
    refusals: Sequence[str]

    def show(self, console: Console) -> None:
        """Print everything."""
        for line in self._setup():
            console.print(line, highlight=False)
        for num_tokens, results in self.results.items():
            title = f"{self.model.name}, {num_tokens:,} tokens through the codec"
            console.print(printed_table(title, results))
            for line in self._baseline(results):
                console.print(line, highlight=False)
            if self.options.is_verbose:
                for line in _answers(results):
                    console.print(line, markup=False, highlight=False)
        for line in self.refusals:
            console.print(line, markup=False, highlight=False)

    def markdown(self) -> str:
        """Paragraphs and tables."""
        parts = [" ".join([f"`{self.options.command}`:", *self._setup()])]
        for num_tokens, results in self.results.items():
            if len(self.results) > 1:
                parts.append(f"**{num_tokens:,} tokens**")
            parts += [document_table(results), " ".join(self._baseline(results))]
        if self.refusals:
            parts.append("\n".join(f"* {line}" for line in self.refusals))
        return "\n\n".join(parts)

    def append_rows(self, path: Path) -> None:
        """One JSON object a line, each with the machine."""
        facts = {
            **machine_facts("host"),
            "num_cores": _num_cores(),
            "benchmark": "quality",
            "command": self.options.command,
            "model": self.model.name,
            "dtype": "float32",
            "tokens_per_block": self.options.evaluation.tokens_per_block,
            "calibration": self.calibration.name,
        }
        with open(path, "a", encoding="utf-8") as file:
            for num_tokens, results in self.results.items():
                for result in results:
                    for row in result_rows(result):
                        file.write(json.dumps({**facts, "num_tokens": num_tokens, **row}) + "\n")

    # ------------------------------------------------------------------ sentences

    def _setup(self) -> Iterator[str]:
        own, facts = self.options.evaluation, machine_facts("host")
        some = next(iter(self.results.values()))[0]
        contexts = ", ".join(f"{tokens:,}" for tokens in self.results)
        yield (
            f"{self.model.name} in float32 at commit {facts['commit'] or 'unknown'} on "
            f"{facts['date'][:10]}; {_num_cores()} cores of {facts['cpu']}, torch "
            f"{torch.__version__}."
        )
        texts = f"{' and '.join(some.tokens_of)} ({self.options.text} text)"
        yield (
            f"At {own.num_places} places each of {texts} {contexts} tokens in blocks of "
            f"{own.tokens_per_block} go through the codec, and the next {own.num_read_tokens} are "
            "read behind them."
        )
        if self.options.num_recent_blocks:
            yield f"Of them the newest {self.options.num_recent_blocks} blocks are kept whole."
        known = self.calibration
        yield f"Means of keys are those of {known.num_tokens:,} tokens, {known.name}."
        if some.speed is not None:
            yield (
                f"GB/s are of hot bytes in bf16 on all cores, medians of {len(some.speed.copy_ms)}."
            )

    def _baseline(self, results: Sequence[CodecQuality]) -> Iterator[str]:
        """The same figures without a codec."""
        first = results[0]
        said = f"On the cache as it was computed: perplexity {first.tokens.lossless_perplexity:.3f}"
        if first.needles:
            right = sum(one.needle.is_in(one.lossless) for one in first.needles)
            said += f", needles {right} of {len(first.needles)}"
        yield said + "."
        if first.speed is not None:
            yield (
                f"One thread copies the {first.speed.num_bytes / 1e6:,.1f} MB of a context at "
                f"{first.speed.copy_gb_per_s:.1f} GB/s."
            )


def _answers(results: Sequence[CodecQuality]) -> Iterator[str]:
    """Every needle's exact text."""
    for index, said in enumerate(results[0].needles):
        yield f"needle {index + 1}: {said.needle.answer}"
        yield f"  lossless: {said.lossless!r}"
        for result in results:
            yield f"  {result.setting.name}: {result.needles[index].own!r}"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
