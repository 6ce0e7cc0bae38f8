"""Typed ids and small value types that every layer shares.

An index has a type, so that a slot id can not stand where a page id belongs. Numbers end in their
unit, counts are ``num_x`` and ranges are half-open.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Final, NewType, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from coldpage.errors import UsageError

__all__ = [
    "HOT_LEVEL",
    "NO_PAGE",
    "NO_SLOT",
    "PAGE_INDEX_PAIR",
    "BlockKey",
    "BlockOrdinal",
    "BufferId",
    "BufferRole",
    "ByteRange",
    "CacheLevel",
    "CacheTier",
    "CodecIdentity",
    "DeviceArray",
    "HalfOpenRange",
    "Int32Array",
    "Int64Array",
    "LayerGroupId",
    "LayerId",
    "LifeCycleId",
    "MemAddress",
    "PageClass",
    "PageId",
    "PageIndexLocation",
    "PageStatus",
    "PoolGroupIndex",
    "PoolIndex",
    "Priority",
    "SlotId",
    "TokenId",
    "is_number",
    "is_whole_number",
    "token_array",
]

LayerId = NewType("LayerId", int)
LayerGroupId = NewType("LayerGroupId", int)
LifeCycleId = NewType("LifeCycleId", int)
CacheLevel = NewType("CacheLevel", int)
PoolGroupIndex = NewType("PoolGroupIndex", int)
PoolIndex = NewType("PoolIndex", int)
SlotId = NewType("SlotId", int)
PageId = NewType("PageId", int)
BlockOrdinal = NewType("BlockOrdinal", int)
TokenId = NewType("TokenId", int)
Priority = NewType("Priority", int)
MemAddress = NewType("MemAddress", int)
BlockKey = NewType("BlockKey", bytes)
BufferRole = NewType("BufferRole", str)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

HOT_LEVEL: Final = CacheLevel(0)
# Row 0 of the page columns is never a page, so a block table can name it where it has none.
NO_PAGE: Final = PageId(0)
# Kernel-facing arrays only: the entry of a block with no hot page. Its positions score -inf.
NO_SLOT: Final = SlotId(-1)

_TOKEN_DTYPE: Final = np.dtype(np.int32)
_MIN_TOKEN: Final = -(2**31)
_MAX_TOKEN: Final = 2**31 - 1

# One (destination, source) pair of a codec call: two little-endian int32, 8 bytes.
PAGE_INDEX_PAIR: Final = np.dtype([("dst", "<i4"), ("src", "<i4")])


class CacheTier(enum.Enum):
    """The medium of a cache level."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


class PageStatus(enum.Enum):
    """What a page's holders allow the storage to do with it."""

    LOCKED = "locked"  # an active sequence uses it: it stays on the hot level
    HELD = "held"  # a suspended sequence's: it may migrate, and vanish only as the last resort
    DROPPABLE = "droppable"  # committed and nobody's: it may vanish


class PageClass(enum.Enum):
    """Which pages of a layer group may differ in cold format. Hot pages do not differ."""

    SINK = "sink"  # of the first block, on whose tokens attention leans
    BODY = "body"  # of every other block, or of all where sinks are no class of their own
    RECENT = "recent"  # of the newest blocks, while no sequence that holds them has grown past them


class PageIndexLocation(enum.Enum):
    """Where a codec wants its array of index pairs."""

    HOST = "host"  # a numpy array, valid until the codec call returns
    DEVICE = "device"  # device memory, valid until the enqueued work completes


class CodecIdentity(Protocol):
    """What a configuration knows of a codec. Equal names, versions and parameters mean equal cold
    pages.
    """

    codec_id: str
    version: int
    parameters: str
    is_lossless: bool


@dataclass(frozen=True, slots=True)
class BufferId:
    """One (layer, role) region of a page."""

    layer_id: LayerId
    role: BufferRole


@dataclass(frozen=True, slots=True)
class HalfOpenRange:
    """The integers ``start <= i < stop``; empty when ``stop <= start``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, value: int) -> bool:
        return self.start <= value < self.stop


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes ``address <= a < address + num_bytes`` that some work reads or writes."""

    address: MemAddress
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """``size`` items in device memory from ``address`` on; the reader knows their dtype.

    ``host`` is the array they are uploaded from, where the host has it: valid as long as a host
    array in its place would be, so only until the call that passes it returns.
    """

    address: MemAddress
    size: int
    host: npt.NDArray[np.generic] | None = field(default=None, repr=False, compare=False)


def is_whole_number(value: object) -> TypeGuard[int]:
    """Whether it is an integer, Python's or numpy's; a truth value is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is an integer or a float, Python's or numpy's; a truth value is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def token_array(tokens: Sequence[int] | npt.NDArray[Any]) -> Int32Array:
    """Token ids as int32 [num_tokens]: the same array where they are one already. Raises UsageError
    for anything but one row of whole numbers of 32 bits. Called for every token that is committed.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == _TOKEN_DTYPE and tokens.ndim == 1:
        return tokens
    if isinstance(tokens, (list, tuple, range)):
        try:
            # Unlike numpy it cuts no fractions.
            return np.frombuffer(array("i", tokens), _TOKEN_DTYPE)
        except OverflowError:
            too_large = next(t for t in tokens if not _MIN_TOKEN <= t <= _MAX_TOKEN)
            raise _too_large(too_large) from None
        except TypeError:
            pass  # the array below says what they are
    try:
        found = np.asarray(tokens)
    except (TypeError, ValueError) as error:
        raise UsageError(
            "tokens must be one row of whole numbers in host memory, and not rows of many lengths"
        ) from error
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise UsageError(
            f"tokens must be one row of whole numbers, and not {found.dtype.name} "
            f"{list(found.shape)}"
        )
    if found.size:
        for extreme in (int(found.min()), int(found.max())):
            if not _MIN_TOKEN <= extreme <= _MAX_TOKEN:
                raise _too_large(extreme)
    return found.astype(_TOKEN_DTYPE, copy=False)


def _too_large(token: int) -> UsageError:
    return UsageError(
        f"{token} is no token id: ids lie between {_MIN_TOKEN} and {_MAX_TOKEN}, in 32 bits"
    )
