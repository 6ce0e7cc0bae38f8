"""A slot file on a real file, with memory to write from and read into."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coldpage.device.base import IoJob, MemoryKind
from coldpage.device.file import BlockFile
from coldpage.device.host import HostDevice
from coldpage.store import BlobName, FileIdentity, SlotFile, slot_bytes_of
from coldpage.types import BlockKey, BlockOrdinal, LayerGroupId, PageClass

TOKENS_PER_BLOCK = 4
PAYLOAD_BYTES = 1000
NUM_SLOTS = 4


def identity_of(payload_bytes: int = PAYLOAD_BYTES, **changes: object) -> FileIdentity:
    """The identity that tests use, or one that differs from it."""
    fields: dict[str, object] = {
        "model_fingerprint": b"m" * 32,
        "codec": "raw:1:",
        "payload_bytes": payload_bytes,
        "tokens_per_block": TOKENS_PER_BLOCK,
    }
    return FileIdentity(**(fields | changes))  # type: ignore[arg-type]


def key_of(seed: int) -> BlockKey:
    """Keys that differ; never the blank one."""
    return BlockKey(seed.to_bytes(31, "little") + b"k")


def name_of(
    seed: int, layer_group: int = 0, page_class: PageClass = PageClass.BODY, num_tokens: int = 4
) -> BlobName:
    """A name with something of its own in each field."""
    tokens = np.arange(seed, seed + num_tokens, dtype=np.int32)
    group, ordinal = LayerGroupId(layer_group), BlockOrdinal(seed % 7)
    return BlobName(key_of(seed), key_of(seed + 1000), group, page_class, ordinal, tokens)


def payload_of(seed: int, num_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Bytes that follow from the seed."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes()


class SlotRig:
    """A slot file, and memory to write from and read into."""

    def __init__(
        self,
        path: Path,
        identity: FileIdentity | None = None,
        kind: type[BlockFile] = BlockFile,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self.path = path
        self.identity = identity or identity_of()
        self.payload_bytes = self.identity.payload_bytes
        self.slot_bytes = slot_bytes_of(self.identity)
        self.file: BlockFile = kind(path, num_slots * self.slot_bytes)
        self.slots = SlotFile(self.file, num_slots, self.identity)
        self.device = HostDevice(num_io_threads=2)
        self.memory = self.device.allocate(1 << 20, MemoryKind.PINNED)
        self.half = self.memory.num_bytes // 2

    def write_jobs(
        self, slots: Sequence[int], offsets: Sequence[int], names: Sequence[BlobName] | None = None
    ) -> list[IoJob]:
        addresses = np.array(offsets, np.int64) + self.memory.address
        names = names or [name_of(slot) for slot in slots]
        return self.slots.write_jobs(np.array(slots, np.int32), addresses, names)

    def read_jobs(
        self, slots: Sequence[int], offsets: Sequence[int], keys: Sequence[BlockKey] | None = None
    ) -> list[IoJob]:
        addresses = np.array(offsets, np.int64) + self.memory.address
        return self.slots.read_jobs(np.array(slots, np.int32), addresses, keys)

    def write(
        self, slot: int, payload: bytes, offset: int = 0, name: BlobName | None = None
    ) -> bool:
        self.memory.array[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
        return self.write_jobs([slot], [offset], [name or name_of(slot)])[0].run()

    def read(
        self, slot: int, offset: int | None = None, key: BlockKey | None = None
    ) -> bytes | None:
        """The payload; None where the file says that it is not good."""
        offset = self.half if offset is None else offset
        self.memory.array[offset : offset + self.payload_bytes] = 0xEE
        keys = None if key is None else [key]
        if not self.read_jobs([slot], [offset], keys)[0].run():
            return None
        return self.memory.array[offset : offset + self.payload_bytes].tobytes()

    def slot_on_disk(self, slot: int) -> bytes:
        with open(self.path, "rb") as file:
            return os.pread(file.fileno(), self.slot_bytes, slot * self.slot_bytes)

    def put_on_disk(self, slot: int, data: bytes, offset: int = 0) -> None:
        with open(self.path, "r+b") as file:
            os.pwrite(file.fileno(), data, slot * self.slot_bytes + offset)

    def close(self) -> None:
        self.slots.close()
        self.device.close()
