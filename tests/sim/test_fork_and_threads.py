"""A fork copies nothing until somebody writes, and nobody but its thread touches a manager."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable

import pytest

from coldpage import KVCache, KVCacheManager, WrongThreadError
from coldpage.device.simulated_stream import SimulatedStream
from coldpage.types import Int64Array
from tests.sim.rig import Rig
from tests.sim.scenes import Build, filled, prompt, push_out, resumed, suspended, totals

# They read what never changes after the manager was made.
CONSTANT = {"layer_group_of"}


# Forks


class Traffic:
    """Bytes that streams were asked to copy, and all that they were asked to do."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_submissions = 0

    def taken(self) -> tuple[int, int]:
        """What there was since the last call."""
        found = self.num_bytes, self.num_submissions
        self.num_bytes = self.num_submissions = 0
        return found


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    counted = Traffic()
    copy, begin = SimulatedStream.copy, SimulatedStream._begin

    def count_copy(
        self: SimulatedStream, dst: Int64Array, src: Int64Array, num_bytes: Int64Array
    ) -> None:
        counted.num_bytes += int(num_bytes.sum())
        copy(self, dst, src, num_bytes)

    def count_any(self: SimulatedStream, what: str) -> object:
        counted.num_submissions += 1
        return begin(self, what)

    monkeypatch.setattr(SimulatedStream, "copy", count_copy)
    monkeypatch.setattr(SimulatedStream, "_begin", count_any)
    return counted


@pytest.mark.parametrize("kind", ["full", "mixed-sizes"])
def test_a_fork_copies_no_byte_until_a_write(build: Build, traffic: Traffic, kind: str) -> None:
    rig = build(hot=16, host=16, kind=kind)
    page_bytes = sum(sum(sizes) for sizes in rig.layout.slot_bytes)
    sequence = filled(rig, prompt(3)[:5], num_committed=5)  # the last block is half full
    used = rig.used
    traffic.taken()
    forks = [rig.adopt(sequence.fork()) for _ in range(3)]
    for fork in forks:
        assert fork.cache.resume()
        fork.cache.synchronize()
        fork.check()
        assert fork.cache.page_indices(0).tolist() == sequence.cache.page_indices(0).tolist()
    assert traffic.taken() == (0, 0)
    assert rig.used == used
    # The first to write gets its own last block: one page in each layer group.
    assert forks[0].step([7], num_committed=5)
    assert traffic.taken() == (page_bytes, len(rig.layout.slot_bytes))
    assert forks[0].cache.page_indices(0)[:2].tolist() == [
        *sequence.cache.page_indices(0)[:2].tolist()
    ]
    assert forks[1].step([8], num_committed=5)
    assert sequence.step([9], num_committed=5)
    assert traffic.taken()[0] == 2 * page_bytes
    assert forks[2].step([6], num_committed=5)
    assert traffic.taken() == (0, 0), "it is the last one that has the old page"
    # Whole blocks that come next are nobody else's.
    for member in (sequence, *forks):
        assert member.step([1, 2, 3], num_committed=5)
    assert traffic.taken() == (0, 0)
    for member in (sequence, *forks):
        member.check()
        member.cache.suspend()
    groups = len(rig.layout.layer_groups)
    assert totals(rig, "copied_on_write_pages") == 3 * groups


def test_a_fork_at_the_end_of_a_block_never_copies(build: Build, traffic: Traffic) -> None:
    rig = build(hot=16)
    sequence = filled(rig, prompt(3))
    fork = rig.adopt(sequence.fork())
    traffic.taken()
    assert sequence.step([1, 2])
    assert fork.cache.resume()
    assert fork.step([3, 4])
    assert traffic.taken() == (0, 0)


def test_a_fork_of_what_is_cold_moves_nothing_and_comes_back_once(
    build: Build, traffic: Traffic
) -> None:
    rig = build(hot=8, host=8)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 8)
    traffic.taken()
    fork = rig.adopt(sequence.fork())
    assert traffic.taken() == (0, 0)
    assert rig.used == [0, 4]
    page_bytes = sum(rig.layout.slot_bytes[0])
    resumed(rig, fork)
    assert traffic.taken()[0] == 4 * page_bytes
    resumed(rig, sequence)
    assert traffic.taken() == (0, 0)


# Threads


def public_methods(owner: type) -> list[str]:
    """Every method that a caller may use."""
    return sorted(
        name
        for name, member in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_") and name not in CONSTANT
    )


def bound(thing: object, name: str) -> Callable[[], object]:
    """The call, with nothing sensible in it: the thread is looked at first."""
    method = getattr(thing, name)
    parameters = inspect.signature(method).parameters.values()
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    positional = [None for p in required if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    named = {p.name: None for p in required if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return lambda: method(*positional, **named)


def outcomes(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What another thread gets."""
    found: dict[str, str] = {}

    def intrude() -> None:
        for name, call in calls.items():
            try:
                call()
            except Exception as error:
                found[name] = type(error).__name__
            else:
                found[name] = "nothing"

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    return found


def expect_trapped(rig: Rig, thing: object, names: list[str]) -> None:
    assert len(names) > 10
    before = rig.used, rig.manager.stats()
    found = outcomes({name: bound(thing, name) for name in names})
    assert found == dict.fromkeys(names, WrongThreadError.__name__)
    rig.check()
    assert (rig.used, rig.manager.stats()) == before


def test_every_method_of_a_manager_traps_another_thread(build: Build) -> None:
    rig = build(hot=6, host=4, disk=8)
    sequence = filled(rig, prompt(3))
    expect_trapped(rig, rig.manager, public_methods(KVCacheManager))
    sequence.check()


@pytest.mark.parametrize("is_active", [True, False])
def test_every_method_of_a_sequence_traps_another_thread(build: Build, is_active: bool) -> None:
    rig = build(hot=6, host=4, disk=8)
    sequence = filled(rig, prompt(3))
    if not is_active:
        sequence.cache.suspend()
    expect_trapped(rig, sequence.cache, public_methods(KVCache))
    if not is_active:
        resumed(rig, sequence)
    sequence.check()


def test_the_thread_that_made_a_manager_owns_it(build: Build) -> None:
    """Also when that is not the main thread."""
    rigs: list[Rig] = []
    is_made, is_over = threading.Event(), threading.Event()

    def own() -> None:
        rigs.append(Rig(hot=4))
        is_made.set()
        is_over.wait()  # the ids of threads that have ended are used again
        rigs[0].finish()

    owner = threading.Thread(target=own)
    owner.start()
    is_made.wait()
    try:
        with pytest.raises(WrongThreadError, match="belongs to the thread that made it"):
            rigs[0].manager.stats()
    finally:
        is_over.set()
        owner.join()
    assert rigs[0].device._world.is_closed, "its own thread may do everything"
