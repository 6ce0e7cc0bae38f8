"""A disk that fails at random while it is worked on: nothing wrong, nothing hangs, and what was
acknowledged all the same is there.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coldpage.device.file import BlockFile
from coldpage.testing.faulty_file import Fault, FaultPlan, FileCall
from tests.crash.board import Board, WatchedFaultyFile, WatchedFile
from tests.crash.ledger import Ledger, Tally
from tests.crash.work import WORKS, Reporter

NUM_ROUNDS = 6
NUM_STEPS = 60
RATES = {
    FileCall.READ: {Fault.EIO: 0.04, Fault.SHORT: 0.2, Fault.DELAY: 0.05},
    FileCall.WRITE: {Fault.EIO: 0.04, Fault.ENOSPC: 0.03, Fault.SHORT: 0.2, Fault.DELAY: 0.05},
    FileCall.SYNC: {Fault.EIO: 0.1, Fault.DELAY: 0.1},
}


@pytest.mark.crash
@pytest.mark.parametrize("work_name", list(WORKS))
def test_a_failing_disk_costs_pages_and_nothing_else(work_name: str, tmp_path: Path) -> None:
    rng, board, tally = random.Random(7), Board(), Tally()
    ledger = Ledger(board, tally)
    plan = FaultPlan(RATES, seed=7, delay_s=0.002)

    def open_file(path: Path, num_bytes: int) -> BlockFile:
        return WatchedFaultyFile(path, num_bytes, plan)

    path = tmp_path / work_name
    for _ in range(NUM_ROUNDS):
        plan.rates = {}
        work = WORKS[work_name](path, board, rng, ledger, open_file)
        plan.rates = dict(RATES)
        for _ in range(NUM_STEPS):
            work.step()
            work.check_integrity()
        tally.wrong += work.wrong
        work.abandon()
        work = WORKS[work_name](path, board, rng, Reporter(), WatchedFile)
        good = work.verify()
        work.abandon()
        tally.num_read += work.num_checked
        tally.wrong += work.wrong
        ledger.settle(good, work)
    assert not tally.wrong, tally.wrong[:3]
    assert not tally.lost, tally.lost[:3]
    assert not tally.back, tally.back[:3]
    assert tally.num_acknowledged > 0
    for call, rates in RATES.items():
        for fault in rates:
            if call is not FileCall.SYNC:
                assert plan.num_faults[call, fault] > 0
