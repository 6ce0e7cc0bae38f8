"""Small managers on the simulated device: few slots on every level, and pressure everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coldpage.layout.partition
import coldpage.staging
from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    create_default_cold_page_codec,
)
from coldpage.config import CacheTierConfig
from coldpage.device.base import Device
from coldpage.device.simulated import SimulatedDevice
from coldpage.layout import hot_layout
from coldpage.pools.disk import disk_slot_bytes
from coldpage.testing.index_poison import IndexPoisoningCodec
from coldpage.types import BufferRole, LayerId

TYPICAL_BLOCKS = 4
ROOMY_BLOCKS = 2000


def _layer(
    layer_id: int, sizes: tuple[int, ...], *, window: int | None = None, sinks: int = 0
) -> AttentionLayerConfig:
    buffers = tuple(
        BufferConfig(BufferRole(role), size)
        for role, size in zip(("key", "value"), sizes, strict=True)
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
    raise AssertionError(kind)


KINDS = ("full", "mixed", "mixed-sizes", "window")


@dataclass(frozen=True)
class Setup:
    """One manager. Sizes are in blocks of every layer group; 0: no such level."""

    kind: str = "full"
    per_block: int = 2
    hot_blocks: int = 8
    host_blocks: int = 0
    disk_blocks: int = 0
    is_ring_tiny: bool = False
    max_util: float = 0.97

    @property
    def has_windows(self) -> bool:
        return self.kind != "full"

    def config(self, directory: Path) -> KVCacheManagerConfig:
        layers = layers_of(self.kind, self.per_block)
        layout = hot_layout(layers)
        pages = [layout.page_bytes(lc.life_cycle_id) for lc in layout.life_cycles]
        block = sum(pages)
        tiers: list[CacheTierConfig] = [DeviceTierConfig(block * self.hot_blocks)]
        if self.host_blocks:
            tiers.append(HostTierConfig(block * self.host_blocks))
        if self.disk_blocks:
            slots = sum(disk_slot_bytes(size) for size in pages)
            tiers.append(DiskTierConfig(str(directory), slots * self.disk_blocks))
        return KVCacheManagerConfig(
            tokens_per_block=self.per_block,
            cache_tiers=tuple(tiers),
            layers=layers,
            max_util_for_resume=self.max_util,
            model_fingerprint=b"pattern",
        )


@contextlib.contextmanager
def small_constants(setup: Setup) -> Iterator[None]:
    """Sizes that suit real machines, made small while a manager is built: the page ring, and the
    sequence by which quotas are shared between layer groups.
    """
    ring, typical = coldpage.staging.MIN_PAGE_RING_BYTES, coldpage.layout.partition.TYPICAL_SEQUENCE_TOKENS
    coldpage.staging.MIN_PAGE_RING_BYTES = 1 if setup.is_ring_tiny else 1 << 16  # type: ignore[misc]
    coldpage.layout.partition.TYPICAL_SEQUENCE_TOKENS = TYPICAL_BLOCKS * setup.per_block  # type: ignore[misc]
    try:
        yield
    finally:
        coldpage.staging.MIN_PAGE_RING_BYTES = ring  # type: ignore[misc]
        coldpage.layout.partition.TYPICAL_SEQUENCE_TOKENS = typical  # type: ignore[misc]


def build_manager(setup: Setup, device: Device, directory: Path) -> KVCacheManager:
    """A manager on the device, with a codec that catches index arrays used too late."""
    codec = IndexPoisoningCodec(create_default_cold_page_codec())
    with small_constants(setup):
        return KVCacheManager(setup.config(directory), device=device, codec=codec)


def simulated(seed: int = 0) -> SimulatedDevice:
    """A device whose waits inside ReadyEvents count as made by its callers."""
    device = SimulatedDevice(seed, arena_bytes=1 << 26)
    device.forwarding_files.add("slots.py")
    return device
