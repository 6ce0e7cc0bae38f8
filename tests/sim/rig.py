"""Managers of any configuration on the simulated device, and codecs that say what they were asked.

Where ``Driver`` follows a naive model through random operations, a rig is for scenes in which the
test knows each step.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

import coldpage.staging
from coldpage import (
    AttentionLayerConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    SubmissionError,
    create_default_cold_page_codec,
)
from coldpage.codecs import ColdPageCodec, LifeCycleDesc, PoolDesc, PoolGroupDesc
from coldpage.codecs.base import BlockOrdinals, PageIndices
from coldpage.config import CacheTierConfig
from coldpage.device.base import Stream
from coldpage.device.simulated import SimulatedDevice
from coldpage.layout import HotLayout, hot_layout
from coldpage.migration import NUM_SCRATCH_SLOTS
from coldpage.sequence import KVCache, OnMissing
from coldpage.testing.index_poison import IndexPoisoningCodec
from coldpage.testing.pattern_engine import PatternEngine, PatternSequence
from coldpage.types import (
    HOT_LEVEL,
    NO_SLOT,
    ByteRange,
    CacheLevel,
    DeviceArray,
    LayerGroupId,
    LifeCycleId,
    MemAddress,
    PoolGroupIndex,
    PoolIndex,
    Priority,
)
from tests.property.setups import disk_slot_bytes, layers_of, simulated

Bytes = npt.NDArray[np.uint8]
MakeCodec = Callable[[], ColdPageCodec]
_Array = TypeVar("_Array", PageIndices, BlockOrdinals | None)
RING_BYTES = 1 << 16


def _half(array: _Array) -> _Array:
    return array[: array.size // 2] if isinstance(array, np.ndarray) else array


class RecordingCodec(IndexPoisoningCodec):
    """Another codec, each call of which is noted, and rejected when that is planned."""

    def __init__(self, codec: ColdPageCodec) -> None:
        super().__init__(codec)
        self.calls: list[tuple[str, int]] = []  # what, and how many pages
        self.locations: set[tuple[LifeCycleId, bool]] = set()  # whether in device memory
        self.rejections: Counter[str] = Counter()  # of the next calls, by what
        self.num_passed: Counter[str] = Counter()  # calls before those, by what
        self.errors: dict[str, Exception] = {}  # raised instead of SubmissionError, by what
        self.is_closed = False

    def reject(
        self, what: str, num_times: int = 1, *, after: int = 0, error: Exception | None = None
    ) -> None:
        """Reject that many calls, after some that pass. With an ``error`` they fail instead: a part
        of their work is enqueued, half of the pages where indices are on the host, and a copy of it
        raised.
        """
        self.errors.pop(what, None)
        if error is not None:
            self.errors[what] = error
        self.rejections[what] = num_times
        self.num_passed[what] = after

    def sizes(self, what: str) -> list[int]:
        """The pages of each call so far."""
        return [num_pages for name, num_pages in self.calls if name == what]

    def _note(self, what: str, life_cycle_id: LifeCycleId, pages: PageIndices) -> bool:
        """Returns whether the call fails after its work was enqueued."""
        if self.num_passed[what] > 0:
            self.num_passed[what] -= 1
        elif self.rejections[what] > 0:
            self.rejections[what] -= 1
            if what in self.errors:
                self.calls.append((f"failed {what}", int(pages.size)))
                return True
            raise SubmissionError(f"a planned rejection of {what}")
        self.calls.append((what, int(pages.size)))
        self.locations.add((life_cycle_id, isinstance(pages, DeviceArray)))
        return False

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        is_failing = self._note("encode", life_cycle_id, page_indices)
        if is_failing:
            page_indices, block_ordinals = _half(page_indices), _half(block_ordinals)
        super().encode(life_cycle_id, dst_base, page_indices, stream, block_ordinals)
        if is_failing:
            raise copy.copy(self.errors["encode"])

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        is_failing = self._note("decode", life_cycle_id, page_indices)
        if is_failing:
            page_indices, block_ordinals = _half(page_indices), _half(block_ordinals)
        super().decode(life_cycle_id, src_base, page_indices, stream, block_ordinals)
        if is_failing:
            raise copy.copy(self.errors["decode"])

    def close(self) -> None:
        self.is_closed = True
        super().close()


def cold_page_bytes(make: MakeCodec, layout: HotLayout) -> list[int]:
    """What the codec answers for each life cycle of a layout; it never runs."""
    groups = []
    for index, sizes in enumerate(layout.slot_bytes):
        pools = tuple(
            PoolDesc(PoolIndex(i), MemAddress(4096), size) for i, size in enumerate(sizes)
        )
        members = tuple(
            LifeCycleDesc(lc.life_cycle_id, lc.layer_group_id, lc.page_class, ())
            for lc in layout.life_cycles
            if lc.hot_pool_group == index
        )
        groups.append(PoolGroupDesc(PoolGroupIndex(index), 1, pools, members))
    codec = make()
    codec.configure(groups)
    sizes_found = [codec.query_cold_page_bytes(lc.life_cycle_id) for lc in layout.life_cycles]
    codec.close()
    return sizes_found


def _layout_of(layers: tuple[AttentionLayerConfig, ...], settings: dict[str, object]) -> HotLayout:
    num_recent_blocks = settings.get("num_recent_blocks", 0)
    assert isinstance(num_recent_blocks, int)
    return hot_layout(
        layers,
        separate_sinks=bool(settings.get("separate_sink_pages")),
        num_recent_blocks=num_recent_blocks,
    )


class Rig:
    """A manager with ``hot``, ``gpu``, ``host``, ``host2`` and ``disk`` slots for each layer group
    (0: no such level), the cold ones in that ``order``, and, for the tiers, codecs that are made by
    the functions given. What is suspended is copied to memory at once only with ``copies_behind``.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        hot: int = 8,
        gpu: int = 0,
        host: int = 0,
        host2: int = 0,
        disk: int = 0,
        order: tuple[str, ...] = ("gpu", "host", "host2", "disk"),
        copies_behind: bool = False,
        kind: str | tuple[AttentionLayerConfig, ...] = "full",
        per_block: int = 2,
        max_util: float = 1.0,
        codec: MakeCodec | None = None,
        gpu_codec: MakeCodec | None = None,
        host_codec: MakeCodec | None = None,
        host2_codec: MakeCodec | None = None,
        disk_codec: MakeCodec | None = None,
        device: SimulatedDevice | None = None,
        ring_bytes: int = RING_BYTES,
        **settings: object,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="coldpage-test-")
        self.device = simulated(seed) if device is None else device
        self._per_block = per_block
        self.layers = layers_of(kind, per_block) if isinstance(kind, str) else kind
        self.layout = _layout_of(self.layers, settings)
        self._copies_behind = copies_behind
        self._makes: dict[int, MakeCodec] = {}  # by level
        self.codecs: dict[str, RecordingCodec] = {}  # by whose it is
        main = self._take("manager", codec or create_default_cold_page_codec)
        tiers: list[CacheTierConfig] = [DeviceTierConfig(1)]
        own: list[RecordingCodec | None] = [None]
        sizes = {"gpu": gpu, "host": host, "host2": host2, "disk": disk}
        order = tuple(name for name in order if sizes[name])
        makes = {"gpu": gpu_codec, "host": host_codec, "host2": host2_codec, "disk": disk_codec}
        for name in order:
            make = makes[name]
            self._makes[len(tiers)] = make or codec or create_default_cold_page_codec
            own.append(self._take(name, make) if make else None)
            tiers.append(self._tier(name))
        self._tiers = tiers
        formats = {self._format(c) for c in own[1:] if c is not None}
        if len(tiers) == 1 or None in own[1:] or codec is not None:
            formats.add(self._format(main))
        self.has_scratch = len(formats) > 1
        ratio = [float(self.layout.page_bytes(LifeCycleId(self._first(g)))) for g in self._groups]
        defaults: dict[str, object] = {
            "tokens_per_block": per_block,
            "layers": self.layers,
            "max_util_for_resume": max_util,
            "model_fingerprint": b"pattern",
            "initial_pool_ratio": tuple(ratio),
            "cache_tiers": tuple(
                self._with_quota(level, num_blocks, own[level])
                for level, num_blocks in enumerate([hot, *(sizes[name] for name in order)])
            ),
        }
        config = KVCacheManagerConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        needs_main = None in own[1:] or len(tiers) == 1 or codec is not None
        self.manager = self._build(config, main if needs_main else None, ring_bytes)
        self.engine = PatternEngine(self.manager)
        self.storage = self.manager._storage
        self.table = self.storage.table
        streams = [self.device.create_stream(f"compute {i}") for i in range(2)]
        self.streams: list[Stream | None] = [None, *streams]
        self.sequences: list[PatternSequence] = []

    def _build(
        self, config: KVCacheManagerConfig, codec: ColdPageCodec | None, ring_bytes: int
    ) -> KVCacheManager:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coldpage.staging, "MIN_PAGE_RING_BYTES", ring_bytes)
            try:
                return KVCacheManager(config, device=self.device, codec=codec)
            except BaseException:
                self.abandon()
                raise

    def _tier(self, name: str) -> CacheTierConfig:
        """A tier of that medium; its size comes later."""
        if name == "disk":
            return DiskTierConfig(str(Path(self._directory.name) / "disk"), 1)
        return DeviceTierConfig(1) if name == "gpu" else HostTierConfig(1)

    def _take(self, name: str, make: MakeCodec) -> RecordingCodec:
        self.codecs[name] = RecordingCodec(make())
        return self.codecs[name]

    @staticmethod
    def _format(codec: ColdPageCodec) -> tuple[object, ...]:
        return codec.codec_id, codec.version, codec.parameters

    @property
    def _groups(self) -> range:
        return range(len(self.layout.layer_groups))

    def _first(self, layer_group: int) -> int:
        return layer_group * self.layout.num_classes

    def _with_quota(
        self, level: int, num_blocks: int, codec: ColdPageCodec | None
    ) -> CacheTierConfig:
        tier, quota = self._tiers[level], self.quota(level, num_blocks)
        if isinstance(tier, DeviceTierConfig):
            return DeviceTierConfig(quota, codec, self._copies_behind)
        if isinstance(tier, HostTierConfig):
            return HostTierConfig(quota, codec, self._copies_behind)
        return DiskTierConfig(tier.path, quota, codec)

    def quota(self, level: int, num_blocks: int) -> int:
        """The bytes with which a level has so many slots for each layer group."""
        if level == HOT_LEVEL:
            hot = [self.layout.page_bytes(LifeCycleId(self._first(g))) for g in self._groups]
            scratch = sum(sum(sizes) for sizes in self.layout.slot_bytes)
            return num_blocks * sum(hot) + self.has_scratch * NUM_SCRATCH_SLOTS * scratch
        sizes = cold_page_bytes(self._makes[level], self.layout)
        if isinstance(self._tiers[level], DiskTierConfig):
            sizes = [disk_slot_bytes(size, self._per_block) for size in sizes]
        return num_blocks * sum(sizes)

    # ------------------------------------------------------------------ acting

    def adopt(self, sequence: PatternSequence) -> PatternSequence:
        """Close the sequence at the end."""
        self.sequences.append(sequence)
        return sequence

    def create(
        self,
        tokens: Sequence[int] = (),
        *,
        priority: int = 35,
        on_missing: OnMissing = OnMissing.RECOMPUTE,
    ) -> PatternSequence:
        """A new sequence; it has what could be reused of ``tokens``."""
        return self.adopt(
            self.engine.create(tokens, priority=Priority(priority), on_missing=on_missing)
        )

    def resize(self, level: int, num_blocks: int) -> None:
        """Give a level room for so many blocks."""
        try:
            self.manager.resize(CacheLevel(level), self.quota(level, num_blocks))
        finally:
            self.engine.refresh()

    def close(self, sequence: PatternSequence) -> None:
        self.sequences.remove(sequence)
        sequence.cache.close()

    def flip_on_disk(self, cache: KVCache, blocks: Sequence[int] | None = None) -> list[int]:
        """Flip a bit of the blobs of the cache on disk, all or those of some blocks; returns the
        blocks concerned.
        """
        self.manager.finish_transfers()
        blobs = [b for b in cache.blobs_on_disk() if blocks is None or b.ordinal in blocks]
        for blob in blobs:
            with blob.path.open("r+b") as file:
                file.seek(blob.offset_bytes + 5)
                (byte,) = file.read(1)
                file.seek(blob.offset_bytes + 5)
                file.write(bytes([byte ^ 4]))
        return sorted({int(blob.ordinal) for blob in blobs})

    def poll(self, num_times: int = 10) -> None:
        """Let the background spill do its work to the end."""
        for _ in range(num_times):
            self.manager.poll()
            self.manager.finish_transfers()

    # ------------------------------------------------------------------ looking

    @property
    def used(self) -> list[int]:
        """Slots in use, by level."""
        return [level.used_slots for level in self.manager.stats().levels]

    @property
    def num_lockable_blocks(self) -> int:
        """Blocks, all of whose pages fit the hot level at once."""
        groups = self.storage.levels[HOT_LEVEL].groups
        return min(group.slots.num_slots // group.num_block_pages for group in groups)

    def pages(self, sequence: PatternSequence, layer_group: int = 0) -> list[int]:
        """The page of each block, 0 where there is none."""
        pages: list[int] = sequence.cache._table.pages[layer_group].tolist()
        return pages

    def levels_of(self, sequence: PatternSequence, layer_group: int = 0) -> list[int]:
        """For each block the bits of the levels that have its page."""
        present: list[int] = self.table.present[self.pages(sequence, layer_group)].tolist()
        return present

    def contents(self, cache: KVCache, layer_group: int = 0) -> dict[int, Bytes]:
        """The bytes of each hot page, block by block, which the calling thread reads now."""
        slots = cache.page_indices(LayerGroupId(layer_group)).tolist()
        buffers = [b for b in self.engine.buffers if b.layer_group_id == layer_group]
        found: dict[int, Bytes] = {}
        for block, slot in enumerate(slots):
            if slot == NO_SLOT:
                continue
            places = [buffer.array[slot] for buffer in buffers]
            ranges = [ByteRange(MemAddress(p.ctypes.data), p.size) for p in places]
            self.device.host_access(reads=ranges)
            found[block] = np.concatenate(places)
        return found

    def check(self) -> None:
        """Everything that must hold after every step."""
        self.manager.check_integrity()
        assert not self.device.violations, "\n".join(map(str, self.device.violations))
        assert not self.engine.problems, "\n".join(self.engine.problems)

    def finish(self) -> None:
        """Close everything, use every hot slot once more, and look for leaks."""
        self.device._world.planned_failures.clear()
        self.device.faults.is_io_held = False
        for codec in self.codecs.values():
            codec.rejections.clear()
        while self.sequences:
            self.close(self.sequences[-1])
        self.poll(2)
        self.check()
        num_in_tree = sum(
            len(self.manager._tree.pages_of(LayerGroupId(group))) for group in self._groups
        )
        assert self.table.num_pages == num_in_tree, "a page that nobody holds has not been freed"
        self._fill_hot_level()
        self.manager.close()
        for stream in self.streams[1:]:
            assert stream is not None
            stream.synchronize()
        self.device.close()
        assert not self.device.violations, "\n".join(map(str, self.device.violations))
        assert not self.engine.problems, "\n".join(self.engine.problems)
        self.abandon()

    def _fill_hot_level(self) -> None:
        cache = self.manager.create_kv_cache()
        assert cache.resume()
        num_blocks = self.num_lockable_blocks
        assert cache.resize(num_blocks * self.manager.tokens_per_block), "hot slots have leaked"
        cache.close()
        self.check()

    def abandon(self) -> None:
        """Free what a failed test leaves behind."""
        self._directory.cleanup()
