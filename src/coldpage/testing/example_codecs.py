"""Codecs to read, to test a manager with, and to start one's own from. None is fast."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from coldpage.codecs.base import BlockOrdinals, ColdPageCodec, PageIndices
from coldpage.device.base import Stream
from coldpage.errors import ConfigurationError
from coldpage.testing.page_codec import Bytes, HotPages, PageCodec
from coldpage.testing.wrapping_codec import WrappingCodec
from coldpage.types import Int64Array, LifeCycleId, MemAddress, PageClass, PageIndexLocation

__all__ = [
    "PADDING_BYTE",
    "CoarseCodec",
    "DeviceIndexCodec",
    "PaddingCodec",
    "PositionCodec",
    "SlowCodec",
]

PADDING_BYTE: Final = 0x5A


class PaddingCodec(PageCodec):
    """Concatenates, each pool's part padded to a multiple of ``alignment``: cold pages are larger
    than hot ones. The padding holds PADDING_BYTE.
    """

    codec_id = "padding"
    is_lossless = True

    def __init__(self, alignment: int = 64) -> None:
        super().__init__()
        if alignment < 1:
            raise ConfigurationError(f"an alignment of {alignment} bytes: use at least 1")
        self._alignment = alignment
        self.parameters = f"alignment={alignment}"

    def _padded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

    def cold_bytes(self, hot: HotPages) -> int:
        """The padded parts, one after another."""
        return sum(self._padded(pool.piece_bytes) for pool in hot.pools)

    def to_cold(self, hot: HotPages, pages: Bytes, ordinals: Int64Array | None) -> Bytes:
        """Every byte of the cold page is written, so that equal pages give equal blobs."""
        blobs = np.full((len(pages), self.cold_bytes(hot)), PADDING_BYTE, np.uint8)
        blobs[:, self._columns(hot)] = pages
        return blobs

    def to_hot(self, hot: HotPages, blobs: Bytes, ordinals: Int64Array | None) -> Bytes:
        """Drop the padding."""
        return blobs[:, self._columns(hot)]

    def _columns(self, hot: HotPages) -> Int64Array:
        """Where in a cold page each byte of a hot one lies, [page_bytes]."""
        sizes = [pool.piece_bytes for pool in hot.pools]
        starts = np.cumsum([0, *(self._padded(size) for size in sizes)])
        return np.concatenate(
            [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        )


class DeviceIndexCodec(PageCodec):
    """Concatenates, with index pairs that it reads in device memory, as a kernel would: the host
    never learns which slots a call is about, nor does the stream before the work runs.
    """

    codec_id = "device-index"
    is_lossless = True

    def __init__(self) -> None:
        super().__init__(PageIndexLocation.DEVICE)

    def cold_bytes(self, hot: HotPages) -> int:
        """As the hot page."""
        return hot.page_bytes

    def to_cold(self, hot: HotPages, pages: Bytes, ordinals: Int64Array | None) -> Bytes:
        """As it is."""
        return pages

    def to_hot(self, hot: HotPages, blobs: Bytes, ordinals: Int64Array | None) -> Bytes:
        """As it is."""
        return blobs


class PositionCodec(PageCodec):
    """Hides each page behind a pattern of its block's ordinal: what comes back under another
    ordinal is noise. With ``location`` DEVICE it reads pairs and ordinals in device memory.
    """

    codec_id = "position"
    is_lossless = True
    needs_positions = True

    def cold_bytes(self, hot: HotPages) -> int:
        """As the hot page."""
        return hot.page_bytes

    def to_cold(self, hot: HotPages, pages: Bytes, ordinals: Int64Array | None) -> Bytes:
        """Put the pattern on."""
        return pages ^ _pattern(ordinals, pages.shape[1])

    def to_hot(self, hot: HotPages, blobs: Bytes, ordinals: Int64Array | None) -> Bytes:
        """Take it off."""
        return blobs ^ _pattern(ordinals, blobs.shape[1])


class CoarseCodec(PageCodec):
    """Keeps the high four bits of each byte: cold pages have half the size, and a page that was
    cold once stays as it is from then on.

    With ``keeps_sinks`` pages of the sink class stay whole, and with ``keeps_recent`` those of the
    recent class, where the manager has such classes.
    """

    codec_id = "coarse"

    def __init__(self, *, keeps_sinks: bool = False, keeps_recent: bool = False) -> None:
        super().__init__()
        kept = {PageClass.SINK: keeps_sinks, PageClass.RECENT: keeps_recent}
        self._whole = frozenset(page_class for page_class, is_kept in kept.items() if is_kept)
        self.parameters = "nibbles"
        if keeps_sinks:
            self.parameters += " sinks=bytes"
        if keeps_recent:
            self.parameters += " recent=bytes"

    def _is_whole(self, hot: HotPages) -> bool:
        return hot.life_cycle.page_class in self._whole

    def representative(self, hot: HotPages) -> LifeCycleId:
        """The classes differ in size when some stay whole."""
        return hot.alike if self._whole else hot.first

    def cold_bytes(self, hot: HotPages) -> int:
        """Two bytes in one, an odd one alone."""
        return hot.page_bytes if self._is_whole(hot) else -(-hot.page_bytes // 2)

    def to_cold(self, hot: HotPages, pages: Bytes, ordinals: Int64Array | None) -> Bytes:
        """Even bytes in the high bits, odd ones in the low bits."""
        if self._is_whole(hot):
            return pages
        blobs: Bytes = pages[:, ::2] & np.uint8(0xF0)
        blobs[:, : pages.shape[1] // 2] |= pages[:, 1::2] >> 4
        return blobs

    def to_hot(self, hot: HotPages, blobs: Bytes, ordinals: Int64Array | None) -> Bytes:
        """The low four bits come back as zeros."""
        if self._is_whole(hot):
            return blobs
        pages = np.empty((len(blobs), hot.page_bytes), np.uint8)
        pages[:, ::2] = blobs & 0xF0
        pages[:, 1::2] = blobs[:, : hot.page_bytes // 2] << 4
        return pages


class SlowCodec(WrappingCodec):
    """Another codec, whose work waits ``delay_s`` on the stream before it touches anything; the
    caller does not. Its pages are those of the wrapped codec.
    """

    def __init__(self, codec: ColdPageCodec, delay_s: float) -> None:
        super().__init__(codec)
        self._delay_s = delay_s

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """As the wrapped codec, later."""
        stream.launch(self._sleep, reads=(), writes=())
        super().encode(life_cycle_id, dst_base, page_indices, stream, block_ordinals)

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """As the wrapped codec, later."""
        stream.launch(self._sleep, reads=(), writes=())
        super().decode(life_cycle_id, src_base, page_indices, stream, block_ordinals)

    def _sleep(self) -> None:
        time.sleep(self._delay_s)


def _pattern(ordinals: Int64Array | None, num_bytes: int) -> Bytes:
    """Bytes [num_pages, num_bytes], other ones for every ordinal."""
    assert ordinals is not None, "a codec that needs positions is given them"
    # Products of 31 and 32 bits: no overflow. The highest byte of the low word depends on all.
    mixed = ordinals[:, None] * 2_654_435_761 + np.arange(num_bytes) * 40_503
    return (mixed >> 24).astype(np.uint8)
