"""``coldpage bench codecs``: pages through each codec between hot and host memory, against one
contiguous copy of what crosses the link, and what decoding loses meanwhile.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from coldpage.bench.arena import Arena, Direction, default_bytes, is_gpu
from coldpage.bench.page_moves import PageMoves
from coldpage.bench.rows import Row, median, quiet_progress, size_name
from coldpage.codecs import BufferDesc, LayerVectors, ModelPages, create_codec
from coldpage.device.base import Device
from coldpage.errors import ConfigurationError, DeviceError
from coldpage.kernels.cold.formats import KVShape, NumberType
from coldpage.types import BufferId, BufferRole, LayerId, PoolIndex

if TYPE_CHECKING:
    from coldpage.bench.decode_load import DecodeLoad

__all__ = ["CODECS", "CodecBenchOptions", "run_codecs"]

CODECS: Final = ("concat", "int8", "fp8", "k8v4", "int4", "turbo4", "turbo3")
# As a model of 8 billion parameters has.
_SHAPE: Final = KVShape(8, 16, 128, NumberType.BF16)
_NUM_LAYERS: Final = 32
_PAGE_BYTES: Final = 2 * _NUM_LAYERS * _SHAPE.num_bytes
# So that what is left of the bytes takes long enough.
_NUM_DEFAULT: Final = 4
_ROTARY_BASE: Final = 500_000.0
_DIRECTIONS: Final[dict[Direction, str]] = {"down": "offload", "up": "onboard"}
_BESIDE: Final[dict[Direction, str]] = {**_DIRECTIONS, "both": "both ways at once"}
# What part of the limit a GPU must reach; and what a page of Gaussian numbers may be off by.
_GOAL: Final = 0.9
_MAX_ERROR: Final = 0.3


@dataclass(frozen=True, slots=True)
class CodecBenchOptions:
    """What to measure. ``num_bytes`` of hot pages move at a time; None: what suits the device."""

    codecs: tuple[str, ...] = CODECS
    num_bytes: int | None = None
    num_repeats: int = 5
    has_decode: bool = True


@dataclass(frozen=True, slots=True)
class _Case:
    """One line of the table."""

    codec: str
    ratio: float  # of cold bytes to hot ones
    error: float
    hot_bytes: int
    rows: dict[Direction, Row]
    beside: dict[Direction, Row]

    def gb_per_s(self, direction: Direction) -> float:
        """Of hot bytes."""
        return self.hot_bytes / 1e6 / median(self.rows[direction].ours_ms)


def run_codecs(device: Device, options: CodecBenchOptions, console: Console) -> list[Row]:
    """Measure, print the table, and return every row. Leaves memory and streams to the device.

    Raises ConfigurationError for names that are no codec or bytes that hold no page, DeviceError
    where a page comes back as another.
    """
    num_bytes = options.num_bytes or _NUM_DEFAULT * default_bytes(device)
    if num_bytes < _PAGE_BYTES:
        raise ConfigurationError(
            f"a page of {size_name(_PAGE_BYTES)} does not fit {size_name(num_bytes)}: move more"
        )
    for name in options.codecs:
        create_codec(name, _model_pages())
    has_decode = options.has_decode and is_gpu(device)
    if has_decode and importlib.util.find_spec("torch") is None:
        console.print("Decoding beside moves is left out: torch is not installed here.")
        has_decode = False
    with quiet_progress(console) as progress:
        task = progress.add_task("preparing memory", total=len(options.codecs) + 1)
        arena = Arena(device, num_bytes)
        load = _decode_load(device) if has_decode else None
        progress.advance(task)
        cases = []
        for name in options.codecs:
            progress.update(task, description=name)
            cases.append(_measure(arena, name, load, options))
            progress.advance(task)
    console.print(_table(device, cases, load))
    rows = [row for case in cases for row in case.rows.values()]
    return rows + [row for case in cases for row in case.beside.values()]


def _decode_load(device: Device) -> DecodeLoad:
    from coldpage.bench.decode_load import DecodeLoad

    return DecodeLoad(device.name)


def _model_pages() -> ModelPages:
    turns = _ROTARY_BASE ** (-np.arange(0, 1, 2 / _SHAPE.head_dim)) / (2 * np.pi)
    frequencies = np.round(turns * 2**32).astype(np.uint32)
    means = np.random.default_rng(5).normal(0, 0.1, (_SHAPE.num_kv_heads, _SHAPE.head_dim))
    layer = LayerVectors(_SHAPE, _SHAPE, frequencies, means.astype(np.float32))
    return {LayerId(index): layer for index in range(_NUM_LAYERS)}


def _buffers() -> tuple[BufferDesc, ...]:
    """Keys and values of each layer beside each other, as in the engine."""
    roles = (BufferRole("key"), BufferRole("value"))
    names = [BufferId(LayerId(layer), role) for layer in range(_NUM_LAYERS) for role in roles]
    size = _SHAPE.num_bytes
    return tuple(
        BufferDesc(name, PoolIndex(0), index * size, size) for index, name in enumerate(names)
    )


def _gaussian_page() -> npt.NDArray[np.uint16]:
    numbers = np.random.default_rng(6).standard_normal(_PAGE_BYTES // 2, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _measure(arena: Arena, name: str, load: DecodeLoad | None, options: CodecBenchOptions) -> _Case:
    max_bytes = arena.device.max_page_kernel_bytes
    # Plain copies leave bytes in hot memory that are no numbers: no page is checked.
    codec = create_codec(
        name, _model_pages(), max_page_kernel_bytes=max_bytes, check_interval_pages=0
    )
    moves = PageMoves(arena, (_PAGE_BYTES,), codec, _buffers())
    with closing(moves):
        page = _gaussian_page()
        moves.fill(page)
        error = moves.error_of(page)
        # Written so that NaN is refused.
        if not error <= (0 if codec.is_lossless else _MAX_ERROR):
            raise DeviceError(f"pages come back from {name} {error:.0%} off what they were")
        rows = {d: _row(arena, moves, name, d, options.num_repeats) for d in _DIRECTIONS}
        beside = {}
        if load is not None:
            ways = (*_DIRECTIONS, "both")
            beside = {d: _beside_row(load, moves, name, d, options.num_repeats) for d in ways}
        ratio = moves.num_cold_bytes / moves.num_bytes
        return _Case(name, ratio, error, moves.num_bytes, rows, beside)


def _row(arena: Arena, moves: PageMoves, name: str, direction: Direction, num_repeats: int) -> Row:
    ours, limit = [], []
    for repeat in range(num_repeats + 1):
        moved_ms = arena.timed_ms(lambda: moves.move(direction))
        copied_ms = arena.timed_ms(lambda: arena.copy_plainly(direction, moves.num_cold_bytes))
        if repeat:  # the first warms up
            ours.append(moved_ms)
            limit.append(copied_ms)
    notes = {
        "cold_per_hot_byte": round(moves.num_cold_bytes / moves.num_bytes, 4),
        "hot_gb_per_s": round(moves.num_bytes / 1e6 / median(ours), 2),
        "link_gb_per_s": round(moves.num_cold_bytes / 1e6 / median(limit), 2),
    }
    config = f"{name}, {size_name(moves.num_bytes)} of pages of {size_name(_PAGE_BYTES)}"
    goal = f">= {_GOAL}" if is_gpu(arena.device) else "-"
    rival = "one contiguous copy of the cold bytes"
    return Row(_DIRECTIONS[direction], config, rival, ours, limit, goal, notes=notes)


def _beside_row(
    load: DecodeLoad, moves: PageMoves, name: str, direction: Direction, num_repeats: int
) -> Row:
    alone, beside, speeds = load.compare(
        lambda: moves.start_round(direction), moves.round_bytes(direction), num_repeats
    )
    notes = {
        "moved_hot_gb_per_s": round(median(speeds), 2),
        "percent_slower": round(100 * (median(beside) / median(alone) - 1), 2),
    }
    config, goal = f"{name}, {_BESIDE[direction]}", "<= 1.1"
    return Row("decode beside moves", config, "decode alone", beside, alone, goal, False, notes)


def _table(device: Device, cases: Sequence[_Case], load: DecodeLoad | None) -> Table:
    title = f"pages through codecs between hot and host memory, {device.name}"
    table = Table(title=title, show_edge=False)
    table.add_column("codec")
    columns = ["of hot bytes", "error", "down GB/s", "up GB/s", "of limit", "of limit"]
    if load is not None:
        columns += ["decode slower", "moved GB/s"]
    for column in columns:
        table.add_column(column, justify="right")
    for case in cases:
        cells = [f"{case.ratio:.3f}", f"{case.error:.4f}"]
        cells += [f"{case.gb_per_s(direction):.1f}" for direction in _DIRECTIONS]
        cells += [_ratio_cell(device, case.rows[direction]) for direction in _DIRECTIONS]
        if case.beside:
            notes = [row.notes for row in case.beside.values()]
            cells.append(" / ".join(f"{it['percent_slower']:.1f}" for it in notes) + " %")
            cells.append(" / ".join(f"{it['moved_hot_gb_per_s']:.0f}" for it in notes))
        table.add_row(case.codec, *cells)
    down, up = (
        median([case.rows[d].notes["link_gb_per_s"] for case in cases]) for d in _DIRECTIONS
    )
    table.caption = (
        f"GB/s of hot bytes, down and up; limit: one contiguous copy of the cold bytes, {down:.1f} "
        f"down and {up:.1f} up; error: of a page of Gaussian numbers"
    )
    if load is not None:
        table.caption += f"; decode: attention of {load.description}, beside down / up / both ways"
    return table


def _ratio_cell(device: Device, row: Row) -> str:
    if not is_gpu(device):
        return f"{row.ratio:.2f}"
    color = "green" if row.ratio >= _GOAL else "red"
    return f"[{color}]{row.ratio:.2f}[/]"
