"""A disk that fails is left alone for a while, and serving goes on without it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sim.persistent import (
    DISK,
    EIO,
    ENOSPC,
    Place,
    Session,
    SickFile,
    own_clock,
    prompt,
    sick_files,
)

Make = Callable[..., Place]
PROMPTS = [prompt(4, first) for first in range(6)]


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> type[SickFile]:
    return sick_files(monkeypatch)


@pytest.fixture
def place(tmp_path: Path, file: type[SickFile]) -> Iterator[Make]:
    places: list[Place] = []

    def make(**settings: object) -> Place:
        places.append(Place(tmp_path / f"tier{len(places)}", **settings))
        return places[-1]

    yield make
    file.error = file.read_error = file.sync_error = 0
    for made in places:
        made.close()


def _serve(session: Session, tokens: list[int]) -> None:
    """An engine's turn: whatever the disk does, every byte is right in the end."""
    sequence = session.engine.create(tokens)
    assert sequence.resume()
    session.becomes_ready(sequence)
    sequence.recompute()
    assert sequence.step([*tokens[sequence.cache.history_length :], 5, 6])
    sequence.check()
    sequence.cache.close()
    session.check()


@pytest.mark.parametrize("host", [0, 4])
@pytest.mark.parametrize(("error", "words"), [(ENOSPC, "No space left"), (EIO, "Input/output")])
def test_writes_that_fail_make_it_read_only_for_a_while(
    place: Make,
    file: type[SickFile],
    caplog: pytest.LogCaptureFixture,
    error: int,
    words: str,
    host: int,
) -> None:
    session = place(hot=8, host=host, disk=40).open()
    disk = len(session.used) - 1
    clock = own_clock(session)
    session.put(PROMPTS[0])
    assert session.manager.flush(10.0) == 0
    caplog.set_level(logging.WARNING)
    file.error = error
    for tokens in PROMPTS[1:]:
        _serve(session, tokens)
        session.manager.finish_transfers()
    session.manager.flush(0.5)
    assert session.state == "read_only"
    lines = [r.getMessage() for r in caplog.records if "read-only now" in r.getMessage()]
    assert len(lines) == 1
    assert words in lines[0]
    assert str(session.disk.directory.path) in lines[0]
    assert session.total("write_errors") >= 3
    assert session.quarantined[disk] == 0
    # What it has is still served; nothing is written.
    num_errors = session.total("write_errors")
    assert session.num_found(PROMPTS[0]) == 16
    assert session.read(PROMPTS[0]) == 0
    session.put(PROMPTS[1])
    session.manager.flush(0.1)
    session.manager.finish_transfers()
    assert session.total("write_errors") == num_errors
    # One try after a second, then after two more.
    for wait_s, does_try in ((1.1, True), (1.1, False), (1.1, True), (2.1, False), (2.1, True)):
        clock.now_s += wait_s
        before = session.total("write_errors")
        session.manager.flush(0.1)
        session.manager.finish_transfers()
        assert (session.total("write_errors") > before) == does_try, wait_s
    assert len([r for r in caplog.records if "read-only now" in r.getMessage()]) == 1
    file.error = 0
    clock.now_s += 60.0
    session.put(PROMPTS[1])
    session.manager.flush(10.0)
    assert session.manager.flush(10.0) == 0
    assert session.state == "ok"
    assert "works again" in caplog.text
    assert session.read(PROMPTS[1]) == 0


def test_the_next_start_finds_what_was_written_before_it_failed(
    place: Make, file: type[SickFile]
) -> None:
    where = place(hot=8, disk=40)
    session = where.open()
    session.put(PROMPTS[0])
    assert session.manager.flush(10.0) == 0
    file.error = EIO
    session.put(PROMPTS[1])
    assert session.manager.flush(1.0) > 0
    session.close()
    file.error = 0
    again = where.open()
    assert again.num_found(PROMPTS[0]) == 16
    assert again.read(PROMPTS[0]) == 0
    assert again.read(PROMPTS[1]) == 0


def test_reads_that_fail_turn_it_off_and_what_it_has_is_a_miss(
    place: Make, file: type[SickFile], caplog: pytest.LogCaptureFixture
) -> None:
    session = place(hot=8, disk=60).open()
    clock = own_clock(session)
    session.put(*PROMPTS)
    assert session.manager.flush(10.0) == 0
    file.read_error = EIO
    caplog.set_level(logging.WARNING)
    for tokens in PROMPTS[:3]:
        _serve(session, tokens)
    assert session.state == "off"
    lines = [r.getMessage() for r in caplog.records if "is off now" in r.getMessage()]
    assert len(lines) == 1
    assert "Input/output error" in lines[0]
    num_misses = session.total("read_misses")
    assert num_misses == 8
    assert session.quarantined[DISK] == 0, "the disk may come back"
    before = session.used[DISK]
    cache = session.manager.create_kv_cache(PROMPTS[3])
    cache.prefetch(session.manager._storage.levels[0].level)
    session.manager.finish_transfers()
    assert session.used[DISK] == before, "a prefetch of what can not be read loses nothing"
    assert cache.missing_blocks() == []
    cache.close()
    _serve(session, PROMPTS[4])
    assert session.total("read_misses") == num_misses, "nothing was read"
    file.read_error = 0
    clock.now_s += 1.5
    session.manager.flush(10.0)
    clock.now_s += 1.5
    assert session.read(PROMPTS[3]) == 0
    assert session.state == "ok"


def test_damaged_slots_say_nothing_about_the_disk(place: Make) -> None:
    session = place(hot=16, disk=60).open()
    tokens = prompt(12)
    sequence = session.filled(tokens)
    assert session.manager.flush(10.0) == 0
    for blob in sequence.cache.blobs_on_disk():
        with blob.path.open("r+b") as slots:
            slots.seek(blob.offset_bytes)
            slots.write(b"broken")
    sequence.cache.close()
    other = session.engine.create()
    assert other.resume()
    assert other.cache.resize(16 * 4)
    other.cache.synchronize()
    other.cache.close()
    assert session.read(tokens) == 12
    assert session.state == "ok"
    assert session.quarantined[DISK] == 12


def test_syncs_that_fail_are_failures_of_writes(
    place: Make, file: type[SickFile], caplog: pytest.LogCaptureFixture
) -> None:
    where = place(hot=8, disk=60)
    session = where.open()
    file.sync_error = EIO
    for tokens in PROMPTS[:4]:
        session.put(tokens)
        session.manager.flush(10.0)
    assert session.disk.health.num_write_failures >= 3
    session.close()
    assert not (where.directory / "index.bin").exists(), "nobody knows what is there"
    assert "read every header" in caplog.text
    file.sync_error = 0
    again = where.open()
    assert sum(again.num_found(tokens) for tokens in PROMPTS[:4]) == 64
    assert [again.read(tokens) for tokens in PROMPTS[:4]] == [0] * 4


def test_what_is_written_is_made_durable_by_polling(
    place: Make, file: type[SickFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = place(hot=8, disk=60, write_behind=True).open()
    syncs: list[int] = []
    sync = file.sync
    monkeypatch.setattr(file, "sync", lambda self: (syncs.append(1), sync(self))[1])
    session.put(PROMPTS[0])
    session.wait_until(lambda: bool(syncs))
    for _ in range(50):
        session.manager.poll()
        session.manager.wait_for_progress(0.02)
    assert len(syncs) == 1, "and not again without a write"
