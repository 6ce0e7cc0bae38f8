"""``coldpage bench attention``: attention over pages, and what brings numbers into pages and out of
them, beside the library over contiguous memory and beside plain copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from coldpage.bench.attention.decode import DTYPE, DecodeCase, decode_rows
from coldpage.bench.attention.layers import TOKENS_PER_BLOCK, Heads, type_names
from coldpage.bench.attention.moves import gather_rows, write_rows
from coldpage.bench.attention.prefill import PrefillCase, prefill_rows
from coldpage.bench.clock import place_of
from coldpage.bench.rows import Row, quiet_progress
from coldpage.device.base import Device
from coldpage.engine.model.hot_types import HotTypes, choose_hot_types, why_unsupported
from coldpage.errors import ConfigurationError, DeviceError

__all__ = ["PARTS", "AttentionBenchOptions", "run_attention"]

PARTS: Final = ("decode", "prefill", "moves")
_PLAIN: Final = HotTypes.plain(DTYPE)
_8B: Final = Heads(32, 8, 128)
# Of what is free on a GPU; the rest is for the rivals.
_POOL_FRACTION: Final = 0.7
_CPU_POOL_BYTES: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class AttentionBenchOptions:
    """What to measure. ``pool_bytes`` None is what suits the device. The first case is measured in
    all ``types``, the others in bf16, if that is one of them."""

    types: tuple[str, ...]  # of keys and values, or keys/values
    parts: tuple[str, ...] = PARTS
    pool_bytes: int | None = None
    num_repeats: int = 7


class _Sizes(NamedTuple):
    """The cases of a device."""

    decode: tuple[DecodeCase, ...]
    prefill: tuple[PrefillCase, ...]
    gathered_tokens: int
    written_tokens: tuple[int, int]  # by decoding sequences, and by a step of prefill


_GPU_SIZES: Final = _Sizes(
    decode=(
        DecodeCase(64, 8192, _8B),
        DecodeCase(16, 8192, _8B),
        DecodeCase(1, 32_768, _8B),
        DecodeCase(1, 131_072, _8B),
        DecodeCase(64, 4096, Heads(16, 2, 256)),
        DecodeCase(64, 8192, Heads(9, 3, 64)),
    ),
    prefill=(PrefillCase(2048, 32_768, _8B), PrefillCase(8192, 32_768, _8B)),
    gathered_tokens=32_768,
    written_tokens=(64, 8192),
)
_CPU_SIZES: Final = _Sizes(
    decode=(
        DecodeCase(4, 512, _8B),
        DecodeCase(1, 1024, _8B),
        DecodeCase(4, 256, Heads(16, 2, 256)),
        DecodeCase(4, 512, Heads(9, 3, 64)),
    ),
    prefill=(PrefillCase(64, 512, _8B), PrefillCase(256, 512, _8B)),
    gathered_tokens=512,
    written_tokens=(64, 512),
)


def run_attention(device: Device, options: AttentionBenchOptions, console: Console) -> list[Row]:
    """Measure, print the tables, and return every row.

    Raises ConfigurationError for types that the device does not know or a pool that is too small,
    DeviceError where the device has not the memory, or attention gives other results.
    """
    place = place_of(device)
    sizes = _GPU_SIZES if place.type == "cuda" else _CPU_SIZES
    types = [_hot_types(name, place) for name in options.types]
    with _memory_as_a_sentence(place), torch.inference_mode():
        pool = torch.empty(_pool_bytes(options, place), dtype=torch.uint8, device=place)
        rows: list[Row] = []
        for part, cases_of, table_of in (
            ("decode", _decode_cases, _decode_table),
            ("prefill", _prefill_cases, _prefill_table),
            ("moves", _move_cases, _move_table),
        ):
            if part not in options.parts:
                continue
            found = _measured(list(cases_of(pool, sizes, types, options.num_repeats)), console)
            table = table_of(found)
            table.title = f"{table.title}, {device.name}"
            console.print(table)
            rows += found
    return rows


def _hot_types(name: str, place: torch.device) -> HotTypes:
    key, _, value = name.partition("/")
    types = choose_hot_types(key, value or key, DTYPE)
    sentence = why_unsupported(types, [_8B.head_dim], TOKENS_PER_BLOCK, DTYPE, place)
    if sentence is not None:
        raise ConfigurationError(sentence)
    return types


def _pool_bytes(options: AttentionBenchOptions, place: torch.device) -> int:
    if options.pool_bytes is not None:
        return options.pool_bytes
    if place.type == "cpu":
        return _CPU_POOL_BYTES
    return int(_POOL_FRACTION * torch.cuda.mem_get_info(place)[0])


@contextlib.contextmanager
def _memory_as_a_sentence(place: torch.device) -> Iterator[None]:
    on_device = torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device:
            yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{place} has not enough memory: give less with --bytes") from error
    finally:
        if place.type == "cuda":
            torch.cuda.empty_cache()


_Case = tuple[str, Callable[[], list[Row]]]


def _measured(cases: Sequence[_Case], console: Console) -> list[Row]:
    rows = []
    with quiet_progress(console) as progress:
        task = progress.add_task("", total=len(cases))
        for name, measure in cases:
            progress.update(task, description=name)
            rows += measure()
            progress.advance(task)
    return rows


# ---------------------------------------------------------------------- decode


def _decode_cases(
    pool: torch.Tensor, sizes: _Sizes, types: Sequence[HotTypes], num_repeats: int
) -> Iterator[_Case]:
    for index, case in enumerate(sizes.decode):
        for own in types:
            if index == 0 or own == _PLAIN:
                yield (
                    f"decode: {case}, {type_names(own)}",
                    partial(decode_rows, pool, case, own, num_repeats),
                )


def _decode_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "attention of one token a sequence, one layer",
        ("sequences", "contiguous"),
        ("µs", "GB/s", "x bf16", "µs", "GB/s", "x contiguous"),
    )
    plain_us: dict[str, float] = {}
    for row in rows:
        case, _, types = row.config.rpartition(", ")
        notes = row.notes
        if types == _PLAIN.key.name:
            plain_us[case] = notes["us"]
        if case in plain_us:
            notes["times_bf16"] = round(plain_us[case] / notes["us"], 3)
        table.add_row(
            row.config,
            row.rival.removeprefix("contiguous bf16, "),
            f"{notes['us']:,.1f}",
            _speed(notes["gb_per_s"]),
            f"{notes['times_bf16']:.2f}" if "times_bf16" in notes else "",
            f"{notes['rival_us']:,.1f}",
            _speed(notes["rival_gb_per_s"]),
            f"{row.ratio:.2f}",
        )
    table.caption = (
        "GB/s of K and V as they are stored; x bf16: times as fast as bf16 pages; contiguous: the "
        "library's fastest way over bf16 in a row, whose time and speed follow"
    )
    return table


# ---------------------------------------------------------------------- prefill


def _prefill_cases(
    pool: torch.Tensor, sizes: _Sizes, types: Sequence[HotTypes], num_repeats: int
) -> Iterator[_Case]:
    for case in sizes.prefill:
        for own in types:
            if own.key == own.value and own.key.name in ("bf16", "turbo4"):
                yield (
                    f"prefill: {case}, {type_names(own)}",
                    partial(prefill_rows, pool, case, own, num_repeats),
                )


def _prefill_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "attention of a chunk of a prompt, one layer",
        ("queries", "beside"),
        ("µs", "TFLOP/s", "TFLOP/s", "ratio"),
    )
    for row in rows:
        table.add_row(
            row.config,
            row.rival,
            f"{row.notes['us']:,.0f}",
            _speed(row.notes["tflop_per_s"]),
            _speed(row.notes["rival_tflop_per_s"]),
            f"{row.ratio:.2f}",
        )
    table.caption = "with the gather of the pages and the merge; the others read contiguous bf16"
    return table


# ---------------------------------------------------------------------- moves


def _move_cases(
    pool: torch.Tensor, sizes: _Sizes, types: Sequence[HotTypes], num_repeats: int
) -> Iterator[_Case]:
    for own in types:
        yield (
            f"gather: {type_names(own)}",
            partial(gather_rows, pool, sizes.gathered_tokens, _8B, own, num_repeats),
        )
        yield (
            f"write: {type_names(own)}",
            partial(write_rows, pool, sizes.written_tokens, _8B, own, num_repeats),
        )


def _move_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "keys and values into pages and out of them, one layer",
        ("what", "tokens"),
        ("µs", "GB/s", "µs", "GB/s", "x copy"),
    )
    for row in rows:
        table.add_row(
            row.name,
            row.config,
            f"{row.notes['us']:,.1f}",
            _speed(row.notes["gb_per_s"]),
            f"{row.notes['rival_us']:,.1f}",
            _speed(row.notes["rival_gb_per_s"]),
            f"{row.ratio:.2f}",
        )
    table.caption = (
        "GB/s read and written together; then a copy on the device that reads and writes as much"
    )
    return table


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, show_edge=False)
    for column in texts:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _speed(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2f}"
