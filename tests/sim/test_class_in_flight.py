"""Pages that change their class while the disk writes them: what is written is void, and nobody is
worse off for it.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from coldpage.storage import escalation
from coldpage.testing.pattern_engine import PatternSequence
from tests.property.checks import high_bits
from tests.sim.persistent import DISK, Place, Session, SickFile, sick_files
from tests.sim.persistent import prompt as persistent_prompt
from tests.sim.rig import Rig
from tests.sim.scenes import Build, suspended, totals
from tests.sim.test_recent_blocks import come_back, grown, made, past

# ---------------------------------------------------------------------- write-behind


def _written_late(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> tuple[Session, PatternSequence, type[SickFile]]:
    """A suspended sequence of eight blocks, of which the fifth and sixth were recent when the write
    began that the disk has not done yet.
    """
    file = sick_files(monkeypatch)
    where = place(hot=40, codec=past, num_recent_blocks=2, write_behind=True)
    session = where.open(view=high_bits)
    sequence = session.filled(persistent_prompt(6))
    file.writes_may_go.clear()
    session.manager.poll()
    assert session.manager._storage.num_in_flight
    assert sequence.resume()
    assert sequence.step([7] * 2 * len(persistent_prompt(1)))
    sequence.cache.suspend()
    return session, sequence, file


def _blocks_on_disk(sequence: PatternSequence) -> list[int]:
    return sorted(int(blob.ordinal) for blob in sequence.cache.blobs_on_disk())


def _polled(session: Session) -> None:
    for _ in range(20):
        session.manager.poll()
        session.manager.finish_transfers()


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_changed_while_it_was_written_behind_is_written_again(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    session, sequence, file = _written_late(place, monkeypatch)
    session.manager.poll()
    if is_closed:
        sequence.cache.close()
    file.writes_may_go.set()
    _polled(session)
    if not is_closed:
        assert _blocks_on_disk(sequence) == list(range(8))
        sequence.cache.close()
    assert session.used[DISK] == 8
    assert session.moved("hot-disk") == 8, "and nothing twice"
    assert session.manager._storage._behind is not None
    assert session.manager._storage._behind.num_waiting == 0
    session.check()


def test_a_flush_waits_for_what_is_void_and_writes_it_again(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, sequence, file = _written_late(place, monkeypatch)
    threading.Timer(0.2, file.writes_may_go.set).start()
    assert session.manager.flush(10.0) == 0
    assert _blocks_on_disk(sequence) == list(range(8))
    sequence.cache.close()


def test_what_fails_is_not_tried_for_ever(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, sequence, file = _written_late(place, monkeypatch)
    # Else there would be a second's rest after each few.
    monkeypatch.setattr(type(session.disk.health), "may_write", lambda self: True)
    writes = session.manager._storage._disk_moves.writes  # type: ignore[union-attr]
    submit, num_tried = writes.submit, 0

    def count(pages, source, destination):  # type: ignore[no-untyped-def]
        nonlocal num_tried
        num_tried += pages.size
        return submit(pages, source, destination)

    monkeypatch.setattr(writes, "submit", count)
    file.error = errno.EIO
    file.writes_may_go.set()
    _polled(session)
    assert 0 < num_tried <= 8, "each once more at most"
    file.error = 0
    sequence.cache.close()


# ---------------------------------------------------------------------- room


def _droppable_in_motion(build: Build) -> tuple[Rig, PatternSequence]:
    """Nobody holds ten hot pages, of which two are void where they are on host and disk."""
    rig = made(build, hot=16, host=20, disk=30, codec=past, copies_behind=True)
    sequence = suspended(rig, [0, *range(100, 111)])
    rig.device.faults.is_io_held = True
    host, disk = rig.storage.levels[1:]
    pages = np.array(rig.pages(sequence), np.int32)
    rig.storage._escalation.send_below(host, pages, disk)
    come_back(rig, sequence)
    grown(rig, sequence, 8)
    rig.close(sequence)
    return rig, sequence


def test_what_nobody_holds_waits_for_void_transfers(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = _droppable_in_motion(build)
    drain = rig.storage._escalation._drain

    def let_go() -> None:
        rig.device.faults.is_io_held = False
        drain()

    monkeypatch.setattr(rig.storage._escalation, "_drain", let_go)
    other = rig.engine.create()
    assert other.resume()
    assert other.cache.resize(32), "all of the hot level"
    rig.device.faults.is_io_held = False
    other.cache.close()
    assert totals(rig, "room_waits") > 0
    assert totals(rig, "dropped_pages") == 0, "there is room for all of them"
    again = rig.create([0, *range(100, 111), *[7] * 8])
    assert again.cache.history_length == 20
    come_back(rig, again)


def test_a_disk_that_hangs_is_not_waited_for_without_end(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escalation, "MAX_WAIT_S", 0.1)
    rig, _ = _droppable_in_motion(build)
    other = rig.create()
    assert other.resume()
    begin_s = time.monotonic()
    assert other.cache.resize(32), "they go in the end"
    assert time.monotonic() - begin_s < 5.0
    assert totals(rig, "dropped_pages") == 2
    rig.device.faults.is_io_held = False
    rig.manager.finish_transfers()
    rig.check()
