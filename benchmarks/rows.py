"""Rows as ``coldpage bench`` has them, kept in ``benchmarks/results``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from coldpage.bench.rows import Row, append_rows, table_of, timed_ms

__all__ = ["Row", "report", "scratch_directory", "timed_ms"]

RESULTS = Path(__file__).parent / "results"
# Ignored by git, and on the file system of the tree: a temporary directory may be memory.
SCRATCH = Path(__file__).parent / "out"


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory for a disk tier, removed at the end of its ``with``."""
    SCRATCH.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=SCRATCH)


def report(benchmark: str, rows: Sequence[Row], console: Console) -> None:
    """Print a table and append the rows to ``benchmarks/results/<benchmark>.jsonl``."""
    RESULTS.mkdir(exist_ok=True)
    append_rows(RESULTS / f"{benchmark}.jsonl", benchmark, rows)
    console.print(table_of(benchmark, rows))
