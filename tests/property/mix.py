"""The fixed mix of operations, over managers of every shape, and the table of what it did.

A run is a list of walks: one for each manager below and each seed, the odd ones with faults.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.property.driver import Driver
from tests.property.setups import ROOMY_BLOCKS, Setup
from tests.property.walks import Walk

SETUPS = {
    "one codec, four levels": Setup(
        "many", 2, 8, 6, 24, host2_blocks=6, codec="position-device", is_ring_tiny=True
    ),
    "a codec each, four levels": Setup(
        "many", 2, 8, 6, 24, host2_blocks=6, host2_codec="padding", disk_codec="device-index"
    ),
    "a codec each, windows": Setup(
        "mixed", 2, 10, 6, 24, host2_blocks=6, host_codec="position", disk_codec="padding"
    ),
    "transcoded to disk": Setup("many", 2, 8, 8, 30, disk_codec="padding", separate_sinks=True),
    "one codec, three levels": Setup("many", 4, 8, 8, 24, codec="slow", is_ring_tiny=True),
    "sinks apart, sizes": Setup(
        "mixed-sizes",
        2,
        10,
        10,
        20,
        codec="padding",
        separate_sinks=True,
        has_constraints=True,
        write_behind=True,
        watermark=0.1,
    ),
    "lossy, sinks whole": Setup(
        "mixed", 2, 8, 10, 20, codec="coarse-body", separate_sinks=True, watermark=0.2
    ),
    "lossy on disk": Setup("full", 2, 8, 8, 20, disk_codec="coarse", max_util=1.0),
    "disk only, late": Setup(
        "full", 3, 8, 0, 20, codec="device-index", write_behind=True, read_deadline_rounds=4
    ),
    "disk only, roomy": Setup(
        "mixed-sizes", 4, 8, 0, ROOMY_BLOCKS, codec="position", is_ring_tiny=True, watermark=0.3
    ),
    "lossy, newest whole": Setup(
        "mixed",
        2,
        10,
        10,
        20,
        codec="coarse-past",
        separate_sinks=True,
        num_recent_blocks=2,
        write_behind=True,
        copies_behind=True,
    ),
    "lossy on disk, newest whole": Setup(
        "full", 2, 8, 8, 24, disk_codec="coarse-past", num_recent_blocks=1, is_ring_tiny=True
    ),
    "host only": Setup("window", 2, 8, 12, codec="device-index", has_pool_ratio=True),
    "cold on the device": Setup(
        "mixed-sizes", 2, 8, 6, 24, is_ring_tiny=True, gpu_blocks=6, gpu_place=1
    ),
    "cold on the device, a codec each": Setup(
        "mixed",
        2,
        8,
        6,
        24,
        codec="position",
        gpu_blocks=6,
        gpu_codec="padding",
        gpu_place=1,
        copies_behind=True,
    ),
    "nothing cold": Setup("full", 2, 10),
}


MAX_WALKS = 1_000_000  # of one run, so that no two runs share a seed
# How many walks each of them gets: rare paths want more.
WEIGHTS = {
    **dict.fromkeys(SETUPS, 1),
    "one codec, four levels": 6,
    "a codec each, four levels": 5,
    "transcoded to disk": 4,
    "one codec, three levels": 3,
}


class Task(NamedTuple):
    """One walk."""

    name: str
    seed: int
    num_operations: int


@dataclass
class Report:
    """What walks did. ``paths`` are pages moved, ``transcoded`` those that changed their codec."""

    seed: int
    operations: Counter[str] = field(default_factory=Counter)
    details: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, other: Report) -> None:
        self.operations.update(other.operations)
        self.details.update(other.details)
        self.paths.update(other.paths)
        self.totals.update(other.totals)

    @property
    def num_operations(self) -> int:
        return self.operations.total()

    def table(self) -> str:
        lines = [f"seed {self.seed}: {self.num_operations:,} operations"]
        columns = {
            "operations": self.operations,
            "of which": self.details,
            "pages moved": self.paths,
            "totals": self.totals,
        }
        for title, counts in columns.items():
            lines.append(f"  {title}:")
            lines += [f"    {name:<28}{counts[name]:>12,}" for name in sorted(counts)]
        return "\n".join(lines)


def walk(task: Task) -> Report:
    """One walk from its first operation to the last check of its manager."""
    driver = Driver(SETUPS[task.name], task.seed)
    try:
        steps = Walk(driver, task.seed, with_faults=task.seed % 2 == 1)
        steps.run(task.num_operations)
        driver.finish()
    except BaseException as error:
        error.add_note(f"repeat it with walk({task!r})")
        raise
    finally:
        driver.abandon()
    stats = driver.final_stats
    report = Report(task.seed, steps.operations, driver.operations)
    # Between levels of different codecs a path is another one.
    transcoded = driver.transcoded_paths()
    for path, num_pages in stats.moved_pages.items():
        report.paths[f"{path} (transcoded)" if path in transcoded else path] += num_pages
    report.totals.update(stats.totals)
    report.totals.update(driver.device_counts())
    report.totals.update(driver.exactness.counts())
    return report


def tasks_of(seed: int, num_operations: int, operations_a_walk: int) -> list[Task]:
    """Walks over all managers in turn, of so many operations together."""
    most = max(WEIGHTS.values())
    turns = [name for turn in range(most) for name in SETUPS if WEIGHTS[name] > turn]
    tasks: list[Task] = []
    while num_operations > 0:
        length = min(operations_a_walk, num_operations)
        number = len(tasks)
        # Of two walks of one manager that follow each other, one has faults.
        round_index, turn = divmod(number, len(turns))
        is_odd = (turn + turns[:turn].count(turns[turn]) + round_index) % 2
        walk_seed = MAX_WALKS * seed + 2 * number + is_odd
        tasks.append(Task(turns[turn], walk_seed, length))
        num_operations -= length
    return tasks


def run(seed: int, tasks: Sequence[Task], num_processes: int = 1) -> Report:
    """All walks, on one or more processes, and the sum of what they did."""
    report = Report(seed)
    if num_processes == 1:
        for task in tasks:
            report.add(walk(task))
        return report
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes) as pool:
        for part in pool.imap_unordered(walk, tasks):
            report.add(part)
    return report
