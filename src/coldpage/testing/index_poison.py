"""A codec wrapper that finds a codec which reads its host arrays after its call returned."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from coldpage.codecs.base import BlockOrdinals, PageIndices
from coldpage.device.base import Stream
from coldpage.testing.wrapping_codec import WrappingCodec
from coldpage.types import DeviceArray, LifeCycleId, MemAddress

__all__ = ["IndexPoisoningCodec"]

_Array = TypeVar("_Array")


class IndexPoisoningCodec(WrappingCodec):
    """Passes on copies of index pairs and ordinals that lie on the host, and overwrites them when
    the codec call returns. Late work then sees pairs (0, 0): valid slots, so nothing crashes, and
    wrong bytes.

    Arrays in device memory belong to the manager's streams, and pass through; what the host has of
    them does not.
    """

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """As the wrapped codec, with host arrays that do not outlive the call."""
        with _lend(page_indices) as pairs, _lend(block_ordinals) as ordinals:
            self._codec.encode(life_cycle_id, dst_base, pairs, stream, ordinals)

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """As the wrapped codec, with host arrays that do not outlive the call."""
        with _lend(page_indices) as pairs, _lend(block_ordinals) as ordinals:
            self._codec.decode(life_cycle_id, src_base, pairs, stream, ordinals)


@contextlib.contextmanager
def _lend(array: _Array) -> Iterator[_Array]:
    """A copy of what lies on the host, overwritten at the end; anything else as it is."""
    if isinstance(array, DeviceArray):
        with _lend(array.host) as host:
            yield dataclasses.replace(array, host=host)
        return
    if not isinstance(array, np.ndarray):
        yield array
        return
    lent = array.copy()
    try:
        yield lent
    finally:
        lent[...] = np.zeros((), dtype=lent.dtype)
