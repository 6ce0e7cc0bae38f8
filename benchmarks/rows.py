"""What every benchmark row says, and where it is kept."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "report", "scratch_directory", "timed_ms"]

RESULTS = Path(__file__).parent / "results"
# Ignored by git, and on the file system of the tree: a temporary directory may be memory.
SCRATCH = Path(__file__).parent / "out"


@dataclass(frozen=True)
class Row:
    """One measurement beside its rival or limit, in the same run.

    Samples are milliseconds a repetition.

    ``ratio`` is rival over ours for ``is_faster_better`` (how many times faster), else ours over
    rival.
    """

    name: str
    config: str
    rival: str
    ours_ms: Sequence[float]
    rival_ms: Sequence[float]
    goal: str
    is_faster_better: bool = True
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """By medians."""
        ours, rival = statistics.median(self.ours_ms), statistics.median(self.rival_ms)
        return rival / ours if self.is_faster_better else ours / rival


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory for a disk tier, removed at the end of its ``with``."""
    SCRATCH.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=SCRATCH)


def timed_ms(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    started = perf_counter()
    work()
    return 1e3 * (perf_counter() - started)


def _spread(samples: Sequence[float]) -> str:
    return f"{statistics.median(samples):,.2f} ({min(samples):,.2f}-{max(samples):,.2f})"


def _machine() -> dict[str, str]:
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(
        (line.split(":")[1].strip() for line in cpu_lines if line.startswith("model name")),
        "unknown",
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "cpu": cpu,
        "python": platform.python_version(),
    }


def report(benchmark: str, rows: Sequence[Row], console: Console) -> None:
    """Print a table and append the rows to ``benchmarks/results/<benchmark>.jsonl``."""
    table = Table(title=benchmark, show_edge=False)
    for column in ("what", "configuration", "ours ms", "rival", "rival ms", "ratio", "goal"):
        table.add_column(
            column, justify="left" if column in ("what", "configuration", "rival") else "right"
        )
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{benchmark}.jsonl", "a") as file:
        for row in rows:
            table.add_row(
                row.name,
                row.config,
                _spread(row.ours_ms),
                row.rival,
                _spread(row.rival_ms),
                f"{row.ratio:.2f}",
                row.goal,
            )
            record = {**_machine(), **dataclasses.asdict(row), "ratio": round(row.ratio, 3)}
            file.write(json.dumps(record) + "\n")
    console.print(table)
