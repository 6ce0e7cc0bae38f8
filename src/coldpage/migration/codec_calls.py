"""Calls of codecs: index pairs built, brought to where the codec wants them, and cut into chunks.

The ring for indices in device memory exists only where some life cycle asks for it. A chunk's lease
ends with the call; the event it leaves on the ring protects it until the codec's work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from coldpage.codecs import ConfiguredCodec
from coldpage.codecs.base import BlockOrdinals, PageIndexPairs, PageIndices
from coldpage.device.base import Device, MemoryKind, Stream
from coldpage.errors import DeviceError, SubmissionError
from coldpage.staging import StagingRing
from coldpage.types import (
    PAGE_INDEX_PAIR,
    DeviceArray,
    Int32Array,
    LifeCycleId,
    MemAddress,
    PageIndexLocation,
)

__all__ = [
    "INDEX_RING_BYTES",
    "MAX_INDEX_BATCH_BYTES",
    "CodecCalls",
    "CodecFailedError",
]

# A larger batch of device indices is cut into codec calls of this size.
MAX_INDEX_BATCH_BYTES: Final = 64 * 1024
# Room for uploads of the next chunks while the codec works on the first.
INDEX_RING_BYTES: Final = 4 * MAX_INDEX_BATCH_BYTES
_PAIR_BYTES: Final = PAGE_INDEX_PAIR.itemsize
# A lease is a multiple of this, or a whole chunk: looking for room costs time by the range.
_LEASE_BYTES: Final = 64 * _PAIR_BYTES
_ORDINAL_BYTES: Final = 4
# A codec whose calls of one kind have been rejected for so long, and so often in a row, has failed.
_MAX_REJECTED_S: Final = 5.0
_MIN_REJECTIONS: Final = 8

_Transform = Callable[[LifeCycleId, MemAddress, PageIndices, Stream, BlockOrdinals | None], None]


def _pairs(dst: Int32Array, src: Int32Array) -> PageIndexPairs:
    pairs = np.empty(dst.size, PAGE_INDEX_PAIR)
    pairs["dst"] = dst
    pairs["src"] = src
    return pairs


class CodecFailedError(SubmissionError):
    """A codec raised what no device does, or has been rejected for too long: trying again is of no
    use.
    """

    def __init__(self, codec: ConfiguredCodec, call: str, cause: Exception) -> None:
        self.codec = codec
        self.call = call
        super().__init__(f"{call} of {codec.name_and_package} failed: {cause!r}")


class CodecCalls:
    """Encodes and decodes for one manager. Owned by its thread."""

    def __init__(self, device: Device, codecs: Iterable[ConfiguredCodec]) -> None:
        # Since when, and how often in a row, calls have been rejected.
        self._rejections: dict[tuple[int, str, LifeCycleId], tuple[float, int]] = {}
        self.index_ring: StagingRing | None = None
        if any(codec.any_device_indices for codec in codecs):
            self.index_ring = StagingRing(device, INDEX_RING_BYTES, MemoryKind.DEVICE)

    def encode(
        self,
        codec: ConfiguredCodec,
        life_cycle_id: LifeCycleId,
        base: MemAddress,
        dst: Int32Array,
        src: Int32Array,
        ordinals: Int32Array,
        stream: Stream,
    ) -> None:
        """Enqueue hot slots ``src`` -> cold pages ``dst`` at ``base``. Waits for no event itself.

        ``life_cycle_id`` stands for its batching class; ``ordinals`` are the pages' blocks. All
        [num_pages]. Raises SubmissionError, which is a CodecFailedError for whatever else the
        codec raises; then a part may have been enqueued: destinations may be in part written,
        sources are untouched.
        """
        self._call(
            codec,
            "encode",
            codec.codec.encode,
            life_cycle_id,
            base,
            _pairs(dst, src),
            ordinals,
            stream,
        )

    def decode(
        self,
        codec: ConfiguredCodec,
        life_cycle_id: LifeCycleId,
        base: MemAddress,
        dst: Int32Array,
        src: Int32Array,
        ordinals: Int32Array,
        stream: Stream,
    ) -> None:
        """Enqueue cold pages ``src`` at ``base`` -> hot slots ``dst``. As ``encode``."""
        self._call(
            codec,
            "decode",
            codec.codec.decode,
            life_cycle_id,
            base,
            _pairs(dst, src),
            ordinals,
            stream,
        )

    def _call(
        self,
        codec: ConfiguredCodec,
        call: str,
        transform: _Transform,
        life_cycle_id: LifeCycleId,
        base: MemAddress,
        pairs: PageIndexPairs,
        ordinals: Int32Array,
        stream: Stream,
    ) -> None:
        key = id(codec), call, life_cycle_id
        stream.caller = f"in {call} of {codec.name_and_package}"
        try:
            self._call_codec(codec, transform, life_cycle_id, base, pairs, ordinals, stream)
        except SubmissionError as error:
            if self._is_rejected_for_good(key):
                raise CodecFailedError(codec, call, error) from error
            raise
        except DeviceError:
            raise
        except Exception as error:
            raise CodecFailedError(codec, call, error) from error
        finally:
            stream.caller = ""
        self._rejections.pop(key, None)

    def _is_rejected_for_good(self, key: tuple[int, str, LifeCycleId]) -> bool:
        now_s = time.monotonic()
        since_s, count = self._rejections.get(key, (now_s, 0))
        self._rejections[key] = since_s, count + 1
        return count >= _MIN_REJECTIONS and now_s - since_s > _MAX_REJECTED_S

    def _call_codec(
        self,
        codec: ConfiguredCodec,
        transform: _Transform,
        life_cycle_id: LifeCycleId,
        base: MemAddress,
        pairs: PageIndexPairs,
        ordinals: Int32Array,
        stream: Stream,
    ) -> None:
        wanted = ordinals if codec.needs_positions else None
        if codec.locations[life_cycle_id] is PageIndexLocation.HOST:
            transform(life_cycle_id, base, pairs, stream, wanted)
            return
        page_bytes = _PAIR_BYTES + (0 if wanted is None else _ORDINAL_BYTES)
        num_pages = MAX_INDEX_BATCH_BYTES // page_bytes
        for start in range(0, pairs.size, num_pages):
            chunk = slice(start, start + num_pages)
            some = None if wanted is None else wanted[chunk]
            self._call_on_device(transform, life_cycle_id, base, pairs[chunk], some, stream)

    def _call_on_device(
        self,
        transform: _Transform,
        life_cycle_id: LifeCycleId,
        base: MemAddress,
        pairs: PageIndexPairs,
        ordinals: Int32Array | None,
        stream: Stream,
    ) -> None:
        data = pairs.view(np.uint8)
        if ordinals is not None:
            data = np.concatenate([data, ordinals.view(np.uint8)])
        num_bytes = min(-(-data.size // _LEASE_BYTES) * _LEASE_BYTES, MAX_INDEX_BATCH_BYTES)
        assert self.index_ring is not None, "a codec has changed its mind about its indices"
        lease = self.index_ring.acquire(num_bytes, num_bytes, _PAIR_BYTES, _PAIR_BYTES, stream)
        assert lease is not None, "leases of the index ring end before the next begins"
        with lease:
            stream.upload(lease.address, data)
            indices = DeviceArray(lease.address, pairs.size, pairs)
            beside: BlockOrdinals | None = None
            if ordinals is not None:
                after = MemAddress(lease.address + pairs.size * _PAIR_BYTES)
                beside = DeviceArray(after, ordinals.size, ordinals)
            transform(life_cycle_id, base, indices, stream, beside)

    def close(self) -> None:
        """Wait for the last uses of the index ring and free it."""
        if self.index_ring is not None:
            self.index_ring.close()
