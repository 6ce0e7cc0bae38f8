"""The file of saved sequences, ``CPSN`` version 1: a header that says all about them, then pages.

=============  ====================================================================================
bytes          what
=============  ====================================================================================
0-3            ``CPSN``
4-7            version, u32
8-15           bytes of the header, a multiple of 4,096, u64
16-23          bytes of the JSON text, u64
24-31          number of pages, u64
32-            JSON: identity, bytes of all pages, and of each sequence its counts, scope and label
then           pages: offset after the header u64, xxh3_64 u64, layer group u32, block u32, each
then           of each sequence: tokens i32; the page of each block, -1 for none, i32 [layer groups,
               blocks]; whether it is a hole, u8 [layer groups, blocks]
then           zeros
last 8         xxh3_64 of the header up to here, u64
=============  ====================================================================================

All numbers are little-endian. The pages follow, each as its codec made it, in the order of their
offsets and with nothing between them; the file ends with the last.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from coldpage.errors import SnapshotError
from coldpage.types import Int32Array

__all__ = [
    "HEAD_BYTES",
    "NO_SAVED_PAGE",
    "PAGE_ENTRY",
    "SNAPSHOT_VERSION",
    "Origin",
    "SavedSequence",
    "SnapshotHeader",
    "SnapshotIdentity",
    "header_bytes_of",
    "pack_header",
    "parse_header",
    "parse_sizes",
]

SNAPSHOT_VERSION: Final = 1
# The entry of a block whose page is not in the file.
NO_SAVED_PAGE: Final = -1
PAGE_ENTRY: Final = np.dtype(
    [("offset", "<u8"), ("checksum", "<u8"), ("layer_group", "<u4"), ("block", "<u4")]
)

_MAGIC: Final = b"CPSN"
_HEAD: Final = struct.Struct("<4sIQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 4096
HEAD_BYTES: Final = _HEAD.size
_INT32: Final = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Origin:
    """What only the caller knows of where pages come from: a file of another origin is refused."""

    tokenizer: str = ""  # a fingerprint: equal ids must mean equal text
    dtype: str = ""  # the number type of keys and values


@dataclass(frozen=True, slots=True)
class SnapshotIdentity:
    """What the pages of a file are good for. A difference in any field refuses the file."""

    model: str
    tokenizer: str
    dtype: str
    geometry: str
    codec: str
    provenance: str

    def differences(self, other: SnapshotIdentity) -> list[str]:
        """The names of the fields in which another one differs."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """One sequence: what was known of it, and which pages of the file hold its blocks."""

    label: str  # the caller's
    scope: str  # a digest: who does not know the scope learns nothing of it
    history_length: int
    tokens: Int32Array  # the committed ones [num_tokens]
    pages: Int32Array  # [num_layer_groups, num_blocks], NO_SAVED_PAGE where there is none
    is_hole: npt.NDArray[np.bool_]  # [num_layer_groups, num_blocks]


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotHeader:
    """All that a file says before its pages."""

    identity: SnapshotIdentity
    has_pages: bool
    sequences: tuple[SavedSequence, ...]
    pages: npt.NDArray[np.void]  # of PAGE_ENTRY [num_pages]
    data_bytes: int  # of all pages


def _describe(header: SnapshotHeader) -> bytes:
    sequences = [
        {
            "label": one.label,
            "scope": one.scope,
            "history_length": one.history_length,
            "num_tokens": int(one.tokens.size),
            "num_layer_groups": one.pages.shape[0],
            "num_blocks": one.pages.shape[1],
        }
        for one in header.sequences
    ]
    return json.dumps(
        {
            "identity": asdict(header.identity),
            "has_pages": header.has_pages,
            "data_bytes": header.data_bytes,
            "sequences": sequences,
        }
    ).encode()


def _tables(header: SnapshotHeader) -> list[bytes]:
    parts = [np.ascontiguousarray(header.pages, PAGE_ENTRY).tobytes()]
    for one in header.sequences:
        parts.append(np.ascontiguousarray(one.tokens, _INT32).tobytes())
        parts.append(np.ascontiguousarray(one.pages, _INT32).tobytes())
        parts.append(np.ascontiguousarray(one.is_hole, np.uint8).tobytes())
    return parts


def header_bytes_of(header: SnapshotHeader) -> int:
    """What the header takes in the file. Offsets and checksums of pages do not change it."""
    content = len(_describe(header)) + sum(map(len, _tables(header)))
    return -(-(_HEAD.size + content + _CHECKSUM.size) // _ALIGNMENT) * _ALIGNMENT


def pack_header(header: SnapshotHeader) -> bytes:
    """The header as it stands in the file."""
    text, total = _describe(header), header_bytes_of(header)
    head = _HEAD.pack(_MAGIC, SNAPSHOT_VERSION, total, len(text), header.pages.size)
    body = b"".join((head, text, *_tables(header))).ljust(total - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def parse_sizes(head: bytes, what: str) -> int:
    """The bytes of the header that begins with ``head`` [HEAD_BYTES]. Raises SnapshotError."""
    if len(head) < _HEAD.size or head[:4] != _MAGIC:
        raise SnapshotError(f"{what} is no file of saved sessions")
    _, version, total, _, _ = _HEAD.unpack(head)
    if version != SNAPSHOT_VERSION:
        raise SnapshotError(
            f"{what} has the format version {version}; this program reads {SNAPSHOT_VERSION}"
        )
    if total < _ALIGNMENT or total % _ALIGNMENT:
        raise SnapshotError(f"{what} is damaged: its header does not match its checksum")
    return int(total)


def parse_header(data: bytes, what: str) -> SnapshotHeader:
    """The header from its bytes. Raises SnapshotError when they are not what was written."""
    end = len(data) - _CHECKSUM.size
    damaged = SnapshotError(f"{what} is damaged: its header does not match its checksum")
    if _CHECKSUM.unpack_from(data, end) != (xxhash.xxh3_64_intdigest(memoryview(data)[:end]),):
        raise damaged
    _, _, _, text_bytes, num_pages = _HEAD.unpack_from(data)
    try:
        said = json.loads(data[_HEAD.size : _HEAD.size + text_bytes])
        return _parse(data[:end], _HEAD.size + text_bytes, num_pages, said)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise damaged from error


class _Cursor:
    """Takes arrays off the front of some bytes."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._at = start

    def take(self, dtype: npt.DTypeLike, *shape: int) -> npt.NDArray[Any]:
        count = int(np.prod(shape))
        if min(shape) < 0:
            raise ValueError("a negative count")
        array = np.frombuffer(self._data, dtype, count, self._at)
        self._at += array.nbytes
        return array.reshape(shape)


def _parse(data: bytes, start: int, num_pages: int, said: Mapping[str, Any]) -> SnapshotHeader:
    """Raises ValueError, KeyError or TypeError where the parts do not fit together."""
    cursor = _Cursor(data, start)
    pages = cursor.take(PAGE_ENTRY, num_pages)
    sequences = []
    for one in said["sequences"]:
        shape = int(one["num_layer_groups"]), int(one["num_blocks"])
        tokens = cursor.take(_INT32, int(one["num_tokens"])).astype(np.int32)
        table = cursor.take(_INT32, *shape).astype(np.int32)
        is_hole = cursor.take(np.uint8, *shape) != 0
        history = int(one["history_length"])
        if table.size and not NO_SAVED_PAGE <= table.min() <= table.max() < num_pages:
            raise ValueError("a block names a page that is not in the file")
        if history < tokens.size:
            raise ValueError("more tokens than positions")
        sequences.append(
            SavedSequence(str(one["label"]), str(one["scope"]), history, tokens, table, is_hole)
        )
    return SnapshotHeader(
        SnapshotIdentity(**said["identity"]),
        bool(said["has_pages"]),
        tuple(sequences),
        pages,
        int(said["data_bytes"]),
    )
