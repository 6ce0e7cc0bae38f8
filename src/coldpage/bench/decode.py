"""``coldpage bench decode``: steps in which every sequence decodes one token, by the engine's model
runner with random weights, against the time that reading the weights and the cache takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from coldpage.bench.arena import is_gpu, prepared
from coldpage.bench.attention.layers import fill_pages
from coldpage.bench.clock import Timed, fastest, place_of
from coldpage.bench.kv import LLAMA_8B, SMOLLM2_135M, TOKENS_PER_BLOCK, Geometry
from coldpage.bench.prefill import MODELS
from coldpage.bench.rows import Row, median, quiet_progress, size_name
from coldpage.config import DeviceTierConfig
from coldpage.device.base import Device
from coldpage.engine.assembly import block_bytes, build_manager, with_hot_types
from coldpage.engine.forward.decode_graphs import MAX_GRAPH_ROWS
from coldpage.engine.forward.hot_pages import layer_pages
from coldpage.engine.forward.runner import LogitsWanted, ModelRunner, StepItem
from coldpage.engine.model.model import LoadedModel
from coldpage.engine.model.random_model import random_model
from coldpage.errors import ConfigurationError, DeviceError
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCache
from coldpage.types import LayerId

__all__ = ["BATCHES", "DecodeOptions", "run_decode"]

BATCHES: Final = (1, 16, 64)
# Of one sample, at the last positions of each sequence.
_STEPS: Final = {"cuda": 8, "cpu": 2}
_COPY_BYTES: Final = {"cuda": 1 << 30, "cpu": 64 << 20}
_NUM_COPY_PARTS: Final = 8
_DTYPE: Final = torch.bfloat16
# So that what running sequences may lock holds them all.
_HOT_BLOCKS: Final = 1.1


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What to measure; None is what suits the device. The types are named as for ``serve``."""

    geometry: Geometry | None = None
    num_tokens: int | None = None
    batches: tuple[int, ...] = BATCHES
    key_type: str = "auto"
    value_type: str = "auto"
    num_repeats: int = 5


class _WatchedRunner(ModelRunner):
    """Knows for how long it has waited for the device."""

    waited_s = 0.0

    def _wait(self) -> None:
        started_s = perf_counter()
        super()._wait()
        self.waited_s += perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class _Samples:
    """Milliseconds of a step."""

    total_ms: list[float]
    host_ms: list[float]  # until all was enqueued


class _Copy(NamedTuple):
    """What reads and writes all of some memory of the device."""

    name: str
    timed: Timed


@dataclass(frozen=True, slots=True)
class _Rig:
    """A model with sequences in its cache, and runners by what they do."""

    model: LoadedModel
    caches: Sequence[KVCache]
    runners: dict[str, _WatchedRunner]
    num_tokens: int
    place: torch.device

    def items(self, batch: int) -> list[list[StepItem]]:
        """Steps at the last positions of the first ``batch`` sequences."""
        num_steps = min(_STEPS[self.place.type], self.num_tokens)
        vocab_size: int = self.model.model.config.get_text_config().vocab_size
        tokens = np.random.default_rng(1).integers(0, vocab_size, (num_steps, batch, 1), np.int32)
        first = self.num_tokens - num_steps
        return [
            [
                StepItem(cache, first + step, token, LogitsWanted.LAST)
                for cache, token in zip(self.caches, own, strict=False)
            ]
            for step, own in enumerate(tokens)
        ]

    def read_bytes(self, batch: int) -> int:
        """By a step: all weights but the embeddings, of which few rows are read, and the cache."""
        network: Any = self.model.model
        parameters = {id(p): p for p in network.parameters()}
        if network.get_output_embeddings().weight is not network.get_input_embeddings().weight:
            del parameters[id(network.get_input_embeddings().weight)]
        weights: int = sum(p.numel() * p.element_size() for p in parameters.values())
        seen = self.num_tokens - (len(self.items(1)) - 1) / 2  # on average
        token_bytes = block_bytes(self.model, TOKENS_PER_BLOCK) // TOKENS_PER_BLOCK
        return weights + int(batch * seen * token_bytes)


def run_decode(device: Device, options: DecodeOptions, console: Console) -> list[Row]:
    """Measure, print the table, and return every row.

    Raises ConfigurationError for sizes or types that can not be, DeviceError where the device has
    not the memory, or a step as a CUDA graph gives other logits than without.
    """
    place = place_of(device)
    geometry = options.geometry or (LLAMA_8B if is_gpu(device) else SMOLLM2_135M)
    num_tokens = options.num_tokens or (1024 if is_gpu(device) else 256)
    _check_sizes(options, num_tokens, MODELS[geometry.name].context_tokens)
    on_device = torch.cuda.device(place) if is_gpu(device) else contextlib.nullcontext()
    with quiet_progress(console) as progress, on_device:
        task = progress.add_task("making weights", total=2 + len(options.batches))
        try:
            model = random_model(MODELS[geometry.name], place, _DTYPE)
            model = with_hot_types(model, options.key_type, options.value_type, TOKENS_PER_BLOCK)
            progress.update(task, description="filling the cache", advance=1)
            with _manager(model, device, num_tokens, max(options.batches)) as manager:
                rig = _rig(model, manager, options, num_tokens)
                copy = _copy(place)
                progress.advance(task)
                rows = []
                try:
                    for batch in options.batches:
                        progress.update(task, description=f"{batch} sequences")
                        rows += _rows(rig, geometry, batch, copy, options.num_repeats)
                        progress.advance(task)
                finally:
                    for cache in rig.caches:
                        cache.close()
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{place} has not enough memory: use fewer tokens") from error
    console.print(_table(rows, f"steps of decoding, {geometry.name}, {device.name}"))
    return rows


def _check_sizes(options: DecodeOptions, num_tokens: int, context_tokens: int) -> None:
    if num_tokens > context_tokens:
        raise ConfigurationError(
            f"{num_tokens:,} tokens a sequence: the model takes {context_tokens:,} at most"
        )
    if max(options.batches) > MAX_GRAPH_ROWS:
        raise ConfigurationError(
            f"{max(options.batches)} sequences: a step takes {MAX_GRAPH_ROWS} at most"
        )


def _manager(
    model: LoadedModel, device: Device, num_tokens: int, num_sequences: int
) -> KVCacheManager:
    num_blocks = num_sequences * -(-num_tokens // TOKENS_PER_BLOCK)
    num_hot = int(_HOT_BLOCKS * num_blocks) + 2
    hot = DeviceTierConfig(num_hot * block_bytes(model, TOKENS_PER_BLOCK))
    with prepared(device):
        manager = build_manager(model, (hot,), TOKENS_PER_BLOCK, device=device)
    manager.poll()  # the levels take what is ready
    return manager


def _rig(
    model: LoadedModel, manager: KVCacheManager, options: DecodeOptions, num_tokens: int
) -> _Rig:
    place, most = model.model.device, max(options.batches)
    caches = []
    for _ in range(most):
        cache = manager.create_kv_cache()
        assert cache.resume() and cache.resize(num_tokens), "the hot level has room for them"
        cache.synchronize()
        caches.append(cache)
    for index in range(len(model.layers)):
        layer = layer_pages(model, manager, LayerId(index))
        fill_pages(layer.keys)
        fill_pages(layer.values)
    ways = {"CUDA graph": True, "no graph": False} if place.type == "cuda" else {"no graph": False}
    runners = {
        name: _WatchedRunner(model, manager, max_decode_rows=most, use_graphs=use_graphs)
        for name, use_graphs in ways.items()
    }
    return _Rig(model, caches, runners, num_tokens, place)


def _copy(place: torch.device) -> _Copy:
    """The fastest on the device: one way alone may be far from what its memory can do."""
    source = torch.ones(_COPY_BYTES[place.type], dtype=torch.uint8, device=place)
    return _Copy(*fastest(_copies(source, torch.zeros_like(source)), place, num_units=1))


def _copies(source: torch.Tensor, target: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to read all of ``source`` and write all of ``target``."""
    num_parts = _NUM_COPY_PARTS
    parts = list(zip(source.chunk(num_parts), target.chunk(num_parts), strict=True))
    words, target_words = source.view(torch.int64), target.view(torch.int64)

    def copy_parts() -> None:
        for own, to in parts:
            to.copy_(own)

    return {
        "one copy": lambda: target.copy_(source),
        f"{num_parts} copies": copy_parts,
        "a kernel": lambda: torch.bitwise_not(words, out=target_words),
    }


# ---------------------------------------------------------------------- measuring


def _rows(rig: _Rig, geometry: Geometry, batch: int, copy: _Copy, num_repeats: int) -> list[Row]:
    steps = rig.items(batch)
    _check_equal(rig, steps[0])
    samples = {name: _Samples([], []) for name in rig.runners}
    copied_ms = []
    for repeat in range(num_repeats + 1):
        for name, runner in rig.runners.items():
            total_ms, host_ms = _step_ms(runner, steps)
            if repeat:  # the first warms up
                samples[name].total_ms.append(total_ms)
                samples[name].host_ms.append(host_ms)
        once_ms = copy.timed.ms()
        if repeat:
            copied_ms.append(once_ms)
    _check_counters(rig)
    read_bytes = rig.read_bytes(batch)
    # What is copied is read and written.
    moved_bytes = 2 * _COPY_BYTES[rig.place.type]
    limit_ms = [read_bytes / moved_bytes * ms for ms in copied_ms]
    types = rig.model.hot_types
    config = (
        f"{geometry.name}, {batch} x {rig.num_tokens:,} tokens, "
        f"K {types.key.name}, V {types.value.name}"
    )
    notes = {
        "batch": float(batch),
        "num_tokens": float(rig.num_tokens),
        "read_bytes": float(read_bytes),
        "copy_gb_per_s": round(moved_bytes / 1e6 / median(copied_ms), 3),
    }
    rival = f"reading weights and cache at the speed of {copy.name}"
    rows = []
    for name, own in samples.items():
        own_notes = {"tokens_per_s": round(1e3 * batch / median(own.total_ms), 1)}
        if rig.place.type == "cuda":
            own_notes["host_ms"] = round(median(own.host_ms), 3)
        rows.append(
            Row(
                f"decode step, {name}",
                config,
                rival,
                own.total_ms,
                limit_ms,
                notes=notes | own_notes,
            )
        )
    return rows


def _step_ms(runner: _WatchedRunner, steps: Sequence[Sequence[StepItem]]) -> tuple[float, float]:
    """Of one step: in all, and without what the host waited for the device."""
    runner.waited_s = 0.0
    started_s = perf_counter()
    for items in steps:
        runner.forward(items)
    spent_s = perf_counter() - started_s
    return 1e3 * spent_s / len(steps), 1e3 * (spent_s - runner.waited_s) / len(steps)


def _check_equal(rig: _Rig, items: Sequence[StepItem]) -> None:
    """Every runner gives the same bits, finite numbers."""
    results = []
    for runner in rig.runners.values():
        logits = [row for row in runner.forward(items) if row is not None]
        results.append(torch.cat(logits))
    if not all(bool(torch.isfinite(result).all()) for result in results):
        raise DeviceError("a decoding step gives logits that are no numbers")
    if not all(torch.equal(result, results[0]) for result in results):
        raise DeviceError("a decoding step as a CUDA graph gives other logits than without")


def _check_counters(rig: _Rig) -> None:
    for name, runner in rig.runners.items():
        is_graph = name == "CUDA graph"
        if is_graph and runner.counters["eager_decode_steps"]:
            raise DeviceError("a decoding step could not be captured as a CUDA graph")
        assert is_graph or not runner.counters["graph_decode_steps"]


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, show_edge=False)
    for column in ("sequences", "enqueued as"):
        table.add_column(column)
    numbers = ("ms a step", "tokens/s", "host ms", "reads", "limit ms", "part of the limit")
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        host_ms = row.notes.get("host_ms")
        table.add_row(
            row.config.partition(", ")[2],
            row.name.removeprefix("decode step, "),
            f"{median(row.ours_ms):,.2f}",
            f"{row.notes['tokens_per_s']:,.0f}",
            "" if host_ms is None else f"{host_ms:.2f}",
            size_name(int(row.notes["read_bytes"])),
            f"{median(row.rival_ms):,.2f}",
            f"{row.ratio:.2f}",
        )
    speed = median([row.notes["copy_gb_per_s"] for row in rows])
    table.caption = (
        f"limit: the weights and the cache that a step reads, at the {speed:,.0f} GB/s that the "
        f"fastest copy on the device reads and writes ({rows[0].rival.rpartition(' of ')[2]}); "
        "host: until a step is enqueued"
    )
    return table
