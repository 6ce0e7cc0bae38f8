"""A small tier whose every byte is known: what tests/format/golden/v2 holds.

``python -m tests.format.golden_tier DIRECTORY`` writes it; a file there is replaced only together
with its version.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from coldpage.device.file import BlockFile
from coldpage.store import BlobName, FileIdentity, InstanceIdentity, SlotFile, slot_bytes_of
from coldpage.store.sidecar import ENTRY, SlotIndex, fill_entry, write_sidecar
from coldpage.types import BlockKey, BlockOrdinal, LayerGroupId, PageClass

__all__ = ["FILE", "FIRST_WRITE", "INSTANCE", "NAMES", "SLOTS", "payload", "write_tier"]

FILE = FileIdentity(
    model_fingerprint=bytes(range(32)), codec="golden:3:é", payload_bytes=100, tokens_per_block=4
)
INSTANCE = InstanceIdentity(FILE.model_fingerprint, FILE.codec, "1 layer of 100 bytes, f32")
NAMES = (
    BlobName(
        BlockKey(b"\xa1" * 32),
        BlockKey(b"\xb1" * 32),
        LayerGroupId(2),
        PageClass.SINK,
        BlockOrdinal(0),
        np.array([1, 2, 3, 2_000_000_000], np.int32),
    ),
    BlobName(
        BlockKey(b"\xa2" * 32),
        BlockKey(b"\xa1" * 32),
        LayerGroupId(0),
        PageClass.BODY,
        BlockOrdinal(70_000),
        np.array([5], np.int32),
    ),
)
SLOTS = (0, 2)  # slot 1 is blank
FIRST_WRITE = 1_800_000_000_000_000_000


def payload(index: int) -> np.ndarray:
    """The page under ``NAMES[index]``."""
    return (np.arange(FILE.payload_bytes) * (index + 1)).astype(np.uint8)


def write_tier(directory: Path) -> None:
    """Write ``pool-0.slots``, ``index.bin`` and ``identity.json``."""
    file = BlockFile(directory / "pool-0.slots", 3 * slot_bytes_of(FILE))
    slots = SlotFile(file, 3, FILE, clock=lambda: FIRST_WRITE)
    index = SlotIndex(np.zeros(2, ENTRY), np.zeros((2, FILE.tokens_per_block), np.int32))
    for row, (slot, name) in enumerate(zip(SLOTS, NAMES, strict=True)):
        data, where = payload(row), np.array([slot], np.int32)
        (job,) = slots.write_jobs(where, np.array([data.ctypes.data]), [name])
        assert job.run()
        fill_entry(index, row, name)
        entry = index.entries[row]
        entry["slot"], entry["priority"] = slot, -row
        entry["write_number"] = slots.write_numbers(where)[0]
        entry["last_use"] = FIRST_WRITE + 10 - row
    slots.close()
    write_sidecar(directory, INSTANCE.digest, index)
    (directory / "identity.json").write_text(INSTANCE.to_json("0.1.0"), encoding="utf-8")


if __name__ == "__main__":
    write_tier(Path(sys.argv[1]))
