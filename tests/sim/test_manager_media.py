"""What submissions, disks and files do wrong, and what the manager makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coldpage.device.host import HostDevice
from coldpage.sequence import DiskBlob
from coldpage.testing.pattern_engine import PatternEngine, PatternSequence
from coldpage.types import BlockOrdinal, CacheLevel
from tests.property.driver import Driver
from tests.property.setups import Setup, build_manager
from tests.sim.scenes import (
    PER_BLOCK,
    Make,
    filled,
    hot_blocks,
    moves,
    prompt,
    push_out,
    resumed,
    suspended,
    totals,
)

HOT = CacheLevel(0)


# Two transfers of one page


def _rewritten_while_it_spills(make: Make, seed: int) -> tuple[Driver, PatternSequence]:
    """A suspended sequence whose pages lay in host memory, were being written to disk as well, and
    have been filled with something else since: the disk still hangs.
    """
    driver = make(seed, hot_blocks=4, host_blocks=4, disk_blocks=20, max_util=1.0)
    sequence = suspended(driver, prompt(4), num_committed=0)
    driver.faults.is_io_held = True
    other = driver.engine.create()
    assert other.resume()
    assert other.cache.resize(4 * PER_BLOCK)
    for _ in range(20):
        driver.manager.poll()
    other.cache.close()
    assert sequence.resume()
    sequence.cache.synchronize()
    sequence.check()
    assert sequence.cache.resize(8, 0)
    sequence.forget_from(0)
    sequence.cache.synchronize()
    sequence.write(prompt(4, 1))
    assert sequence.cache.resize(8, 8)
    sequence.cache.suspend()
    assert moves(driver, "hot-host") == 4
    assert moves(driver, "host-disk") == 0
    assert driver.device.counts.executed_io_jobs == 0
    driver.faults.is_io_held = False
    return driver, sequence


def test_a_page_written_to_while_it_spills_is_not_replaced_by_the_old_bytes(make: Make) -> None:
    driver, sequence = _rewritten_while_it_spills(make, 0)
    driver.manager.finish_transfers()
    assert driver.device.counts.executed_io_jobs == 2
    assert moves(driver, "host-disk") == 0
    push_out(driver, 4)
    resumed(driver, sequence)
    assert sequence.cache.missing_blocks() == []


def test_a_page_is_not_sent_where_an_older_transfer_still_has_its_slot(make: Make) -> None:
    num_waits = 0
    for seed in range(10):
        driver, sequence = _rewritten_while_it_spills(make, seed)
        push_out(driver, 4)
        num_waits += totals(driver, "room_waits")
        assert totals(driver, "lost_held_pages") == 0
        resumed(driver, sequence)
    assert num_waits > 0, "the transfers were over each time"


# Submissions


def test_a_rejected_encode_leaves_the_pages_where_they_were(make: Make) -> None:
    for levels in ({"host_blocks": 8}, {"disk_blocks": 8}):
        driver = make(hot_blocks=4, max_util=1.0, **levels)
        sequence = suspended(driver, prompt(3))
        other = driver.adopt(driver.engine.create())
        assert other.resume()
        driver.fail_next_submission("offload")
        assert not other.cache.resize(2 * PER_BLOCK)
        assert other.cache.capacity == 0
        assert hot_blocks(sequence) == [0, 1, 2]
        assert totals(driver, "rejected_submissions") == 1
        assert [level.used_slots for level in driver.manager.stats().levels] == [3, 0]
        assert other.step([1, 2, 3, 4])
        assert len(hot_blocks(sequence)) == 2
        other.cache.suspend()
        resumed(driver, sequence)
        assert sequence.cache.missing_blocks() == []


def test_a_rejected_decode_leaves_the_pages_where_they_were(make: Make) -> None:
    driver = make(hot_blocks=4, host_blocks=8, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 4)
    driver.fail_next_submission("onboard")
    assert not sequence.resume()
    assert sequence.cache.status.value == "suspended"
    assert [level.used_slots for level in driver.manager.stats().levels] == [0, 3]
    resumed(driver, sequence)
    assert sequence.cache.missing_blocks() == []


def test_a_rejected_decode_of_what_came_from_disk_is_tried_again(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=8, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 4)
    driver.fail_next_submission("onboard")
    driver.fail_next_submission("onboard")
    resumed(driver, sequence)
    assert sequence.cache.missing_blocks() == []
    assert totals(driver, "rejected_submissions") == 2
    assert driver.manager.stats().levels[1].quarantined_slots == 0


def test_a_rejected_decode_is_not_the_blobs_fault(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=8, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 4)
    for _ in range(20):
        driver.fail_next_submission("onboard")
    assert sequence.resume()
    sequence.cache.synchronize()
    sequence.check()
    assert sequence.cache.missing_blocks() == [], "the blobs on disk are good"
    assert driver.manager.stats().levels[1].quarantined_slots == 0


def test_a_page_whose_decode_was_rejected_keeps_its_place(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=8, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 4)
    for _ in range(3):
        driver.fail_next_submission("onboard")
    assert sequence.resume()
    while totals(driver, "rejected_submissions") < 3:
        driver.manager.wait_for_progress(1.0)
        driver.manager.poll()
    other = driver.adopt(driver.engine.create())
    assert other.resume()
    assert not other.cache.resize(2 * PER_BLOCK)
    assert other.cache.resize(PER_BLOCK)
    sequence.cache.synchronize()
    sequence.check()


# Disk


def test_a_failed_write_is_tried_in_another_slot(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=12, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    other = driver.engine.create()
    assert other.resume()
    driver.set_faults(submission=0.0, io=1.0, delay=0.0)
    assert other.cache.resize(4 * PER_BLOCK)
    while not driver.device.counts.failed_io_jobs:
        driver.device.step()
        driver.manager.poll()
    driver.set_faults(submission=0.0, io=0.0, delay=0.0)
    other.cache.close()
    driver.manager.finish_transfers()
    failed = driver.device.counts.failed_io_jobs
    assert totals(driver, "write_errors") == failed > 0
    assert driver.manager.stats().levels[1].quarantined_slots == 0
    resumed(driver, sequence)
    assert sequence.cache.missing_blocks() == []
    assert totals(driver, "lost_held_pages") == 0


def test_a_disk_that_fails_every_write_loses_pages_and_counts_them(make: Make) -> None:
    driver = make(hot_blocks=4, disk_blocks=12, max_util=1.0)
    sequence = suspended(driver, prompt(3))
    driver.set_faults(submission=0.0, io=1.0, delay=0.0)
    push_out(driver, 4)
    driver.set_faults(submission=0.0, io=0.0, delay=0.0)
    assert totals(driver, "lost_held_pages") == 3
    assert sequence.cache.missing_blocks() == [0, 1, 2]
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.recompute() == [0, 1, 2]
    sequence.check()


def test_a_hung_disk_delays_its_own_sequence_only(make: Make) -> None:
    driver = make(hot_blocks=8, disk_blocks=20, max_util=1.0)
    cold = suspended(driver, prompt(3, 1))
    push_out(driver, 8)
    running = filled(driver, prompt(2, 2), stream=driver.streams[1])
    driver.faults.is_io_held = True
    assert cold.resume()
    for token in range(3):
        assert running.step([token])
        running.check()
        driver.manager.poll()
        assert not cold.cache.is_ready()
    running.cache.suspend()
    driver.faults.is_io_held = False
    cold.cache.synchronize()
    cold.check()


# Damage on a real disk


@pytest.fixture
def real(tmp_path: Path) -> Iterator[PatternEngine]:
    """An engine over a manager whose disk tier is a file, with threads that read and write it."""
    setup = Setup(per_block=PER_BLOCK, hot_blocks=8, disk_blocks=20, max_util=1.0)
    device = HostDevice()
    manager = build_manager(setup, device, tmp_path / "disk")
    engine = PatternEngine(manager)
    yield engine
    manager.check_integrity()
    manager.close()
    device.close()
    assert engine.problems == []


def _blobs(engine: PatternEngine, sequence: PatternSequence) -> list[DiskBlob]:
    """Send everything to disk; where the sequence's blobs are then."""
    other = engine.create()
    assert other.resume()
    assert other.cache.resize(8 * PER_BLOCK)
    other.cache.synchronize()
    other.cache.close()
    engine.manager.finish_transfers()
    blobs = sequence.cache.blobs_on_disk()
    assert all(blob.is_only_copy for blob in blobs)
    return blobs


def _on_disk(engine: PatternEngine) -> tuple[PatternSequence, list[DiskBlob]]:
    sequence = engine.create()
    assert sequence.resume()
    assert sequence.step(prompt(5))
    sequence.cache.suspend()
    blobs = _blobs(engine, sequence)
    assert [blob.ordinal for blob in blobs] == [0, 1, 2, 3, 4]
    return sequence, blobs


def _flip(blob: DiskBlob, at: int) -> None:
    with blob.path.open("r+b") as file:
        file.seek(blob.offset_bytes + at)
        (byte,) = file.read(1)
        file.seek(blob.offset_bytes + at)
        file.write(bytes([byte ^ 0x10]))


def _swap(blob: DiskBlob, other: DiskBlob) -> None:
    """Exchange two blobs, each whole and with its header."""
    with blob.path.open("r+b") as file:
        contents = []
        for where in (blob, other):
            file.seek(where.offset_bytes - 4096)
            contents.append(file.read(8192))
        for where, content in zip((other, blob), contents, strict=True):
            file.seek(where.offset_bytes - 4096)
            file.write(content)


def _damage(how: str, blobs: list[DiskBlob]) -> list[BlockOrdinal]:
    match how:
        case "first byte":
            _flip(blobs[2], 0)
            return [BlockOrdinal(2)]
        case "last byte":
            _flip(blobs[4], 2 * 2 * 8 * PER_BLOCK - 1)
            return [BlockOrdinal(4)]
        case "header":
            _flip(blobs[0], -4096 + 5)
            return [BlockOrdinal(0)]
        case "swapped":
            _swap(blobs[1], blobs[3])
            return [BlockOrdinal(1), BlockOrdinal(3)]
        case "cut short":
            with blobs[0].path.open("r+b") as file:
                file.truncate(max(blob.offset_bytes for blob in blobs) + 16)
            return [max(blobs, key=lambda blob: blob.offset_bytes).ordinal]
    raise AssertionError(how)


@pytest.mark.parametrize("how", ["first byte", "last byte", "header", "swapped", "cut short"])
def test_a_damaged_blob_is_a_miss_and_never_data(real: PatternEngine, how: str) -> None:
    sequence, blobs = _on_disk(real)
    bad = _damage(how, blobs)
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.cache.missing_blocks() == bad
    stats = real.manager.stats()
    assert stats.totals["read_misses"] == len(bad)
    assert stats.totals["lost_held_pages"] == len(bad)
    # A disk that only does not answer may do so later.
    assert stats.levels[1].quarantined_slots == (0 if how == "cut short" else len(bad))
    sequence.check()
    assert sequence.recompute() == bad
    sequence.check()
    sequence.cache.suspend()
    # And the next ones find nothing wrong any more, in other slots.
    places = {(blob.path, blob.offset_bytes) for blob in blobs if blob.ordinal in bad}
    again = _blobs(real, sequence)
    assert not places & {(blob.path, blob.offset_bytes) for blob in again}
    twin = real.create(sequence.tokens)
    assert twin.cache.num_committed_tokens == 10
    for reader in (twin, sequence):
        assert reader.resume()
        reader.cache.synchronize()
        assert reader.cache.missing_blocks() == []
        reader.check()
        reader.cache.suspend()
    assert real.manager.stats().totals["read_misses"] == len(bad)


def test_damage_to_what_nobody_holds_is_a_shorter_match(real: PatternEngine) -> None:
    sequence, blobs = _on_disk(real)
    _flip(blobs[3], 1)
    sequence.cache.close()
    cache = real.create(sequence.tokens)
    assert cache.cache.num_committed_tokens == 10
    cache.cache.prefetch(HOT)
    real.manager.finish_transfers()
    assert cache.cache.missing_blocks() == [3]
    cache.cache.close()
    assert real.create(sequence.tokens).cache.num_committed_tokens == 6
