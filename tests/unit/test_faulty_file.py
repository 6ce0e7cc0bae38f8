"""Files that fail as disks do."""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from coldpage.device.file import DIRECT_ALIGNMENT
from coldpage.testing.faulty_file import (
    Fault,
    FaultPlan,
    FaultyFile,
    FileCall,
    PowerCutFile,
    PowerSupply,
)

BLOCK = DIRECT_ALIGNMENT
NUM_BLOCKS = 8


def block_buffer(value: int, num_blocks: int = 1) -> np.ndarray:
    array = np.frombuffer(mmap.mmap(-1, num_blocks * BLOCK), np.uint8)
    array[:] = value
    return array


def read(file: FaultyFile | PowerCutFile, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
    buffer = block_buffer(0xEE, num_blocks)
    file.readv(0, [buffer])
    return buffer


def faulty(path: Path, plan: FaultPlan | None = None) -> FaultyFile:
    return FaultyFile(path / "file", NUM_BLOCKS * BLOCK, plan)


def test_short_calls_are_continued_and_nothing_is_lost(tmp_path: Path) -> None:
    file = faulty(tmp_path)
    file.plan.add(FileCall.WRITE, [Fault.SHORT, Fault.SHORT])
    file.plan.add(FileCall.READ, [Fault.SHORT])
    data = np.concatenate([block_buffer(i) for i in range(NUM_BLOCKS)])
    aligned = block_buffer(0, NUM_BLOCKS)
    aligned[:] = data
    file.writev(0, [aligned[:BLOCK], aligned[BLOCK:]])
    assert read(file).tobytes() == data.tobytes()
    assert file.plan.num_faults == {
        (FileCall.WRITE, Fault.SHORT): 2,
        (FileCall.READ, Fault.SHORT): 1,
    }
    file.close()


@pytest.mark.parametrize(("fault", "code"), [(Fault.EIO, errno.EIO), (Fault.ENOSPC, errno.ENOSPC)])
def test_errors_come_in_the_order_of_the_plan(fault: Fault, code: int, tmp_path: Path) -> None:
    file = faulty(tmp_path)
    file.plan.add(FileCall.WRITE, [None, fault])
    file.plan.add(FileCall.SYNC, [fault])
    file.writev(0, [block_buffer(1)])
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        file.writev(0, [block_buffer(2)])
    assert caught.value.errno == code
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        file.sync()
    assert caught.value.errno == code
    file.sync()
    assert set(read(file, 1).tolist()) == {1}
    file.close()


def test_a_delay_is_waited_for_and_the_call_works(tmp_path: Path) -> None:
    file = faulty(tmp_path, FaultPlan(delay_s=0.05))
    file.plan.add(FileCall.READ, [Fault.DELAY])
    started = time.perf_counter()
    read(file)
    assert time.perf_counter() - started >= 0.05
    file.close()


def test_rates_strike_as_often_as_they_say_the_same_for_one_seed() -> None:
    rates = {FileCall.READ: {Fault.EIO: 0.2, Fault.SHORT: 0.3}}
    plans = [FaultPlan(rates, seed=5) for _ in range(2)]
    drawn = [[plan.next_fault(FileCall.READ) for _ in range(2000)] for plan in plans]
    assert drawn[0] == drawn[1]
    assert 300 < drawn[0].count(Fault.EIO) < 500
    assert 500 < drawn[0].count(Fault.SHORT) < 700
    assert plans[0].next_fault(FileCall.WRITE) is None
    plans[0].clear()
    assert all(plans[0].next_fault(FileCall.READ) is None for _ in range(100))


def test_a_power_cut_keeps_what_was_synced_and_loses_some_of_the_rest(tmp_path: Path) -> None:
    counts = {"old": 0, "new": 0}
    for seed in range(40):
        file = PowerCutFile(tmp_path / f"{seed}", NUM_BLOCKS * BLOCK)
        file.writev(0, [block_buffer(1, NUM_BLOCKS)])
        file.sync()
        assert file.num_unsynced == 0
        file.writev(0, [block_buffer(2)])
        file.writev(2 * BLOCK, [block_buffer(3, 2)])
        assert read(file)[:BLOCK].tolist() == [2] * BLOCK  # before the cut everything is there
        assert file.num_unsynced == 2
        file.power_cut(random.Random(seed))
        with pytest.raises(OSError, match="the power is off"):
            file.writev(0, [block_buffer(4)])
        with pytest.raises(OSError, match="the power is off"):
            file.sync()
        file.close()
        found = np.fromfile(file.path, np.uint8).reshape(NUM_BLOCKS, BLOCK)
        values = [set(row.tolist()) for row in found]
        assert values[1] == {1} and all(value == {1} for value in values[4:])
        assert values[0] in ({1}, {2})
        assert all(value in ({1}, {3}) for value in values[2:4])
        assert file.num_torn == (values[2] != values[3])
        counts["old" if values[0] == {1} else "new"] += 1
    assert min(counts.values()) >= 8


def test_of_two_writes_to_one_place_any_may_survive(tmp_path: Path) -> None:
    found = set()
    for seed in range(40):
        file = PowerCutFile(tmp_path / f"{seed}", BLOCK)
        file.writev(0, [block_buffer(1)])
        file.writev(0, [block_buffer(2)])
        file.power_cut(random.Random(seed))
        file.close()
        (value,) = set(np.fromfile(file.path, np.uint8).tolist())
        found.add(value)
    assert found == {0, 1, 2}


def test_a_disk_of_small_sectors_tears_inside_a_block(tmp_path: Path) -> None:
    num_mixed = 0
    for seed in range(20):
        file = PowerCutFile(tmp_path / f"{seed}", BLOCK, tear_bytes=512)
        file.writev(0, [block_buffer(7)])
        file.power_cut(random.Random(seed))
        file.close()
        sectors = np.fromfile(file.path, np.uint8).reshape(-1, 512)
        assert all(len(set(sector.tolist())) == 1 for sector in sectors)
        num_mixed += len(set(sectors[:, 0].tolist())) == 2
    assert num_mixed >= 3


def test_one_cut_hits_every_file_of_the_supply(tmp_path: Path) -> None:
    supply = PowerSupply()
    files = [supply.open_file(tmp_path / name, BLOCK) for name in ("a", "b")]
    for file in files:
        file.writev(0, [block_buffer(1)])
    assert supply.num_unsynced == 2
    supply.cut(random.Random(0))
    for file in files:
        with pytest.raises(OSError, match="the power is off"):
            read(file, 1)
        file.close()


def test_what_was_cut_off_does_not_come_back(tmp_path: Path) -> None:
    for seed in range(10):
        file = PowerCutFile(tmp_path / f"{seed}", NUM_BLOCKS * BLOCK)
        file.writev(BLOCK, [block_buffer(1, 2)])
        file.writev(3 * BLOCK, [block_buffer(1, 5)])
        file.resize(2 * BLOCK)
        file.resize(NUM_BLOCKS * BLOCK)
        file.power_cut(random.Random(seed))
        file.close()
        found = np.fromfile(file.path, np.uint8)
        assert found.size == NUM_BLOCKS * BLOCK
        assert not found[2 * BLOCK :].any()
