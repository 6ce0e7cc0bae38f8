"""Ten thousand operations and more in 'make test', a million in 'make fuzz': the fixed mix, with
everything checked after each operation, and a table of what it reached.

``COLDPAGE_FUZZ_OPS`` and ``COLDPAGE_FUZZ_SEED`` change how long the long run is and which.
"""

from __future__ import annotations

import os

import pytest

from tests.property import mix
from tests.property.mix import SETUPS, Report, Task, run, tasks_of, walk

SEED = 1
NUM_OPERATIONS = 32_000
OPERATIONS_A_WALK = 1_000
NUM_FUZZ_OPERATIONS = int(os.environ.get("COLDPAGE_FUZZ_OPS", "1000000"))
FUZZ_SEED = int(os.environ.get("COLDPAGE_FUZZ_SEED", "20261130"))
FUZZ_OPERATIONS_A_WALK = 2_000

LEVELS = ("hot", "host", "host2", "disk")
# Every way there is: a resize moves pages within a level.
PATHS = tuple(f"{source}-{target}" for source in LEVELS for target in LEVELS)
TRANSCODED = tuple(
    f"{path} (transcoded)"
    for path in ("host-disk", "disk-host", "host-host2", "host2-host", "host2-disk", "disk-host2")
)
DEVICE_PATHS = (
    *("hot-gpu", "gpu-hot", "gpu-gpu"),
    *(
        f"{path}{form}"
        for path in ("gpu-host", "host-gpu", "gpu-disk", "disk-gpu")
        for form in ("", " (transcoded)")
    ),
)
OPERATIONS = (
    "ask ready",
    "close",
    "commit",
    "create",
    "defragment",
    "drop blocks",
    "fail next submission",
    "fork",
    "plan drop",
    "poll",
    "prefetch",
    "ready",
    "resize",
    "resize level",
    "resume",
    "resume and step",
    "step",
    "suspend",
    "take peaks",
    "truncate",
    "wait",
)
OUTCOMES = (
    "create matched blocks",
    "defragment moved pages",
    "found ready",
    "resize level: done",
    "resize level: in use",
    "resize level: rejected",
    "resize level: too small",
    "resize refused",
    "resume refused",
)
TOTALS = (
    "copied_on_write_pages",
    "device: failed I/O jobs",
    "device: failed submissions",
    "device: late I/O jobs",
    "dropped_pages",
    "late_reads",
    "lost_held_pages",
    "masked_pages",
    "planned_drops",
    "read_misses",
    "recent: blocks grown past",
    "recent: pieces compared",
    "rejected_submissions",
    "room_waits",
    "staging_waits",
    "transcoded_pages",
    "write_errors",
)


def _check(report: Report, num_operations: int, scale: float = 1.0) -> None:
    """Everything was reached, often enough. ``scale`` is for runs of another length."""
    assert report.num_operations == num_operations
    assert set(report.operations) == set(OPERATIONS)
    rare = {n: c for n, c in report.operations.items() if c < 100 * scale}
    assert not rare, f"too few operations: {rare}"
    for path in PATHS:
        num_pages = report.paths[path] + report.paths[f"{path} (transcoded)"]
        assert num_pages >= 1000 * scale, f"{num_pages} pages went {path}"
    for path in ("host-disk", "disk-host"):  # in both forms
        for name in (path, f"{path} (transcoded)"):
            assert report.paths[name] >= 1000 * scale, f"{report.paths[name]} pages went {name}"
    assert [path for path in (*TRANSCODED, *DEVICE_PATHS) if not report.paths[path]] == []
    assert [name for name in OUTCOMES if not report.details[name]] == []
    assert [name for name in TOTALS if not report.totals[name]] == []
    assert set(report.paths) <= {*PATHS, *TRANSCODED, *DEVICE_PATHS}, (
        "a path that nobody has thought of"
    )


@pytest.mark.timeout(600)  # some forty seconds where nothing else runs
def test_ten_thousand_operations() -> None:
    tasks = tasks_of(SEED, NUM_OPERATIONS, OPERATIONS_A_WALK)
    assert {task.name for task in tasks} == set(SETUPS)
    report = run(SEED, tasks)
    print(report.table())  # shown where something was not reached
    _check(report, NUM_OPERATIONS)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_million_operations(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = tasks_of(FUZZ_SEED, NUM_FUZZ_OPERATIONS, FUZZ_OPERATIONS_A_WALK)
    report = run(FUZZ_SEED, tasks, num_processes=len(os.sched_getaffinity(0)))
    with capsys.disabled():
        print(f"\n{report.table()}")
    _check(report, NUM_FUZZ_OPERATIONS, min(1.0, NUM_FUZZ_OPERATIONS / 100_000))


def test_a_seed_replays() -> None:
    """Also in another process, where strings hash otherwise."""
    tasks = [Task("a codec each, four levels", 7, 250), Task("lossy on disk", 9, 250)]
    here = run(3, tasks)
    assert here.num_operations == 500
    assert here == run(3, tasks)
    assert here == run(3, tasks, num_processes=2)
    assert here != run(3, [task._replace(seed=task.seed + 2) for task in tasks])


def test_a_walk_that_fails_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("something is wrong")

    monkeypatch.setattr(mix.Walk, "_step", fail)
    with pytest.raises(AssertionError) as caught:
        walk(Task("nothing cold", 4, 100))
    assert caught.value.__notes__ == [
        "repeat it with walk(Task(name='nothing cold', seed=4, num_operations=100))"
    ]
