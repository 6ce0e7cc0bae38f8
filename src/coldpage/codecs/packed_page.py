"""How packed cold pages lie: keys and values first, each packed, then whatever is copied as it is.

Packed buffers start at multiples of ALIGNMENT_BYTES in the page, which is therefore such a multiple
long: behind the copied parts, bytes from their beginnings fill it up. A page of which nothing is
packed is the copied parts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from coldpage.codecs.base import BufferDesc, LifeCycleDesc, PoolDesc
from coldpage.device.base import PageParts
from coldpage.kernels.cold.formats import ALIGNMENT_BYTES, ColdFormat, KVShape, PackedBuffers
from coldpage.types import ByteRange, Int64Array, MemAddress

__all__ = ["BufferCoding", "PackedPage"]


@dataclass(frozen=True, slots=True, eq=False)
class BufferCoding:
    """How one buffer is packed. Keys that are turned back have frequencies [head_dim / 2], and
    those of which a mean is taken out have means [kv_heads, head_dim].
    """

    cold_format: ColdFormat
    shape: KVShape
    frequencies: npt.NDArray[np.uint32] | None = None
    means: npt.NDArray[np.float32] | None = None

    @property
    def kind(self) -> tuple[ColdFormat, KVShape, bool, bool]:
        """Buffers of one kind are packed together."""
        has_frequencies, has_means = self.frequencies is not None, self.means is not None
        return self.cold_format, self.shape, has_frequencies, has_means


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a hot page, and where the cold page has them."""

    pool: PoolDesc
    offset_bytes: int
    num_bytes: int
    cold_offset_bytes: int = 0

    @property
    def hot_base(self) -> int:
        """Where they begin in slot 0."""
        return self.pool.base_address + self.offset_bytes


@dataclass(slots=True)
class _Buffers:
    """Buffers of one kind while a page is laid out."""

    codings: list[BufferCoding] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)

    def finish(self, cold_page_bytes: int) -> PackedBuffers:
        first = self.codings[0]
        frequencies = [it.frequencies for it in self.codings if it.frequencies is not None]
        means = [it.means for it in self.codings if it.means is not None]
        return PackedBuffers(
            first.cold_format,
            first.shape,
            _column(part.hot_base for part in self.parts),
            _column(part.pool.slot_bytes for part in self.parts),
            _column(part.cold_offset_bytes for part in self.parts),
            cold_page_bytes,
            np.stack(frequencies) if frequencies else None,
            np.stack(means) if means else None,
        )


class PackedPage:
    """The pages of one life cycle. Immutable.

    ``fingerprint`` is equal for pages whose hot bytes lie at the same places and become the same
    cold bytes.
    """

    buffers: tuple[PackedBuffers, ...]
    cold_page_bytes: int
    fingerprint: tuple[object, ...]

    def __init__(
        self,
        life_cycle: LifeCycleDesc,
        pools: Sequence[PoolDesc],
        coding_of: Callable[[BufferDesc], BufferCoding | None],
    ) -> None:
        """``coding_of`` says how a buffer is packed; None means copied."""
        pool_of = {pool.pool_index: pool for pool in pools}
        kinds: dict[object, _Buffers] = {}
        copied: list[_Part] = []
        packed_bytes = 0
        for buffer in life_cycle.buffers:
            pool, coding = pool_of[buffer.pool_index], coding_of(buffer)
            part = _Part(pool, buffer.offset_bytes, buffer.num_bytes, packed_bytes)
            if coding is None:
                copied.append(part)
                continue
            members = kinds.setdefault(coding.kind, _Buffers())
            members.codings.append(coding)
            members.parts.append(part)
            packed_bytes += coding.cold_format.buffer_bytes(coding.shape)
        self._copied, copied_stop = _placed(_merged(copied), packed_bytes)
        num_missing = -copied_stop % ALIGNMENT_BYTES if kinds else 0
        self._filler, self.cold_page_bytes = _placed(_repeated(copied, num_missing), copied_stop)
        packed = [part for members in kinds.values() for part in members.parts]
        self._spans = _merged([*packed, *copied])
        self.buffers = tuple(members.finish(self.cold_page_bytes) for members in kinds.values())
        self.fingerprint = (
            self.cold_page_bytes,
            tuple(self._copied),
            *(_fingerprint(kind, members) for kind, members in kinds.items()),
        )

    @property
    def is_all_copied(self) -> bool:
        """Whether nothing of the page is packed."""
        return not self.buffers

    @property
    def has_copied(self) -> bool:
        """Whether some of the page is not packed."""
        return bool(self._copied)

    @property
    def hot_address(self) -> MemAddress:
        """Where a pool of hot pages begins."""
        return self._spans[0].pool.base_address

    def parts_to_cold(self, cold_base: MemAddress) -> PageParts:
        """What is copied on the way to the cold pages at ``cold_base``. There is something."""
        parts = [*self._copied, *self._filler]
        hot_base, hot_stride, cold_at, cold_stride, sizes = self._columns(parts, cold_base)
        return PageParts(cold_at, cold_stride, hot_base, hot_stride, sizes)

    def parts_to_hot(self, cold_base: MemAddress) -> PageParts:
        """What is copied on the way back."""
        return PageParts(*self._columns(self._copied, cold_base))

    def _columns(self, parts: Sequence[_Part], cold_base: MemAddress) -> tuple[Int64Array, ...]:
        return (
            _column(part.hot_base for part in parts),
            _column(part.pool.slot_bytes for part in parts),
            _column(cold_base + part.cold_offset_bytes for part in parts),
            np.full(len(parts), self.cold_page_bytes, np.int64),
            _column(part.num_bytes for part in parts),
        )

    def hot_ranges(self, slots: Int64Array) -> list[ByteRange]:
        """The bytes of the hot pages in ``slots``."""
        return [
            ByteRange(MemAddress(span.hot_base + slot * span.pool.slot_bytes), span.num_bytes)
            for span in self._spans
            for slot in slots.tolist()
        ]

    def cold_ranges(self, cold_base: MemAddress, indices: Int64Array) -> list[ByteRange]:
        """The bytes of the cold pages at ``cold_base``."""
        size = self.cold_page_bytes
        return [ByteRange(MemAddress(cold_base + i * size), size) for i in indices.tolist()]


def _column(numbers: Iterable[int]) -> Int64Array:
    return np.fromiter(numbers, np.int64)


def _merged(parts: Sequence[_Part]) -> list[_Part]:
    """Pool by pool; parts that follow each other in one are one."""
    merged: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.pool.pool_index, part.offset_bytes)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.pool is part.pool
            and last.offset_bytes + last.num_bytes == part.offset_bytes
        ):
            merged[-1] = replace(last, num_bytes=last.num_bytes + part.num_bytes)
        else:
            merged.append(part)
    return merged


def _repeated(parts: Sequence[_Part], num_bytes: int) -> list[_Part]:
    """The beginnings of ``parts``, as often as it takes to have so many bytes."""
    repeated: list[_Part] = []
    while num_bytes:
        for part in parts:
            size = min(num_bytes, part.num_bytes)
            if size:
                repeated.append(replace(part, num_bytes=size))
            num_bytes -= size
    return repeated


def _placed(parts: Sequence[_Part], start: int) -> tuple[tuple[_Part, ...], int]:
    """The parts one after another from ``start`` on in the cold page, and where they end."""
    placed: list[_Part] = []
    for part in parts:
        placed.append(replace(part, cold_offset_bytes=start))
        start += part.num_bytes
    return tuple(placed), start


def _fingerprint(kind: object, members: _Buffers) -> tuple[object, ...]:
    constants = [
        array.tobytes()
        for coding in members.codings
        for array in (coding.frequencies, coding.means)
        if array is not None
    ]
    return kind, tuple(members.parts), tuple(constants)
