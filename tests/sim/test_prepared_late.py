"""Host memory that the device prepares in the background: levels start with what is ready, grow
into the rest, and lose nothing meanwhile.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from coldpage import DeviceError
from coldpage.snapshot import state_write, transfer
from coldpage.storage import escalation, preparing, resizing
from coldpage.types import CacheLevel
from tests.property.driver import Driver
from tests.property.setups import KINDS, ROOMY_BLOCKS, Setup, simulated
from tests.property.walks import Walk
from tests.sim.rig import RING_BYTES, Rig
from tests.sim.scenes import Build, filled, moves, prompt, push_out, resumed, suspended, totals

HOST = CacheLevel(1)
PAGE_BYTES = 2 * 2 * 16  # of a block in the rig's "full" geometry


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (escalation, resizing):
        monkeypatch.setattr(module, "MAX_WAIT_S", 0.05)


def late(build: Build, **settings: object) -> Rig:
    """A rig nothing of whose pinned memory is ready."""
    return build(device=simulated(is_prepared_late=True), **settings)


def prepare(rig: Rig, num_blocks: float) -> None:
    """Let the device have room for so many blocks more, and the manager know."""
    rig.device.prepare(int(num_blocks * PAGE_BYTES))
    rig.manager.poll()
    rig.check()


def ready(rig: Rig, level: int = HOST) -> tuple[int, int]:
    """Slots that are ready, and all of them."""
    stats = rig.manager.stats().levels[level]
    assert sum(group.ready_slots for group in stats.pool_groups) == stats.ready_slots
    return stats.ready_slots, stats.total_slots


def test_a_level_grows_as_its_memory_gets_ready(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = late(build, hot=4, host=8)
    assert ready(rig, 0) == (4, 4), "device memory is ready at once"
    assert ready(rig) == (0, 8)
    prepare(rig, 1.5)
    assert ready(rig) == (1, 8)
    prepare(rig, 0.5)
    assert ready(rig) == (2, 8)
    first = suspended(rig, prompt(4))
    second = suspended(rig, prompt(2, 1))
    assert rig.used == [4, 2]
    assert "is ready" not in caplog.text
    prepare(rig, 100)
    assert ready(rig) == (8, 8)
    assert "all memory of the host tier is ready" in caplog.text
    push_out(rig, 4)
    assert rig.used == [0, 6]
    for sequence in (first, second):
        resumed(rig, sequence)
        sequence.cache.suspend()
    assert not totals(rig, "lost_held_pages")


def test_held_pages_stay_hot_until_there_is_room(build: Build) -> None:
    rig = late(build, hot=4, host=8)
    first = suspended(rig, prompt(4))
    second = rig.create()
    assert second.resume()
    assert not second.cache.resize(4), "refused for now"
    assert rig.used == [4, 0]
    assert not totals(rig, "lost_held_pages") and not totals(rig, "dropped_pages")
    prepare(rig, 2)
    assert second.cache.resize(4)
    second.cache.synchronize()
    assert not second.cache.resize(6)
    rig.close(second)
    resumed(rig, first)
    assert not totals(rig, "lost_held_pages")


def test_a_wait_finds_what_gets_ready_meanwhile(build: Build) -> None:
    rig = late(build, hot=4, host=8)
    suspended(rig, prompt(4))
    rig.device.prepared_bytes_a_wait = PAGE_BYTES // 2
    filled(rig, prompt(4, 1))
    assert moves(rig, "hot-host") == 4
    assert totals(rig, "room_waits") > 0


def test_nobody_waits_for_ever(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing gets ready any more, it is as if the level were full."""
    rig = late(build, hot=4, host=8)
    suspended(rig, prompt(4))
    monkeypatch.setattr(preparing, "_MAX_IDLE_S", 0.0)
    filled(rig, prompt(4, 1))
    assert totals(rig, "lost_held_pages") == 4


def test_what_is_ready_is_found_by_whoever_needs_room(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nobody has polled since, and nothing got ready for long."""
    rig = late(build, hot=4, host=8)
    first = suspended(rig, prompt(4))
    rig.device.prepare(8 * PAGE_BYTES)
    monkeypatch.setattr(preparing, "_MAX_IDLE_S", 0.0)
    push_out(rig, 4)
    assert moves(rig, "hot-host") == 4
    assert not totals(rig, "lost_held_pages")
    resumed(rig, first)


def test_pages_that_nobody_holds_do_not_hold_anybody_up(build: Build) -> None:
    rig = late(build, hot=4, host=8)
    rig.close(suspended(rig, prompt(4)))
    filled(rig, prompt(4, 1))
    assert totals(rig, "room_waits") == 0


def test_copies_ahead_use_what_is_ready(build: Build) -> None:
    rig = late(build, hot=8, host=8, copies_behind=True)
    prepare(rig, 3)
    suspended(rig, prompt(4))
    assert moves(rig, "hot-host") == 3


@pytest.mark.parametrize("num_blocks", [3, 6, 20])
def test_a_resize_while_it_gets_ready(build: Build, num_blocks: int) -> None:
    rig = late(build, hot=8, host=8)
    prepare(rig, 4)
    sequences = [suspended(rig, prompt(2, first)) for first in range(2)]
    push_out(rig, 8)
    assert rig.used == [0, 4]
    rig.resize(HOST, num_blocks)
    rig.check()
    assert ready(rig) == (min(4, num_blocks), num_blocks)
    prepare(rig, 100)
    assert ready(rig) == (num_blocks, num_blocks)
    push_out(rig, 8)
    for sequence in sequences:
        assert sequence.resume()
        sequence.cache.synchronize()
        sequence.recompute()
        sequence.check()
        sequence.cache.suspend()
    assert totals(rig, "lost_held_pages") == max(0, 4 - num_blocks)


def test_the_hot_level_shrinks_only_when_there_is_room_below(build: Build) -> None:
    rig = late(build, hot=8, host=8)
    sequence = suspended(rig, prompt(6))
    with pytest.raises(DeviceError, match="has yet to prepare"):
        rig.resize(0, 4)
    assert ready(rig, 0) == (8, 8)
    prepare(rig, 4)
    rig.resize(0, 4)
    prepare(rig, 4)
    rig.resize(0, 8)
    resumed(rig, sequence)
    assert not totals(rig, "lost_held_pages")


def test_files_wait_for_staging(build: Build) -> None:
    """Nothing can be written while the staging ring is not there, and nothing is lost."""
    rig = late(build, hot=4, disk=20)
    first = suspended(rig, prompt(4))
    second = rig.create()
    assert second.resume()
    assert not second.cache.resize(4)
    assert not totals(rig, "lost_held_pages")
    rig.device.prepare(RING_BYTES // 2)
    assert second.cache.resize(4)
    rig.close(second)
    rig.poll()
    resumed(rig, first)
    assert rig.device.num_unprepared_bytes == RING_BYTES // 2


def test_a_level_that_grows_gets_ready_again(build: Build) -> None:
    rig = late(build, hot=4, host=8)
    prepare(rig, 8)
    assert ready(rig) == (8, 8)
    rig.resize(HOST, 20)
    assert ready(rig) == (8, 20)
    prepare(rig, 12)
    assert ready(rig) == (20, 20)


def test_a_cold_level_shrinks_only_when_there_is_staging(build: Build) -> None:
    rig = late(build, hot=8, gpu=8, disk=20)
    sequence = suspended(rig, prompt(8))
    push_out(rig, 8)
    assert rig.used == [0, 8, 0]
    with pytest.raises(DeviceError, match="has yet to prepare"):
        rig.resize(1, 4)
    assert rig.used == [0, 8, 0]
    rig.device.prepare(RING_BYTES)
    rig.resize(1, 4)
    resumed(rig, sequence)
    assert not totals(rig, "lost_held_pages")


def test_reads_that_wait_for_staging_are_not_late(build: Build) -> None:
    rig = late(build, hot=4, disk=20)
    rig.device.prepare(RING_BYTES)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 4)
    rig.poll()
    assert rig.storage._disk_moves is not None
    end = rig.storage._disk_moves.end
    memory = end.ring._memory
    memory._num_ready_bytes = 0  # type: ignore[attr-defined]
    assert sequence.resume()
    end.clock = lambda: 1e9
    rig.manager.poll()
    end.clock = lambda: 2e9
    rig.manager.poll()
    assert not totals(rig, "late_reads")
    memory._num_ready_bytes = RING_BYTES  # type: ignore[attr-defined]
    sequence.cache.synchronize()
    sequence.check()
    assert not totals(rig, "lost_held_pages")


@pytest.mark.parametrize("bytes_a_wait", [1 << 20, 0])
def test_saving_waits_for_its_buffer(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_a_wait: int
) -> None:
    rig = late(build, hot=4)
    sequence = suspended(rig, prompt(4))
    rig.device.prepared_bytes_a_wait = bytes_a_wait
    path = tmp_path / "one.cpsn"
    if bytes_a_wait:
        assert state_write(rig.manager, [sequence.cache], path)
        return
    monkeypatch.setattr(transfer, "_MAX_READY_WAIT_S", 0.01)
    with pytest.raises(DeviceError, match="does not get 8,388,608 bytes of host memory ready"):
        state_write(rig.manager, [sequence.cache], path)


def test_the_spill_goes_by_what_is_ready(build: Build) -> None:
    rig = late(build, hot=4, host=40, disk=40)
    rig.device.prepare(RING_BYTES)
    prepare(rig, 4)
    suspended(rig, prompt(2))
    push_out(rig, 4)
    rig.poll()
    assert rig.used == [0, 2, 0], "half of what is ready is free"


def test_closing_while_memory_gets_ready() -> None:
    device = simulated(is_prepared_late=True)
    rig = Rig(device=device, hot=4, host=8, disk=20)
    prepare(rig, 2)
    suspended(rig, prompt(4))
    while rig.sequences:
        rig.close(rig.sequences[-1])
    rig.manager.close()
    for stream in rig.streams[1:]:
        assert stream is not None
        stream.synchronize()
    device.close()
    assert not device.violations
    rig.abandon()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_faults", [False, True])
@pytest.mark.parametrize("copies_behind", [False, True])
def test_a_walk(kind: str, with_faults: bool, copies_behind: bool) -> None:
    setup = Setup(
        kind=kind,
        hot_blocks=8,
        host_blocks=12,
        disk_blocks=ROOMY_BLOCKS,
        gpu_blocks=4,
        is_prepared_late=True,
        copies_behind=copies_behind,
    )
    driver = Driver(setup, 5)
    try:
        Walk(driver, 5, with_faults=with_faults).run(250)
        driver.finish()
    finally:
        driver.abandon()
