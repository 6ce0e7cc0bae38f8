"""What can not be saved is refused before anything happens, and no save leaves a wrong file."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldpage import (
    ClosedError,
    DeviceTierConfig,
    HalfOpenRange,
    KVCacheManager,
    SnapshotError,
    UsageError,
)
from coldpage.snapshot import read_header, state_read, state_write
from coldpage.testing.pattern_engine import PatternEngine
from coldpage.types import Priority
from tests.unit.snapshot_rig import (
    CONFIG,
    PER_BLOCK,
    assert_same,
    contents,
    with_tiers,
    written,
)

BLOCK_BYTES = 2 * 2 * PER_BLOCK * 64


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    with KVCacheManager(CONFIG) as manager:
        yield manager
        manager.check_integrity()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.cpsn"


def restored(path: Path) -> list[int]:
    """How many tokens of each sequence come back in a manager that has none of them."""
    with KVCacheManager(CONFIG) as fresh:
        lengths = [cache.history_length for cache in state_read(fresh, path)]
        fresh.check_integrity()
    return lengths


# ---------------------------------------------------------------------- wrong calls


def test_a_cache_of_another_manager_is_not_saved(path: Path, manager: KVCacheManager) -> None:
    own = written(PatternEngine(manager), range(30)).cache
    with KVCacheManager(CONFIG) as other:
        foreign = written(PatternEngine(other), range(100, 130)).cache
        for caches in ([foreign], [own, foreign], [foreign.fork()]):
            with pytest.raises(UsageError, match=r"of another manager.*the manager that made it"):
                state_write(manager, caches, path)
        assert os.listdir(path.parent) == []
        assert manager.owns(own.fork())
        assert not manager.owns(foreign)
        assert state_write(other, [foreign], path)


def test_a_closed_cache_is_said_to_be_closed(path: Path, manager: KVCacheManager) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    cache.close()
    with pytest.raises(ClosedError, match="a closed KV cache can not be saved"):
        state_write(manager, [cache], path)
    assert os.listdir(path.parent) == []


def test_a_file_of_no_model_is_neither_written_nor_read(
    path: Path, manager: KVCacheManager
) -> None:
    """Another model's would be taken for it."""
    sequence = written(PatternEngine(manager), range(8))
    state_write(manager, [sequence.cache], path)
    with KVCacheManager(replace(CONFIG, model_fingerprint=b"")) as nameless:
        cache = nameless.create_kv_cache()
        with pytest.raises(UsageError, match="make the manager with a model_fingerprint"):
            state_write(nameless, [cache], path)
        with pytest.raises(UsageError, match="make the manager with a model_fingerprint"):
            state_read(nameless, path)
    assert state_read(manager, path)[0].history_length == 8


def test_scopes_are_no_strings(path: Path, manager: KVCacheManager) -> None:
    sequence = written(PatternEngine(manager), range(8))
    state_write(manager, [sequence.cache], path)
    with pytest.raises(UsageError, match="scopes is 'salt': give a list of ReuseScope"):
        state_read(manager, path, scopes="salt")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="priority is 40000"):
        state_read(manager, path, priority=Priority(40_000))


def test_more_labels_than_caches_are_refused(path: Path, manager: KVCacheManager) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    with pytest.raises(UsageError, match="2 labels were given for 1 KV caches: give each one"):
        state_write(manager, [cache], path, labels=["a", "b"])
    assert os.listdir(path.parent) == []


# ---------------------------------------------------------------------- lost blocks


@pytest.mark.parametrize(("length", "kept"), [(4, 3), (16, 13), (16, 14)])
def test_a_sequence_without_any_page_is_saved(
    length: int, kept: int, path: Path, manager: KVCacheManager
) -> None:
    """Its blocks are holes, but for the last: that one is not full any more, and so it is lost."""
    cache = written(PatternEngine(manager), range(length)).cache
    cache.drop_blocks(HalfOpenRange(0, length))
    cache.truncate(kept)
    assert cache.missing_blocks() == [length // PER_BLOCK - 1]
    assert state_write(manager, [cache], path) == path.stat().st_size == 4096
    assert read_header(path).sequences[0].tokens.tolist() == list(range(kept))
    # Holes come back as holes, and the last block, which is lost, not at all.
    assert restored(path) == [kept // PER_BLOCK * PER_BLOCK]


def test_before_a_lost_last_block_all_comes_back(path: Path, manager: KVCacheManager) -> None:
    engine = PatternEngine(manager)
    cut = written(engine, range(16)).cache
    cut.drop_blocks(HalfOpenRange(12, 16))
    cut.truncate(13)
    whole = written(engine, range(100, 130)).cache
    assert cut.missing_blocks() == [3]
    before = contents(manager, whole)
    assert state_write(manager, [cut, whole], path)
    with KVCacheManager(CONFIG) as fresh:
        first, second = state_read(fresh, path)
        assert (first.history_length, first.holes()) == (12, [])
        assert_same(contents(fresh, second), before)
        fresh.check_integrity()


def fill_hot_level(manager: KVCacheManager) -> None:
    """Push out all that is suspended."""
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(manager.max_sequence_tokens)
    cache.close()


def test_of_a_sequence_that_is_lost_only_tokens_are_saved(path: Path) -> None:
    hot_alone = with_tiers(CONFIG, DeviceTierConfig(10 * BLOCK_BYTES))
    with KVCacheManager(hot_alone) as manager:
        cache = written(PatternEngine(manager), range(30)).cache
        fill_hot_level(manager)
        assert cache.missing_blocks() == list(range(8))
        assert state_write(manager, [cache], path) == path.stat().st_size == 4096
        manager.check_integrity()
    assert read_header(path).sequences[0].tokens.tolist() == list(range(30))
    assert restored(path) == [0]


def test_beside_a_lost_sequence_another_is_saved_whole(path: Path) -> None:
    hot_alone = with_tiers(CONFIG, DeviceTierConfig(20 * BLOCK_BYTES))
    with KVCacheManager(hot_alone) as manager:
        engine = PatternEngine(manager)
        lost = written(engine, range(30)).cache
        fill_hot_level(manager)
        kept = written(engine, range(100, 130)).cache
        before = contents(manager, kept)
        num_bytes = state_write(manager, [lost, kept], path)
        assert num_bytes == path.stat().st_size == 4096 + 8 * BLOCK_BYTES
    with KVCacheManager(CONFIG) as fresh:
        first, second = state_read(fresh, path)
        assert first.history_length == 0
        assert_same(contents(fresh, second), before)


# ---------------------------------------------------------------------- the file


def test_a_directory_that_does_not_exist_is_to_be_created(
    tmp_path: Path, manager: KVCacheManager
) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    with pytest.raises(SnapshotError) as caught:
        state_write(manager, [cache], tmp_path / "none" / "file")
    directory = tmp_path / "none"
    assert str(caught.value) == (
        f"{directory / 'file'} can not be written: create the directory {directory} first"
    )
    assert caught.value.errno == errno.ENOENT
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_without_space_the_old_file_stays(
    number: int, path: Path, manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    state_write(manager, [cache], path)
    old = path.read_bytes()

    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    words = rf"can not be written \({os.strerror(number)}\): free space there or save elsewhere"
    with pytest.raises(SnapshotError, match=words) as caught:
        state_write(manager, [cache], path)
    assert caught.value.errno == number
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


KILLED = """
import os, signal, sys
from coldpage import KVCacheManager
from coldpage.snapshot import state_write
from coldpage.testing.pattern_engine import PatternEngine
from coldpage.types import Priority
from tests.unit.snapshot_rig import CONFIG, written
manager = KVCacheManager(CONFIG)
cache = written(PatternEngine(manager), range(30)).cache
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
state_write(manager, [cache], sys.argv[1])
"""


def kill_while_saving(path: Path) -> Path:
    """What a process leaves that is killed in ``state_write``."""
    before = set(os.listdir(path.parent))
    killed = subprocess.run([sys.executable, "-c", KILLED, path], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (name,) = set(os.listdir(path.parent)) - before
    assert name.startswith(f".{path.name}.")
    assert name.endswith(".new")
    return path.with_name(name)


def test_what_a_killed_process_left_is_removed(path: Path, manager: KVCacheManager) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    kill_while_saving(path)
    other = kill_while_saving(path.with_name("other"))
    kept = [f".{path.name}.new", f".{path.name}.conf.new", f"{path.name}.abcdefgh.new", "mine"]
    for name in kept:
        path.with_name(name).touch()
    assert state_write(manager, [cache], path)
    assert sorted(os.listdir(path.parent)) == sorted([*kept, other.name, path.name])
    assert restored(path) == [5]


def test_a_refused_save_removes_nothing(path: Path, manager: KVCacheManager) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    cache.close()
    left = kill_while_saving(path)
    with pytest.raises(ClosedError):
        state_write(manager, [cache], path)
    assert left.exists()


def test_two_saves_under_one_name_do_not_meet(
    path: Path, manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that ends later wins, and each file is whole."""
    long = written(PatternEngine(manager), range(30)).cache
    fsync, lengths = os.fsync, []

    def save_another_first(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        with KVCacheManager(CONFIG) as other:
            short = written(PatternEngine(other), range(5)).cache
            assert state_write(other, [short], path)
        lengths.extend(restored(path))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", save_another_first)
    assert state_write(manager, [long], path)
    assert [*lengths, *restored(path)] == [5, 30]
    assert os.listdir(path.parent) == [path.name]


def test_a_new_file_that_was_taken_for_a_leftover_is_made_again(
    path: Path, manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    lock, num_removed = fcntl.flock, 0

    def lock_late(fd: int, operation: int) -> None:
        nonlocal num_removed
        lock(fd, operation)
        if num_removed == 0:
            num_removed += 1
            os.unlink(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert state_write(manager, [cache], path)
    assert num_removed == 1
    assert restored(path) == [5]


def test_where_there_are_no_locks_nothing_is_removed(
    path: Path, manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    left = kill_while_saving(path)

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert state_write(manager, [cache], path)
    assert sorted(os.listdir(path.parent)) == sorted([left.name, path.name])
