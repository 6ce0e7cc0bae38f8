"""The engine's forward pass against transformers' own generate and cache: same model, same run.

    PYTHONPATH=src python -m benchmarks.engine_vs_transformers [--quick]

Rounds of the two alternate, so that a slow minute of the machine falls on both. Prints a table and
appends a JSON line per row to ``benchmarks/results/engine.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table as RichTable
from transformers import DynamicCache, StoppingCriteriaList

from coldpage.engine.geometry import cache_argument
from coldpage.engine.model import LoadedModel, load_model
from coldpage.engine.runner import DEFAULT_CHUNK_TOKENS, LogitsWanted, ModelRunner, StepItem
from tests.engine.arena import Arena, Table

TOKENS_PER_BLOCK = 16
NEW_TOKENS = 32  # of a resumed conversation's turn
DECODE_STEPS = 12  # of one round; the first is thrown away
RESULTS = Path(__file__).parent / "results" / "engine.jsonl"


@dataclass(frozen=True)
class Row:
    """One comparison: milliseconds of each side, per repetition."""

    what: str
    dtype: str
    context_tokens: int
    batch: int
    ours_ms: list[float]
    rival_ms: list[float]

    @property
    def ratio(self) -> float:
        """How many times faster than the rival, by medians."""
        return statistics.median(self.rival_ms) / statistics.median(self.ours_ms)


class Sides:
    """One model twice: on pages, and as transformers runs it."""

    def __init__(self, dtype: torch.dtype, longest_tokens: int) -> None:
        ours = load_model(None, dtype, lambda line: None)
        self.rival: Any = load_model(None, dtype, lambda line: None).model
        self.arena = _arena(ours, 4 * (longest_tokens // TOKENS_PER_BLOCK + 8))
        self.runner = ModelRunner(ours, self.arena)
        self.cache_argument = cache_argument(self.rival)
        self._free = list(np.random.default_rng(0).permutation(self.arena.num_slots))

    def table(self, num_tokens: int) -> Table:
        """Shuffled slots for ``num_tokens``."""
        return Table(
            [np.array([self._free.pop() for _ in range(-(-num_tokens // TOKENS_PER_BLOCK))])]
        )

    def free(self, tables: list[Table]) -> None:
        """Gives the slots back."""
        for table in tables:
            self._free.extend(table.slots[0].tolist())

    def prefill_ours(self, table: Table, tokens: np.ndarray, chunk: int) -> None:
        """Chunked prefill into ``table``."""
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            last = start + chunk >= len(tokens)
            wanted = LogitsWanted.LAST if last else LogitsWanted.NONE
            self.runner.forward([StepItem(table, start, part, wanted)])

    def resume_ours(self, table: Table, start: int, tokens: np.ndarray) -> None:
        """The first step of a turn of ``tokens`` behind a history of ``start`` tokens in pages."""
        self.runner.forward([StepItem(table, start, tokens, LogitsWanted.LAST)])

    def prefill_rival(self, tokens: np.ndarray) -> Any:
        """The whole prompt at once into a new DynamicCache, which is returned."""
        cache = DynamicCache(config=self.rival.config)
        with torch.inference_mode():
            ids = torch.from_numpy(tokens).long()[None]
            self.rival(input_ids=ids, logits_to_keep=1, **{self.cache_argument: cache})
        return cache


def _arena(model: LoadedModel, num_slots: int) -> Arena:
    size = TOKENS_PER_BLOCK * model.dtype.itemsize
    layers = [
        (layer.sliding_window_tokens, size * layer.num_kv_heads * layer.head_dim)
        for layer in model.layers
    ]
    return Arena(layers, num_slots, TOKENS_PER_BLOCK, fill=0)


def _timed_ms(work: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    work(*arguments)
    return (time.perf_counter() - started) * 1e3


def _generate_steps(sides: Sides, cache: Any, tokens: np.ndarray, batch: int) -> list[float]:
    """Milliseconds of each of generate's decode steps behind a prefilled cache."""
    ends: list[float] = []

    def record(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    cache = copy.deepcopy(cache)
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    ids = torch.from_numpy(np.append(tokens, 7)).long()[None].repeat(batch, 1)
    sides.rival.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=DECODE_STEPS,
        max_new_tokens=DECODE_STEPS,
        stopping_criteria=StoppingCriteriaList([record]),
        **{sides.cache_argument: cache},
    )
    return [1e3 * (b - a) for a, b in itertools.pairwise(ends)]


def _our_steps(sides: Sides, tables: list[Table], start: int) -> list[float]:
    """Milliseconds of each of our decode steps, greedy, all tables together."""
    next_ids = [7] * len(tables)
    taken = []
    for step in range(DECODE_STEPS):
        started = time.perf_counter()
        items = [
            StepItem(t, start + step, np.array([i], np.int32), LogitsWanted.LAST)
            for t, i in zip(tables, next_ids, strict=True)
        ]
        next_ids = [int(row.argmax()) for row in sides.runner.forward(items) if row is not None]
        taken.append(1e3 * (time.perf_counter() - started))
    return taken[1:]


def _copies(sides: Sides, table: Table, num_tokens: int, count: int) -> list[Table]:
    """Tables with the same contents in slots of their own."""
    made = []
    for _ in range(count):
        other = sides.table(num_tokens)
        for pool in sides.arena.pools:
            pool[other.slots[0]] = pool[table.slots[0]]
        made.append(other)
    return made


def measure(dtype: torch.dtype, contexts: list[int], repetitions: int, chunk: int) -> list[Row]:
    """All rows of one dtype."""
    sides = Sides(dtype, max(contexts))
    name = str(dtype).removeprefix("torch.")
    rows = []
    sides.prefill_rival(np.full(64, 7, np.int32))
    for context in contexts:
        tokens = np.random.default_rng(context).integers(5, 40_000, context).astype(np.int32)
        num_tokens = context + NEW_TOKENS + DECODE_STEPS
        table = sides.table(num_tokens)
        sides.prefill_ours(table, tokens[:64], chunk)
        ours, rival = [], []
        for _ in range(repetitions if context > 200 else 5 * repetitions):
            ours.append(_timed_ms(sides.prefill_ours, table, tokens, chunk))
            started = time.perf_counter()
            cache = sides.prefill_rival(tokens)
            rival.append((time.perf_counter() - started) * 1e3)
        rows.append(Row("prefill", name, context, 1, ours, rival))
        resumed = [
            _timed_ms(sides.resume_ours, table, context, tokens[:NEW_TOKENS])
            for _ in range(3 * repetitions)
        ]
        rows.append(Row(f"resume, {NEW_TOKENS} new", name, context, 1, resumed, rival))
        for batch in (1, 4):
            tables = [table, *_copies(sides, table, num_tokens, batch - 1)]
            ours, rival = [], []
            for _ in range(3):
                rival += _generate_steps(sides, cache, tokens, batch)
                ours += _our_steps(sides, tables, context)
            rows.append(Row("decode step", name, context, batch, ours, rival))
            sides.free(tables[1:])
        sides.free([table])
    return rows


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _spread(values: list[float]) -> list[float]:
    return [round(float(v), 2) for v in np.percentile(values, [10, 90])]


def report(rows: list[Row], chunk: int) -> None:
    """Prints the table and appends the rows to the results."""
    table = RichTable(
        "what", "dtype", "context", "batch", "coldpage ms", "transformers ms", "x faster"
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": "SmolLM2-135M-Instruct",
        "pages": "arena",
        "tokens_per_block": TOKENS_PER_BLOCK,
        "chunk_tokens": chunk,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        for row in rows:
            ours, rival = statistics.median(row.ours_ms), statistics.median(row.rival_ms)
            numbers = [str(row.context_tokens), str(row.batch), f"{ours:.1f}", f"{rival:.1f}"]
            table.add_row(row.what, row.dtype, *numbers, f"{row.ratio:.2f}")
            line = machine | {
                "what": row.what,
                "dtype": row.dtype,
                "context_tokens": row.context_tokens,
                "batch": row.batch,
                "ours_ms_median": round(ours, 2),
                "ours_ms_p10_p90": _spread(row.ours_ms),
                "rival_ms_median": round(rival, 2),
                "rival_ms_p10_p90": _spread(row.rival_ms),
                "ratio": round(row.ratio, 3),
            }
            file.write(json.dumps(line) + "\n")
    Console(width=100).print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="contexts 128 and 1,500 in bf16 only")
    parser.add_argument("--chunk", type=int, default=DEFAULT_CHUNK_TOKENS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    dtypes = [torch.bfloat16] if arguments.quick else [torch.bfloat16, torch.float32]
    contexts = [128, 1500] if arguments.quick else [128, 1500, 6000]
    rows = [row for dtype in dtypes for row in measure(dtype, contexts, 3, arguments.chunk)]
    report(rows, arguments.chunk)


if __name__ == "__main__":
    main()
