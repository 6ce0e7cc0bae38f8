"""Each wait in the code, taken out, is caught: none is missing from the tests, none is for show."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import coldpage.slots
from coldpage.device.base import MemoryKind, Stream
from coldpage.device.simulated import SimulatedDevice
from coldpage.migration import CodecMoves
from coldpage.staging import StagingRing
from coldpage.types import ByteRange, Int32Array, MemAddress
from tests.property.driver import Driver
from tests.property.setups import KINDS, Setup
from tests.property.walks import Walk
from tests.sim.rig import Rig
from tests.sim.scenes import filled, suspended

PACKAGE = Path(coldpage.slots.__file__).parent
# Their waits are proven by other tests: the device's own, and whatever runs above the manager.
ELSEWHERE = {
    "device",
    "testing",
    "store",
    "snapshot",
    "engine",
    "server",
    "cli",
    "kernels",
    "bench",
}
WAITING_CALLS = {
    "wait",
    "wait_on",
    "synchronize",
    "is_done",
    "outstanding",
    "all_outstanding",
    "register",  # sweeps finished events, which it asks for
}
# Gives slots an event that others will wait for.
ORDERING_CALLS = {"order_after"}
# Waits for its callers: the callers are the sites.
FORWARDING_FILE = "slots.py"
# CodecMoves waits at places of its own when it is asked to: these are the sites.
FORWARDING_OBJECT = "moves"
MAX_WALKS = 60


@dataclass(frozen=True)
class WaitSite:
    """A call that waits."""

    file: str
    lines: range
    call: str

    def keys(self) -> set[tuple[str, int]]:
        return {(self.file, line) for line in self.lines}

    def __str__(self) -> str:
        return f"{self.file}:{self.lines.start} {self.call}"


def _sites_of(path: Path, calls: set[str]) -> Iterator[WaitSite]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        receiver = ast.unparse(node.func.value).rpartition(".")[2]
        if node.func.attr in calls and (receiver != FORWARDING_OBJECT or calls is ORDERING_CALLS):
            last_line = node.end_lineno or node.lineno
            yield WaitSite(path.name, range(node.lineno, last_line + 1), ast.unparse(node))


def _files() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    return [path for path in found if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE]


def _all_sites(calls: set[str]) -> list[WaitSite]:
    return [
        site for path in _files() if path.name != FORWARDING_FILE for site in _sites_of(path, calls)
    ]


SITES = _all_sites(WAITING_CALLS)
ORDERINGS = _all_sites(ORDERING_CALLS)

# A scenario runs with some waits taken out, and says what was found.
Findings = list[str]
Scenario = Callable[[set[tuple[str, int]]], Findings]


def _ring(ignored: set[tuple[str, int]]) -> Findings:
    """Every way a piece of a staging ring changes hands."""
    device = SimulatedDevice()
    device.ignored_wait_sites |= ignored
    ring = StagingRing(device, 4096, MemoryKind.PINNED)
    a, b = device.create_stream("a"), device.create_stream("b")
    whole = ByteRange(MemAddress(ring.base_address), 4096)

    def touch(stream: object) -> None:
        if stream is None:
            device.host_access(writes=[whole])
        else:
            stream.launch(lambda: None, reads=(), writes=[whole])  # type: ignore[attr-defined]

    for first, second in [(a, b), (a, None), (None, b), (None, a), (b, None), (b, a)]:
        lease = ring.acquire(4096, 4096, 4096, 1, first)
        assert lease is not None
        touch(first)
        lease.set_stream(second)
        touch(second)
        lease.release()
    lease = ring.acquire(4096, 4096, 4096, 1, b)
    assert lease is not None
    touch(b)
    lease.release()
    ring.close()
    return [str(violation) for violation in device.violations]


def _small_driver(ignored: set[tuple[str, int]], seed: int = 0, **levels: int) -> Driver:
    driver = Driver(Setup(hot_blocks=4, max_util=1.0, **levels), seed)  # type: ignore[arg-type]
    driver.device.ignored_wait_sites |= ignored
    return driver


def _findings(driver: Driver) -> Findings:
    return [str(violation) for violation in driver.device.violations] + driver.engine.problems


def _close_with_work(ignored: set[tuple[str, int]], *, is_over: bool) -> Findings:
    """The manager frees memory on which a caller's stream works, or worked for all it knows."""
    driver = _small_driver(ignored)
    sequence = driver.engine.create()
    assert sequence.resume(driver.streams[1])
    assert sequence.step([0, 1, 1], num_committed=3)
    for _ in range(20):
        sequence.check()
    sequence.cache.suspend()
    if is_over:
        driver.device.step(1000)
    driver.manager.close()
    driver.abandon()
    return _findings(driver)


def _look_at_memory(driver: Driver) -> None:
    """After ``finish_transfers`` the calling thread may read all memory of the levels."""
    driver.manager.finish_transfers()
    for level in driver.manager._storage.levels:
        for pool in (pool for group in level.groups for pool in group.memory):
            size = pool.num_slots * pool.slot_bytes
            driver.device.host_access(reads=[ByteRange(pool.base_address, size)])


def _finish_transfers(ignored: set[tuple[str, int]]) -> Findings:
    driver = _small_driver(ignored, host_blocks=8)
    first = driver.engine.create()
    assert first.resume()
    assert first.step([0] * 8)
    first.cache.suspend()
    second = driver.engine.create()
    assert second.resume()
    assert second.cache.resize(8)
    _look_at_memory(driver)
    second.cache.close()
    assert first.resume()
    _look_at_memory(driver)
    assert driver.manager.stats().moved_pages.keys() == {"hot-host", "host-hot"}
    driver.manager.close()
    driver.abandon()
    return _findings(driver)


def _copy_on_write(ignored: set[tuple[str, int]], *, seed: int) -> Findings:
    """A page just written is copied into a slot that is just being offloaded."""
    driver = _small_driver(ignored, seed, host_blocks=8)
    other = driver.engine.create()
    assert other.resume()
    assert other.step([1] * 4)
    other.cache.suspend()
    sequence = driver.engine.create()
    assert sequence.resume(driver.streams[1])
    assert sequence.step([0, 1, 1])
    fork = sequence.fork()
    assert sequence.step([0])
    sequence.check()
    assert driver.manager.stats().totals["copied_on_write_pages"] == 1
    assert driver.manager.stats().moved_pages["hot-host"] == 1
    fork.cache.close()
    sequence.cache.suspend()
    driver.manager.close()
    driver.abandon()
    return _findings(driver)


def _shared_pages(ignored: set[tuple[str, int]], *, seed: int) -> Findings:
    """Pages that pass from stream to stream: by commit, by fork, by copying, by recomputing."""
    driver = _small_driver(ignored, seed)
    _, a, b = driver.streams
    first = driver.engine.create()
    assert first.resume(a)
    assert first.step([0, 1, 0, 1])
    twin = driver.engine.create([0, 1, 0, 1])
    assert twin.resume(b)
    twin.cache.synchronize()
    twin.check()
    twin.cache.close()
    assert first.step([1], num_committed=4)
    fork = first.fork()
    assert fork.resume(b)
    fork.cache.synchronize()
    fork.check()
    first.check()
    assert first.step([1])
    assert fork.cache.resize(6, 4)
    fork.forget_from(4)
    fork.cache.synchronize()
    fork.write([0])
    first.cache.suspend()
    fork.cache.suspend()
    # Only the fork's blocks come back, and both sequences lose them.
    greedy = driver.engine.create()
    assert greedy.resume()
    assert greedy.step([0] * 8)
    greedy.cache.close()
    first.truncate(4)
    assert first.resume(a)
    assert fork.resume(b)
    first.cache.synchronize()
    fork.cache.synchronize()
    assert len(first.recompute()) == 2
    fork.cache.synchronize()
    fork.check()
    first.cache.close()
    fork.cache.close()
    driver.manager.close()
    driver.abandon()
    return _findings(driver)


def _on_rig(
    play: Callable[[Rig], None], ignored: set[tuple[str, int]], **settings: int
) -> Findings:
    rig = Rig(**settings)  # type: ignore[arg-type]
    rig.device.ignored_wait_sites |= ignored
    try:
        play(rig)
        rig.manager.close()
    except AssertionError:  # the scenes look for violations themselves
        assert rig.device.violations or rig.engine.problems, "something other than a violation"
    finally:
        rig.abandon()
    return [str(violation) for violation in rig.device.violations] + rig.engine.problems


def _cut_off_with_work(ignored: set[tuple[str, int]], *, seed: int) -> Findings:
    """A level becomes smaller while a caller's stream works, or has worked for all the manager
    knows, on pages that nobody holds any more.
    """

    def play(rig: Rig) -> None:
        low = filled(rig, [1] * 8)
        high = rig.create()
        assert high.resume(rig.streams[1])
        assert high.step([0] * 8, num_committed=0)
        for _ in range(5):
            high.check()
        rig.close(high)
        rig.device.step(6 * seed)
        rig.resize(0, 4)
        low.cache.suspend()

    return _on_rig(play, ignored, seed=seed, hot=8, host=4)


def _spilled_at_once(ignored: set[tuple[str, int]], *, seed: int) -> Findings:
    """Pages go on to disk that have only just arrived in host memory, or not yet."""

    def play(rig: Rig) -> None:
        suspended(rig, [seed] * 8)
        asker = rig.create()
        assert asker.resume()
        assert asker.cache.resize(8)
        rig.device.step(seed)
        rig.manager.poll()
        rig.manager.finish_transfers()
        assert rig.manager.stats().moved_pages["host-disk"] == 2

    return _on_rig(play, ignored, seed=seed, hot=4, host=4, disk=8)


def _random_walk(seed: int) -> Scenario:
    def walk(ignored: set[tuple[str, int]]) -> Findings:
        with pytest.MonkeyPatch.context() as patch:
            # Finished events are forgotten all the time, not only after hundreds.
            patch.setattr(coldpage.slots, "SWEEP_INTERVAL_EVENTS", 2 + seed % 7)
            return _walk(seed, ignored)

    return walk


def _walk(seed: int, ignored: set[tuple[str, int]]) -> Findings:
    num_host, num_disk = [(0, 0), (6, 0), (0, 6), (5, 6), (4, 20)][seed % 5]
    per_block, is_ring_tiny = 2 + seed % 3, seed % 2 == 0
    setup = Setup(KINDS[seed % 4], per_block, 8, num_host, num_disk, is_ring_tiny)
    driver = Driver(setup, seed)
    driver.device.ignored_wait_sites |= ignored
    try:
        Walk(driver, seed, with_faults=seed % 3 == 0).run(250)
        driver.finish()
    except AssertionError:
        assert _findings(driver), "something other than a violation"
    finally:
        driver.abandon()
    return _findings(driver)


SCENARIOS: list[Scenario] = [
    _ring,
    partial(_close_with_work, is_over=False),
    partial(_close_with_work, is_over=True),
    _finish_transfers,
]
SCENARIOS += [partial(_shared_pages, seed=seed) for seed in range(10)]
SCENARIOS += [partial(_copy_on_write, seed=seed) for seed in range(10)]
SCENARIOS += [partial(_cut_off_with_work, seed=seed) for seed in range(5)]
SCENARIOS += [partial(_spilled_at_once, seed=seed) for seed in range(8)]
SCENARIOS += [_random_walk(seed) for seed in range(MAX_WALKS)]


@pytest.mark.parametrize("site", SITES, ids=str)
def test_a_wait_taken_out_is_caught(site: WaitSite) -> None:
    for scenario in SCENARIOS:
        if scenario(site.keys()):
            return
    raise AssertionError(f"without {site} no scenario of {len(SCENARIOS)} shows a violation")


@pytest.mark.parametrize("site", ORDERINGS, ids=str)
def test_an_event_not_given_is_caught(site: WaitSite, monkeypatch: pytest.MonkeyPatch) -> None:
    order_after = CodecMoves.order_after
    places = site.keys()

    def leave_out(moves: CodecMoves, pages: Int32Array, stream: Stream) -> None:
        caller = inspect.stack(context=0)[1]
        if (Path(caller.filename).name, caller.lineno) not in places:
            order_after(moves, pages, stream)

    monkeypatch.setattr(CodecMoves, "order_after", leave_out)
    for scenario in SCENARIOS:
        if scenario(set()):
            return
    raise AssertionError(f"without {site} no scenario of {len(SCENARIOS)} shows a violation")


def test_nothing_is_found_with_every_wait_in_place() -> None:
    for scenario in SCENARIOS[:-MAX_WALKS] + SCENARIOS[-MAX_WALKS:][:8]:
        assert scenario(set()) == []


def test_every_wait_that_was_made_is_listed() -> None:
    driver = Driver(Setup("mixed", host_blocks=5, disk_blocks=6))
    Walk(driver, 1, with_faults=True).run(400)
    driver.finish()
    listed = set().union(*(site.keys() for site in SITES))
    in_package = {path.name for path in _files()}
    made = {key for key in driver.device.wait_sites if key[0] in in_package}
    assert len(made) > 10
    assert made <= listed
