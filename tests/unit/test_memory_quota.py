"""What is allocated for pages is what the quotas allow and the statistics show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coldpage import KVCacheManager
from coldpage.device.base import MemoryKind
from coldpage.device.host import HostDevice, HostMemory
from coldpage.testing.example_codecs import PaddingCodec
from tests.property.setups import Setup


class _Counting(HostDevice):
    """Adds up what is allocated of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = dict.fromkeys(MemoryKind, 0)

    def allocate(
        self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
    ) -> HostMemory:
        self.num_bytes[kind] += num_bytes
        return super().allocate(num_bytes, kind, is_growable=is_growable)


@pytest.mark.parametrize("make_codec", [lambda: None, lambda: PaddingCodec(100)])
def test_memory_for_pages_stays_within_its_quota_and_shows(
    make_codec: Callable[[], PaddingCodec | None], tmp_path: Path
) -> None:
    """With any codec, and however the quota divides."""
    for num_blocks in (8, 9, 13):
        setup = Setup("mixed-sizes", hot_blocks=num_blocks, host_blocks=3 * num_blocks)
        config = setup.config(tmp_path)
        device = _Counting()
        with KVCacheManager(config, device=device, codec=make_codec()) as manager:
            hot, host = manager.stats().levels
            for stats, tier in zip((hot, host), config.cache_tiers, strict=True):
                assert 0 < stats.total_bytes <= tier.quota_bytes
            assert device.num_bytes[MemoryKind.DEVICE] == hot.total_bytes
            assert device.num_bytes[MemoryKind.PINNED] == host.total_bytes
        device.close()
