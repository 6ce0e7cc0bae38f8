"""What the processes that are killed do, and how what they leave is checked."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from coldpage.device.file import BlockFile
from coldpage.pools import disk_tier
from coldpage.store import BlobName, FileIdentity
from coldpage.store.blob_store import BlobStore
from coldpage.types import BlockKey, BlockOrdinal, LayerGroupId, PageClass
from tests.crash.board import Board
from tests.crash.patterned import Patterned, Talker, config_of

OpenFile = Callable[[Path, int], BlockFile]
# A page or blob, as it is named in reports.
Id = str
# Where it was durable: file, slot, and how many writes of the slot had begun.
Place = tuple[int, int, int]

AMPLE_BLOCKS = 200  # all that the conversations have, written twice, and more
TIGHT_BLOCKS = 24
NUM_KEYS = 60
PAYLOAD_BYTES = 8192


class Reporter:
    """What a work has been told that it is so. Each method is told before or after, as it says."""

    def durable(self, places: dict[Id, Place]) -> None:
        """These will be found from now on, until their slots are written again."""

    def returning(self, ids: list[Id]) -> None:
        """Before these are put: one that is gone may be there again."""

    def unsure(self, ids: list[Id]) -> None:
        """Before something is done after which these may be there or not."""

    def gone(self, ids: list[Id]) -> None:
        """These will not be found from now on."""


class Work(abc.ABC):
    """A tier, opened, and random operations on it. ``wrong`` and ``num_checked`` are about all
    reads.
    """

    wrong: list[str]
    num_checked: int

    @abc.abstractmethod
    def step(self) -> None:
        """One operation."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Assert what must always hold."""

    @abc.abstractmethod
    def close(self) -> None:
        """A clean end."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """An end like a crash's, in a process that lives on."""

    @abc.abstractmethod
    def verify(self) -> set[Id]:
        """Read everything; returns what is there and right."""

    def is_cut_off(self, entry: Id) -> bool:
        """Whether nothing could lead to it when the tier was opened, so that it was given up."""
        return False


class ManagerWork(Work):
    """Conversations of a manager with a disk level."""

    def __init__(
        self, path: Path, board: Board, rng: random.Random, report: Reporter, open_file: OpenFile
    ) -> None:
        num_blocks = TIGHT_BLOCKS if path.name.endswith("tight") else AMPLE_BLOCKS
        config = config_of(path, num_blocks, write_behind=rng.random() < 0.5)
        with _disk_files(open_file):
            self._patterned = Patterned(config)
        self._files = [group.disk for group in self._patterned.manager._storage.levels[1].groups]
        for file in self._files:
            file._file.watch(board, file.slot_bytes)
        self._board = board
        self._report = report
        self._talker = Talker(self._patterned, rng, self._on_flushed)
        self.wrong = self._patterned.wrong
        # Found, and not read yet: a torn payload shows at its first read.
        self._found = self._places()

    @property
    def num_checked(self) -> int:
        return self._patterned.num_checked

    def _places(self) -> dict[Id, Place]:
        places = {}
        for entry in self._patterned.index().entries:
            file, slot = int(entry["pool"]), int(entry["slot"])
            place = (file, slot, int(self._board.num_begun[file, slot]))
            places[_page_id(bytes(entry["key"]), int(entry["layer_group"]))] = place
        return places

    def _on_flushed(self) -> None:
        """What this process wrote is durable; for the rest those vouch who wrote it."""
        places = self._places()
        self._report.durable({i: at for i, at in places.items() if self._found.get(i) != at})

    def is_cut_off(self, entry: Id) -> bool:
        """Whether the block before it is gone."""
        known = {_key_part(found) for found in self._found}
        for keys in self._patterned.keys:
            parts = [_key_part(_page_id(key, 0)) for key in keys]
            if _key_part(entry) in parts[1:]:
                return parts[parts.index(_key_part(entry)) - 1] not in known
        return False

    def step(self) -> None:
        self._talker.step()

    def check_integrity(self) -> None:
        self._patterned.manager.check_integrity()

    def close(self) -> None:
        self._talker.close_all()
        self._patterned.close()

    def abandon(self) -> None:
        self._patterned.abandon()

    def verify(self) -> set[Id]:
        self.check_integrity()
        good = {_page_id(key, group) for key, group in self._patterned.read_all_slots()}
        self._patterned.read_all_conversations()
        self.check_integrity()
        return good


class StoreWork(Work):
    """Puts, deletions and evictions of a store of its own."""

    identity = FileIdentity(b"s" * 32, "raw", PAYLOAD_BYTES, 4)

    def __init__(
        self, path: Path, board: Board, rng: random.Random, report: Reporter, open_file: OpenFile
    ) -> None:
        num_blobs = TIGHT_BLOCKS if path.name.endswith("tight") else 2 * NUM_KEYS
        self._store = BlobStore(
            path,
            model_fingerprint=self.identity.model_fingerprint,
            codec=self.identity.codec,
            payload_bytes=PAYLOAD_BYTES,
            tokens_per_block=4,
            capacity_bytes=BlobStore.capacity_for(num_blobs, self.identity),
            max_sync_delay_s=0.005,
            open_file=open_file,
        )
        self._store._file._file.watch(board, self._store._file.slot_bytes)  # type: ignore[attr-defined]
        self._board = board
        self._rng = rng
        self._report = report
        self.wrong: list[str] = []
        self.num_checked = 0

    def step(self) -> None:
        seeds = self._rng.sample(range(NUM_KEYS), self._rng.randint(1, 6))
        dice = self._rng.random()
        if dice < 0.5:
            self._put(seeds)
        elif dice < 0.7:
            self._delete(seeds[:3])
        else:
            self._get(seeds)

    def _put(self, seeds: list[int]) -> None:
        """Two batches at once."""
        self._report.returning([_blob_id(seed) for seed in seeds])
        names = [_blob_name(seed) for seed in seeds]
        payloads = np.stack([_blob(seed) for seed in seeds])
        half = len(seeds) // 2
        tickets = [
            self._store.put(names[rows], payloads[rows])
            for rows in (slice(0, half), slice(half, None))
        ]
        for ticket in tickets:
            ticket.synchronize()
        places = {}
        for seed, name, ok in zip(seeds, names, [k for t in tickets for k in t.ok], strict=True):
            slot = self._store._slots.slot_of.get((name.key, name.layer_group_id))
            if ok and slot is not None:
                places[_blob_id(seed)] = (0, slot, int(self._board.num_begun[0, slot]))
        self._report.durable(places)

    def _delete(self, seeds: list[int]) -> None:
        ids = [_blob_id(seed) for seed in seeds]
        self._report.unsure(ids)
        ticket = self._store.delete([_blob_name(seed).key for seed in seeds])
        ticket.synchronize()
        self._report.gone([i for i, ok in zip(ids, ticket.ok.tolist(), strict=True) if ok])

    def _get(self, seeds: list[int]) -> set[Id]:
        out = np.zeros((len(seeds), PAYLOAD_BYTES), np.uint8)
        ticket = self._store.get([_blob_name(seed).key for seed in seeds], out)
        ticket.synchronize()
        good = set()
        for seed, row, ok in zip(seeds, out, ticket.ok.tolist(), strict=True):
            if ok:
                self.num_checked += 1
                good.add(_blob_id(seed))
                if not np.array_equal(row, _blob(seed)):
                    self.wrong.append(f"blob {seed}")
        return good

    def check_integrity(self) -> None:
        self._store.check_integrity()

    def close(self) -> None:
        self._store.close()

    def abandon(self) -> None:
        store = self._store
        for operation in (*store._reads, *store._writes, *store._erases):
            operation.batch.synchronize()
        store._is_closed = True
        store._resources.close()

    def verify(self) -> set[Id]:
        self.check_integrity()
        good = self._get(list(range(NUM_KEYS)))
        self.check_integrity()
        return good


WORKS: dict[str, type[ManagerWork] | type[StoreWork]] = {
    "manager": ManagerWork,
    "manager-tight": ManagerWork,
    "store": StoreWork,
    "store-tight": StoreWork,
}


@contextlib.contextmanager
def _disk_files(open_file: OpenFile) -> Iterator[None]:
    """Disk levels are built on such files."""
    kept = disk_tier.BlockFile
    disk_tier.BlockFile = open_file  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        disk_tier.BlockFile = kept  # type: ignore[misc]


def _page_id(key: bytes, layer_group: int) -> Id:
    return f"{key[:8].hex()}.{layer_group}"


def _key_part(entry: Id) -> str:
    return entry.partition(".")[0]


def _blob_id(seed: int) -> Id:
    return f"blob {seed}"


def _blob(seed: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(b"%d" % seed).digest(PAYLOAD_BYTES), np.uint8)


def _blob_name(seed: int) -> BlobName:
    key = BlockKey(hashlib.sha256(b"%d" % seed).digest())
    tokens = np.arange(4, dtype=np.int32) + seed
    return BlobName(key, key, LayerGroupId(0), PageClass.BODY, BlockOrdinal(0), tokens)
