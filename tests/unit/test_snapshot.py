"""Saved sequences come back with the same bytes, elsewhere too, and nothing else comes back."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coldpage import (
    DeviceTierConfig,
    DiskTierConfig,
    HalfOpenRange,
    HostTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    OnMissing,
    ReuseScope,
    SnapshotError,
    UsageError,
)
from coldpage.snapshot import Origin, read_header, state_read, state_write
from coldpage.testing.example_codecs import CoarseCodec
from coldpage.testing.pattern_engine import PatternEngine, PatternSequence
from coldpage.types import LayerGroupId
from tests.unit.snapshot_rig import (
    CONFIG,
    MIB,
    ORIGIN,
    PER_BLOCK,
    WINDOWED,
    assert_same,
    contents,
    layers,
    with_tiers,
    written,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.cpsn"


@pytest.fixture
def saved(path: Path) -> Path:
    """A file with one sequence of CONFIG, of 30 tokens."""
    with KVCacheManager(CONFIG) as manager:
        cache = written(PatternEngine(manager), range(30)).cache
        assert state_write(manager, [cache], path, origin=ORIGIN) == path.stat().st_size
    return path


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    with KVCacheManager(CONFIG) as manager:
        yield manager
        manager.check_integrity()


@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("separate_sinks", [False, True])
@pytest.mark.parametrize("length", [1, 4, 31, 64, 90])
def test_a_sequence_comes_back_in_another_manager(
    config: KVCacheManagerConfig, separate_sinks: bool, length: int, path: Path, tmp_path: Path
) -> None:
    config = replace(config, separate_sink_pages=separate_sinks)
    with KVCacheManager(config) as manager:
        sequence = written(PatternEngine(manager), range(length))
        before = contents(manager, sequence.cache)
        assert state_write(manager, [sequence.cache], path, origin=ORIGIN)
        manager.check_integrity()
    tiers = HostTierConfig(MIB // 2), DiskTierConfig(str(tmp_path / "disk"), MIB, instance_id="x")
    with KVCacheManager(with_tiers(config, DeviceTierConfig(MIB // 2), *tiers)) as other:
        (cache,) = state_read(other, path, origin=ORIGIN)
        assert cache.tokens.tolist() == list(range(length))
        assert cache.history_length == length
        assert_same(contents(other, cache), before)
        engine = PatternEngine(other)
        restored = PatternSequence(engine, cache, ReuseScope(), list(range(length)))
        assert restored.resume()
        assert restored.step([7, 8, 9])
        restored.cache.suspend()
        assert engine.problems == []
        # Its whole blocks are known to everybody.
        again = other.create_kv_cache(list(range(length)))
        assert again.num_committed_tokens == length // PER_BLOCK * PER_BLOCK
        other.check_integrity()


def test_positions_that_are_not_final_come_back_too(path: Path, manager: KVCacheManager) -> None:
    sequence = written(PatternEngine(manager), range(11), committed=6)
    before = contents(manager, sequence.cache)
    state_write(manager, [sequence.cache], path)
    sequence.cache.close()
    (cache,) = state_read(manager, path)
    assert (cache.num_committed_tokens, cache.history_length) == (6, 11)
    assert_same(contents(manager, cache), before)


def test_what_the_manager_has_is_not_read(saved: Path, manager: KVCacheManager) -> None:
    engine = PatternEngine(manager)
    written(engine, range(16)).cache.close()
    data = bytearray(saved.read_bytes())
    header = read_header(saved)
    start = len(data) - header.data_bytes
    for entry in header.pages:
        if entry["block"] < 4:
            data[start + int(entry["offset"])] ^= 1
    saved.write_bytes(data)
    (cache,) = state_read(manager, saved, origin=ORIGIN)
    assert cache.history_length == 30
    restored = PatternSequence(engine, cache, ReuseScope(), list(range(30)))
    assert restored.resume()
    restored.cache.synchronize()
    restored.check()
    restored.cache.suspend()
    assert engine.problems == []


def test_shared_pages_are_stored_once(path: Path, manager: KVCacheManager) -> None:
    engine = PatternEngine(manager)
    first = written(engine, range(30))
    fork = first.fork()  # shares the last, partial block too
    other = written(engine, [*range(16), 99, 98, 97])
    caches = [first.cache, fork.cache, other.cache]
    before = [contents(manager, cache) for cache in caches]
    assert state_write(manager, caches, path, labels=["a", "b"])
    header = read_header(path)
    assert [one.label for one in header.sequences] == ["a", "b", ""]
    assert header.pages.size == 8 + 1
    for cache in caches:
        cache.close()
    with KVCacheManager(CONFIG) as fresh:
        restored = state_read(fresh, path)
        for cache, expected in zip(restored, before, strict=True):
            assert_same(contents(fresh, cache), expected)
        fresh.check_integrity()


def test_several_sequences_need_not_fit_the_hot_level_together(path: Path, tmp_path: Path) -> None:
    block_bytes = 2 * 2 * PER_BLOCK * 64
    small = with_tiers(CONFIG, DeviceTierConfig(10 * block_bytes), HostTierConfig(MIB))
    with KVCacheManager(small) as manager:
        engine = PatternEngine(manager)
        caches = [written(engine, [i * 1000 + t for t in range(30)]).cache for i in range(3)]
        before = [contents(manager, cache) for cache in caches]
        assert state_write(manager, caches, path)
    disk = DiskTierConfig(str(tmp_path), MIB)
    with KVCacheManager(with_tiers(CONFIG, DeviceTierConfig(9 * block_bytes), disk)) as other:
        restored = state_read(other, path)
        assert [cache.history_length for cache in restored] == [30, 30, 30]
        for cache, expected in zip(restored, before, strict=True):
            assert_same(contents(other, cache), expected)


def test_of_too_long_a_sequence_the_longest_prefix_that_fits_comes_back(saved: Path) -> None:
    block_bytes = 2 * 2 * PER_BLOCK * 64
    small = with_tiers(CONFIG, DeviceTierConfig(5 * block_bytes))
    with KVCacheManager(small) as manager:
        (cache,) = state_read(manager, saved, origin=ORIGIN)
        assert cache.history_length == cache.num_committed_tokens == 5 * PER_BLOCK
        engine = PatternEngine(manager)
        restored = PatternSequence(engine, cache, ReuseScope(), list(range(20)))
        assert restored.resume()
        restored.cache.synchronize()
        restored.check()
        assert engine.problems == []


def test_beside_what_runs_only_what_has_room_comes_back(saved: Path) -> None:
    block_bytes = 2 * 2 * PER_BLOCK * 64
    with KVCacheManager(with_tiers(CONFIG, DeviceTierConfig(9 * block_bytes))) as manager:
        running = manager.create_kv_cache()
        assert running.resume()
        assert running.resize(6 * PER_BLOCK)
        (cache,) = state_read(manager, saved, origin=ORIGIN)
        assert cache.history_length == cache.num_committed_tokens == 3 * PER_BLOCK
        running.close()
        manager.check_integrity()


def test_of_a_sequence_with_windows_that_does_not_fit_nothing_comes_back(path: Path) -> None:
    with KVCacheManager(WINDOWED) as manager:
        cache = written(PatternEngine(manager), range(90)).cache
        state_write(manager, [cache], path)
    small = with_tiers(WINDOWED, DeviceTierConfig(MIB // 64))
    with KVCacheManager(small) as manager:
        assert 9 < manager.max_sequence_tokens < 90
        (restored,) = state_read(manager, path)
        assert restored.history_length == 0
        manager.check_integrity()


def test_a_sequence_that_does_not_fit_now_is_not_saved(path: Path) -> None:
    block_bytes = 2 * 2 * PER_BLOCK * 64
    tiers = DeviceTierConfig(9 * block_bytes), HostTierConfig(MIB)
    with KVCacheManager(with_tiers(CONFIG, *tiers)) as manager:
        cache = written(PatternEngine(manager), range(30)).cache
        running = manager.create_kv_cache()
        assert running.resume()
        assert running.resize(6 * PER_BLOCK)
        assert state_write(manager, [cache], path) is None
        assert list(path.parent.iterdir()) == []
        running.suspend()
        assert state_write(manager, [cache], path)


def test_without_pages_only_tokens_are_kept(path: Path, manager: KVCacheManager) -> None:
    cache = written(PatternEngine(manager), range(30)).cache
    num_bytes = state_write(manager, [cache], path, include_pages=False)
    assert num_bytes == path.stat().st_size == 4096
    header = read_header(path)
    assert header.sequences[0].tokens.tolist() == list(range(30))
    (same,) = state_read(manager, path)
    assert same.history_length == 28  # what the manager has anyway
    with KVCacheManager(CONFIG) as fresh:
        (none,) = state_read(fresh, path)
        assert none.history_length == 0


def test_holes_come_back_as_holes(path: Path) -> None:
    with KVCacheManager(WINDOWED) as manager:
        sequence = written(PatternEngine(manager), range(40))
        cache = sequence.cache
        cache.drop_blocks(HalfOpenRange(4, 12))
        cache.drop_blocks(HalfOpenRange(16, 20), LayerGroupId(0))
        holes = [cache.holes(LayerGroupId(group)) for group in (0, 1)]
        assert sequence.resume()
        assert sequence.step([50, 51, 52, 53, 54])
        cache.suspend()
        before = contents(manager, cache)
        assert state_write(manager, [cache], path)
    with KVCacheManager(WINDOWED) as fresh:
        # Others have the same tokens, computed without holes.
        written(PatternEngine(fresh), [*range(40), 50, 51, 52, 53, 54]).cache.close()
        (cache,) = state_read(fresh, path)
        assert [cache.holes(LayerGroupId(group)) for group in (0, 1)] == holes
        assert_same(contents(fresh, cache), before)
        fresh.check_integrity()


def test_after_a_hole_nothing_is_shared(path: Path, manager: KVCacheManager) -> None:
    sequence = written(PatternEngine(manager), range(24))
    sequence.cache.drop_blocks(HalfOpenRange(8, 12))
    state_write(manager, [sequence.cache], path)
    with KVCacheManager(CONFIG) as fresh:
        (cache,) = state_read(fresh, path)
        assert cache.history_length == 24
        assert fresh.create_kv_cache(list(range(24))).num_committed_tokens == 8


def test_lost_blocks_are_left_out(path: Path, tmp_path: Path) -> None:
    tiers = DeviceTierConfig(10 * 1024), DiskTierConfig(str(tmp_path / "d"), MIB)
    with KVCacheManager(with_tiers(CONFIG, *tiers)) as manager:
        engine = PatternEngine(manager)
        cache = written(engine, range(32)).cache
        written(engine, range(1000, 1036)).cache.close()  # pushes it out
        manager.finish_transfers()
        blob = next(b for b in cache.blobs_on_disk() if b.ordinal == 5 and b.is_only_copy)
        with open(blob.path, "r+b") as file:
            file.seek(blob.offset_bytes)
            file.write(b"\xff" * 8)
        assert state_write(manager, [cache], path)
    with KVCacheManager(CONFIG) as fresh:
        (restored,) = state_read(fresh, path)
        assert restored.history_length == 20
        engine = PatternEngine(fresh)
        sequence = PatternSequence(engine, restored, ReuseScope(), list(range(20)))
        assert sequence.resume()
        restored.synchronize()
        sequence.check()
        assert engine.problems == []


def test_files_are_private_and_replaced_whole(saved: Path, manager: KVCacheManager) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    old = saved.read_bytes()
    cache = written(PatternEngine(manager), range(5)).cache
    state_write(manager, [cache], saved)
    assert saved.read_bytes() != old
    assert os.listdir(saved.parent) == [saved.name]


def test_an_active_cache_is_not_saved(path: Path, manager: KVCacheManager) -> None:
    cache = manager.create_kv_cache()
    assert cache.resume()
    with pytest.raises(UsageError, match="suspend"):
        state_write(manager, [cache], path)


def test_a_salt_is_neither_told_nor_got_around(path: Path, manager: KVCacheManager) -> None:
    engine, salted = PatternEngine(manager), ReuseScope(salt="open sesame")
    sequence = engine.create(scope=salted)
    assert sequence.resume()
    assert sequence.step(list(range(10)))
    sequence.cache.suspend()
    state_write(manager, [sequence.cache], path)
    assert b"sesame" not in path.read_bytes()
    with pytest.raises(SnapshotError, match="another salt"):
        state_read(manager, path)
    (cache,) = state_read(manager, path, scopes=[ReuseScope(), salted])
    assert cache.history_length == 10


# ---------------------------------------------------------------------- refusals

OTHERS: dict[str, tuple[Callable[[], KVCacheManagerConfig], Origin]] = {
    "another model": (lambda: replace(CONFIG, model_fingerprint=b"other"), ORIGIN),
    "another tokenizer": (lambda: CONFIG, replace(ORIGIN, tokenizer="letters")),
    r"another number type \(float32 there, bfloat16 here\)": (
        lambda: CONFIG,
        replace(ORIGIN, dtype="bfloat16"),
    ),
    r"another tokenizer \(words there, none named here\), "
    r"another number type \(float32 there, none named here\); "
    r"pass origin=Origin\(tokenizer='words', dtype='float32'\) if its pages are right": (
        lambda: CONFIG,
        Origin(),
    ),
    r"another number type \(float32 there, none named here\); "
    r"pass origin=Origin\(tokenizer='words', dtype='float32'\) if its pages are right": (
        lambda: CONFIG,
        replace(ORIGIN, dtype=""),
    ),
    r"another tokenizer, another number type \(float32 there, none named here\)$": (
        lambda: CONFIG,
        Origin(tokenizer="letters"),
    ),
    r"another model, another tokenizer \(words there, none named here\), "
    r"another number type \(float32 there, none named here\)$": (
        lambda: replace(CONFIG, model_fingerprint=b"other"),
        Origin(),
    ),
    "another geometry": (lambda: replace(CONFIG, layers=layers(None, 9)), ORIGIN),
    "another choice of lossy codecs": (
        lambda: with_tiers(CONFIG, DeviceTierConfig(MIB), HostTierConfig(MIB, codec=CoarseCodec())),
        ORIGIN,
    ),
}


@pytest.mark.parametrize("words", OTHERS)
def test_a_file_of_another_kind_is_refused(words: str, saved: Path) -> None:
    config, origin = OTHERS[words]
    with KVCacheManager(config()) as manager:
        with pytest.raises(SnapshotError, match=words) as caught:
            state_read(manager, saved, origin=origin)
        assert "\n" not in str(caught.value)
        assert manager.stats().num_pages == 0


def test_a_file_of_another_codec_version_is_refused(
    saved: Path, manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldpage.codecs.concat._ConcatCodec.version", 2)
    with pytest.raises(SnapshotError, match="another codec or version of it"):
        state_read(manager, saved, origin=ORIGIN)


def test_every_flipped_bit_is_found(saved: Path, manager: KVCacheManager) -> None:
    data = bytearray(saved.read_bytes())
    used = 4096 * 1 + 2 * 1024  # the header, and two pages
    unnoticed = []
    for at in [*range(700), *range(4080, 4096), *range(4096, used, 37), len(data) - 1]:
        data[at] ^= 1 << (at % 8)
        saved.write_bytes(data)
        with contextlib.suppress(SnapshotError):
            for cache in state_read(manager, saved, origin=ORIGIN):
                cache.close()
            unnoticed.append(at)
        data[at] ^= 1 << (at % 8)
    assert unnoticed == []
    assert manager.stats().num_committed_blocks == 0


def test_every_truncated_file_is_refused(saved: Path, manager: KVCacheManager) -> None:
    data = saved.read_bytes()
    for size in [0, 3, 31, 32, 100, 4095, 4096, 5000, len(data) - 1]:
        saved.write_bytes(data[:size])
        with pytest.raises(SnapshotError, match=r"truncated|no file of saved"):
            state_read(manager, saved, origin=ORIGIN)


def test_swapped_pages_are_found(saved: Path, manager: KVCacheManager) -> None:
    data = bytearray(saved.read_bytes())
    data[4096:5120], data[5120:6144] = data[5120:6144], data[4096:5120]
    saved.write_bytes(data)
    with pytest.raises(SnapshotError, match="block 0 does not match its checksum"):
        state_read(manager, saved, origin=ORIGIN)


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path, manager: KVCacheManager) -> None:
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    (tmp_path / "real").write_bytes(b"x" * 10_000)
    link.symlink_to(tmp_path / "real")
    os.mkfifo(fifo)
    for name, words in (
        ("real", "no file of saved sessions"),
        ("none", "can not be read"),
        ("link", "can not be read"),
        (".", "can not be read"),
        ("fifo", "no file of saved sessions"),
    ):
        with pytest.raises(SnapshotError, match=words):
            state_read(manager, tmp_path / name)


def test_a_file_that_can_not_be_written_is_a_sentence(
    tmp_path: Path, manager: KVCacheManager
) -> None:
    cache = written(PatternEngine(manager), range(5)).cache
    with pytest.raises(SnapshotError, match="can not be written"):
        state_write(manager, [cache], tmp_path / "none" / "file")


def test_masked_losses_are_holes_in_the_file(path: Path, tmp_path: Path) -> None:
    tiers = DeviceTierConfig(10 * 1024), DiskTierConfig(str(tmp_path / "d"), MIB)
    with KVCacheManager(with_tiers(CONFIG, *tiers)) as manager:
        engine = PatternEngine(manager)
        sequence = engine.create(on_missing=OnMissing.HOLE)
        assert sequence.resume()
        assert sequence.step(list(range(32)))
        sequence.cache.suspend()
        written(engine, range(1000, 1036)).cache.close()
        manager.finish_transfers()
        blob = next(b for b in sequence.cache.blobs_on_disk() if b.ordinal == 5 and b.is_only_copy)
        with open(blob.path, "r+b") as file:
            file.seek(blob.offset_bytes)
            file.write(b"\xff" * 8)
        assert state_write(manager, [sequence.cache], path)
    with KVCacheManager(CONFIG) as fresh:
        (restored,) = state_read(fresh, path)
        assert restored.history_length == 32
        assert restored.holes() == [5]
