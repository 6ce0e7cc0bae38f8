"""Suspend plus resume: microseconds a page of the owner's thread, with and without pages moving.

python -m benchmarks manager_cost
"""

from __future__ import annotations

from benchmarks.rows import Row
from coldpage.bench.kv import Geometry
from coldpage.bench.manager_cost import suspend_resume_rows

__all__ = ["run"]

TINY = Geometry("tiny", 30, 16)  # so that the cost is the manager's, not the copy's
LIMIT_US = 5.0
REPETITIONS = 7


def run(is_quick: bool) -> list[Row]:
    """The limit of 5 us a page stands as the rival."""
    rows: list[Row] = []
    for num_pages in (1_000, 10_000) if is_quick else (1_000, 10_000, 100_000):
        rows += suspend_resume_rows(None, TINY, num_pages, REPETITIONS, LIMIT_US)
    return rows
