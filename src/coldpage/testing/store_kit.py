"""What every store of keyed blobs promises, as tests: subclass ``StoreConformance`` and run it with
pytest.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.errors import ClosedError, StorageError, UsageError
from coldpage.store.base import KeyedStore, StoreTicket
from coldpage.store.format import BLANK_KEY, BlobName
from coldpage.types import BlockKey, BlockOrdinal, LayerGroupId, PageClass

__all__ = ["StoreConformance", "blob_name", "blob_payloads"]

_DEADLINE_S = 20.0
_NUM_BLOBS = 8


def blob_name(seed: int, layer_group: int = 0) -> BlobName:
    """Names that differ where their seeds do."""
    key = BlockKey(seed.to_bytes(30, "little") + b"kk")
    parent = BlockKey(max(seed - 1, 0).to_bytes(30, "little") + b"kk")
    tokens = np.array([seed, seed + 1], np.int32)
    group = LayerGroupId(layer_group)
    return BlobName(key, parent, group, PageClass.BODY, BlockOrdinal(seed), tokens)


def blob_payloads(
    seeds: Sequence[int], num_bytes: int, layer_group: int = 0
) -> npt.NDArray[np.uint8]:
    """Contents [len(seeds), num_bytes] that follow from the names."""
    rows = [
        np.random.default_rng([seed, layer_group]).integers(0, 256, num_bytes, np.uint8)
        for seed in seeds
    ]
    return np.array(rows, np.uint8).reshape(len(rows), num_bytes)


class StoreConformance:
    """Tests of one store. The subclass makes it."""

    payload_bytes = 5000

    def make_store(self, path: Path, num_blobs: int) -> KeyedStore:
        """Open the store in the directory ``path``, with room for exactly ``num_blobs`` blobs of
        ``payload_bytes`` and at least two tokens.
        """
        raise NotImplementedError

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "store"

    def open(self, path: Path, num_blobs: int = _NUM_BLOBS) -> KeyedStore:
        return self.make_store(path, num_blobs)

    def put(self, store: KeyedStore, seeds: Sequence[int], layer_group: int = 0) -> StoreTicket:
        names = [blob_name(seed, layer_group) for seed in seeds]
        return store.put(names, blob_payloads(seeds, self.payload_bytes, layer_group))

    def put_well(self, store: KeyedStore, seeds: Sequence[int], layer_group: int = 0) -> None:
        ticket = self.put(store, seeds, layer_group)
        ticket.synchronize()
        assert ticket.ok.all()

    def read(self, store: KeyedStore, seeds: Sequence[int], layer_group: int = 0) -> list[bool]:
        """Which are hits; every hit has the right bytes."""
        out = np.full((len(seeds), self.payload_bytes), 0xEE, np.uint8)
        keys = [blob_name(seed).key for seed in seeds]
        ticket = store.get(keys, out, layer_group_id=LayerGroupId(layer_group))
        ticket.synchronize()
        expected = blob_payloads(seeds, self.payload_bytes, layer_group)
        assert np.array_equal(out[ticket.ok], expected[ticket.ok])
        hits: list[bool] = ticket.ok.tolist()
        return hits

    def has(self, store: KeyedStore, seeds: Sequence[int]) -> list[bool]:
        found: list[bool] = store.contains([blob_name(seed).key for seed in seeds]).tolist()
        return found

    def delete(self, store: KeyedStore, seeds: Sequence[int]) -> StoreTicket:
        return store.delete([blob_name(seed).key for seed in seeds])

    # Putting and getting

    def test_what_was_put_comes_back(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, [1, 2, 3])
            assert self.has(store, [3, 9, 1]) == [True, False, True]
            assert self.read(store, [3, 9, 1, 1, 2]) == [True, False, True, True, True]

    def test_nothing_is_there_at_first(self, path: Path) -> None:
        with self.open(path) as store:
            assert self.has(store, [1, 2]) == [False, False]
            assert self.read(store, [1, 2]) == [False, False]

    def test_empty_batches_are_done(self, path: Path) -> None:
        with self.open(path) as store:
            nothing = np.zeros((0, self.payload_bytes), np.uint8)
            for ticket in (store.put([], nothing), store.get([], nothing), store.delete([])):
                ticket.synchronize()
                assert ticket.ok.shape == (0,)
            assert store.contains([]).shape == (0,)

    def test_a_blob_is_put_once(self, path: Path) -> None:
        with self.open(path, 3) as store:
            tickets = [self.put(store, [1, 2, 1]), self.put(store, [2, 2])]
            tickets.append(self.put(store, [1, 2]))
            for ticket in tickets:
                ticket.synchronize()
                assert ticket.ok.all()
            self.put_well(store, [1, 2])
            self.put_well(store, [3])
            assert self.read(store, [1, 2, 3]) == [True] * 3

    def test_layer_groups_are_apart(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, [1], layer_group=0)
            self.put_well(store, [1, 2], layer_group=1)
            assert self.read(store, [1, 2], layer_group=0) == [True, False]
            assert self.read(store, [1, 2], layer_group=1) == [True, True]
            self.delete(store, [1]).synchronize()
            assert self.read(store, [1], layer_group=0) == [False]
            assert self.read(store, [1], layer_group=1) == [True]

    def test_tickets_settle_by_polling(self, path: Path) -> None:
        with self.open(path) as store:
            ticket = self.put(store, [1, 2])
            if not ticket.is_done():
                with pytest.raises(UsageError):
                    _ = ticket.ok
            _poll_until_done(store, ticket)
            assert ticket.ok.all()
            out = np.zeros((1, self.payload_bytes), np.uint8)
            ticket = store.get([blob_name(2).key], out)
            _poll_until_done(store, ticket)
            assert ticket.ok.all()
            assert np.array_equal(out, blob_payloads([2], self.payload_bytes))
            ticket = self.delete(store, [2])
            _poll_until_done(store, ticket)
            assert ticket.ok.all()

    def test_flushing_settles_everything(self, path: Path) -> None:
        with self.open(path) as store:
            out = np.zeros((2, self.payload_bytes), np.uint8)
            keys = [blob_name(seed).key for seed in (1, 2)]
            tickets = [self.put(store, [1, 2]), store.get(keys, out), self.delete(store, [1])]
            store.flush()
            assert all(ticket.is_done() for ticket in tickets)
            assert self.has(store, [1, 2]) == [False, True]

    # Deleting

    def test_what_was_deleted_is_not_found(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, [1, 2, 3])
            ticket = self.delete(store, [1, 9, 3])
            assert self.has(store, [1, 2, 3]) == [False, True, False]
            assert self.read(store, [1, 2, 3]) == [False, True, False]
            ticket.synchronize()
            assert ticket.ok.all()
            self.put_well(store, [1])
            assert self.read(store, [1, 2, 3]) == [True, True, False]

    def test_a_deletion_overtakes_a_put(self, path: Path) -> None:
        store = self.open(path)
        put, ticket = self.put(store, [1, 2]), self.delete(store, [1])
        again = self.put(store, [3])
        assert not self.has(store, [1])[0]
        store.flush()
        assert ticket.ok.all()
        assert again.ok.all()
        assert put.ok[1]
        assert self.read(store, [1, 2, 3]) == [False, True, True]
        store.close()
        with self.open(path) as store:
            assert self.read(store, [1, 2, 3]) == [False, True, True]

    def test_a_put_follows_a_deletion(self, path: Path) -> None:
        store = self.open(path)
        tickets = [self.put(store, [1]), self.delete(store, [1]), self.put(store, [1])]
        store.flush()
        assert tickets[1].ok.all()
        assert tickets[2].ok.all()
        assert self.read(store, [1]) == [True]
        store.close()
        with self.open(path) as store:
            assert self.read(store, [1]) == [True]

    # The bound

    def test_the_bound_holds_and_the_newest_stay(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, range(_NUM_BLOBS))
            num_bytes = _bytes_below(path)
            for seed in range(_NUM_BLOBS, 5 * _NUM_BLOBS):
                self.put_well(store, [seed])
                assert self.has(store, [seed]) == [True]
                assert sum(self.has(store, range(5 * _NUM_BLOBS))) <= _NUM_BLOBS
            newest = range(4 * _NUM_BLOBS, 5 * _NUM_BLOBS)
            assert self.read(store, newest) == [True] * _NUM_BLOBS
            assert _bytes_below(path) <= num_bytes

    def test_what_is_used_stays(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, range(_NUM_BLOBS))
            for seed in range(_NUM_BLOBS, 2 * _NUM_BLOBS - 2):
                assert self.read(store, [0]) == [True]
                self.put_well(store, [1])  # putting what is there uses it too
                self.put_well(store, [seed])
            assert self.read(store, [0, 1]) == [True, True]

    def test_deleted_room_is_used_first(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, range(_NUM_BLOBS))
            self.delete(store, [3, 5]).synchronize()
            self.put_well(store, [20, 21])
            kept = [0, 1, 2, 4, 6, 7, 20, 21]
            assert self.read(store, kept) == [True] * _NUM_BLOBS

    def test_more_than_fits_at_once_is_refused_in_part(self, path: Path) -> None:
        with self.open(path) as store:
            ticket = self.put(store, range(3 * _NUM_BLOBS))
            ticket.synchronize()
            assert 0 < ticket.ok.sum() <= _NUM_BLOBS
            assert self.read(store, range(3 * _NUM_BLOBS)) == ticket.ok.tolist()

    # Restarts

    def test_a_restart_finds_everything(self, path: Path) -> None:
        for start in range(3):
            with self.open(path) as store:
                seeds = range(2 * start)
                assert self.has(store, seeds) == [True] * len(seeds)
                assert self.read(store, seeds) == [True] * len(seeds)
                self.put(store, [2 * start, 2 * start + 1])  # closing waits for it

    def test_a_restart_finds_nothing_deleted(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, [1, 2, 3])
            self.delete(store, [1])
        with self.open(path) as store:
            assert self.read(store, [1, 2, 3]) == [False, True, True]
            self.delete(store, [2])
        with self.open(path) as store:
            assert self.read(store, [1, 2, 3]) == [False, False, True]

    def test_a_restart_keeps_the_order_of_use(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, range(_NUM_BLOBS))
            assert self.read(store, [0]) == [True]
        with self.open(path) as store:
            self.put_well(store, range(20, 20 + _NUM_BLOBS - 1))
            assert self.has(store, [0, 1, 7]) == [True, False, False]

    def test_a_smaller_store_keeps_what_fits(self, path: Path) -> None:
        with self.open(path) as store:
            self.put_well(store, range(_NUM_BLOBS))
        with self.open(path, _NUM_BLOBS // 2) as store:
            assert sum(self.read(store, range(_NUM_BLOBS))) <= _NUM_BLOBS // 2
            self.put_well(store, [20])
            assert self.read(store, [20]) == [True]

    # Misuse

    def test_a_closed_store_does_nothing(self, path: Path) -> None:
        store = self.open(path)
        store.close()
        store.close()
        out = np.zeros((1, self.payload_bytes), np.uint8)
        key = blob_name(1).key
        for call in (
            lambda: self.put(store, [1]),
            lambda: store.get([key], out),
            lambda: store.contains([key]),
            lambda: store.delete([key]),
            store.poll,
            store.flush,
        ):
            with pytest.raises(ClosedError):
                call()

    def test_a_store_has_one_opener(self, path: Path) -> None:
        with self.open(path) as store:
            with pytest.raises(StorageError):
                self.open(path)
            self.put_well(store, [1])
        with self.open(path) as store:
            assert self.read(store, [1]) == [True]

    def test_what_can_not_be_put_is_refused(self, path: Path) -> None:
        with self.open(path) as store:
            payloads = blob_payloads([1, 2], self.payload_bytes)
            blank = dataclasses.replace(blob_name(1), key=BLANK_KEY)
            for names, rows in (
                ([blob_name(1)], payloads),
                ([blob_name(1), blank], payloads),
                ([blob_name(1), blob_name(2)], payloads[:, :-1]),
                ([blob_name(1), blob_name(2)], payloads.view(np.int8)),
            ):
                with pytest.raises(UsageError):
                    store.put(names, rows)  # type: ignore[arg-type]
            read_only = np.zeros((1, self.payload_bytes), np.uint8)
            read_only.flags.writeable = False
            for out in (read_only, np.zeros((2, self.payload_bytes), np.uint8)):
                with pytest.raises(UsageError):
                    store.get([blob_name(1).key], out)
            assert self.has(store, [1, 2]) == [False, False]

    # Everything at once

    @pytest.mark.parametrize("seed", range(3))
    def test_a_random_walk_never_gives_wrong_bytes(self, path: Path, seed: int) -> None:
        """Hits are right; what was put last and not deleted is a hit; deleted is a miss."""
        rng = np.random.default_rng(seed)
        store = self.open(path)
        deleted: set[int] = set()
        for _ in range(120):
            seeds = rng.integers(0, 3 * _NUM_BLOBS, rng.integers(1, 4)).tolist()
            match rng.integers(0, 8):
                case 0 | 1 | 2:
                    ticket = self.put(store, seeds)
                    deleted -= set(seeds)
                    if rng.random() < 0.5:
                        ticket.synchronize()
                        assert self.read(store, seeds) == ticket.ok.tolist()
                case 3 | 4 | 5:
                    hits = self.read(store, seeds)
                    assert not any(h for h, s in zip(hits, seeds, strict=True) if s in deleted)
                case 6:
                    self.delete(store, seeds)
                    deleted |= set(seeds)
                case _:
                    if rng.random() < 0.3:
                        store.close()
                        store = self.open(path)
                    store.poll()
            found = self.has(store, range(3 * _NUM_BLOBS))
            assert sum(found) <= _NUM_BLOBS
            assert not any(found[seed] for seed in deleted)
        store.close()


def _poll_until_done(store: KeyedStore, ticket: StoreTicket) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not ticket.is_done():
        assert time.monotonic() < deadline, "polling does not settle the ticket"
        store.poll()
        time.sleep(0.001)


def _bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
