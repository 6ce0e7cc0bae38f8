"""Committed pages go to disk before anybody needs their room, and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import coldpage.storage.storage
from tests.property.setups import Setup, build_manager, simulated
from tests.sim.persistent import DISK, PER_BLOCK, Place, Session, prompt, sick_files

Make = Callable[..., Place]


def _polled(session: Session) -> None:
    """Everything that is written in the background has been."""
    for _ in range(20):
        session.manager.poll()
        session.manager.finish_transfers()


@pytest.mark.parametrize("kind", ["full", "mixed-sizes", "window"])
def test_committed_pages_reach_the_disk_without_pressure(place: Make, kind: str) -> None:
    where = place(kind=kind, hot=40, write_behind=True)
    session = where.open()
    sequence = session.filled([*prompt(4), 1, 2])
    _polled(session)
    on_disk = {blob.ordinal for blob in sequence.cache.blobs_on_disk()}
    assert on_disk == {0, 1, 2, 3} if kind == "full" else on_disk
    assert not any(blob.is_only_copy for blob in sequence.cache.blobs_on_disk())
    num_pages = 4 * len(session.engine.layer_groups)
    assert session.used[DISK] == session.moved("hot-disk") == num_pages, "not the block in progress"
    # Once.
    assert sequence.resume()
    sequence.cache.synchronize()
    sequence.check()
    sequence.cache.suspend()
    _polled(session)
    sequence.cache.close()
    _polled(session)
    session.put(prompt(4))
    _polled(session)
    assert session.moved("hot-disk") == num_pages


def test_without_it_nothing_is_written_until_it_must_be(place: Make) -> None:
    session = place(hot=40).open()
    session.put(prompt(4))
    _polled(session)
    assert session.used[DISK] == 0


def test_active_sequences_are_left_alone_and_written_when_they_stop(place: Make) -> None:
    session = place(hot=40, write_behind=True).open()
    sequence = session.engine.create()
    assert sequence.resume()
    assert sequence.step(prompt(4))
    _polled(session)
    assert session.used[DISK] == 0
    sequence.cache.suspend()
    _polled(session)
    assert session.used[DISK] == 4
    sequence.cache.close()


def test_a_page_written_to_meanwhile_is_not_stale(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence goes back into a committed block, whose page is on its way to disk."""
    file = sick_files(monkeypatch)
    where = place(hot=40, write_behind=True)
    session = where.open()
    sequence = session.filled(prompt(4))
    file.writes_may_go.clear()
    session.manager.poll()
    assert session.manager._storage._disk_moves.writes.num_pages_in_flight == 4  # type: ignore[union-attr]
    sequence.truncate(3 * PER_BLOCK + 1)
    assert sequence.resume()
    assert sequence.step([77, 78, 79])
    sequence.check()
    file.writes_may_go.set()
    _polled(session)
    sequence.cache.suspend()
    _polled(session)
    other = list(sequence.tokens)
    assert other != prompt(4)
    assert session.used[DISK] == 5, "both blocks are what their tokens say"
    sequence.cache.close()
    session.close()
    again = where.open()
    assert [again.num_found(tokens) for tokens in (prompt(4), other)] == [16, 16]
    assert [again.read(tokens) for tokens in (prompt(4), other)] == [0, 0]


def test_what_is_committed_after_it_went_to_disk_bears_its_name(place: Make) -> None:
    where = place(hot=8)
    session = where.open()
    tokens = prompt(3)
    sequence = session.engine.create()
    assert sequence.resume()
    assert sequence.step(tokens, num_committed=0)
    sequence.cache.suspend()
    other = session.engine.create()
    assert other.resume()
    assert other.cache.resize(8 * PER_BLOCK)
    other.cache.synchronize()
    other.cache.close()
    session.manager.finish_transfers()
    assert len(sequence.cache.blobs_on_disk()) == 3
    assert sequence.resume()
    sequence.cache.synchronize()
    sequence.cache.commit(tokens)
    sequence.cache.suspend()
    assert session.manager.flush(10.0) == 0
    sequence.cache.close()
    session.close()
    (where.directory / "index.bin").unlink()
    again = where.open()
    assert again.num_found(tokens) == 12
    assert again.read(tokens) == 0


def test_it_is_bounded(place: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coldpage.storage.storage, "MAX_BACKUP_PAGES", 6)
    file = sick_files(monkeypatch)
    session = place(hot=64, disk=100, write_behind=True).open()
    file.writes_may_go.clear()
    session.put(*[prompt(4, first) for first in range(10)])
    writes = session.manager._storage._disk_moves.writes  # type: ignore[union-attr]
    for _ in range(10):
        session.manager.poll()
        assert writes.num_pages_in_flight <= 6
    assert writes.num_pages_in_flight == 6
    file.writes_may_go.set()
    _polled(session)
    assert session.used[DISK] == 40
    assert file.num_writes >= 40


def test_what_waited_and_was_dropped_is_not_written(place: Make) -> None:
    session = place(hot=4, disk=20, write_behind=True).open()
    session.put(prompt(4, 1))  # noted, and pushed out before anybody polls
    session.put(prompt(4, 2))
    session.manager.finish_transfers()
    _polled(session)
    assert session.used[DISK] == 8
    session.check()
    assert [session.read(prompt(4, first)) for first in (1, 2)] == [0, 0]


# ---------------------------------------------------------------------- at the end


def test_flushing_writes_from_every_level_in_memory(place: Make) -> None:
    where = place(hot=8, host=8, disk=40, kind="mixed")
    session = where.open()
    prompts = [prompt(4, first) for first in range(3)]
    session.put(*prompts)
    session.manager.finish_transfers()
    assert session.used[1] > 0
    assert session.manager.flush(10.0) == 0
    session.close()
    again = where.open()
    assert [again.num_found(tokens) for tokens in prompts] == [16, 16, 16]
    assert [again.read(tokens) for tokens in prompts] == [0, 0, 0]


def test_the_most_valuable_come_first_where_there_is_no_room_for_all(place: Make) -> None:
    where = place(hot=40, disk=8)
    session = where.open()
    prompts = [prompt(4, first) for first in range(4)]
    session.put(*prompts)
    session.put(prompts[1])
    assert session.manager.flush(10.0) == 8
    session.close()
    again = where.open()
    assert [again.num_found(tokens) for tokens in prompts] == [0, 16, 0, 16]


def test_what_is_on_disk_gives_way_to_what_is_worth_more(place: Make) -> None:
    where = place(hot=40, disk=8)
    session = where.open()
    prompts = [prompt(4, first) for first in range(3)]
    session.put(prompts[0], prompts[1])
    assert session.manager.flush(10.0) == 0
    session.put(prompts[0], prompts[2])
    assert session.manager.flush(10.0) == 4
    session.check()
    session.close()
    again = where.open()
    assert [again.num_found(tokens) for tokens in prompts] == [16, 0, 16]
    assert [again.read(tokens) for tokens in (prompts[0], prompts[2])] == [0, 0]


def test_a_budget_is_kept_and_first_blocks_come_first(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sick_files(monkeypatch)
    where = place(hot=64, disk=100)
    session = where.open()
    session.put(prompt(40))
    file.writes_may_go.clear()
    started = time.monotonic()
    monkeypatch.setattr(file, "sync", lambda self: None)
    num_left = session.manager.flush(0.3)
    assert 0.25 < time.monotonic() - started < 3.0
    assert num_left == 40
    file.writes_may_go.set()
    monkeypatch.setattr(coldpage.storage.storage, "MAX_BACKUP_PAGES", 5)
    session.manager.finish_transfers()
    monkeypatch.undo()
    session.manager.flush(0.0)
    session.close()
    again = where.open()
    assert again.num_found(prompt(40)) == 160
    assert again.read(prompt(40)) == 0


def test_a_part_that_was_flushed_is_the_beginning(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coldpage.storage.storage, "MAX_BACKUP_PAGES", 4)
    where = place(hot=64, disk=100)
    session = where.open()
    session.put(prompt(40))
    storage = session.manager._storage
    (backup,) = storage._backups
    backup.note_all(storage._escalation.policy)
    for _ in range(3):  # as if the time had been over then
        storage._advance_backup(backup)
        session.manager.finish_transfers()
    assert session.used[DISK] == 12
    session.close()
    again = where.open()
    # The newest block counts for more than those before it, so it is the twelfth.
    assert again.num_found(prompt(40)) == 11 * PER_BLOCK


def test_without_a_disk_everything_is_left(tmp_path: Path) -> None:
    manager = build_manager(Setup(), simulated(), tmp_path)
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(4)
    cache.synchronize()
    cache.commit([1, 2, 3, 4])
    cache.close()
    assert manager.flush(1.0) == 2
    manager.close()
