"""Random operations on a store whose disk fails at random and whose process dies at random.

Nothing wrong is read, nothing acknowledged is lost, nothing deleted comes back, and every slot is
accounted for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from coldpage.device.file import BlockFile
from coldpage.store import BlobStore, FileIdentity
from coldpage.store.base import StoreTicket
from coldpage.testing.store_kit import blob_name, blob_payloads

_PAYLOAD = 300
_IDENTITY = FileIdentity(b"f" * 32, "raw:1:", _PAYLOAD, 4)
_NUM_BLOBS = 10
_NUM_KEYS = 24


class _Disk(BlockFile):
    """When sick, calls fail by chance; a failed write may have written all, a part or nothing."""

    is_sick = False

    def _fails(self) -> bool:
        return self.is_sick and os.urandom(1)[0] < 100

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        if self._fails():
            raise OSError(5, "sick")
        return super()._read_some(buffers, offset)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        if self._fails():
            match os.urandom(1)[0] % 3:
                case 0:
                    super()._write_some([buffers[0][:4096]], offset)
                case 1:
                    super()._write_some(buffers, offset)
            raise OSError(28, "sick")
        return super()._write_some(buffers, offset)

    def sync(self) -> None:
        if self._fails():
            raise OSError(5, "sick")
        super().sync()


class _Walk:
    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = np.random.default_rng(seed)
        self.puts: list[tuple[StoreTicket, list[int]]] = []
        self.deletions: list[tuple[StoreTicket, list[int]]] = []
        self.acknowledged: set[int] = set()  # put, ok, and not deleted since
        self.gone: set[int] = set()  # deleted, ok, and not put since
        self.last_call: dict[int, StoreTicket] = {}  # by key, the put or deletion asked for last
        self.num_acknowledged = self.num_gone = self.num_hits = 0
        self.open()

    def open(self) -> None:
        self.store = BlobStore(
            self.path,
            model_fingerprint=_IDENTITY.model_fingerprint,
            codec=_IDENTITY.codec,
            payload_bytes=_PAYLOAD,
            tokens_per_block=4,
            capacity_bytes=BlobStore.capacity_for(_NUM_BLOBS, _IDENTITY),
            max_sync_delay_s=0.001,
            open_file=self._open_file,
        )

    def _open_file(self, path: Path, num_bytes: int) -> BlockFile:
        self.disk = _Disk(path, num_bytes)
        return self.disk

    def step(self) -> None:
        seeds = self.rng.integers(0, _NUM_KEYS, self.rng.integers(1, 4)).tolist()
        names = [blob_name(seed) for seed in seeds]
        keys = [name.key for name in names]
        match self.rng.integers(0, 12):
            case 0 | 1 | 2 | 3:
                ticket = self.store.put(names, blob_payloads(seeds, _PAYLOAD))
                self.puts.append((ticket, seeds))
                self.gone -= set(seeds)
                self.last_call.update(dict.fromkeys(seeds, ticket))
            case 4 | 5 | 6:
                self._read(seeds)
            case 7 | 8:
                ticket = self.store.delete(keys)
                self.deletions.append((ticket, seeds))
                self.acknowledged -= set(seeds)
                self.last_call.update(dict.fromkeys(seeds, ticket))
            case 9:
                self.disk.is_sick = not self.disk.is_sick
            case 10:
                self._end(is_clean=bool(self.rng.integers(0, 2)))
            case _:
                for breaker in (self.store.health._writes, self.store.health._reads):
                    breaker._retry_at = 0.0
                time.sleep(0.001)
        self.store.poll()
        self.settle()
        self.store.check_integrity()

    def _read(self, seeds: list[int]) -> None:
        out = np.full((len(seeds), _PAYLOAD), 0xEE, np.uint8)
        ticket = self.store.get([blob_name(seed).key for seed in seeds], out)
        ticket.synchronize()
        assert np.array_equal(out[ticket.ok], blob_payloads(seeds, _PAYLOAD)[ticket.ok])
        self.num_hits += int(ticket.ok.sum())

    def settle(self) -> None:
        for ticket, seeds in [item for item in self.puts if item[0].is_done()]:
            self.puts.remove((ticket, seeds))
            good = {s for s, ok in zip(seeds, ticket.ok, strict=True) if ok}
            latest = {s for s in good if self.last_call[s] is ticket}
            self.acknowledged |= latest
            self.num_acknowledged += len(latest)
        for ticket, seeds in [item for item in self.deletions if item[0].is_done()]:
            self.deletions.remove((ticket, seeds))
            good = {s for s, ok in zip(seeds, ticket.ok, strict=True) if ok}
            latest = {s for s in good if self.last_call[s] is ticket}
            self.gone |= latest
            self.num_gone += len(latest)

    def _end(self, is_clean: bool) -> None:
        """Close, or die with whatever is under way; then look at what is left."""
        if is_clean:
            self.store.flush()
        self.settle()
        found = dict(zip(range(_NUM_KEYS), self._has(), strict=True))
        kept = {seed for seed in self.acknowledged if found[seed]}
        if is_clean:
            self.store.close()
        else:
            self.store._resources.close()
        self.puts, self.deletions = [], []
        self.open()
        found = dict(zip(range(_NUM_KEYS), self._has(), strict=True))
        assert not {seed for seed in self.gone if found[seed]}, "a deleted blob came back"
        assert not {seed for seed in kept if not found[seed]}, "an acknowledged blob is lost"
        hits = sorted(kept)
        out = np.zeros((len(hits), _PAYLOAD), np.uint8)
        ticket = self.store.get([blob_name(seed).key for seed in hits], out)
        ticket.synchronize()
        assert ticket.ok.all(), "an acknowledged blob can not be read"
        assert np.array_equal(out, blob_payloads(hits, _PAYLOAD))
        self.acknowledged = kept

    def _has(self) -> list[bool]:
        found: list[bool] = self.store.contains(
            [blob_name(seed).key for seed in range(_NUM_KEYS)]
        ).tolist()
        return found


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_on_a_sick_disk(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    walk = _Walk(tmp_path, seed)
    for _ in range(300):
        walk.step()
    walk.disk.is_sick = False
    walk.store.flush()
    walk.store.close()
    # The walk has been where it was sent.
    assert min(walk.num_acknowledged, walk.num_gone, walk.num_hits) > 20
