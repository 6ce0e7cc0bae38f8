"""A pool in a file of fixed-size slots: a 4 KiB header with a checksum, then one cold page. One I/O
a page.

A slot's header says what was written there; a read is good only if header and payload agree with
it, so a torn, flipped or misplaced blob is a miss and never data.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from coldpage.device.base import IoJob
from coldpage.device.file import BlockFile
from coldpage.types import ByteRange, Int32Array, Int64Array, MemAddress

__all__ = ["DISK_HEADER_BYTES", "DiskPool", "disk_slot_bytes"]

DISK_HEADER_BYTES: Final = 4096
_ALIGNMENT: Final = 4096
_MAGIC: Final = b"CPG1"
# magic, format version, payload bytes, slot id, write number, payload checksum
_HEADER: Final = struct.Struct("<4sIQQQQ")
_FORMAT_VERSION: Final = 1
_CHECKSUM: Final = struct.Struct("<Q")
# Leaves room for 2 ** 62 writes in 63 bits.
_FIRST_WRITE_NUMBER_BITS: Final = 62

_Bytes = npt.NDArray[np.uint8]


def disk_slot_bytes(payload_bytes: int) -> int:
    """What a slot takes in the file: the header and the payload rounded up to 4 KiB."""
    return DISK_HEADER_BYTES + -(-payload_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_at(address: int, num_bytes: int) -> _Bytes:
    """The memory at ``address`` as an array; the caller keeps it alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), np.uint8)


class _Slab(threading.local):
    """An aligned buffer for one slot, one a thread: the header always, the payload when its memory
    is not aligned.
    """

    def __init__(self, num_bytes: int) -> None:
        self.array: _Bytes = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


class DiskPool:
    """``num_slots`` slots in ``file``, each holding one payload of ``payload_bytes``."""

    def __init__(self, file: BlockFile, num_slots: int, payload_bytes: int) -> None:
        self.num_slots = num_slots
        self.payload_bytes = payload_bytes
        self.slot_bytes = disk_slot_bytes(payload_bytes)
        self._file = file
        self.last_failure = ""  # one sentence about the I/O that failed last, for the log
        self._slab = _Slab(self.slot_bytes)
        # What each slot last had written to it: an older copy that a lost write left behind must
        # not pass. Runs begin at numbers far apart, so that it is not an earlier run's either.
        self._write_number: Int64Array = np.zeros(num_slots, np.int64)
        self._next_write_number = 1 + secrets.randbits(_FIRST_WRITE_NUMBER_BITS)

    def write_jobs(self, slots: Int32Array, addresses: Int64Array) -> list[IoJob]:
        """Jobs that write the payload at each address to its slot. The memory stays untouched until
        they end.
        """
        numbers = self._register_writes(slots)
        return [
            IoJob(self._writer(slot, number, address), reads=(self._range(address),))
            for slot, number, address in zip(
                slots.tolist(), numbers.tolist(), addresses.tolist(), strict=True
            )
        ]

    def read_jobs(self, slots: Int32Array, addresses: Int64Array) -> list[IoJob]:
        """Jobs that read each slot's payload to its address; a job whose checks fail says so and
        leaves bytes that nobody may use.
        """
        numbers = self._write_number[slots]
        return [
            IoJob(self._reader(slot, number, address), writes=(self._range(address),))
            for slot, number, address in zip(
                slots.tolist(), numbers.tolist(), addresses.tolist(), strict=True
            )
        ]

    def relocate_jobs(self, src_slots: Int32Array, dst_slots: Int32Array) -> list[IoJob]:
        """Jobs that copy each source slot's payload to the destination slot beside it. They use no
        memory of the caller. A job whose source fails its checks says so and writes nothing.

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

    def resize(self, num_slots: int) -> None:
        """Have ``num_slots`` slots; those that stay keep their payloads, new ones hold none.

        Blocks. Nothing may be in flight on the slots that go. Raises StorageError, changing
        nothing, when the disk has no room.
        """
        assert num_slots > 0, "a pool has at least one slot"
        self._file.resize(num_slots * self.slot_bytes)
        numbers = np.zeros(num_slots, np.int64)  # of a slot that holds nothing
        num_kept = min(num_slots, self.num_slots)
        numbers[:num_kept] = self._write_number[:num_kept]
        self._write_number = numbers
        self.num_slots = num_slots

    def _register_writes(self, slots: Int32Array) -> Int64Array:
        """A new write number for each slot, the only one under which it is good from now on."""
        numbers = np.arange(self._next_write_number, self._next_write_number + slots.size)
        self._next_write_number += int(slots.size)
        self._write_number[slots] = numbers
        return numbers

    def _range(self, address: int) -> ByteRange:
        return ByteRange(MemAddress(address), self.payload_bytes)

    def _buffers(self, address: int) -> tuple[_Bytes, _Bytes, list[_Bytes]]:
        """Header, payload at ``address``, and the aligned buffers of the I/O."""
        slab = self._slab.array
        header = slab[:DISK_HEADER_BYTES]
        payload = _bytes_at(address, self.payload_bytes)
        if address % _ALIGNMENT == 0 and self.payload_bytes % _ALIGNMENT == 0:
            return header, payload, [header, payload]
        return header, payload, [slab]

    def _writer(self, slot: int, number: int, address: int) -> Callable[[], bool]:
        def write() -> bool:
            header, payload, buffers = self._buffers(address)
            self._fill_header(header, slot, number, xxhash.xxh3_64_intdigest(payload.data))
            if len(buffers) == 1:
                bounce = buffers[0][DISK_HEADER_BYTES:]
                bounce[: self.payload_bytes] = payload
                bounce[self.payload_bytes :] = 0
            return self._put(slot, buffers)

        return write

    def _reader(self, slot: int, number: int, address: int) -> Callable[[], bool]:
        def read() -> bool:
            header, payload, buffers = self._buffers(address)
            if not self._get(slot, buffers):
                return False
            if len(buffers) == 1:
                payload[:] = buffers[0][DISK_HEADER_BYTES : DISK_HEADER_BYTES + self.payload_bytes]
            return self._checksum_if_good(header, payload, slot, number) is not None

        return read

    def _relocator(self, src: tuple[int, int], dst: tuple[int, int]) -> Callable[[], bool]:
        """Both are a slot and its write number."""

        def relocate() -> bool:
            slab = self._slab.array
            header = slab[:DISK_HEADER_BYTES]
            payload = slab[DISK_HEADER_BYTES : DISK_HEADER_BYTES + self.payload_bytes]
            if not self._get(src[0], [slab]):
                return False
            checksum = self._checksum_if_good(header, payload, *src)
            if checksum is None:
                return False
            self._fill_header(header, *dst, checksum)
            slab[DISK_HEADER_BYTES + self.payload_bytes :] = 0
            return self._put(dst[0], [slab])

        return relocate

    def _get(self, slot: int, buffers: list[_Bytes]) -> bool:
        try:
            self._file.readv(slot * self.slot_bytes, buffers)
        except OSError as error:
            self.last_failure = f"reading slot {slot} of {self._file.path} failed: {error}"
            return False
        return True

    def _put(self, slot: int, buffers: list[_Bytes]) -> bool:
        try:
            self._file.writev(slot * self.slot_bytes, buffers)
        except OSError as error:
            self.last_failure = f"writing slot {slot} of {self._file.path} failed: {error}"
            return False
        return True

    def _fill_header(self, header: _Bytes, slot: int, number: int, checksum: int) -> None:
        fields = (_MAGIC, _FORMAT_VERSION, self.payload_bytes, slot, number, checksum)
        _HEADER.pack_into(header.data, 0, *fields)
        _CHECKSUM.pack_into(
            header.data, _HEADER.size, xxhash.xxh3_64_intdigest(header[: _HEADER.size].data)
        )
        header[_HEADER.size + _CHECKSUM.size :] = 0  # what this thread last read stays out

    def _checksum_if_good(
        self, header: _Bytes, payload: _Bytes, slot: int, number: int
    ) -> int | None:
        """The payload's checksum if these are the bytes that were written last to the slot."""
        (header_checksum,) = _CHECKSUM.unpack_from(header.data, _HEADER.size)
        is_intact = header_checksum == xxhash.xxh3_64_intdigest(header[: _HEADER.size].data)
        *fields, checksum = _HEADER.unpack_from(header.data, 0)
        expected = [_MAGIC, _FORMAT_VERSION, self.payload_bytes, slot, number]
        if is_intact and fields == expected and checksum == xxhash.xxh3_64_intdigest(payload.data):
            return int(checksum)
        self.last_failure = f"slot {slot} of {self._file.path} does not match its checksum"
        return None

    def payload_location(self, slot: int) -> tuple[Path, int]:
        """The file and the offset of a slot's payload in it."""
        return self._file.path, slot * self.slot_bytes + DISK_HEADER_BYTES

    def close(self) -> None:
        """Close the file. No job may be in flight."""
        self._file.close()
