"""The way of a context's pages through a codec and back, as a manager's moves call it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coldpage.bench.quality.hot_store import HotStore
from coldpage.codecs import ColdPageCodec, close_codec, configure_taken
from coldpage.device.base import Memory, MemoryKind
from coldpage.migration.codec_calls import CodecCalls
from coldpage.types import BlockOrdinal, HalfOpenRange, Int32Array, LifeCycleId, PageClass

__all__ = ["Passage"]


@dataclass(frozen=True, slots=True)
class _Call:
    """The pages of one batching class: one call each way."""

    life_cycle_id: LifeCycleId
    original: Int32Array
    restored: Int32Array
    ordinals: Int32Array

    @property
    def cold(self) -> Int32Array:
        """Cold pages, one after another."""
        return np.arange(self.ordinals.size, dtype=np.int32)


class Passage:
    """A codec that is consumed here, between the two parts of ``store``. ``separates_sinks``: the
    first block's pages are a class of their own, as ``separate_sink_pages`` has it; and so are
    those of the ``num_recent_blocks`` at the end of a context.

    Raises CodecError where the codec refuses the store.
    """

    def __init__(
        self,
        store: HotStore,
        codec: ColdPageCodec,
        *,
        separates_sinks: bool,
        num_recent_blocks: int = 0,
    ) -> None:
        self.store = store
        self._layout = store.layout(
            separates_sinks=separates_sinks, num_recent_blocks=num_recent_blocks
        )
        self.configured = configure_taken(codec, store.describe(self._layout))
        self._calls = CodecCalls(store.device, [self.configured])
        self._stream = store.device.create_stream("quality")
        self._cold: dict[LifeCycleId, Memory] = {}
        self.configured.codec.prepare(self._stream)
        self._stream.synchronize()

    @property
    def is_lossless(self) -> bool:
        """As the codec says."""
        return self.configured.codec.is_lossless

    def run(self, num_blocks: int, blocks: HalfOpenRange) -> None:
        """Those of ``blocks`` that a context of ``num_blocks`` keeps go out and come back. Blocks
        until it is done. Raises DeviceError.
        """
        self.store.poison_restored()
        self.encode(num_blocks, blocks)
        self.decode(num_blocks, blocks)

    def encode(self, num_blocks: int, blocks: HalfOpenRange) -> None:
        """Hot to cold. Blocks until it is done."""
        for call in self._calls_of(num_blocks, blocks):
            self._calls.encode(
                self.configured,
                call.life_cycle_id,
                self._cold_memory(call.life_cycle_id).address,
                call.cold,
                call.original,
                call.ordinals,
                self._stream,
            )
        self._stream.synchronize()

    def decode(self, num_blocks: int, blocks: HalfOpenRange) -> None:
        """Cold to the restored part. Blocks until it is done."""
        for call in self._calls_of(num_blocks, blocks):
            self._calls.decode(
                self.configured,
                call.life_cycle_id,
                self._cold_memory(call.life_cycle_id).address,
                call.restored,
                call.cold,
                call.ordinals,
                self._stream,
            )
        self._stream.synchronize()

    def hot_bytes(self, num_blocks: int, blocks: HalfOpenRange) -> int:
        """Of the pages that ``run`` moves, hot."""
        return sum(
            call.ordinals.size * self._layout.page_bytes(call.life_cycle_id)
            for call in self._calls_of(num_blocks, blocks)
        )

    def body_ratio(self) -> float:
        """Bytes of cold pages over those of their hot ones: of all blocks but the first and the
        newest, where those are classes of their own.
        """
        body = [lc for lc in self._layout.life_cycles if lc.page_class is PageClass.BODY]
        cold = sum(self.configured.cold_page_bytes[lc.life_cycle_id] for lc in body)
        return cold / sum(self._layout.page_bytes(lc.life_cycle_id) for lc in body)

    def close(self) -> None:
        """Close the codec and free the cold pages."""
        self._stream.synchronize()
        self._calls.close()
        close_codec(self.configured.codec)
        for memory in self._cold.values():
            memory.free()

    def _calls_of(self, num_blocks: int, blocks: HalfOpenRange) -> Iterator[_Call]:
        """The pages of each batching class, which is named by its representative."""
        members: dict[LifeCycleId, list[tuple[Int32Array, Int32Array, Int32Array]]] = {}
        for group in self.store.layer_groups:
            live = self.store.live_ordinals(group, num_blocks)
            live = live[(live >= blocks.start) & (live < blocks.stop)]
            recent_from = num_blocks - self._layout.num_recent_blocks
            life_cycles = np.array(
                [
                    self._layout.life_cycle_of(
                        group, BlockOrdinal(block), is_recent=block >= recent_from
                    )
                    for block in live
                ],
                np.int16,
            )
            firsts = self.configured.representative[life_cycles]
            for first in np.unique(firsts):
                own = live[firsts == first]
                members.setdefault(LifeCycleId(int(first)), []).append(
                    (
                        self.store.original_slots(group, own),
                        self.store.restored_slots(group, own),
                        own,
                    )
                )
        for life_cycle, parts in members.items():
            original, restored, ordinals = (
                np.concatenate(column) for column in zip(*parts, strict=True)
            )
            yield _Call(life_cycle, original, restored, ordinals)

    def _cold_memory(self, life_cycle_id: LifeCycleId) -> Memory:
        """Room for as many pages as the store can have of the class."""
        if life_cycle_id not in self._cold:
            num_pages = len(self.store.layer_groups) * self.store.max_blocks
            num_bytes = num_pages * self.configured.cold_page_bytes[life_cycle_id]
            self._cold[life_cycle_id] = self.store.device.allocate(num_bytes, MemoryKind.PINNED)
        return self._cold[life_cycle_id]
