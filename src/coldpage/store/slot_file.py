"""A file of fixed-size slots: a header that names and vouches for a page, then the page. One I/O
a page.

A read is good only if header and payload agree with each other and with what this process knows of
the slot, so a torn, flipped, misplaced or outdated page is a miss and never data.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from coldpage.device.base import IoJob
from coldpage.device.file import BlockFile
from coldpage.store.format import SECTOR_BYTES, BlobName, FileIdentity, HeaderCodec, SlotHeader
from coldpage.types import BlockKey, ByteRange, Int32Array, Int64Array, MemAddress

__all__ = ["SCAN_SLOTS", "ScanPart", "SlotFile", "slot_bytes_of"]

# Headers that one scanning job reads: few enough that all I/O threads have work in a small file.
SCAN_SLOTS: Final = 256
# The write number of a slot in which this process knows of no page.
_NEVER: Final = 0

_Bytes = npt.NDArray[np.uint8]


def slot_bytes_of(identity: FileIdentity) -> int:
    """What a slot takes in the file: the header, and the payload in whole sectors."""
    payload = -(-identity.payload_bytes // SECTOR_BYTES) * SECTOR_BYTES
    return HeaderCodec(identity).header_bytes + payload


def _bytes_at(address: int, num_bytes: int) -> _Bytes:
    """The memory at ``address`` as an array; the caller keeps it alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), np.uint8)


class _Slab(threading.local):
    """An aligned buffer for one slot, one a thread: the header always, the payload when its memory
    is not aligned.
    """

    def __init__(self, num_bytes: int) -> None:
        self.array: _Bytes = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


class ScanPart:
    """What a scan found in the slots [start, stop). Filled by its job."""

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self.found: list[SlotHeader] = []  # in the order of slots, anonymous pages included
        self.num_damaged = 0  # neither good nor blank, or not readable


class SlotFile:
    """``num_slots`` slots in ``file``, each for one page of the file's identity.

    A slot that this process has neither written nor adopted holds nothing. Write numbers grow with
    the time (``clock``, nanoseconds), from run to run, so that of two copies of a page the newer is
    known; of copies in two files, unless the clock went back between them.
    """

    def __init__(
        self,
        file: BlockFile,
        num_slots: int,
        identity: FileIdentity,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.num_slots = num_slots
        self.identity = identity
        self.payload_bytes = identity.payload_bytes
        self.last_failure = ""  # one sentence about the I/O that failed last, for the log
        self._headers = HeaderCodec(identity)
        self.header_bytes = self._headers.header_bytes
        self.slot_bytes = slot_bytes_of(identity)
        self._file = file
        self._clock = clock
        self._slab = _Slab(self.slot_bytes)
        # What each slot last had written to it: an older copy must not pass.
        self._write_number: Int64Array = np.full(num_slots, _NEVER, np.int64)
        self._next_write_number = 1
        self._is_damaged: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def write_jobs(
        self, slots: Int32Array, addresses: Int64Array, names: Sequence[BlobName]
    ) -> list[IoJob]:
        """Jobs that write the payload at each address to its slot under its name. The memory stays
        untouched until they end.
        """
        numbers = self._register_writes(slots)
        return [
            IoJob(self._writer(slot, number, address, name), reads=(self._range(address),))
            for slot, number, address, name in zip(
                slots.tolist(), numbers.tolist(), addresses.tolist(), names, strict=True
            )
        ]

    def read_jobs(
        self, slots: Int32Array, addresses: Int64Array, keys: Sequence[BlockKey] | None = None
    ) -> list[IoJob]:
        """Jobs that read each slot's payload to its address. A job whose checks fail, or that finds
        another key than the one asked for, says so and leaves bytes that nobody may use.
        """
        wanted = [None] * slots.size if keys is None else keys
        numbers = self._write_number[slots]
        return [
            IoJob(self._reader(slot, number, address, key), writes=(self._range(address),))
            for slot, number, address, key in zip(
                slots.tolist(), numbers.tolist(), addresses.tolist(), wanted, strict=True
            )
        ]

    def relocate_jobs(self, src_slots: Int32Array, dst_slots: Int32Array) -> list[IoJob]:
        """Jobs that copy each source slot's page, under its name, to the destination slot beside
        it. They use no memory of the caller. A job whose source fails its checks says so and writes
        nothing.

        No slot may be both a source and a destination, since the jobs run in any order.
        """
        assert src_slots.shape == dst_slots.shape, "two [num_slots] arrays"
        assert np.unique(dst_slots).size == dst_slots.size, "each destination once"
        assert np.intersect1d(src_slots, dst_slots).size == 0, "disjoint slots"
        src_numbers = self._write_number[src_slots]
        dst_numbers = self._register_writes(dst_slots)
        return [
            IoJob(self._relocator((src, src_number), (dst, dst_number)))
            for src, src_number, dst, dst_number in zip(
                src_slots.tolist(),
                src_numbers.tolist(),
                dst_slots.tolist(),
                dst_numbers.tolist(),
                strict=True,
            )
        ]

    def erase_jobs(self, slots: Int32Array) -> list[IoJob]:
        """Jobs that overwrite each slot's header with zeros, so that no scan finds the page again.
        The slots hold nothing from now on.
        """
        self.forget(slots)
        return [IoJob(self._eraser(slot)) for slot in slots.tolist()]

    def scan_jobs(self) -> list[tuple[IoJob, ScanPart]]:
        """Jobs that read all headers, and what each will have found. A job says False where a
        header could not be read.
        """
        starts = range(0, self.num_slots, SCAN_SLOTS)
        parts = [ScanPart(start, min(start + SCAN_SLOTS, self.num_slots)) for start in starts]
        return [(IoJob(self._scanner(part)), part) for part in parts]

    def adopt(self, slots: Int32Array, write_numbers: Int64Array) -> None:
        """Slots that an index or a scan found: readable from now on, each as exactly that write."""
        self._write_number[slots] = write_numbers
        self._is_damaged[slots] = False
        if write_numbers.size:
            self._next_write_number = max(self._next_write_number, int(write_numbers.max()) + 1)

    def count_from(self, write_number: int) -> None:
        """No later write has a smaller number."""
        self._next_write_number = max(self._next_write_number, write_number)

    def forget(self, slots: Int32Array) -> None:
        """The slots hold nothing, for this process."""
        self._write_number[slots] = _NEVER
        self._is_damaged[slots] = False

    def write_numbers(self, slots: Int32Array) -> Int64Array:
        """The write that each slot holds; 0 where it holds nothing."""
        return self._write_number[slots]

    def is_damaged(self, slots: Int32Array) -> npt.NDArray[np.bool_]:
        """Per slot whether a read has found other bytes than were written, so that trying again is
        no use; a disk that only did not answer is no damage. Until the slot is written again.
        """
        return self._is_damaged[slots]

    def resize(self, num_slots: int) -> None:
        """Have ``num_slots`` slots; those that stay keep their pages, new ones hold none.

        Blocks. Nothing may be in flight on the slots that go. Raises StorageError, changing
        nothing, when the disk has no room.
        """
        assert num_slots > 0, "a file has at least one slot"
        self._file.resize(num_slots * self.slot_bytes)
        numbers = np.full(num_slots, _NEVER, np.int64)
        num_kept = min(num_slots, self.num_slots)
        numbers[:num_kept] = self._write_number[:num_kept]
        self._write_number = numbers
        is_damaged = np.zeros(num_slots, np.bool_)
        is_damaged[:num_kept] = self._is_damaged[:num_kept]
        self._is_damaged = is_damaged
        self.num_slots = num_slots

    def payload_location(self, slot: int) -> tuple[Path, int]:
        """The file and the offset of a slot's payload in it."""
        return self._file.path, slot * self.slot_bytes + self.header_bytes

    def sync(self) -> None:
        """Block until every write that has ended survives a power cut. Raises OSError when one may
        not; what was written since the sync before may be lost then.
        """
        self._file.sync()

    def close(self) -> None:
        """Close the file. No job may be in flight."""
        self._file.close()

    def _register_writes(self, slots: Int32Array) -> Int64Array:
        """A new write number for each slot, the only one under which it is good from now on."""
        start = max(self._next_write_number, self._clock())
        numbers = np.arange(start, start + slots.size)
        self._next_write_number = start + int(slots.size)
        self._write_number[slots] = numbers
        self._is_damaged[slots] = False
        return numbers

    def _range(self, address: int) -> ByteRange:
        return ByteRange(MemAddress(address), self.payload_bytes)

    def _buffers(self, address: int) -> tuple[_Bytes, _Bytes, list[_Bytes]]:
        """Header, payload at ``address``, and the aligned buffers of the I/O."""
        slab = self._slab.array
        header = slab[: self.header_bytes]
        payload = _bytes_at(address, self.payload_bytes)
        if address % SECTOR_BYTES == 0 and self.payload_bytes % SECTOR_BYTES == 0:
            return header, payload, [header, payload]
        return header, payload, [slab]

    def _writer(self, slot: int, number: int, address: int, name: BlobName) -> Callable[[], bool]:
        def write() -> bool:
            header, payload, buffers = self._buffers(address)
            checksum = xxhash.xxh3_64_intdigest(payload.data)
            self._headers.pack(header, slot, number, checksum, name)
            if len(buffers) == 1:
                bounce = buffers[0][self.header_bytes :]
                bounce[: self.payload_bytes] = payload
                bounce[self.payload_bytes :] = 0  # what this thread last read stays out
            return self._put(slot, buffers)

        return write

    def _reader(
        self, slot: int, number: int, address: int, key: BlockKey | None
    ) -> Callable[[], bool]:
        def read() -> bool:
            header, payload, buffers = self._buffers(address)
            if not self._get(slot, number, buffers):
                return False
            if len(buffers) == 1:
                payload[:] = buffers[0][self.header_bytes :][: self.payload_bytes]
            found = self._header_if_good(header, payload, slot, number)
            if found is not None and key is not None and key != found.name.key:
                self._note_damage(slot, number, "holds another page than was asked for")
                return False
            return found is not None

        return read

    def _relocator(self, src: tuple[int, int], dst: tuple[int, int]) -> Callable[[], bool]:
        """Both are a slot and its write number."""

        def relocate() -> bool:
            slab = self._slab.array
            header = slab[: self.header_bytes]
            payload_stop = self.header_bytes + self.payload_bytes
            if not self._get(*src, [slab]):
                return False
            found = self._header_if_good(header, slab[self.header_bytes : payload_stop], *src)
            if found is None:
                return False
            self._headers.pack(header, *dst, found.payload_checksum, found.name)
            slab[payload_stop:] = 0
            return self._put(dst[0], [slab])

        return relocate

    def _eraser(self, slot: int) -> Callable[[], bool]:
        def erase() -> bool:
            header = self._slab.array[: self.header_bytes]
            header[:] = 0
            return self._put(slot, [header])

        return erase

    def _scanner(self, part: ScanPart) -> Callable[[], bool]:
        def scan() -> bool:
            header, num_unread = self._slab.array[: self.header_bytes], 0
            for slot in range(part.start, part.stop):
                try:
                    self._file.readv(slot * self.slot_bytes, [header])
                except OSError as error:
                    self._note_failure("reading", slot, error)
                    num_unread += 1
                    continue
                found = self._headers.read(header, slot)
                if found is not None:
                    part.found.append(found)
                elif header.any():
                    part.num_damaged += 1
            part.num_damaged += num_unread
            return num_unread == 0

        return scan

    def _get(self, slot: int, number: int, buffers: list[_Bytes]) -> bool:
        if number == _NEVER:
            self.last_failure = f"slot {slot} of {self._file.path} holds nothing"
            return False
        try:
            self._file.readv(slot * self.slot_bytes, buffers)
        except OSError as error:
            self._note_failure("reading", slot, error)
            return False
        return True

    def _put(self, slot: int, buffers: list[_Bytes]) -> bool:
        try:
            self._file.writev(slot * self.slot_bytes, buffers)
        except OSError as error:
            self._note_failure("writing", slot, error)
            return False
        return True

    def _note_failure(self, verb: str, slot: int, error: OSError) -> None:
        self.last_failure = f"{verb} slot {slot} of {self._file.path} failed: {error}"

    def _header_if_good(
        self, header: _Bytes, payload: _Bytes, slot: int, number: int
    ) -> SlotHeader | None:
        """The header if these are the bytes that were written last to the slot."""
        found = self._headers.read(header, slot)
        if (
            found is not None
            and found.write_number == number
            and found.payload_checksum == xxhash.xxh3_64_intdigest(payload.data)
        ):
            return found
        self._note_damage(slot, number, "does not match its checksum")
        return None

    def _note_damage(self, slot: int, number: int, what: str) -> None:
        self.last_failure = f"slot {slot} of {self._file.path} {what}"
        # A read that was overtaken by a write says nothing about what is there now.
        if self._write_number[slot] == number:
            self._is_damaged[slot] = True
