"""A packed page decoded again by threads of the host, beside the hot page that it was made from."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from coldpage.codecs.base import PageIndexPairs
from coldpage.kernels.cold.formats import KVShape, NumberType, PackedBuffers
from coldpage.types import PAGE_INDEX_PAIR, Int32Array, MemAddress

__all__ = ["HostCheck"]

_Bytes = npt.NDArray[np.uint8]


class HostCheck:
    """Room for one hot page, and the buffers of one kind of page as they lie there."""

    def __init__(self, buffers: Sequence[PackedBuffers]) -> None:
        self._buffers = tuple(buffers)
        sizes = [it.hot_base.size * it.shape.num_bytes for it in buffers]
        self._rooms = [np.empty(size, np.uint8) for size in sizes]
        self._restored = tuple(
            replace(
                it,
                hot_base=room.ctypes.data + np.arange(it.hot_base.size) * it.shape.num_bytes,
                hot_stride_bytes=np.zeros_like(it.hot_stride_bytes),
            )
            for it, room in zip(buffers, self._rooms, strict=True)
        )
        # Streams have a thread each, and the room is one.
        self._lock = threading.Lock()

    def squares(
        self, cold_base: MemAddress, pair: PageIndexPairs, ordinal: Int32Array | None
    ) -> tuple[float, float]:
        """The squared lengths of what a page has lost and of the page, over all packed buffers.
        Numbers that were 0 do not count: a page that tokens have not filled yet holds them behind
        these.

        ``pair`` [1] has been encoded: dst is the cold page and src the hot slot. Blocks.
        """
        from coldpage.kernels.cold import cpu

        back = np.zeros(1, PAGE_INDEX_PAIR)
        back["src"] = pair["dst"]
        difference = length = 0.0
        with self._lock, np.errstate(all="ignore"):  # of a page that has infinite numbers
            for buffers, restored, room in zip(
                self._buffers, self._restored, self._rooms, strict=True
            ):
                turned = ordinal if buffers.frequencies is not None else None
                cpu.unpack_pages(restored, cold_base, back, turned)
                places = buffers.hot_base + buffers.hot_stride_bytes * int(pair["src"][0])
                size, shape = buffers.shape.num_bytes, buffers.shape
                for place, found in zip(places.tolist(), room.reshape(-1, size), strict=True):
                    was = _numbers(np.frombuffer(ctypes.string_at(place, size), np.uint8), shape)
                    lost = np.where(was != 0, _numbers(found, shape) - was, np.float32(0))
                    difference += float(np.dot(lost, lost))
                    length += float(np.dot(was, was))
        return difference, length


def _numbers(raw: _Bytes, shape: KVShape) -> npt.NDArray[np.float32]:
    """The numbers of a hot buffer, [num_numbers]."""
    if shape.number_type is NumberType.F32:
        return raw.view(np.float32)
    if shape.number_type is NumberType.F16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
