"""What every benchmark row says, and how it is kept."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from coldpage.engine.stage_progress import StageProgress

__all__ = [
    "Row",
    "append_rows",
    "machine_facts",
    "median",
    "quiet_progress",
    "size_name",
    "spread",
    "table_of",
    "timed_ms",
]


@dataclass(frozen=True)
class Row:
    """One measurement beside its rival or limit, in the same run.

    Samples are milliseconds a repetition.

    ``ratio`` is rival over ours for ``is_faster_better`` (how many times faster, or what part of a
    limit), else ours over rival.
    """

    name: str
    config: str
    rival: str
    ours_ms: Sequence[float]
    rival_ms: Sequence[float]
    goal: str = "-"
    is_faster_better: bool = True
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """By medians."""
        ours, rival = statistics.median(self.ours_ms), statistics.median(self.rival_ms)
        return rival / ours if self.is_faster_better else ours / rival


def timed_ms(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    started = perf_counter()
    work()
    return 1e3 * (perf_counter() - started)


def median(samples: Sequence[float]) -> float:
    """The middle of the samples."""
    return float(statistics.median(samples))


def spread(samples: Sequence[float]) -> str:
    """Median and extremes, for people."""
    digits = 2 if median(samples) >= 0.1 else 4
    low, high = min(samples), max(samples)
    return f"{median(samples):,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def size_name(num_bytes: int) -> str:
    """For people: ``4 KiB``, ``2 MiB``."""
    if num_bytes >= 1 << 20:
        return f"{num_bytes / (1 << 20):,.4g} MiB"
    return f"{num_bytes / (1 << 10):.4g} KiB"


def quiet_progress(console: Console) -> StageProgress:
    """A bar that is gone at the end, and drawn rarely: drawing takes time from what is measured."""
    return StageProgress(console=console, refresh_per_second=1)


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """One line a row."""
    table = Table(title=title, show_edge=False)
    for column in ("what", "configuration", "ours ms", "rival", "rival ms", "ratio", "goal"):
        is_text = column in ("what", "configuration", "rival")
        table.add_column(column, justify="left" if is_text else "right")
    for row in rows:
        ours, rival = spread(row.ours_ms), spread(row.rival_ms)
        table.add_row(row.name, row.config, ours, row.rival, rival, f"{row.ratio:.2f}", row.goal)
    return table


def append_rows(path: Path, benchmark: str, rows: Sequence[Row], device_name: str = "host") -> None:
    """Add each row to a file of JSON lines, with the commit, the machine and every sample."""
    machine = machine_facts(device_name)
    with open(path, "a", encoding="utf-8") as file:
        for row in rows:
            record = {
                **machine,
                "benchmark": benchmark,
                **dataclasses.asdict(row),
                "median_ms": round(median(row.ours_ms), 6),
                "rival_median_ms": round(median(row.rival_ms), 6),
                "ratio": round(row.ratio, 3),
            }
            file.write(json.dumps(record) + "\n")


def machine_facts(device_name: str) -> dict[str, str]:
    """When, of what commit, and on what a row was measured."""
    cpu = "unknown"
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        cpu = next(iter(names), cpu)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output_of("git", "rev-parse", "--short", "HEAD"),
        "cpu": cpu,
        "device": device_name,
        "gpu": _gpu_name(device_name),
        "python": platform.python_version(),
    }


def _gpu_name(device_name: str) -> str:
    kind, _, index = device_name.partition(":")
    if kind != "cuda":
        return ""
    query = ("--query-gpu=name,driver_version", "--format=csv,noheader")
    return _output_of("nvidia-smi", "-i", index or "0", *query)


def _output_of(*command: str) -> str:
    """Empty where there is no such command, or it has nothing to say."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
