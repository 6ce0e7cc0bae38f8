"""Small managers on the simulated device: few slots on every level, and pressure everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coldpage.layout.partition
import coldpage.migration.codec_calls
import coldpage.staging
from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    ColdPageCodec,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    create_default_cold_page_codec,
)
from coldpage.config import BatchDesc, CacheTierConfig, KVCacheDesc
from coldpage.device.base import Device
from coldpage.device.simulated import SimulatedDevice
from coldpage.layout import HotLayout, hot_layout
from coldpage.migration import NUM_SCRATCH_SLOTS
from coldpage.store import FileIdentity, slot_bytes_of
from coldpage.testing.example_codecs import (
    CoarseCodec,
    DeviceIndexCodec,
    PaddingCodec,
    PositionCodec,
    SlowCodec,
)
from coldpage.testing.index_poison import IndexPoisoningCodec
from coldpage.types import BufferRole, LayerId, LifeCycleId, PageClass, PageIndexLocation

TYPICAL_BLOCKS = 4
ROOMY_BLOCKS = 2000
PADDING_BYTES = 64
MANY_GROUPS = 12
SMALL_CHUNK_BYTES = 48  # of device indices: six pages, or four with positions
NO_WINDOW = 1000  # tokens: no sequence here is so long


def _layer(
    layer_id: int, sizes: tuple[int, ...], *, window: int | None = None, sinks: int = 0
) -> AttentionLayerConfig:
    buffers = tuple(
        BufferConfig(BufferRole(role), size)
        for role, size in zip(("key", "value")[: len(sizes)], sizes, strict=True)
    )
    return AttentionLayerConfig(
        LayerId(layer_id), buffers, sliding_window_tokens=window, num_sink_tokens=sinks
    )


def layers_of(kind: str, per_block: int) -> tuple[AttentionLayerConfig, ...]:
    """The layers by the name of a model's kind."""
    big, small = 16 * per_block, 8 * per_block
    window = 2 * per_block + 1
    match kind:
        case "full":
            return (_layer(0, (small, small)), _layer(1, (small, small)))
        case "mixed":  # both groups in one hot pool group
            return (_layer(0, (big, small)), _layer(1, (big, small), window=window, sinks=1))
        case "mixed-sizes":  # two hot pool groups, one of them of two pools
            return (_layer(0, (big, small)), _layer(1, (small, small), window=window))
        case "window":
            return (_layer(0, (small, small), window=window, sinks=per_block),)
        case "many":  # groups that differ in name only: each block has a page in all of them
            windows = [None, *range(NO_WINDOW, NO_WINDOW + MANY_GROUPS - 1)]
            return tuple(_layer(i, (big,), window=window) for i, window in enumerate(windows))
    raise AssertionError(kind)


KINDS = ("full", "mixed", "mixed-sizes", "window")


def make_codec(name: str) -> ColdPageCodec:
    """A codec that catches index arrays used too late."""
    codecs: dict[str, ColdPageCodec] = {
        "concat": create_default_cold_page_codec(),
        "concat-pages": create_default_cold_page_codec(1 << 20),
        "padding": PaddingCodec(PADDING_BYTES),
        "device-index": DeviceIndexCodec(),
        "position": PositionCodec(),
        "position-device": PositionCodec(PageIndexLocation.DEVICE),
        "slow": SlowCodec(create_default_cold_page_codec(), 0.0),
        "coarse": CoarseCodec(),
        "coarse-body": CoarseCodec(keeps_sinks=True),
        "coarse-past": CoarseCodec(keeps_sinks=True, keeps_recent=True),
    }
    return IndexPoisoningCodec(codecs[name])


CODECS = (
    "concat",
    "concat-pages",
    "padding",
    "device-index",
    "position",
    "position-device",
    "slow",
)
LOSSY_CODECS = ("coarse", "coarse-body", "coarse-past")
# Which page classes stay whole.
WHOLE_CLASSES = {
    "coarse-body": (PageClass.SINK,),
    "coarse-past": (PageClass.SINK, PageClass.RECENT),
}
# Another object, and the same cold pages.
_FORMATS = {"concat-pages": "concat", "slow": "concat", "position-device": "position"}


def disk_slot_bytes(payload_bytes: int, per_block: int) -> int:
    """What a page takes on disk, header included; names of codecs here are short."""
    return slot_bytes_of(FileIdentity(bytes(32), "", payload_bytes, per_block))


@dataclass(frozen=True)
class Setup:
    """One manager. Sizes are in blocks of every layer group; 0: no such level. ``codec`` is for
    every cold tier that names none.
    """

    kind: str = "full"
    per_block: int = 2
    hot_blocks: int = 8
    host_blocks: int = 0
    disk_blocks: int = 0
    is_ring_tiny: bool = False
    max_util: float = 0.97
    host2_blocks: int = 0
    codec: str = "concat"
    host_codec: str | None = None
    host2_codec: str | None = None
    disk_codec: str | None = None
    separate_sinks: bool = False
    watermark: float = 0.0
    has_constraints: bool = False
    has_pool_ratio: bool = False
    max_sequences: int = 6
    write_behind: bool = False
    # After so many rounds of the simulated device a read from disk is late; 0: it never is.
    read_deadline_rounds: int = 0
    gpu_blocks: int = 0
    gpu_codec: str | None = None
    gpu_place: int = 0  # how many cold levels come before it
    is_prepared_late: bool = False  # pinned memory gets ready bit by bit
    copies_behind: bool = False  # suspended pages are copied to a cold level in memory at once
    num_recent_blocks: int = 0

    @property
    def has_windows(self) -> bool:
        return self.kind != "full"

    @property
    def is_lossy(self) -> bool:
        return any(codec in LOSSY_CODECS for _, _, codec in self.cold_levels)

    @property
    def num_whole_blocks(self) -> int:
        """How many of a sequence's newest full blocks every codec keeps as they are."""
        lossy = {codec for _, _, codec in self.cold_levels if codec in LOSSY_CODECS}
        is_kept = all(PageClass.RECENT in WHOLE_CLASSES.get(codec, ()) for codec in lossy)
        return self.num_recent_blocks if is_kept else 0

    @property
    def cold_levels(self) -> list[tuple[str, int, str]]:
        """Medium, blocks and codec of the levels after the hot one."""
        return [(medium, size, own or self.codec) for medium, size, own in self._cold]

    @property
    def _cold(self) -> list[tuple[str, int, str | None]]:
        levels = [
            ("host", self.host_blocks, self.host_codec),
            ("host", self.host2_blocks, self.host2_codec),
            ("disk", self.disk_blocks, self.disk_codec),
        ]
        levels = [level for level in levels if level[1]]
        if self.gpu_blocks:
            levels.insert(self.gpu_place, ("gpu", self.gpu_blocks, self.gpu_codec))
        return levels

    @property
    def needs_shared_codec(self) -> bool:
        """Whether some tier, or all, leave the codec to the manager."""
        return not self._cold or any(own is None for _, _, own in self._cold)

    @property
    def blocks(self) -> list[int]:
        """The size of each level."""
        return [self.hot_blocks, *(size for _, size, _ in self.cold_levels)]

    @property
    def num_formats(self) -> int:
        return len({_FORMATS.get(codec, codec) for _, _, codec in self.cold_levels})

    def is_transcoded(self, source: int, target: int) -> bool:
        """Whether pages change their form between two levels."""
        formats = [_FORMATS.get(codec, codec) for _, _, codec in self.cold_levels]
        return source > 0 and target > 0 and formats[source - 1] != formats[target - 1]

    @property
    def layout(self) -> HotLayout:
        layers = layers_of(self.kind, self.per_block)
        return hot_layout(
            layers,
            separate_sinks=self.separate_sinks,
            num_recent_blocks=self.num_recent_blocks,
        )

    def quota_bytes(self, level: int, num_blocks: int) -> int:
        """What holds so many blocks there, scratch slots apart."""
        layout = self.layout
        groups = layout.life_cycles[:: layout.num_classes]
        if level == 0:
            pages = [layout.page_bytes(lc.life_cycle_id) for lc in groups]
            scratch = sum(sum(pools) for pools in layout.slot_bytes) * NUM_SCRATCH_SLOTS
            return sum(pages) * num_blocks + (scratch if self.num_formats > 1 else 0)
        medium, _, codec = self.cold_levels[level - 1]
        pages = [
            max(
                self._cold_bytes(layout, LifeCycleId(lc.life_cycle_id + i), codec)
                for i in range(layout.num_classes)
            )
            for lc in groups
        ]
        if medium == "disk":
            pages = [disk_slot_bytes(page, self.per_block) for page in pages]
        return num_blocks * sum(pages)

    def _cold_bytes(self, layout: HotLayout, life_cycle_id: LifeCycleId, codec: str) -> int:
        life_cycle = layout.life_cycles[life_cycle_id]
        pools = layout.slot_bytes[life_cycle.hot_pool_group]
        if codec == "padding":
            return sum(-(-size // PADDING_BYTES) * PADDING_BYTES for size in pools)
        is_whole = life_cycle.page_class in WHOLE_CLASSES.get(codec, ())
        return -(-sum(pools) // 2) if codec in LOSSY_CODECS and not is_whole else sum(pools)

    def config(self, directory: Path) -> KVCacheManagerConfig:
        tiers: list[CacheTierConfig] = [DeviceTierConfig(self.quota_bytes(0, self.hot_blocks))]
        for level, (medium, size, name) in enumerate(self._cold, start=1):
            quota = self.quota_bytes(level, size)
            codec = None if name is None else make_codec(name)
            if medium == "host":
                tiers.append(HostTierConfig(quota, codec, self.copies_behind))
            elif medium == "gpu":
                tiers.append(DeviceTierConfig(quota, codec, self.copies_behind))
            else:
                deadline = self.read_deadline_rounds or 1e9
                tiers.append(
                    DiskTierConfig(
                        str(directory),
                        quota,
                        codec,
                        write_behind=self.write_behind,
                        read_deadline_s=deadline,
                    )
                )
        num_groups = len(self.layout.layer_groups)
        need = KVCacheDesc(2 * self.per_block, self.per_block)
        return KVCacheManagerConfig(
            tokens_per_block=self.per_block,
            cache_tiers=tuple(tiers),
            layers=layers_of(self.kind, self.per_block),
            max_util_for_resume=self.max_util,
            model_fingerprint=b"pattern",
            initial_pool_ratio=tuple(range(1, num_groups + 1)) if self.has_pool_ratio else None,
            constraints=(BatchDesc((need,)),) if self.has_constraints else (),
            separate_sink_pages=self.separate_sinks,
            free_watermark=self.watermark,
            num_recent_blocks=self.num_recent_blocks,
        )


@contextlib.contextmanager
def small_constants(setup: Setup) -> Iterator[None]:
    """Sizes that suit real machines, made small while a manager is built: the page ring, and the
    sequence by which quotas are shared between layer groups.
    """
    staging, partition = coldpage.staging, coldpage.layout.partition
    ring, typical = staging.MIN_PAGE_RING_BYTES, partition.TYPICAL_SEQUENCE_TOKENS
    staging.MIN_PAGE_RING_BYTES = 1 if setup.is_ring_tiny else 1 << 16  # type: ignore[misc]
    partition.TYPICAL_SEQUENCE_TOKENS = TYPICAL_BLOCKS * setup.per_block  # type: ignore[misc]
    try:
        yield
    finally:
        staging.MIN_PAGE_RING_BYTES = ring  # type: ignore[misc]
        partition.TYPICAL_SEQUENCE_TOKENS = typical  # type: ignore[misc]


@contextlib.contextmanager
def small_index_chunks() -> Iterator[None]:
    """Codec calls with indices on the device take few pages each, so that they are cut up, and the
    ring that the indices go through is soon used again.
    """
    calls = coldpage.migration.codec_calls
    largest, ring = calls.MAX_INDEX_BATCH_BYTES, calls.INDEX_RING_BYTES
    calls.MAX_INDEX_BATCH_BYTES = SMALL_CHUNK_BYTES  # type: ignore[misc]
    calls.INDEX_RING_BYTES = 4 * SMALL_CHUNK_BYTES  # type: ignore[misc]
    try:
        yield
    finally:
        calls.MAX_INDEX_BATCH_BYTES = largest  # type: ignore[misc]
        calls.INDEX_RING_BYTES = ring  # type: ignore[misc]


def build_manager(setup: Setup, device: Device, directory: Path) -> KVCacheManager:
    """A manager on the device."""
    codec = make_codec(setup.codec) if setup.needs_shared_codec else None
    with small_constants(setup):
        return KVCacheManager(setup.config(directory), device=device, codec=codec)


def simulated(seed: int = 0, *, is_prepared_late: bool = False) -> SimulatedDevice:
    """A device whose waits inside ReadyEvents count as made by its callers, and whose hot level the
    host can not reach.
    """
    device = SimulatedDevice(
        seed,
        arena_bytes=1 << 26,
        hides_memory=True,
        prepares_in_background=is_prepared_late,
    )
    device.forwarding_files.add("slots.py")
    return device
