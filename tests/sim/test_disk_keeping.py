"""What is written to disk at all, how long it stays, and what is kept on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from coldpage.config import DiskAdmission
from coldpage.page import RETAINED_PRIORITY
from coldpage.pools import disk_tier
from tests.sim.persistent import DISK, PER_BLOCK, Place, Session, prompt

Make = Callable[..., Place]
TTL_S = 0.4


def _polled(session: Session) -> None:
    for _ in range(20):
        session.manager.poll()
        session.manager.finish_transfers()


@pytest.mark.parametrize("write_behind", [False, True])
def test_only_what_is_wanted_twice_costs_a_write(place: Make, write_behind: bool) -> None:
    session = place(hot=8, write_behind=write_behind, admission=DiskAdmission.SECOND_USE).open()
    session.put(prompt(4, 1))
    _polled(session)
    session.put(prompt(8, 2))  # at the cost of the first
    _polled(session)
    assert session.used[DISK] == 0
    assert session.num_found(prompt(4, 1)) == 0, "dropped, not written"
    # Computed again not long after: it may be wanted a third time.
    session.put(prompt(4, 1))
    _polled(session)
    session.put(prompt(8, 3))
    _polled(session)
    assert session.used[DISK] == 4
    assert session.num_found(prompt(4, 1)) == 4 * PER_BLOCK
    assert session.read(prompt(4, 1)) == 0


def test_what_was_matched_is_worth_a_write(place: Make) -> None:
    session = place(hot=8, admission=DiskAdmission.SECOND_USE).open()
    session.put(prompt(4, 1))
    assert session.num_found(prompt(2, 1)) == 2 * PER_BLOCK
    session.put(prompt(8, 2))
    _polled(session)
    assert session.num_found(prompt(4, 1)) == 2 * PER_BLOCK
    assert session.used[DISK] == 2


def test_what_a_sequence_holds_is_written_always(place: Make) -> None:
    session = place(hot=8, admission=DiskAdmission.SECOND_USE).open()
    held = session.filled(prompt(4, 1))
    session.put(prompt(8, 2))
    _polled(session)
    assert session.used[DISK] == 4
    assert held.cache.missing_blocks() == []
    held.cache.close()


def _wait_for_expiry(session: Session) -> None:
    time.sleep(TTL_S + 0.1)
    _polled(session)


def test_pages_expire_unless_they_are_used_held_or_retained(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_EXPIRY_INTERVAL_S", 0.0)
    where = place(hot=16, write_behind=True, time_to_live_s=TTL_S)
    session = where.open()
    session.put(prompt(2, 1))
    retained = session.filled(prompt(2, 2))
    retained.cache.raise_priority(RETAINED_PRIORITY)
    retained.cache.close()
    held = session.filled(prompt(2, 3))
    _polled(session)
    assert session.used[DISK] == 6
    _wait_for_expiry(session)
    assert session.total("expired_pages") == 2
    assert session.used == [4, 4]
    assert [session.num_found(prompt(2, n)) // PER_BLOCK for n in (1, 2, 3)] == [0, 2, 2]
    # The time goes on while nothing runs, and what is retained is so after a restart.
    held.cache.close()
    session.manager.flush(10.0)
    session.close()
    again = where.open()
    assert again.used[DISK] == 4
    _wait_for_expiry(again)
    assert [again.num_found(prompt(2, n)) // PER_BLOCK for n in (2, 3)] == [2, 0]


def test_retained_pages_go_last(place: Make) -> None:
    session = place(hot=4, disk=4).open()
    retained = session.filled(prompt(4, 1))
    retained.cache.raise_priority(RETAINED_PRIORITY)
    retained.cache.close()
    for number in range(2, 6):
        session.put(prompt(4, number))
        _polled(session)
    assert session.num_found(prompt(4, 1)) == 4 * PER_BLOCK
    assert session.read(prompt(4, 1)) == 0
