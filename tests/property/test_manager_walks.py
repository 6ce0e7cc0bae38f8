"""Seeded walks, faster than Hypothesis: every kind of model on every set of levels, with and
without faults.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.property.driver import Driver
from tests.property.setups import KINDS, ROOMY_BLOCKS, Setup
from tests.property.walks import Walk

NUM_OPERATIONS = 500

# host blocks, disk blocks, cold blocks on the device
LEVELS = {
    "hot": (0, 0, 0),
    "host": (6, 0, 0),
    "disk": (0, 6, 0),
    "host and disk": (5, 6, 0),
    "much host": (14, 4, 0),
    "much disk": (5, ROOMY_BLOCKS, 0),
    "device": (0, 0, 6),
    "device and disk": (0, 6, 5),
    "device, host and disk": (5, 6, 5),
}


def _walk(levels: str, kind: str, seed: int, num_operations: int, *, with_faults: bool) -> Driver:
    num_host, num_disk, num_cold = LEVELS[levels]
    setup = Setup(
        kind=kind,
        per_block=2 + seed % 3,
        hot_blocks=8,
        host_blocks=num_host,
        disk_blocks=num_disk,
        is_ring_tiny=seed % 2 == 0,
        gpu_blocks=num_cold,
        copies_behind=seed % 3 == 0,
    )
    driver = Driver(setup, seed)
    try:
        Walk(driver, seed, with_faults=with_faults).run(num_operations)
        driver.finish()
    finally:
        driver.abandon()
    return driver


def _print_mix(levels: str, kind: str, drivers: list[Driver]) -> Counter[str]:
    operations, moves, totals = Counter[str](), Counter[str](), Counter[str]()
    for driver in drivers:
        operations.update(driver.operations)
        moves.update(driver.final_stats.moved_pages)
        totals.update(driver.final_stats.totals)
    print(f"\n{levels}, {kind}: {sum(operations.values())} operations: {dict(operations)}")
    print(f"pages moved: {dict(moves)}; {dict(totals)}")
    return moves


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", LEVELS)
def test_a_walk(levels: str, kind: str) -> None:
    seed = 3 * list(LEVELS).index(levels) + list(KINDS).index(kind)
    drivers = [
        _walk(levels, kind, seed, NUM_OPERATIONS, with_faults=with_faults)
        for with_faults in (False, True)
    ]
    moves = _print_mix(levels, kind, drivers)
    device = {"hot-gpu", "gpu-hot"}
    expected = {
        "hot": set(),
        "host": {"hot-host", "host-hot"},
        "disk": {"hot-disk", "disk-hot"},
        "device": device,
        "device and disk": device | {"gpu-disk", "disk-hot"},
        "device, host and disk": device | {"gpu-host", "host-gpu", "host-disk", "host-hot"},
    }
    both = {"hot-host", "host-hot", "host-disk", "disk-hot"}
    assert expected.get(levels, both) <= moves.keys(), "a path was never walked"
