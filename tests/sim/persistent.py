"""Managers on real files that are closed and opened again, and disks that hang or fail."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import coldpage.layout.partition
import coldpage.pools.disk_tier
from coldpage import DeviceTierConfig, DiskTierConfig, HostTierConfig, KVCacheManager
from coldpage.codecs import ColdPageCodec
from coldpage.config import CacheTierConfig, KVCacheManagerConfig
from coldpage.device.file import BlockFile
from coldpage.layout import hot_layout
from coldpage.testing.pattern_engine import Bytes, PatternEngine, PatternSequence
from coldpage.types import LayerGroupId
from tests.property.setups import disk_slot_bytes, layers_of

PER_BLOCK = 4
DISK = 1  # the level, where there is no host level
_MAX_WAIT_S = 20.0


def prompt(num_blocks: int, first: int = 0) -> list[int]:
    """Tokens of whole blocks that share none with those of another ``first``."""
    return [first, *range(100, 99 + PER_BLOCK * num_blocks)]


class Place:
    """A directory in which managers of one kind follow each other. Sizes are in blocks."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.path = path
        self.settings = settings
        self._open: list[Session] = []

    def open(self, **changes: object) -> Session:
        session = Session(self.path, **(self.settings | changes))  # type: ignore[arg-type]
        self._open.append(session)
        return session

    @property
    def directory(self) -> Path:
        """Of the one instance."""
        (directory,) = (self.path / "paged").iterdir()
        return directory

    def close(self) -> None:
        for session in self._open:
            session.close()


class Session:
    """One manager on real memory and files."""

    def __init__(
        self,
        path: Path,
        *,
        hot: int = 16,
        host: int = 0,
        disk: int = 64,
        disk2: int = 0,
        kind: str = "full",
        per_block: int = PER_BLOCK,
        fingerprint: bytes = b"pattern",
        codec: Callable[[], ColdPageCodec] | None = None,
        disk_codec: Callable[[], ColdPageCodec] | None = None,
        separate_sinks: bool = False,
        num_recent_blocks: int = 0,
        view: Callable[[Bytes], Bytes] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **disk_settings: object,
    ) -> None:
        layers = layers_of(kind, per_block)
        layout = hot_layout(
            layers, separate_sinks=separate_sinks, num_recent_blocks=num_recent_blocks
        )
        sizes = [layout.page_bytes(lc.life_cycle_id) for lc in layout.life_cycles]
        self._on_disk = sum(disk_slot_bytes(size, per_block) for size in sizes)
        tiers: list[CacheTierConfig] = [DeviceTierConfig(hot * sum(sizes))]
        if host:
            tiers.append(HostTierConfig(host * sum(sizes)))
        for name, size in (("disk2", disk2), ("disk", disk)):
            if size:
                where = str(path if name == "disk" else path.with_name(path.name + "-2"))
                own = disk_codec() if disk_codec is not None else None
                tiers.append(
                    DiskTierConfig(where, size * self._on_disk, own, **disk_settings)  # type: ignore[arg-type]
                )
        config = KVCacheManagerConfig(
            per_block,
            tuple(tiers),
            layers,
            1.0,
            fingerprint,
            separate_sink_pages=separate_sinks,
            num_recent_blocks=num_recent_blocks,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coldpage.layout.partition, "TYPICAL_SEQUENCE_TOKENS", 4 * per_block)
            needs_main = codec is not None and (disk_codec is None or host)
            self.manager = KVCacheManager(
                config, codec=codec() if needs_main and codec else None, on_progress=on_progress
            )
        self.engine = PatternEngine(self.manager, view=view)
        self.disk = next(level.disk for level in self.manager._storage.levels if level.is_disk)
        self._is_closed = False

    def filled(self, tokens: Sequence[int]) -> PatternSequence:
        """A suspended sequence that has written and committed the tokens."""
        sequence = self.engine.create(tokens)
        assert sequence.resume()
        assert sequence.step(tokens[sequence.cache.history_length :])
        sequence.cache.suspend()
        return sequence

    def put(self, *prompts: Sequence[int]) -> None:
        """Commit them, one after the other, and let go of them."""
        for tokens in prompts:
            self.filled(tokens).cache.close()

    def num_found(self, tokens: Sequence[int]) -> int:
        """How many tokens would be reused."""
        cache = self.manager.create_kv_cache(tokens)
        found = cache.history_length
        cache.close()
        return found

    def read(self, tokens: Sequence[int]) -> int:
        """Reuse what there is of the tokens, look at every byte, and return how many blocks had to
        be computed again.
        """
        sequence = self.engine.create(tokens)
        assert sequence.resume()
        self.becomes_ready(sequence)
        num_missing = len(sequence.cache.missing_blocks())
        sequence.recompute()
        sequence.check()
        sequence.cache.close()
        self.check()
        return num_missing

    def becomes_ready(self, sequence: PatternSequence) -> None:
        self.wait_until(sequence.cache.is_ready)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll until it is so; a hang fails."""
        deadline = time.monotonic() + _MAX_WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "it never happens"
            self.manager.wait_for_progress(0.01)
            self.manager.poll()

    def keys(self) -> set[bytes]:
        """Every block in the tree."""
        return set(self.manager._tree._by_key)

    def pages_by_value(self) -> list[bytes]:
        """The keys of all committed pages of the first layer group, least valuable first."""
        storage, tree = self.manager._storage, self.manager._tree
        pages = tree.pages_of(LayerGroupId(0))
        storage.table.is_protected[pages] = False  # for the sake of sequences that are no more
        scores = storage._escalation.policy.score(storage.table, pages)
        return [tree.key_of(page) for page in pages[scores.argsort(kind="stable")].tolist()]  # type: ignore[misc]

    @property
    def state(self) -> str:
        """Of the disk level."""
        return self.manager.stats().levels[-1].state

    @property
    def used(self) -> list[int]:
        return [level.used_slots for level in self.manager.stats().levels]

    @property
    def quarantined(self) -> list[int]:
        return [level.quarantined_slots for level in self.manager.stats().levels]

    def total(self, name: str) -> int:
        return self.manager.stats().totals.get(name, 0)

    def moved(self, path: str) -> int:
        return self.manager.stats().moved_pages.get(path, 0)

    def check(self) -> None:
        self.manager.check_integrity()
        assert not self.engine.problems, "\n".join(self.engine.problems)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                self.check()
            finally:
                del self.engine
                self.manager.close()


class SickFile(BlockFile):
    """A file that hangs or fails while the class says so; a test has a class of its own."""

    error = 0  # of writes
    read_error = 0
    sync_error = 0
    num_writes = 0
    reads_may_go: threading.Event
    writes_may_go: threading.Event

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads_may_go.wait()
        _raise(self.read_error)
        return super()._read_some(buffers, offset)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.writes_may_go.wait()
        _raise(self.error)
        type(self).num_writes += 1
        return super()._write_some(buffers, offset)

    def sync(self) -> None:
        _raise(self.sync_error)
        super().sync()


def _raise(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))


def sick_files(monkeypatch: pytest.MonkeyPatch) -> type[SickFile]:
    """The class of every disk file that is opened from now on; well, until told otherwise."""
    kind = type("OwnSickFile", (SickFile,), {})
    kind.reads_may_go, kind.writes_may_go = threading.Event(), threading.Event()
    kind.reads_may_go.set()
    kind.writes_may_go.set()
    monkeypatch.setattr(coldpage.pools.disk_tier, "BlockFile", kind)
    return kind


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


def own_clock(session: Session) -> Clock:
    """The clock by which the session's disk has deadlines and is tried again."""
    clock = Clock()
    disk_moves = session.manager._storage._disk_moves
    assert disk_moves is not None
    disk_moves.end.clock = clock
    for breaker in (session.disk.health._writes, session.disk.health._reads):
        breaker._clock = clock
    return clock


EIO, ENOSPC = errno.EIO, errno.ENOSPC
