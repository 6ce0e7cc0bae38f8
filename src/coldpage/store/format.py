"""What stands in front of each cold page on disk: a header that says what the page is and vouches
for it. docs/FORMAT.md describes every byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from coldpage.types import BlockKey, BlockOrdinal, Int32Array, LayerGroupId, PageClass

__all__ = [
    "BLANK_KEY",
    "FORMAT_VERSION",
    "MAX_CODEC_BYTES",
    "PAGE_CLASSES",
    "SECTOR_BYTES",
    "BlobName",
    "FileIdentity",
    "HeaderCodec",
    "SlotHeader",
    "parse_header",
]

SECTOR_BYTES: Final = 4096
FORMAT_VERSION: Final = 2
# The key of a page that nobody could look up: its block is not committed.
BLANK_KEY: Final = BlockKey(bytes(32))
MAX_CODEC_BYTES: Final = 1024
# A page class on disk is its place in here.
PAGE_CLASSES: Final = (PageClass.BODY, PageClass.SINK, PageClass.RECENT)

_MAGIC: Final = b"CPGS"
# magic, format version, header bytes, tokens a block, payload bytes, slot, write number, payload
# checksum, model fingerprint, key, parent key, layer group, page class, number of tokens, block
# ordinal, bytes of the codec's name
_FIXED: Final = struct.Struct("<4sIIIQQQQ32s32s32sHHIII")
_CHECKSUM: Final = struct.Struct("<Q")
_TOKEN_DTYPE: Final = np.dtype("<i4")

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What all pages of a file have in common. A page of another identity is not there."""

    model_fingerprint: bytes  # 32 bytes: weights, number type and geometry
    codec: str  # id, version and parameters
    payload_bytes: int
    tokens_per_block: int


@dataclass(frozen=True, slots=True, eq=False)
class BlobName:
    """What one page holds. ``key`` is BLANK_KEY while nobody could ask for it."""

    key: BlockKey
    parent_key: BlockKey
    layer_group_id: LayerGroupId
    page_class: PageClass
    ordinal: BlockOrdinal  # the block's place in its sequence
    tokens: Int32Array  # [num_tokens], at most tokens_per_block


@dataclass(frozen=True, slots=True, eq=False)
class SlotHeader:
    """A header that was found good: what the slot holds, and which write put it there."""

    name: BlobName
    slot: int
    write_number: int
    payload_checksum: int


class HeaderCodec:
    """Packs and reads the headers of one file."""

    def __init__(self, identity: FileIdentity) -> None:
        self.identity = identity
        self._codec = identity.codec.encode()
        assert len(self._codec) <= MAX_CODEC_BYTES, "the codec's name does not fit a header"
        assert len(identity.model_fingerprint) == 32, "a fingerprint has 32 bytes"
        self._codec_at = _FIXED.size + 4 * identity.tokens_per_block
        needed = self._codec_at + len(self._codec) + _CHECKSUM.size
        self.header_bytes = -(-needed // SECTOR_BYTES) * SECTOR_BYTES

    def pack(
        self, header: _Bytes, slot: int, write_number: int, payload_checksum: int, name: BlobName
    ) -> None:
        """Fill ``header`` [header_bytes], every byte of it."""
        identity, tokens = self.identity, np.ascontiguousarray(name.tokens, _TOKEN_DTYPE)
        assert tokens.size <= identity.tokens_per_block, "more tokens than a block has"
        assert len(name.key) == len(name.parent_key) == 32, "a key has 32 bytes"
        header[:] = 0
        _FIXED.pack_into(
            header.data,
            0,
            _MAGIC,
            FORMAT_VERSION,
            self.header_bytes,
            identity.tokens_per_block,
            identity.payload_bytes,
            slot,
            write_number,
            payload_checksum,
            identity.model_fingerprint,
            name.key,
            name.parent_key,
            name.layer_group_id,
            PAGE_CLASSES.index(name.page_class),
            tokens.size,
            name.ordinal,
            len(self._codec),
        )
        header[_FIXED.size : _FIXED.size + tokens.nbytes] = tokens.view(np.uint8)
        codec_stop = self._codec_at + len(self._codec)
        header[self._codec_at : codec_stop] = np.frombuffer(self._codec, np.uint8)
        end = self.header_bytes - _CHECKSUM.size
        _CHECKSUM.pack_into(header.data, end, xxhash.xxh3_64_intdigest(header[:end].data))

    def read(self, header: _Bytes, slot: int) -> SlotHeader | None:
        """What the slot holds, or None: nothing, something torn, or a page of another place, model,
        codec or format.
        """
        parsed = parse_header(header)
        if parsed is None or parsed[0] != self.identity or parsed[1].slot != slot:
            return None
        return parsed[1]


def parse_header(header: _Bytes) -> tuple[FileIdentity, SlotHeader] | None:
    """A header [header_bytes] of any file of this format, or None where there is no good one."""
    end = header.size - _CHECKSUM.size
    fields = _FIXED.unpack_from(header.data, 0)
    if fields[:3] != (_MAGIC, FORMAT_VERSION, header.size):
        return None
    (checksum,) = _CHECKSUM.unpack_from(header.data, end)
    if checksum != xxhash.xxh3_64_intdigest(header[:end].data):
        return None
    per_block, payload_bytes, slot, number, payload_checksum = fields[3:8]
    fingerprint, key, parent, layer_group, page_class, num_tokens, ordinal, codec_bytes = fields[8:]
    codec_at = _FIXED.size + 4 * per_block
    if num_tokens > per_block or page_class >= len(PAGE_CLASSES) or codec_at + codec_bytes > end:
        return None
    try:
        codec = header[codec_at : codec_at + codec_bytes].tobytes().decode()
    except UnicodeDecodeError:
        return None
    tokens = header[_FIXED.size : _FIXED.size + 4 * num_tokens].view(_TOKEN_DTYPE)
    name = BlobName(
        BlockKey(key),
        BlockKey(parent),
        LayerGroupId(layer_group),
        PAGE_CLASSES[page_class],
        BlockOrdinal(ordinal),
        tokens.astype(np.int32),
    )
    identity = FileIdentity(fingerprint, codec, payload_bytes, per_block)
    return identity, SlotHeader(name, slot, number, payload_checksum)
