"""Codecs that lose as much as a test wants, on f32 pages."""

from __future__ import annotations

import numpy as np

from coldpage.codecs.base import LifeCycleDesc
from coldpage.testing.page_codec import Bytes, HotPages, PageCodec
from coldpage.types import Int64Array, LifeCycleId, PageClass

__all__ = ["ForgetfulCodec", "RoundingCodec"]


class RoundingCodec(PageCodec):
    """Keeps so many bits of each f32 number, the highest, in whole words; sinks and recent pages
    stay whole.

    ``is_lossless`` is what it is told to say. It remembers the pages that it has packed.
    """

    def __init__(self, num_bits: int, *, is_lossless: bool = False) -> None:
        super().__init__()
        self.codec_id = "rounding"
        self.parameters = f"{num_bits} bits"
        self.is_lossless = is_lossless
        self.needs_positions = True
        self._num_bits = num_bits
        self.packed: list[tuple[LifeCycleDesc, list[int]]] = []

    def representative(self, hot: HotPages) -> LifeCycleId:
        """Classes are not packed alike."""
        return hot.alike

    def cold_bytes(self, hot: HotPages) -> int:
        """As the hot page."""
        return hot.page_bytes

    def to_cold(self, hot: HotPages, pages: Bytes, ordinals: Int64Array | None) -> Bytes:
        """Round to the bits that stay."""
        assert ordinals is not None
        self.packed.append((hot.life_cycle, ordinals.tolist()))
        if hot.life_cycle.page_class is not PageClass.BODY:
            return pages
        drop = np.uint32(32 - self._num_bits)
        words = np.ascontiguousarray(pages).view(np.uint32)
        half = np.uint32(1 << int(drop) >> 1)
        return ((words + half) >> drop << drop).view(np.uint8)

    def to_hot(self, hot: HotPages, blobs: Bytes, ordinals: Int64Array | None) -> Bytes:
        """As they are."""
        return blobs


class ForgetfulCodec(RoundingCodec):
    """Says that it brings pages back, and brings nothing."""

    def __init__(self) -> None:
        super().__init__(32)

    def decode(self, *args: object) -> None:  # type: ignore[override]
        """Enqueue nothing."""
