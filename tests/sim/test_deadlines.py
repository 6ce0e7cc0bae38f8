"""A disk that does not answer in time: its pages are computed again, and nothing waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import coldpage.staging
from coldpage.testing.example_codecs import PaddingCodec
from tests.sim.persistent import (
    DISK,
    Clock,
    Session,
    SickFile,
    own_clock,
    prompt,
    sick_files,
)

DEADLINE_S = 2.0
TOKENS = prompt(4)


class Stage:
    """A session on a disk that a test can make hang, with a clock that it moves."""

    def __init__(self, file: type[SickFile], path: Path, **settings: object) -> None:
        self.file = file
        self.session = Session(path, read_deadline_s=DEADLINE_S, **settings)  # type: ignore[arg-type]
        self.clock: Clock = own_clock(self.session)

    def on_disk(self, tokens: list[int]) -> None:
        """Committed, on disk, and nowhere else."""
        session = self.session
        session.put(tokens)
        assert session.manager.flush(10.0) == 0
        self.push_out()

    def push_out(self) -> None:
        """Nothing is on the hot level any more."""
        session = self.session
        other = session.engine.create()
        assert other.resume()
        num_blocks = session.manager.num_hot_blocks
        assert other.cache.resize(num_blocks * session.manager.tokens_per_block)
        other.cache.synchronize()
        other.cache.close()
        session.manager.wait_for_progress(0.0)

    def hang(self) -> None:
        self.file.reads_may_go.clear()

    def answer(self) -> None:
        self.file.reads_may_go.set()

    def pass_deadline(self) -> None:
        self.clock.now_s += DEADLINE_S + 0.1
        self.session.manager.poll()


Make = Callable[..., Stage]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    stages: list[Stage] = []
    kind = sick_files(monkeypatch)

    def make(**settings: object) -> Stage:
        stages.append(Stage(kind, tmp_path / f"tier{len(stages)}", **settings))
        return stages[-1]

    yield make
    kind.reads_may_go.set()
    kind.writes_may_go.set()
    for made in stages:
        made.session.close()


def test_a_read_past_its_deadline_is_a_miss(stage: Make, caplog: pytest.LogCaptureFixture) -> None:
    s = stage(hot=8)
    s.on_disk(TOKENS)
    session = s.session
    s.hang()
    sequence = session.engine.create(TOKENS)
    assert sequence.cache.history_length == 16
    assert sequence.resume()
    for _ in range(5):
        session.manager.poll()
    assert not sequence.cache.is_ready()
    assert session.total("late_reads") == 0
    s.pass_deadline()
    session.becomes_ready(sequence)
    assert sequence.cache.missing_blocks() == [0, 1, 2, 3]
    assert session.total("late_reads") == 4
    assert caplog.text.count("longer than 2 s") == 1
    session.manager.check_integrity()
    assert session.quarantined[DISK] == 4, "the I/O may still touch what it was given"
    leased = session.manager._storage._disk_moves.reads.num_in_flight  # type: ignore[union-attr]
    assert leased == 1
    assert sequence.recompute() == [0, 1, 2, 3]
    sequence.check()
    sequence.cache.suspend()
    # Its late end gives back what it had and changes nothing.
    s.answer()
    session.manager.finish_transfers()
    session.manager.check_integrity()
    assert session.quarantined == [0, 0]
    assert session.used[DISK] == 0
    ring = session.manager._storage._disk_moves.end.ring  # type: ignore[union-attr]
    lease = ring.acquire(ring.num_bytes, ring.num_bytes, 1, 1, None)
    assert lease is not None, "the staging was given back"
    lease.release()
    assert sequence.resume()
    session.becomes_ready(sequence)
    assert sequence.cache.missing_blocks() == []
    sequence.check()
    sequence.cache.close()


def test_what_is_recomputed_goes_to_disk_again_while_the_old_read_hangs(stage: Make) -> None:
    s = stage(hot=8)
    s.on_disk(TOKENS)
    session = s.session
    s.hang()
    sequence = session.engine.create(TOKENS)
    assert sequence.resume()
    s.pass_deadline()
    session.becomes_ready(sequence)
    sequence.recompute()
    sequence.cache.suspend()
    assert session.manager.flush(1.0) == 0
    assert session.used[DISK] == 4
    assert session.quarantined[DISK] == 4
    session.manager.check_integrity()
    s.answer()
    session.manager.finish_transfers()
    sequence.cache.close()
    s.push_out()
    assert session.read(TOKENS) == 0


def test_droppable_pages_that_are_late_are_forgotten(stage: Make) -> None:
    s = stage(hot=8)
    s.on_disk(TOKENS)
    session = s.session
    s.hang()
    sequence = session.engine.create(TOKENS)
    assert sequence.resume()
    sequence.cache.close()
    s.pass_deadline()
    assert session.num_found(TOKENS) == 0
    s.answer()
    session.manager.finish_transfers()
    assert session.quarantined[DISK] == 0
    session.put(TOKENS)
    assert session.read(TOKENS) == 0


@pytest.mark.parametrize("is_transcoded", [False, True])
def test_a_late_read_into_host_memory_leaves_its_slots_alone(
    stage: Make, is_transcoded: bool
) -> None:
    own = (lambda: PaddingCodec(64)) if is_transcoded else None
    s = stage(hot=8, host=8, disk_codec=own, kind="mixed")
    session = s.session
    session.put(TOKENS)
    assert session.manager.flush(10.0) == 0
    for first in (50, 60, 70, 80):
        session.put(prompt(4, first))
        session.manager.flush(10.0)
    cache = session.manager.create_kv_cache(TOKENS)
    assert cache.history_length == 16
    table = session.manager._storage.table
    pages = cache._table.pages[cache._table.pages != 0]
    assert (table.present[pages] == 4).all(), "on disk only"
    s.hang()
    cache.prefetch(session.manager._storage.levels[1].level)
    assert (table.reserved[pages] == 2).any()
    s.pass_deadline()
    session.manager.check_integrity()
    assert cache.missing_blocks()
    assert session.quarantined[2] > 0
    s.answer()
    session.manager.finish_transfers()
    session.manager.check_integrity()
    assert session.quarantined == [0, 0, 0]
    cache.close()


def test_reads_in_the_queue_do_not_wait_for_those_that_hang(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging for a few pages at a time is held by reads that hang."""
    monkeypatch.setattr(coldpage.staging, "MIN_PAGE_RING_BYTES", 1 << 12)
    s = stage(hot=40, disk=200)
    tokens = prompt(30)
    session = s.session
    session.put(tokens)
    assert session.manager.flush(10.0) == 0
    for first in (50, 60, 70):
        session.put(prompt(30, first))
    session.manager.finish_transfers()
    sequence = session.engine.create(tokens)
    s.hang()
    assert sequence.resume()
    reads = session.manager._storage._disk_moves.reads  # type: ignore[union-attr]
    is_queued = bool(reads._queued)
    for _ in range(3):
        s.pass_deadline()
    session.becomes_ready(sequence)
    assert not reads._queued
    session.manager.check_integrity()
    assert is_queued, "there was staging for all"
    num_blocks = sequence.cache.num_blocks
    assert len(sequence.cache.missing_blocks()) == num_blocks
    sequence.recompute()
    sequence.check()
    s.answer()
    session.manager.finish_transfers()
    assert session.quarantined[DISK] == 0
    sequence.check()
    sequence.cache.close()


def test_closing_waits_for_the_disk_and_for_nothing_else(stage: Make) -> None:
    s = stage(hot=8)
    s.on_disk(TOKENS)
    session = s.session
    s.hang()
    sequence = session.engine.create(TOKENS)
    assert sequence.resume()
    s.pass_deadline()
    session.becomes_ready(sequence)
    sequence.cache.close()
    started = time.monotonic()
    threading.Timer(0.3, s.answer).start()
    session.close()
    assert 0.2 < time.monotonic() - started < 5.0


def test_flushing_does_not_wait_for_reads_that_hang(stage: Make) -> None:
    s = stage(hot=8)
    s.on_disk(TOKENS)
    session = s.session
    s.hang()
    sequence = session.engine.create(TOKENS)
    assert sequence.resume()
    s.pass_deadline()
    session.becomes_ready(sequence)
    sequence.recompute()
    sequence.cache.close()
    started = time.monotonic()
    assert session.manager.flush(30.0) == 0
    assert time.monotonic() - started < 10.0


def test_many_late_reads_turn_the_disk_off_and_it_comes_back(
    stage: Make, caplog: pytest.LogCaptureFixture
) -> None:
    s = stage(hot=12)
    s.on_disk(prompt(8))
    s.on_disk(prompt(4, 7))
    session = s.session
    s.hang()
    sequence = session.engine.create(prompt(8))
    assert sequence.resume()
    s.pass_deadline()
    session.becomes_ready(sequence)
    assert session.state == "off"
    sequence.recompute()
    sequence.cache.close()
    # What it has is a miss at once.
    started = time.monotonic()
    assert session.read(prompt(4, 7)) == 4
    assert time.monotonic() - started < 1.0
    assert caplog.text.count("is off now") == 1
    s.answer()
    session.manager.finish_transfers()
    s.clock.now_s += 1.5
    assert session.manager.flush(10.0) == 0, "the next try is a write"
    session.read(prompt(8))
    s.clock.now_s += 1.5
    s.push_out()
    assert session.read(prompt(8)) == 0
    assert session.state == "ok"
    assert caplog.text.count("works again") >= 1
    assert np.all(session.manager._storage.table.num_locks == 0)
