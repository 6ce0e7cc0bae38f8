"""A cold level in device memory: the codec's form, between other levels, and files that never touch
it.
"""

from __future__ import annotations

import numpy as np
import pytest

from coldpage import create_default_cold_page_codec
from coldpage.device.base import IoJob, MemoryKind
from coldpage.device.simulated import ViolationKind
from coldpage.testing.example_codecs import DeviceIndexCodec, PaddingCodec
from coldpage.types import HOT_LEVEL, ByteRange, CacheLevel
from tests.property.setups import simulated
from tests.sim.rig import MakeCodec, Rig
from tests.sim.scenes import Build, moves, prompt, push_out, resumed, suspended, totals

ORDERS = [("gpu", "host", "disk"), ("host", "gpu", "disk")]


def padding() -> PaddingCodec:
    return PaddingCodec(48)


def _names(rig: Rig) -> list[str]:
    return [level.name for level in rig.manager.stats().levels]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("codec", [create_default_cold_page_codec, padding, DeviceIndexCodec])
def test_pages_pass_through_every_level_and_come_back(
    build: Build, order: tuple[str, ...], codec: MakeCodec
) -> None:
    """Twelve blocks, and each level in memory holds four."""
    rig = build(hot=4, gpu=4, host=4, disk=40, order=order, codec=codec)
    assert _names(rig) == ["hot", *order]
    sequences = [suspended(rig, prompt(4, first)) for first in range(3)]
    rig.poll()
    push_out(rig, 4)
    rig.poll()
    rig.check()
    for name, used in zip(_names(rig)[1:], rig.used[1:], strict=True):
        assert used >= 4, f"nothing has come to {name}"
    for sequence in sequences:
        resumed(rig, sequence)
        assert not sequence.cache.missing_blocks()
        sequence.cache.suspend()
    assert not totals(rig, "lost_held_pages")


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("name", ["gpu", "host", "disk"])
def test_codecs_of_their_own_are_changed_between_levels(
    build: Build, order: tuple[str, ...], name: str
) -> None:
    sizes = {"gpu": 6, "host": 6, order[0]: 4}
    rig = build(hot=4, disk=40, order=order, **sizes, **{f"{name}_codec": padding})
    sequences = [suspended(rig, prompt(4, first)) for first in range(3)]
    rig.poll()
    push_out(rig, 4)
    rig.poll()
    assert totals(rig, "transcoded_pages") > 0
    for sequence in sequences:
        resumed(rig, sequence)
        sequence.cache.suspend()
    assert not totals(rig, "lost_held_pages")


def test_below_a_disk(build: Build) -> None:
    rig = build(hot=4, gpu=8, disk=4, order=("disk", "gpu"))
    sequences = [suspended(rig, prompt(4, first)) for first in range(3)]
    push_out(rig, 4)
    rig.poll()
    assert moves(rig, "hot-disk") and moves(rig, "hot-gpu")
    for sequence in sequences:
        resumed(rig, sequence)
        sequence.cache.suspend()
    assert not totals(rig, "lost_held_pages")


@pytest.mark.parametrize(("below", "path"), [("host", "gpu-host"), ("disk", "gpu-disk")])
def test_what_has_one_form_is_copied_raw(build: Build, below: str, path: str) -> None:
    rig = build(hot=4, gpu=4, **{below: 40})
    sequence = suspended(rig, prompt(4))
    push_out(rig, 4)
    calls = len(rig.codecs["manager"].calls)
    num_encoded = len(rig.codecs["manager"].sizes("encode"))
    rig.poll()
    assert moves(rig, path) > 0
    assert len(rig.codecs["manager"].sizes("encode")) == num_encoded
    assert len(rig.codecs["manager"].calls) == calls
    resumed(rig, sequence)


def test_a_page_on_its_way_to_disk_does_not_hold_its_cold_slot(build: Build) -> None:
    """It lies in staging when the write begins."""
    rig = build(hot=4, gpu=4, disk=40)
    suspended(rig, prompt(4))
    push_out(rig, 4)
    rig.device.faults.is_io_held = True
    rig.manager.poll()
    assert rig.storage.num_in_flight
    assert not (rig.table.busy & 2).any()
    rig.device.faults.is_io_held = False
    rig.poll()
    rig.check()


@pytest.mark.parametrize("disk_codec", [None, padding])
def test_prefetch_from_disk_to_the_device(build: Build, disk_codec: MakeCodec | None) -> None:
    rig = build(hot=4, gpu=4, disk=40, disk_codec=disk_codec)
    first = suspended(rig, prompt(4))
    for other in (1, 2):
        assert rig.manager.flush(60) == 0
        rig.close(suspended(rig, prompt(4, other)))
    assert rig.manager.flush(60) == 0
    assert not any(bits & 2 for bits in rig.levels_of(first))
    first.cache.prefetch(CacheLevel(1))
    rig.poll()
    assert moves(rig, "disk-gpu") > 0
    before = moves(rig, "disk-hot")
    resumed(rig, first)
    assert moves(rig, "disk-hot") == before


def test_a_rejected_way_to_staging_leaves_the_page_where_it_is(build: Build) -> None:
    rig = build(hot=4, gpu=4, disk=40)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 4)
    rig.device.fail_next_submission("offload")
    rig.manager.poll()
    assert totals(rig, "rejected_submissions") == 1
    rig.check()
    rig.poll()
    resumed(rig, sequence)


def test_resizing(build: Build) -> None:
    rig = build(hot=8, gpu=8, host=20)
    sequences = [suspended(rig, prompt(4, first)) for first in range(3)]
    push_out(rig, 8)
    for num_blocks in (3, 12):
        rig.resize(1, num_blocks)
        rig.check()
    rig.manager.defragment(CacheLevel(1))
    for sequence in sequences[:2]:
        resumed(rig, sequence)
    assert not totals(rig, "lost_held_pages")


def test_the_simulated_device_sees_files_that_touch_hidden_memory() -> None:
    device = simulated()
    memory = device.allocate(100, MemoryKind.DEVICE)
    batch = device.io.submit([IoJob(lambda: True, reads=(ByteRange(memory.address, 100),))])
    batch.synchronize()
    assert [v.kind for v in device.violations] == [ViolationKind.OUT_OF_REACH]
    memory.free()
    device.close()


def test_the_hot_level_is_hidden_in_these_tests(build: Build) -> None:
    rig = build(hot=4, gpu=4)
    for level in rig.storage.levels:
        for group in level.groups:
            for pool in group.memory:
                assert not isinstance(pool.view(0, 1), np.ndarray)
    assert rig.storage.levels[HOT_LEVEL].groups
