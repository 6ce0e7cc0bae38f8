"""Power cuts: what was not synced is there, lost or torn; what was acknowledged is there."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from coldpage.testing.faulty_file import PowerSupply
from tests.crash.board import Board, WatchedPowerFile
from tests.crash.killer import CRASHES_A_TIER
from tests.crash.ledger import Ledger, Tally
from tests.crash.work import WORKS, Reporter

NUM_CUTS = int(os.environ.get("COLDPAGE_CRASH_KILLS", "50"))
SHARES = {"manager": 0.4, "manager-tight": 0.2, "store": 0.3, "store-tight": 0.1}
MAX_DELAY_S = 0.1
MAX_WAIT_S = 0.5
STEPS_IN_THE_DARK = 3


def _cut_at_random(supply: PowerSupply, rng: random.Random) -> None:
    """Mostly when there is something to lose."""
    time.sleep(rng.uniform(0, MAX_DELAY_S))
    if rng.random() < 0.85:
        is_cut = threading.Event()

        def cut() -> None:
            supply.cut(rng)
            is_cut.set()

        for file in supply.files:
            assert isinstance(file, WatchedPowerFile)
            file.after_write = cut
        is_cut.wait(MAX_WAIT_S)
    supply.cut(rng)


def _work_until_cut(
    work_name: str, path: Path, board: Board, ledger: Ledger, rng: random.Random
) -> PowerSupply:
    """The power goes while the tier is worked on, and whoever works on it does not know."""
    supply = PowerSupply(WatchedPowerFile, rng.choice((4096, 512)))
    work = WORKS[work_name](path, board, rng, ledger, supply.open_file)
    cut = threading.Thread(target=_cut_at_random, args=(supply, random.Random(rng.random())))
    cut.start()
    while cut.is_alive():
        work.step()
    for _ in range(STEPS_IN_THE_DARK):
        work.step()
    assert not work.wrong, work.wrong[:3]
    work.abandon()
    return supply


@pytest.mark.crash
@pytest.mark.timeout(max(120, 3 * NUM_CUTS))
@pytest.mark.parametrize("work_name", list(WORKS))
def test_a_power_cut_leaves_nothing_wrong_and_loses_nothing(
    work_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, tally = random.Random(NUM_CUTS), Tally()
    num_lost = num_torn = 0
    num_cuts = round(NUM_CUTS * SHARES[work_name])
    for number in range(num_cuts):
        if number % CRASHES_A_TIER == 0:
            path = tmp_path / f"tier-{number}" / work_name
            board = Board()
            ledger = Ledger(board, tally)
        supply = _work_until_cut(work_name, path, board, ledger, rng)
        tally.num_crashes += 1
        tally.num_inside += supply.num_unsynced > 0
        num_lost += sum(file.num_lost for file in supply.files)
        num_torn += sum(file.num_torn for file in supply.files)
        open_file = PowerSupply(WatchedPowerFile).open_file
        work = WORKS[work_name](path, board, rng, Reporter(), open_file)
        good = work.verify()
        work.abandon()
        tally.num_read += work.num_checked
        tally.wrong += work.wrong
        ledger.settle(good, work)
    with capsys.disabled():
        print(f"\n{work_name}: power cut, {num_lost} writes lost, {num_torn} torn: {tally}")
    assert not tally.wrong, tally.wrong[:3]
    assert not tally.lost, tally.lost[:3]
    assert not tally.back, tally.back[:3]
    # Half of them; of a few cuts fewer, by chance.
    enough = num_cuts / (2 if num_cuts >= 20 else 3)
    assert tally.num_inside >= enough, "too few cuts found something that was not synced"
    assert num_lost + num_torn > 0
    assert tally.num_acknowledged > num_cuts
    if work_name == "manager":
        assert tally.num_overwritten == 0, "there was room for everything"
        # What follows a block that an earlier crash tore, until that block is computed again.
        assert 50 * tally.num_cut_off <= tally.num_acknowledged
