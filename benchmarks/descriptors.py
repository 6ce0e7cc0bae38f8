"""The default codec's copy descriptors: nanoseconds each, beside the copies that they describe.

python -m benchmarks descriptors
"""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.rows import Row, timed_ms
from coldpage import PAGE_INDEX_PAIR, PageClass, create_default_cold_page_codec
from coldpage.codecs import LifeCycleDesc, PoolDesc, PoolGroupDesc
from coldpage.device.base import Event, MemoryKind, Stream
from coldpage.device.host import HostDevice
from coldpage.types import (
    Int64Array,
    LayerGroupId,
    LifeCycleId,
    MemAddress,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = ["run"]

NUM_PAGES = 65_536
# Parts of a page by pool: small, so that the memory needed is; the descriptors do not depend on it.
SHAPES = {"1 pool": (4096,), "3 pools": (2048, 1024, 1024)}
REPETITIONS = 21


class _Discard(Stream):
    """Takes copies and forgets them: what is timed is making them."""

    name = "discard"
    num_copies = 0

    def copy(self, dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> None:
        self.num_copies = dst.size

    def launch(self, work, *, reads, writes) -> None:  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def copy_pages(self, parts, pairs) -> None:  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def upload(self, dst, data) -> None:  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def record(self) -> Event:
        raise NotImplementedError

    def wait(self, event: Event) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError


def run(is_quick: bool) -> list[Row]:
    """Non-contiguous on both sides: no two descriptors could be one."""
    num_pages = NUM_PAGES // 16 if is_quick else NUM_PAGES
    rng = np.random.default_rng(0)
    pairs = np.empty(num_pages, PAGE_INDEX_PAIR)
    pairs["dst"], pairs["src"] = rng.permutation(num_pages), rng.permutation(num_pages)
    rows = []
    for shape, sizes in SHAPES.items():
        device = HostDevice()
        hot = [device.allocate(num_pages * size, MemoryKind.DEVICE) for size in sizes]
        cold = device.allocate(num_pages * sum(sizes), MemoryKind.PINNED)
        life_cycle = LifeCycleDesc(LifeCycleId(0), LayerGroupId(0), PageClass.BODY, ())
        pools = tuple(
            PoolDesc(PoolIndex(i), memory.address, size)
            for i, (memory, size) in enumerate(zip(hot, sizes, strict=True))
        )
        codec = create_default_cold_page_codec()
        codec.configure([PoolGroupDesc(PoolGroupIndex(0), num_pages, pools, (life_cycle,))])
        discard, stream = _Discard(), device.create_stream("copies")

        def encode(to: Stream, base: MemAddress = cold.address) -> None:
            codec.encode(LifeCycleId(0), base, pairs, to, None)
            if to is stream:
                stream.synchronize()

        samples = [timed_ms(lambda: encode(discard)) for _ in range(REPETITIONS)]
        copies = [timed_ms(lambda: encode(stream)) for _ in range(5)]
        num_copies = discard.num_copies
        device.close()
        ns_each = 1e6 * statistics.median(samples) / num_copies
        config = f"{num_pages:,} non-contiguous pages, {shape}: {ns_each:.1f} ns a descriptor"
        rows.append(
            Row(
                "copy descriptors of the default codec",
                config,
                "the copies, 4 KiB a page",
                samples,
                copies,
                ">= 10",
                notes={"ns_per_descriptor": round(ns_each, 2), "num_descriptors": num_copies},
            )
        )
    return rows
