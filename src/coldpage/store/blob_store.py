"""The store of keyed blobs: one slot file of one instance, an index in memory, and the least
recently used blob given up for a new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import IoExecutor
from coldpage.device.file import BlockFile
from coldpage.device.io import ThreadedIo
from coldpage.device.progress import Progress
from coldpage.errors import (
    ClosedError,
    ConfigurationError,
    StorageError,
    UsageError,
    WrongThreadError,
)
from coldpage.store import recovery
from coldpage.store.base import FIRST_GROUP, KeyedStore, StoreTicket
from coldpage.store.durability import MAX_DELAY_S, MAX_WRITES, SyncBatcher
from coldpage.store.format import BLANK_KEY, MAX_CODEC_BYTES, BlobName, FileIdentity
from coldpage.store.health import FIRST_RETRY_S, TierHealth
from coldpage.store.instance import InstanceDirectory, InstanceIdentity, default_instance_id
from coldpage.store.operations import Deletion, Key, PendingBlob, Read, Ticket, Write
from coldpage.store.sidecar import ENTRY, write_sidecar
from coldpage.store.slot_file import SlotFile, slot_bytes_of
from coldpage.store.slot_state import BlobSlots
from coldpage.types import BlockKey, Int32Array, LayerGroupId, is_whole_number

__all__ = ["BlobStore", "StoreStats"]

_log = logging.getLogger(__name__)

_FILE_NAME: Final = "pool-0.slots"
# Lock, identity, and the head of the index: what an instance takes beside its slots.
_OVERHEAD_BYTES: Final = 16 * 1024
# How often a wait looks whether a read has missed its deadline.
_LOOK_S: Final = 0.0005

_OpenFile = Callable[[Path, int], BlockFile]
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts since the store was opened."""

    num_slots: int
    num_blobs: int
    num_hits: int
    num_misses: int
    num_written: int
    num_refused: int  # puts with no room, or while the disk failed
    num_evicted: int
    num_damaged: int  # blobs whose bytes were not those written
    num_overdue: int  # reads that missed their deadline


class BlobStore(KeyedStore):
    """See ``KeyedStore``. ``path`` may hold several instances; each is one store's alone."""

    def __init__(
        self,
        path: str | Path,
        *,
        model_fingerprint: bytes,
        codec: str,
        payload_bytes: int,
        tokens_per_block: int,
        capacity_bytes: int,
        instance_id: str | None = None,
        read_deadline_s: float | None = None,
        max_sync_delay_s: float = MAX_DELAY_S,
        io: IoExecutor | None = None,
        progress: recovery.Progress | None = None,
        open_file: _OpenFile = BlockFile,
    ) -> None:
        """Open or create. Blocks: without a clean end before, while every header is read
        (``progress`` hears of it).

        ``capacity_bytes`` bounds everything on disk, headers and index included. ``io`` stays the
        caller's; ``read_deadline_s`` makes a read that takes longer a miss. Raises
        ConfigurationError for what can not be, StorageError for what the disk or another process
        does not allow.
        """
        _check(model_fingerprint, codec)
        _check_numbers(payload_bytes, tokens_per_block, capacity_bytes)
        self.identity = FileIdentity(model_fingerprint, codec, payload_bytes, tokens_per_block)
        geometry = f"blobs of {payload_bytes} bytes, {tokens_per_block} tokens a block"
        instance = InstanceIdentity(model_fingerprint, codec, geometry)
        self.instance_id = instance_id or default_instance_id(instance)
        self.health = TierHealth(f"the store in {path}")
        self._digest = instance.digest
        self._owner = threading.get_ident()
        self._read_deadline_s = read_deadline_s
        self._num_hits = self._num_misses = self._num_written = self._num_refused = 0
        self._num_evicted = self._num_damaged = self._num_overdue = 0
        self._reads: list[Read] = []
        self._writes: list[Write] = []
        self._erases: list[Write] = []
        self._deletions: list[Deletion] = []
        self._pending: dict[Key, PendingBlob] = {}  # from the put until it is durable, or failed
        num_slots = _slots_within(capacity_bytes, self.identity)
        with contextlib.ExitStack() as resources:
            self._io = io or ThreadedIo(Progress())
            if io is None:
                resources.callback(self._io.close)
            self._directory = InstanceDirectory.open(path, self.instance_id, instance)
            resources.callback(self._directory.close)
            num_bytes = num_slots * slot_bytes_of(self.identity)
            file = open_file(self._directory.path / _FILE_NAME, num_bytes)
            resources.callback(file.close)
            self._file = SlotFile(file, num_slots, self.identity)
            self._slots = BlobSlots(self._file, self._recover(progress))
            self._resources = resources.pop_all()
        # A slot can not be taken for another blob before its own is durable.
        max_writes = min(MAX_WRITES, max(1, num_slots // 4))
        self._sync = SyncBatcher(
            [self._file], self._io, max_delay_s=max_sync_delay_s, max_writes=max_writes
        )
        self._no_erase_before = 0.0
        self._num_syncs = 0  # that the health knows of
        self._is_closed = False

    def _recover(self, progress: recovery.Progress | None) -> recovery.Recovered:
        directory = self._directory.path
        found = recovery.recover(directory, [self._file], self._digest, self._io, progress)
        try:
            # What a killed process wrote may be in the disk's cache only.
            self._file.sync()
        except OSError as error:
            raise StorageError(f"{directory} can not be synced ({error.strerror})") from error
        return found

    @staticmethod
    def capacity_for(num_blobs: int, identity: FileIdentity) -> int:
        """The ``capacity_bytes`` that just holds so many blobs."""
        return _OVERHEAD_BYTES + num_blobs * _bytes_per_blob(identity)

    @property
    def num_slots(self) -> int:
        """How many blobs fit."""
        return self._file.num_slots

    def stats(self) -> StoreStats:
        """What has happened so far."""
        return StoreStats(
            self.num_slots,
            len(self._slots.slot_of),
            self._num_hits,
            self._num_misses,
            self._num_written,
            self._num_refused,
            self._num_evicted,
            self._num_damaged,
            self._num_overdue,
        )

    def put(self, names: Sequence[BlobName], payloads: _Bytes) -> StoreTicket:
        """See ``KeyedStore.put``."""
        self._enter()
        self._check_rows(payloads, len(names), "payloads")
        for name in names:
            if name.key == BLANK_KEY or len(name.key) != 32 or len(name.parent_key) != 32:
                raise UsageError("a blob is put under a key of 32 bytes that are not all zeros")
            if len(name.tokens) > self.identity.tokens_per_block:
                raise UsageError("a name has more tokens than a block of this store")
        ticket = Ticket(len(names), self._wait)
        self._put_rows(ticket, range(len(names)), names, payloads)
        return ticket

    def _put_rows(
        self, ticket: Ticket, rows: Sequence[int], names: Sequence[BlobName], payloads: _Bytes
    ) -> None:
        rows = self._rows_to_write(ticket, rows, names, payloads)
        slots = self._take_slots(len(rows)) if rows and self.health.may_write() else []
        for row in rows[len(slots) :]:
            self._num_refused += 1
            self._pending.pop(_key_of(names[row])).settle(False)
        if slots:
            rows = rows[: len(slots)]
            blobs = [self._pending[_key_of(names[row])] for row in rows]
            for blob, slot in zip(blobs, slots, strict=True):
                blob.slot = slot
            addresses = payloads.ctypes.data + np.array(rows, np.int64) * payloads.strides[0]
            written = [blob.name for blob in blobs]
            jobs = self._file.write_jobs(np.array(slots, np.int32), addresses, written)
            self._writes.append(Write(self._io.submit(jobs), slots, blobs, payloads))

    def get(
        self,
        keys: Sequence[BlockKey],
        out: _Bytes,
        *,
        layer_group_id: LayerGroupId = FIRST_GROUP,
    ) -> StoreTicket:
        """See ``KeyedStore.get``."""
        self._enter()
        self._check_rows(out, len(keys), "out")
        if not out.flags.writeable:
            raise UsageError("out is not writable")
        ticket = Ticket(len(keys), self._wait)
        for row, key in enumerate(keys):
            slot = self._slots.slot_of.get((key, layer_group_id))
            if slot is None or not self.health.may_read():
                self._num_misses += 1
                ticket.settle(row, False)
                continue
            self._slots.touch(slot)
            self._start_read(slot, key, out[row], ticket.settler(row))
        return ticket

    def contains(
        self, keys: Sequence[BlockKey], *, layer_group_id: LayerGroupId = FIRST_GROUP
    ) -> npt.NDArray[np.bool_]:
        """See ``KeyedStore.contains``."""
        self._enter()
        found = ((key, layer_group_id) in self._slots.slot_of for key in keys)
        return np.fromiter(found, np.bool_, len(keys))

    def delete(
        self, keys: Sequence[BlockKey], *, layer_group_id: LayerGroupId = FIRST_GROUP
    ) -> StoreTicket:
        """See ``KeyedStore.delete``."""
        self._enter()
        ticket = Ticket(len(keys), self._wait)
        for key in keys:
            self._drop((key, layer_group_id))
        rows = {row: (key, layer_group_id) for row, key in enumerate(keys)}
        self._deletions.append(Deletion(ticket, rows))
        self._start_erases()
        return ticket

    def poll(self) -> None:
        """See ``KeyedStore.poll``."""
        self._enter()
        self._end_reads()
        self._end_writes()
        self._end_erases()
        self._start_erases()
        self._sync.poll()
        num_syncs = self._sync.num_syncs + self._sync.num_failures
        if num_syncs > self._num_syncs:
            self._num_syncs = num_syncs
            self.health.note_write(not self._sync.has_failed, self._file.last_failure)
        self._settle_durable()

    def flush(self) -> None:
        """See ``KeyedStore.flush``. Slots that are being erased are free afterwards."""
        self.poll()
        while (
            self._pending
            or self._deletions
            or self._erases
            or any(not read.is_overdue for read in self._reads)
        ):
            self._block()
            self.poll()

    def close(self) -> None:
        """See ``KeyedStore.close``. Waits for reads that missed their deadline too."""
        if self._is_closed:
            return
        self.flush()
        while self._reads or self._writes or self._erases:
            self._block()
            self.poll()
        self._is_closed = True
        try:
            self._leave_index()
        finally:
            self._resources.close()

    def check_integrity(self) -> None:
        """Assert that every slot is accounted for. For tests; takes time."""
        busy = [slot for operation in (*self._writes, *self._erases) for slot in operation.slots]
        self._slots.check_integrity(busy)
        reading = [read.slot for read in self._reads]
        undurable = [blob.slot for blob in self._pending.values() if blob.point is not None]
        self._slots.check_pins([*busy, *reading, *undurable])

    def _leave_index(self) -> None:
        if len(self._slots.remains):
            # Only a scan would know of them.
            _log.warning(
                "%s: no index is left, because %d slots could not be erased",
                self._directory.path,
                len(self._slots.remains),
            )
            return
        entries = self._slots.index.entries
        rows = np.array(sorted(self._slots.slot_of.values()), np.int32)
        entries["write_number"][rows] = self._file.write_numbers(rows)
        try:
            self._file.sync()
            write_sidecar(self._directory.path, self._digest, self._slots.taken(rows))
        except OSError as error:
            _log.warning(
                "no index could be left in %s (%s): the next start reads every header",
                self._directory.path,
                error,
            )

    # Starting

    def _rows_to_write(
        self, ticket: Ticket, rows: Sequence[int], names: Sequence[BlobName], payloads: _Bytes
    ) -> list[int]:
        """The rows that nobody has written yet; the others are settled, or wait for who does."""
        to_write = []
        for row in rows:
            name = names[row]
            key = _key_of(name)
            slot = self._slots.slot_of.get(key)
            if slot is not None:
                self._slots.touch(slot)
            blob = self._pending.get(key)
            if blob is None and slot is not None:
                if self._slots.is_unread(slot):
                    self._check_before_put(ticket, row, slot, names, payloads)
                else:
                    ticket.settle(row, True)
                continue
            if blob is None:
                blob = self._pending[key] = PendingBlob(key, name)
                to_write.append(row)
            blob.waiters.append((ticket, row))
        return to_write

    def _check_before_put(
        self, ticket: Ticket, row: int, slot: int, names: Sequence[BlobName], payloads: _Bytes
    ) -> None:
        """A crash may have left the header alone: read the payload before saying that it stays."""
        key = _key_of(names[row])

        def end(ok: bool, was_damaged: bool) -> None:
            if was_damaged:
                self._put_rows(ticket, [row], names, payloads)
            else:
                ticket.settle(row, ok and self._slots.slot_of.get(key) == slot)

        scratch = np.empty(self.identity.payload_bytes, np.uint8)
        self._start_read(slot, key[0], scratch, end)

    def _take_slots(self, num_wanted: int) -> list[int]:
        """Free slots, then those of the blobs used longest ago; fewer where all others are busy."""
        slots = self._slots.take_free(num_wanted)
        evicted = self._slots.evict(num_wanted - len(slots))
        self._num_evicted += len(evicted)
        slots += evicted
        self._slots.pin(slots)
        return slots

    def _drop(self, key: Key) -> None:
        """The blob is not found any more, wherever it is on its way."""
        blob = self._pending.pop(key, None)
        if blob is not None:
            blob.settle(False)
            if blob.point is None:
                # Its write is in flight: what that leaves is erased when it has ended.
                blob.is_deleted = True
                self._slots.remains.add(blob.slot, key)
            else:
                self._slots.unpin([blob.slot])
        if key in self._slots.slot_of:
            self._file.forget(_one(self._slots.discard(key)))

    def _start_read(
        self, slot: int, key: BlockKey, out: _Bytes, done: Callable[[bool, bool], None]
    ) -> None:
        self._slots.pin([slot])
        target, copy_to, overdue_at = out, None, None
        if self._read_deadline_s is not None:
            # A read that is given up may still be going on: it must not touch the caller's memory.
            target, copy_to = np.empty(self.identity.payload_bytes, np.uint8), out
            overdue_at = time.monotonic() + self._read_deadline_s
        address = np.array([target.ctypes.data], np.int64)
        jobs = self._file.read_jobs(_one(slot), address, [key])
        batch = self._io.submit(jobs)
        self._reads.append(Read(slot, batch, target, copy_to, overdue_at, done))

    def _start_erases(self) -> None:
        slots = self._slots.erasable()
        if not slots:
            return
        if time.monotonic() < self._no_erase_before or not self.health.may_write():
            self._fail_deletions(slots)
            return
        self._slots.start_erasing(slots)
        jobs = self._file.erase_jobs(np.array(slots, np.int32))
        self._erases.append(Write(self._io.submit(jobs), slots, [], None))

    # Ending

    def _end_reads(self) -> None:
        now = time.monotonic()
        reads, self._reads = self._reads, []  # whoever is told may start another
        for read in reads:
            if read.batch.is_done():
                self._end_read(read)
                continue
            self._reads.append(read)
            if read.overdue_at is not None and now >= read.overdue_at and not read.is_overdue:
                read.is_overdue = True
                self._num_overdue += 1
                self._num_misses += 1
                self.health.note_read(False, f"reading slot {read.slot} took too long")
                read.done(False, False)

    def _end_read(self, read: Read) -> None:
        self._slots.unpin([read.slot])
        ok = bool(read.batch.ok[0])
        key = self._slots.key_in(read.slot)
        is_damaged = not ok and key is not None and bool(self._file.is_damaged(_one(read.slot))[0])
        if is_damaged and key is not None:
            self._num_damaged += 1
            _log.warning("%s: a miss", self._file.last_failure)
            self._drop(key)
        elif ok:
            self._slots.note_read(read.slot)
        if read.is_overdue:
            return
        if ok and read.copy_to is not None:
            read.copy_to[:] = read.target
        self._num_hits += ok
        self._num_misses += not ok
        self.health.note_read(ok, self._file.last_failure)
        read.done(ok, is_damaged)

    def _end_writes(self) -> None:
        ended = [write for write in self._writes if write.batch.is_done()]
        if not ended:
            return
        self._writes = [write for write in self._writes if write not in ended]
        written: list[PendingBlob] = []
        for write in ended:
            for blob, ok in zip(write.blobs, write.batch.ok.tolist(), strict=True):
                self._note_write(ok)
                if ok:
                    self._slots.remains.clear(blob.slot)
                    self._sync.note()
                self._num_written += ok
                if ok and not blob.is_deleted:
                    self._slots.add(blob.slot, blob.key, blob.name)
                    written.append(blob)
                else:
                    self._give_up(blob)
        if written:
            point = self._sync.point()
            for blob in written:
                blob.point = point

    def _note_write(self, ok: bool) -> None:
        """For the health. While syncs fail, a write that ended well is no good sign."""
        if not ok or not self._sync.has_failed:
            self.health.note_write(ok, self._file.last_failure)

    def _give_up(self, blob: PendingBlob) -> None:
        """Its slot holds something torn, or what nobody wants any more."""
        self._slots.unpin([blob.slot])
        self._slots.remains.add(blob.slot, blob.key)
        self._slots.erase_later(blob.slot)
        self._file.forget(_one(blob.slot))
        if not blob.is_deleted:
            del self._pending[blob.key]
            blob.settle(False)

    def _end_erases(self) -> None:
        for erase in [erase for erase in self._erases if erase.batch.is_done()]:
            self._erases.remove(erase)
            ok = erase.batch.ok
            for slot, is_good in zip(erase.slots, ok.tolist(), strict=True):
                self._note_write(is_good)
                self._slots.end_erasing(slot, is_good)
            self._sync.note(int(np.count_nonzero(ok)))
            if not ok.all():
                # It may be a sector's fault that no other write meets: do not try without end.
                self._no_erase_before = time.monotonic() + FIRST_RETRY_S

    def _fail_deletions(self, slots: Sequence[int]) -> None:
        """What remains in these slots could not be erased."""
        remaining = set(slots)
        for deletion in self._deletions:
            for row, key in list(deletion.rows.items()):
                if deletion.point is None and remaining & self._slots.remains.slots_of(key):
                    del deletion.rows[row]
                    deletion.ticket.settle(row, False)

    def _settle_durable(self) -> None:
        for blob in [b for b in self._pending.values() if b.point and b.point.is_done()]:
            assert blob.point is not None
            if not blob.point.ok:
                # It is there, but a later put of it must not be told that it will stay.
                self._drop(blob.key)
                continue
            del self._pending[blob.key]
            self._slots.unpin([blob.slot])
            blob.settle(True)
        for deletion in list(self._deletions):
            remains = self._slots.remains
            if deletion.point is None and not any(map(remains.slots_of, deletion.rows.values())):
                deletion.point = self._sync.point()
            if deletion.point is not None and deletion.point.is_done():
                self._deletions.remove(deletion)
                for row in deletion.rows:
                    deletion.ticket.settle(row, deletion.point.ok)

    # Waiting

    def _wait(self, ticket: Ticket) -> None:
        self.poll()
        while not ticket.is_done():
            self._block()
            self.poll()

    def _block(self) -> None:
        """Until something in flight may have ended, or a read missed its deadline."""
        if any(read.overdue_at is not None for read in self._reads):
            time.sleep(_LOOK_S)
        elif self._reads:
            self._reads[0].batch.synchronize()
        elif self._writes or self._erases:
            (self._writes or self._erases)[0].batch.synchronize()
        else:
            self._sync.flush()

    def _enter(self) -> None:
        if self._is_closed:
            raise ClosedError("the store is closed")
        if threading.get_ident() != self._owner:
            raise WrongThreadError("a store belongs to the thread that opened it")

    def _check_rows(self, array: _Bytes, num_rows: int, what: str) -> None:
        shape = (num_rows, self.identity.payload_bytes)
        if array.dtype != np.uint8 or array.shape != shape or not array.flags.c_contiguous:
            raise UsageError(f"{what} must be a contiguous uint8 array of shape {shape}")


def _key_of(name: BlobName) -> Key:
    return name.key, name.layer_group_id


def _one(slot: int) -> Int32Array:
    return np.array([slot], np.int32)


def _check(model_fingerprint: object, codec: str) -> None:
    if not isinstance(model_fingerprint, bytes) or len(model_fingerprint) != 32:
        raise ConfigurationError("model_fingerprint has 32 bytes, such as a SHA-256")
    if len(codec.encode()) > MAX_CODEC_BYTES:
        raise ConfigurationError(f"codec takes more than {MAX_CODEC_BYTES} bytes")


def _check_numbers(payload_bytes: int, tokens_per_block: int, capacity_bytes: int) -> None:
    numbers = {
        "payload_bytes": payload_bytes,
        "tokens_per_block": tokens_per_block,
        "capacity_bytes": capacity_bytes,
    }
    for name, value in numbers.items():
        if not is_whole_number(value):
            raise ConfigurationError(f"{name} is {value!r}: give a whole number")
    if payload_bytes < 1 or tokens_per_block < 0:
        raise ConfigurationError("payload_bytes must be positive, tokens_per_block not negative")


def _bytes_per_blob(identity: FileIdentity) -> int:
    """A slot, and its entry in the index."""
    return slot_bytes_of(identity) + ENTRY.itemsize + 4 * identity.tokens_per_block


def _slots_within(capacity_bytes: int, identity: FileIdentity) -> int:
    each = _bytes_per_blob(identity)
    num_slots = (capacity_bytes - _OVERHEAD_BYTES) // each
    if num_slots < 1:
        raise ConfigurationError(
            f"capacity_bytes {capacity_bytes:,} holds no blob: one takes {each:,} bytes on disk, "
            f"and the instance {_OVERHEAD_BYTES:,}"
        )
    return num_slots
