"""Processes that are killed with SIGKILL while they write: nothing wrong, nothing lost.

COLDPAGE_CRASH_KILLS says how many kills there are; 'make crash N=1000' sets it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.crash.killer import Killer
from tests.crash.work import WORKS

NUM_KILLS = int(os.environ.get("COLDPAGE_CRASH_KILLS", "50"))
SHARES = {"manager": 0.36, "manager-tight": 0.16, "store": 0.32, "store-tight": 0.16}


@pytest.mark.crash
@pytest.mark.timeout(max(120, 3 * NUM_KILLS))
@pytest.mark.parametrize("work_name", list(WORKS))
def test_a_killed_process_leaves_nothing_wrong_and_loses_nothing(
    work_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_kills = round(NUM_KILLS * SHARES[work_name])
    with Killer(work_name, tmp_path, seed=NUM_KILLS) as killer:
        for _ in range(num_kills):
            killer.kill_one()
    tally = killer.tally
    with capsys.disabled():
        print(f"\n{work_name}: killed: {tally}")
    assert not tally.wrong, tally.wrong[:3]
    assert not tally.lost, tally.lost[:3]
    assert not tally.back, tally.back[:3]
    assert tally.num_crashes == num_kills
    # Half of them; of a few kills fewer, by chance.
    enough = num_kills / (2 if num_kills >= 20 else 3)
    assert tally.num_inside >= enough, "too few of the kills were inside a write"
    assert tally.num_acknowledged > num_kills
    if work_name == "manager":
        assert tally.num_overwritten == 0, "there was room for everything"
        # What follows a block that an earlier crash tore, until that block is computed again.
        assert 50 * tally.num_cut_off <= tally.num_acknowledged
