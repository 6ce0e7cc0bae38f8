"""The index of a disk tier, written at a clean end so that the next start need not read every
header: ``CIDX``. It only makes opening fast: it is taken away when the tier is opened, and what it
says about a slot is checked when that slot is first read.
"""

from __future__ import annotations

import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from coldpage.store.format import PAGE_CLASSES, BlobName
from coldpage.types import BlockKey, BlockOrdinal, Int32Array, LayerGroupId

__all__ = [
    "ENTRY",
    "SIDECAR_NAME",
    "SlotIndex",
    "fill_entry",
    "read_sidecar",
    "sync_directory",
    "take_away_sidecar",
    "write_sidecar",
]

_log = logging.getLogger(__name__)

SIDECAR_NAME: Final = "index.bin"
_MAGIC: Final = 0x58444943  # "CIDX"
_VERSION: Final = 1
# magic, version, identity of the tier (SHA-256), tokens a block, number of entries
_HEAD: Final = struct.Struct("<II32sII")
_CHECKSUM: Final = struct.Struct("<Q")

# One slot. ``pool`` is the place of its file among the tier's. ``last_use`` orders slots by value;
# larger is more recent. ``is_unread``: a scan after a crash has found the header, and nobody has
# looked since whether the payload was written too.
ENTRY: Final = np.dtype(
    [
        ("pool", "<u2"),
        ("layer_group", "<u2"),
        ("page_class", "<u2"),
        ("is_unread", "<u2"),
        ("num_tokens", "<u4"),
        ("ordinal", "<u4"),
        ("slot", "<u4"),
        ("priority", "<i4"),
        ("write_number", "<u8"),
        ("last_use", "<u8"),
        ("key", "V32"),
        ("parent_key", "V32"),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class SlotIndex:
    """Named slots: ``entries`` [num_slots] of ENTRY, and the tokens of each, padded with zeros,
    [num_slots, tokens_per_block].
    """

    entries: npt.NDArray[np.void]
    tokens: Int32Array

    def of_pool(self, pool: int) -> SlotIndex:
        """The slots in one file."""
        rows = np.flatnonzero(self.entries["pool"] == pool)
        return SlotIndex(self.entries[rows], self.tokens[rows])

    def names(self) -> list[BlobName]:
        """What each slot holds."""
        columns = ("key", "parent_key", "layer_group", "page_class", "ordinal", "num_tokens")
        return [
            BlobName(
                BlockKey(key),
                BlockKey(parent),
                LayerGroupId(layer_group),
                PAGE_CLASSES[page_class],
                BlockOrdinal(ordinal),
                tokens[:num_tokens],
            )
            for key, parent, layer_group, page_class, ordinal, num_tokens, tokens in zip(
                *(self.entries[column].tolist() for column in columns), self.tokens, strict=True
            )
        ]


def fill_entry(index: SlotIndex, row: int, name: BlobName) -> None:
    """Put a name in one row of the index; its other fields stay."""
    entry, num_tokens = index.entries[row], len(name.tokens)
    entry["key"], entry["parent_key"] = np.void(name.key), np.void(name.parent_key)
    entry["layer_group"] = name.layer_group_id
    entry["page_class"] = PAGE_CLASSES.index(name.page_class)
    entry["ordinal"], entry["num_tokens"] = name.ordinal, num_tokens
    index.tokens[row, :num_tokens] = name.tokens
    index.tokens[row, num_tokens:] = 0


def write_sidecar(directory: Path, identity: bytes, index: SlotIndex) -> None:
    """Write the index under its name, whole or not at all. Raises OSError.

    What it names has been synced before.
    """
    tokens = np.ascontiguousarray(index.tokens, "<i4")
    head = _HEAD.pack(_MAGIC, _VERSION, identity, tokens.shape[1], index.entries.size)
    parts = (head, np.ascontiguousarray(index.entries).tobytes(), tokens.tobytes())
    digest = xxhash.xxh3_64()
    temporary = directory / f"{SIDECAR_NAME}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600)
    with os.fdopen(fd, "wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(_CHECKSUM.pack(digest.intdigest()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / SIDECAR_NAME)
    sync_directory(directory)


def read_sidecar(directory: Path, identity: bytes) -> SlotIndex | None:
    """The index, or None when there is none, or it is damaged, or it is of another tier."""
    try:
        data = (directory / SIDECAR_NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s can not be read (%s)", directory / SIDECAR_NAME, error)
        return None
    index = _parse(data, identity)
    if index is None:
        _log.warning("%s is damaged or of another tier: not used", directory / SIDECAR_NAME)
    return index


def _parse(data: bytes, identity: bytes) -> SlotIndex | None:
    if len(data) < _HEAD.size + _CHECKSUM.size:
        return None
    magic, version, own_identity, per_block, count = _HEAD.unpack_from(data)
    body = len(data) - _CHECKSUM.size
    expected = _HEAD.size + count * (ENTRY.itemsize + 4 * per_block)
    if (magic, version, own_identity, body) != (_MAGIC, _VERSION, identity, expected):
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, body)
    if checksum != xxhash.xxh3_64_intdigest(memoryview(data)[:body]):
        return None
    entries = np.frombuffer(data, ENTRY, count, _HEAD.size)
    tokens = np.frombuffer(data, "<i4", count * per_block, _HEAD.size + count * ENTRY.itemsize)
    return SlotIndex(entries, tokens.reshape(count, per_block).astype(np.int32))


def take_away_sidecar(directory: Path) -> None:
    """What it says will not be true much longer: gone even after a power cut. Raises OSError."""
    (directory / SIDECAR_NAME).unlink(missing_ok=True)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make names that were created or removed in it survive a power cut. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
