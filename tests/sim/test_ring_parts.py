"""Between memory and disk pages pass the ring in parts, so that the disk works on some while codecs
fill and empty others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coldpage import create_default_cold_page_codec
from coldpage.types import LifeCycleId
from tests.sim.rig import Rig

_NUM_BLOCKS = 32


@pytest.mark.parametrize("num_pages", [3, 16, 40])
def test_a_transfer_takes_a_small_part_of_the_ring(
    build: Callable[..., Rig], num_pages: int
) -> None:
    """The ring holds so many pages, or a few more."""
    page_bytes = build(hot=1).layout.page_bytes(LifeCycleId(0))
    rig = build(
        hot=_NUM_BLOCKS + 1,
        disk=2 * _NUM_BLOCKS,
        codec=create_default_cold_page_codec,
        ring_bytes=num_pages * page_bytes,
    )
    sequence = rig.create()
    assert sequence.resume()
    assert sequence.step(list(range(2 * _NUM_BLOCKS)))
    sequence.cache.suspend()
    other = rig.create()
    assert other.resume()
    assert other.step(list(range(1000, 1000 + 2 * _NUM_BLOCKS)))
    other.cache.suspend()
    rig.manager.finish_transfers()
    codec = rig.codecs["manager"]
    most = max(1, num_pages // 16)
    assert max(codec.sizes("encode")) == most
    other.cache.plan_drop()
    rig.close(other)
    assert sequence.resume()
    disk_moves = rig.storage._disk_moves
    assert disk_moves is not None
    reads = disk_moves.reads._in_flight
    # Half of the ring is for reads, and all of that is in use from the start.
    assert sum(transfer.pages.size for transfer in reads) == max(1, num_pages // 2)
    assert max(transfer.pages.size for transfer in reads) == most
    sequence.cache.synchronize()
    sequence.check()
    assert max(codec.sizes("decode")) == most
