"""Pages between hot slots and the form they have in a file, in batches over one small buffer."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.codecs import (
    codec_identity,
    configure_taken,
    create_default_cold_page_codec,
)
from coldpage.device.base import Device, MemoryKind, Stream
from coldpage.errors import DeviceError, UsageError
from coldpage.manager import KVCacheManager
from coldpage.snapshot.format import Origin, SnapshotIdentity
from coldpage.types import PAGE_INDEX_PAIR, BlockOrdinal, Int32Array, LayerGroupId, LifeCycleId

__all__ = ["PageTransfer", "identity_of"]

_BUFFER_BYTES: Final = 8 * 1024 * 1024
# A device may prepare the buffer in the background.
_MAX_READY_WAIT_S: Final = 10.0

_Pages = npt.NDArray[np.uint8]  # [num_pages, page_bytes]

# A stream ends with its device only, so there is one for all that a device saves and restores.
_STREAMS: Final[weakref.WeakKeyDictionary[Device, Stream]] = weakref.WeakKeyDictionary()


def _stream_of(device: Device) -> Stream:
    if device not in _STREAMS:
        _STREAMS[device] = device.create_stream("snapshot")
    return _STREAMS[device]


def identity_of(manager: KVCacheManager, origin: Origin) -> SnapshotIdentity:
    """What a file that the manager writes is good for. Raises UsageError where its configuration
    names no model.
    """
    config = manager.config
    if not config.model_fingerprint:
        raise UsageError(
            "a saved file must say of which model it is: make the manager with a model_fingerprint"
        )
    layers = [
        (
            layer.layer_id,
            layer.sliding_window_tokens,
            layer.num_sink_tokens,
            [(buffer.role, buffer.num_bytes) for buffer in layer.buffers],
        )
        for layer in config.layers
    ]
    codec = create_default_cold_page_codec()
    return SnapshotIdentity(
        model=config.model_fingerprint.hex(),
        tokenizer=origin.tokenizer,
        dtype=origin.dtype,
        geometry=json.dumps({"tokens_per_block": config.tokens_per_block, "layers": layers}),
        codec=codec_identity(codec),
        provenance=manager.provenance.hex(),
    )


class PageTransfer:
    """The lossless codec, a pinned buffer and a stream. Each call blocks until its work is done.
    The slots are locked, and quiescent, as long as it takes.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        codec = create_default_cold_page_codec()
        self._codec = configure_taken(codec, manager.hot_pool_groups())
        self._layout = manager.layout
        self._stream = _stream_of(manager.device)
        num_bytes = max(_BUFFER_BYTES, self._codec.max_cold_page_bytes)
        self._memory = manager.device.allocate(num_bytes, MemoryKind.PINNED)
        try:
            if not manager.device.wait_until_ready(self._memory, _MAX_READY_WAIT_S):
                raise DeviceError(
                    f"{manager.device.name} does not get {num_bytes:,} bytes of host memory ready "
                    "for saving and restoring: try again later"
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the buffer back."""
        self._memory.free()
        self._codec.codec.close()

    def page_bytes(self, layer_group_id: LayerGroupId) -> int:
        """The size of a page of the layer group in the file; the first block's is like the rest."""
        return self._codec.cold_page_bytes[self._life_cycle(layer_group_id)]

    def _life_cycle(self, layer_group_id: LayerGroupId) -> LifeCycleId:
        life_cycle = self._layout.life_cycle_of(layer_group_id, BlockOrdinal(0))
        return LifeCycleId(int(self._codec.representative[life_cycle]))

    def _batches(self, layer_group_id: LayerGroupId, num_pages: int) -> Iterator[tuple[int, int]]:
        size = self._memory.num_bytes // self.page_bytes(layer_group_id)
        for start in range(0, num_pages, size):
            yield start, min(start + size, num_pages)

    def _buffer(self, layer_group_id: LayerGroupId, num_pages: int) -> _Pages:
        size = self.page_bytes(layer_group_id)
        return self._memory.array[: num_pages * size].reshape(num_pages, size)

    def encode(self, layer_group_id: LayerGroupId, slots: Int32Array) -> Iterator[_Pages]:
        """The pages in these hot slots, a batch at a time; each is good until the next."""
        for start, stop in self._batches(layer_group_id, slots.size):
            pairs = np.zeros(stop - start, PAGE_INDEX_PAIR)
            pairs["dst"], pairs["src"] = np.arange(stop - start), slots[start:stop]
            life_cycle, codec = self._life_cycle(layer_group_id), self._codec.codec
            with self._fence():
                codec.encode(life_cycle, self._memory.address, pairs, self._stream, None)
            yield self._buffer(layer_group_id, stop - start)

    def decode(
        self,
        layer_group_id: LayerGroupId,
        slots: Int32Array,
        fill: Callable[[int, int, _Pages], None],
    ) -> None:
        """Fill these hot slots: ``fill`` is given a range of them and the buffer to put their pages
        in.
        """
        for start, stop in self._batches(layer_group_id, slots.size):
            fill(start, stop, self._buffer(layer_group_id, stop - start))
            pairs = np.zeros(stop - start, PAGE_INDEX_PAIR)
            pairs["dst"], pairs["src"] = slots[start:stop], np.arange(stop - start)
            life_cycle, codec = self._life_cycle(layer_group_id), self._codec.codec
            with self._fence():
                codec.decode(life_cycle, self._memory.address, pairs, self._stream, None)

    @contextlib.contextmanager
    def _fence(self) -> Iterator[None]:
        """A codec that is refused may have enqueued a part, which uses the buffer and the slots."""
        try:
            yield
        finally:
            self._stream.synchronize()
