"""``coldpage bench migrate``: scattered pages through the codec against one contiguous copy of the
same bytes, by the size of a page's parts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from coldpage.bench.arena import Arena, Direction, default_bytes, is_gpu
from coldpage.bench.page_moves import MovePath, PageMoves
from coldpage.bench.rows import Row, median, quiet_progress, size_name
from coldpage.device.base import Device
from coldpage.errors import ConfigurationError

if TYPE_CHECKING:
    from coldpage.bench.decode_load import DecodeLoad

__all__ = ["CALL_PAGES", "MIXED_SEGMENTS", "SEGMENTS", "MigrateOptions", "run_migrate"]

_KIB: Final = 1024
_MIB: Final = 1024 * 1024
SEGMENTS: Final = tuple(_KIB << n for n in range(2, 13))  # 4 KiB to 4 MiB
# A page of three pools: a large one, a small one, and scales.
MIXED_SEGMENTS: Final = (64 * _KIB, 16 * _KIB, 4 * _KIB)
_DECODE_SEGMENTS: Final = (4 * _KIB, 64 * _KIB, 2 * _MIB)
_INDEX_BATCHES: Final = (8 * _KIB, 64 * _KIB)
_PAIR_BYTES: Final = 8
_UPLOADS: Final = 64  # in a row: one is too short to time
# Of the calls whose cost to the calling thread is timed.
CALL_PAGES: Final = 1000
_DIRECTIONS: Final[dict[Direction, str]] = {
    "down": "offload",
    "up": "onboard",
    "both": "both ways",
}
# What part of the limit a GPU must reach from each size on: down, up, both.
_GOALS: Final = (
    (_MIB, (0.97, 0.97, 0.93)),
    (16 * _KIB, (0.95, 0.93, 0.93)),
    (0, (0.9, 0.88, 0.93)),
)


@dataclass(frozen=True, slots=True)
class MigrateOptions:
    """What to measure. ``num_bytes`` is what a direction moves at a time; None: what suits the
    device. ``segments`` are the sizes of a page's parts, one tuple a case.
    """

    path: MovePath = MovePath.AUTO
    num_bytes: int | None = None
    num_repeats: int = 5
    segments: tuple[tuple[int, ...], ...] = (*((size,) for size in SEGMENTS), MIXED_SEGMENTS)
    has_decode: bool = True


@dataclass(frozen=True, slots=True)
class _Case:
    """One line of the table."""

    segments: tuple[int, ...]
    path: MovePath
    num_pages: int
    num_bytes: int
    rows: dict[Direction, Row]

    def gb_per_s(self, direction: Direction, *, is_limit: bool = False) -> float:
        row = self.rows[direction]
        num_bytes = (2 if direction == "both" else 1) * self.num_bytes
        return num_bytes / 1e6 / median(row.rival_ms if is_limit else row.ours_ms)


def run_migrate(device: Device, options: MigrateOptions, console: Console) -> list[Row]:
    """Measure, print the tables, and return every row. Leaves memory and streams to the device.

    Raises ConfigurationError when a page does not fit, DeviceError when the device fails or a page
    comes back changed.
    """
    num_bytes = options.num_bytes or default_bytes(device)
    largest = max(sum(segments) for segments in options.segments)
    if largest > num_bytes:
        raise ConfigurationError(
            f"a page of {size_name(largest)} does not fit {size_name(num_bytes)}: move more bytes"
        )
    with quiet_progress(console) as progress:
        task = progress.add_task("preparing memory", total=len(options.segments) + 1)
        arena = Arena(device, num_bytes)
        progress.advance(task)
        cases = []
        for segments in options.segments:
            progress.update(task, description=f"pages of {_shape_name(segments)}")
            cases.append(_measure(arena, segments, options))
            progress.advance(task)
    console.print(_table(device, cases, options))
    uploads = [_upload_row(arena, size, options.num_repeats) for size in _INDEX_BATCHES]
    console.print(_upload_table(uploads))
    rows = [row for case in cases for row in case.rows.values()] + uploads
    if options.has_decode and is_gpu(device):
        rows += _beside_decoding(arena, options, console)
    return rows


def _shape_name(segments: Sequence[int]) -> str:
    return " + ".join(size_name(size) for size in segments)


# ---------------------------------------------------------------------- moves


def _measure(arena: Arena, segments: tuple[int, ...], options: MigrateOptions) -> _Case:
    moves = PageMoves(arena, segments, options.path.codec(arena.device))
    with closing(moves):
        moves.check()
        ours: dict[Direction, list[float]] = {d: [] for d in _DIRECTIONS}
        limit: dict[Direction, list[float]] = {d: [] for d in _DIRECTIONS}
        for repeat in range(options.num_repeats + 1):
            for direction in _DIRECTIONS:
                moved = arena.timed_ms(lambda d=direction: moves.move(d))  # type: ignore[misc]
                copied = arena.timed_ms(
                    lambda d=direction: arena.copy_plainly(d, moves.num_bytes)  # type: ignore[misc]
                )
                if repeat:  # the first warms up
                    ours[direction].append(moved)
                    limit[direction].append(copied)
        call_us = _call_us(moves, options.num_repeats)
        rows = {d: _row(arena, moves, segments, d, ours[d], limit[d], call_us) for d in _DIRECTIONS}
        return _Case(segments, moves.path, moves.num_pages, moves.num_bytes, rows)


def _call_us(moves: PageMoves, num_repeats: int) -> dict[Direction, float]:
    """Microseconds that one call of at most a thousand pages keeps the calling thread."""
    num_pages = min(moves.num_pages, CALL_PAGES)
    return {
        direction: 1e3 * median([moves.call_ms(direction, num_pages) for _ in range(num_repeats)])
        for direction in ("down", "up")
    }


def _row(
    arena: Arena,
    moves: PageMoves,
    segments: tuple[int, ...],
    direction: Direction,
    ours: list[float],
    limit: list[float],
    call_us: dict[Direction, float],
) -> Row:
    moved_bytes = (2 if direction == "both" else 1) * moves.num_bytes
    notes = {
        "segment_bytes": float(max(segments)),
        "num_pages": float(moves.num_pages),
        "gb_per_s": round(moved_bytes / 1e6 / median(ours), 3),
        "limit_gb_per_s": round(moved_bytes / 1e6 / median(limit), 3),
    }
    if direction in call_us:
        notes["call_us"] = round(call_us[direction], 1)
        notes["call_pages"] = float(min(moves.num_pages, CALL_PAGES))
    config = (
        f"{size_name(moves.num_bytes)} a direction, pages of {_shape_name(segments)}, "
        f"{moves.path.value}"
    )
    goal = f">= {_goal(segments, direction)}" if is_gpu(arena.device) else "-"
    name = _DIRECTIONS[direction]
    return Row(name, config, "one contiguous copy", ours, limit, goal, notes=notes)


def _goal(segments: tuple[int, ...], direction: Direction) -> float:
    index = list(_DIRECTIONS).index(direction)
    return next(goals[index] for size, goals in _GOALS if min(segments) >= size)


def _table(device: Device, cases: Sequence[_Case], options: MigrateOptions) -> Table:
    title = f"pages between hot and host memory, {device.name}: GB/s, and part of the limit"
    table = Table(title=title, show_edge=False)
    for column in ("parts of a page", "path"):
        table.add_column(column)
    for column in ("pages", "down", "up", "both", "down", "up", "both", "µs a call"):
        table.add_column(column, justify="right")
    for case in cases:
        speeds = [f"{case.gb_per_s(d):.1f}" for d in _DIRECTIONS]
        ratios = [_ratio_cell(device, case, d, options) for d in _DIRECTIONS]
        call_us = (case.rows[d].notes["call_us"] for d in ("down", "up"))
        host_cell = " / ".join(f"{us:,.0f}" for us in call_us)
        shape = _shape_name(case.segments)
        table.add_row(shape, case.path.value, f"{case.num_pages:,}", *speeds, *ratios, host_cell)
    limits = (median([case.gb_per_s(d, is_limit=True) for case in cases]) for d in _DIRECTIONS)
    down, up, both = limits
    table.caption = (
        f"limit: one contiguous copy, {down:.1f} down, {up:.1f} up, {both:.1f} both ways; "
        f"medians of {options.num_repeats}; µs of the calling thread for a call "
        f"of {CALL_PAGES:,} pages or all, down / up"
    )
    return table


def _ratio_cell(device: Device, case: _Case, direction: Direction, options: MigrateOptions) -> str:
    ratio = case.rows[direction].ratio
    if not is_gpu(device) or options.path is not MovePath.AUTO:
        return f"{ratio:.2f}"
    color = "green" if ratio >= _goal(case.segments, direction) else "red"
    return f"[{color}]{ratio:.2f}[/]"


# ---------------------------------------------------------------------- index uploads


def _upload_row(arena: Arena, batch_bytes: int, num_repeats: int) -> Row:
    """What bringing the indices of one batch costs, beside the smallest pages that it names."""
    data = np.zeros(batch_bytes, np.uint8)
    page_bytes = min(batch_bytes // _PAIR_BYTES * SEGMENTS[0], arena.num_bytes)
    stream, target = arena.onboard_stream, arena.hot.address
    ours, rival = [], []

    def upload() -> None:
        for _ in range(_UPLOADS):
            stream.upload(target, data)

    for repeat in range(num_repeats + 1):
        spent_ms = arena.timed_ms(upload) / _UPLOADS
        copied_ms = arena.timed_ms(lambda: arena.copy_plainly("up", page_bytes))
        if repeat:
            ours.append(spent_ms)
            rival.append(copied_ms)
    config = f"{batch_bytes // _PAIR_BYTES:,} pairs, {size_name(batch_bytes)}"
    rival_name = f"one copy of {size_name(page_bytes)}"
    notes = {"us_per_batch": round(1e3 * median(ours), 2)}
    return Row("index upload", config, rival_name, ours, rival, "-", False, notes)


def _upload_table(rows: Sequence[Row]) -> Table:
    table = Table(title="bringing indices to the device, a batch", show_edge=False)
    for column in ("batch", "µs", "beside", "µs", "ratio"):
        table.add_column(column, justify="left" if column in ("batch", "beside") else "right")
    for row in rows:
        ours, rival = (f"{1e3 * median(samples):,.1f}" for samples in (row.ours_ms, row.rival_ms))
        table.add_row(row.config, ours, row.rival, rival, f"{row.ratio:.3f}")
    return table


# ---------------------------------------------------------------------- beside decoding


def _beside_decoding(arena: Arena, options: MigrateOptions, console: Console) -> list[Row]:
    if importlib.util.find_spec("torch") is None:
        console.print("Moves beside decoding are left out: torch is not installed here.")
        return []
    from coldpage.bench.decode_load import DecodeLoad

    cases = list(_decode_cases(options))
    rows = []
    with quiet_progress(console) as progress:
        task = progress.add_task("decoding beside moves", total=len(cases))
        load = DecodeLoad(arena.device.name)
        for path, size in cases:
            moves = PageMoves(arena, (size,), path.codec(arena.device))
            with closing(moves):
                rows.append(_decode_row(load, moves, size, options.num_repeats))
            progress.advance(task)
    table = Table(title="decoding while pages move both ways", show_edge=False)
    for column in ("parts of a page", "path", "moved GB/s", "alone ms", "beside ms", "slower by"):
        table.add_column(
            column, justify="left" if column in ("parts of a page", "path") else "right"
        )
    for (path, size), row in zip(cases, rows, strict=True):
        cells = (f"{median(row.rival_ms):.1f}", f"{median(row.ours_ms):.1f}")
        speed, slower = row.notes["moved_gb_per_s"], 100 * (row.ratio - 1)
        table.add_row(size_name(size), path.value, f"{speed:.1f}", *cells, f"{slower:.1f} %")
    table.caption = f"attention of {load.description}: {load.num_bytes / 2**30:.1f} GiB a step"
    console.print(table)
    return rows


def _decode_cases(options: MigrateOptions) -> Iterator[tuple[MovePath, int]]:
    paths = (MovePath.DRIVER, MovePath.KERNEL) if options.path is MovePath.AUTO else (options.path,)
    for size in _DECODE_SEGMENTS:
        for path in paths:
            yield path, size


def _decode_row(load: DecodeLoad, moves: PageMoves, size: int, num_repeats: int) -> Row:
    alone, beside, speeds = load.compare(moves.start_round, moves.round_bytes(), num_repeats)
    config = f"pages of {size_name(size)}, {moves.path.value}, {load.num_steps} steps"
    notes = {
        "segment_bytes": float(size),
        "moved_gb_per_s": round(median(speeds), 2),
        "percent_slower": round(100 * (median(beside) / median(alone) - 1), 2),
    }
    return Row("decode beside moves", config, "decode alone", beside, alone, "-", False, notes)
