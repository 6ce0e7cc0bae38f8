"""Vector clocks and pruned histories against a naive transitive closure, on random programs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from coldpage.device.base import Completion, Event, IoJob, MemoryKind
from coldpage.device.simulated import SimulatedDevice, ViolationKind
from coldpage.types import ByteRange, MemAddress

_NUM_STREAMS = 3
_CELL_BYTES = 8
_NUM_CELLS = 6

Cells = tuple[int, int]  # half-open


@dataclass
class _Node:
    reads: list[Cells]
    writes: list[Cells]
    after: set[int]  # every node that happens before this one


@dataclass
class _Naive:
    """Nodes in the order of submission; ``after`` is closed under transitivity as it is built."""

    nodes: list[_Node] = field(default_factory=list)
    host: set[int] = field(default_factory=set)
    streams: list[set[int]] = field(default_factory=lambda: [set() for _ in range(_NUM_STREAMS)])

    def add(
        self, after: set[int], reads: list[Cells], writes: list[Cells]
    ) -> tuple[set[int], bool]:
        """What happens before anything after the new node, and whether it races."""
        self.nodes.append(_Node(reads, writes, set(after)))
        new = len(self.nodes) - 1
        races = any(
            _conflict(self.nodes[old], self.nodes[new]) for old in range(new) if old not in after
        )
        return after | {new}, races


def _conflict(a: _Node, b: _Node) -> bool:
    pairs = [(x, y) for x in a.writes for y in b.reads + b.writes]
    pairs += [(x, y) for x in a.reads for y in b.writes]
    return any(x[0] < y[1] and y[0] < x[1] for x, y in pairs)


_cells = st.tuples(st.integers(0, _NUM_CELLS - 1), st.integers(1, 3)).map(
    lambda c: (c[0], min(c[0] + c[1], _NUM_CELLS))
)
_accesses = st.tuples(st.lists(_cells, max_size=2), st.lists(_cells, max_size=2))
_stream = st.integers(0, _NUM_STREAMS - 1)
_which = st.integers(0, 30)
_actions = st.one_of(
    st.tuples(st.just("launch"), _stream, _accesses),
    st.tuples(st.just("launch"), _stream, _accesses),
    st.tuples(st.just("record"), _stream, st.none()),
    st.tuples(st.just("wait"), _stream, _which),
    st.tuples(st.just("wait"), _stream, _which),
    st.tuples(st.just("host"), st.none(), _accesses),
    st.tuples(st.just("io"), st.none(), st.lists(_accesses, min_size=1, max_size=2)),
    st.tuples(st.just("event"), st.booleans(), _which),
    st.tuples(st.just("batch"), st.booleans(), _which),
    st.tuples(st.just("drain"), _stream, st.none()),
)


class _Pair:
    """The device and the naive model, driven by the same actions.

    With ``late``, every so many launches name their ranges only when they run.
    """

    def __init__(self, seed: int, late: int = 0) -> None:
        self.late = late
        self.device = SimulatedDevice(seed)
        self.memory = self.device.allocate(_NUM_CELLS * _CELL_BYTES, MemoryKind.DEVICE)
        self.streams = [self.device.create_stream(str(i)) for i in range(_NUM_STREAMS)]
        self.naive = _Naive()
        self.events: list[tuple[Event, set[int]]] = []
        self.batches: list[tuple[Completion, set[int]]] = []

    def ranges(self, cells: list[Cells]) -> list[ByteRange]:
        base = self.memory.address
        return [
            ByteRange(MemAddress(base + a * _CELL_BYTES), (b - a) * _CELL_BYTES) for a, b in cells
        ]

    def run(self, kind: str, where: object, what: object) -> bool:
        """Do it on both; whether the naive model sees a race."""
        return bool(getattr(self, kind)(where, what))

    def launch(self, index: int, accesses: tuple[list[Cells], list[Cells]]) -> bool:
        reads, writes = self.ranges(accesses[0]), self.ranges(accesses[1])
        if self.late and len(self.naive.nodes) % self.late == 0:
            self.streams[index].launch(lambda: None, reads=lambda: reads, writes=lambda: writes)
        else:
            self.streams[index].launch(lambda: None, reads=reads, writes=writes)
        after = self.naive.streams[index] | self.naive.host
        self.naive.streams[index], races = self.naive.add(after, *accesses)
        return races

    def record(self, index: int, _: None) -> None:
        self.events.append((self.streams[index].record(), set(self.naive.streams[index])))

    def wait(self, index: int, which: int) -> None:
        if self.events:
            event, before = self.events[which % len(self.events)]
            self.streams[index].wait(event)
            self.naive.streams[index] |= before

    def host(self, _: None, accesses: tuple[list[Cells], list[Cells]]) -> bool:
        self.device.host_access(reads=self.ranges(accesses[0]), writes=self.ranges(accesses[1]))
        self.naive.host, races = self.naive.add(self.naive.host, *accesses)
        return races

    def io(self, _: None, jobs: list[tuple[list[Cells], list[Cells]]]) -> bool:
        batch = self.device.io.submit(
            [
                IoJob(lambda: True, tuple(self.ranges(reads)), tuple(self.ranges(writes)))
                for reads, writes in jobs
            ]
        )
        results = [self.naive.add(self.naive.host, *accesses) for accesses in jobs]
        self.batches.append((batch, set().union(*(before for before, _ in results))))
        return any(races for _, races in results)

    def event(self, is_polled: bool, which: int) -> None:
        self._observe(self.events, is_polled, which)

    def batch(self, is_polled: bool, which: int) -> None:
        self._observe(self.batches, is_polled, which)

    def drain(self, index: int, _: None) -> None:
        self.streams[index].synchronize()
        self.naive.host |= self.naive.streams[index]

    def _observe(
        self,
        known: list[tuple[Event, set[int]]] | list[tuple[Completion, set[int]]],
        is_polled: bool,
        which: int,
    ) -> None:
        if not known:
            return
        completion, before = known[which % len(known)]
        if is_polled:
            is_done = completion.is_done()
        else:
            completion.synchronize()
            is_done = True
        if is_done:
            self.naive.host |= before


@settings(max_examples=400)
@given(st.integers(0, 1000), st.lists(_actions, max_size=40))
def test_the_first_race_is_the_naive_models(
    seed: int, actions: list[tuple[str, object, object]]
) -> None:
    pair = _Pair(seed)
    for action in actions:
        races = pair.run(*action)
        found = {violation.kind for violation in pair.device.violations}
        assert found == ({ViolationKind.RACE} if races else set()), action
        if races:
            return


class _ForgetsAll(set[tuple[object, ...]]):
    """So that each violation counts as new, also at a place that had one."""

    def __contains__(self, _: object) -> bool:
        return False


def _findings(seed: int, actions: list[tuple[str, object, object]], late: int) -> list[str]:
    """What the device says of the program, in its order, without the numbers of lines."""
    pair = _Pair(seed, late)
    pair.device._history._known = _ForgetsAll()
    for action in actions:
        pair.run(*action)
    pair.memory.free()
    pair.device.close()
    return [re.sub(r":\d+", "", str(v)) for v in pair.device.violations]


@settings(max_examples=300)
@given(st.integers(0, 1000), st.integers(1, 3), st.lists(_actions, max_size=40))
def test_ranges_named_late_give_the_findings_of_ranges_named_early(
    seed: int, late: int, actions: list[tuple[str, object, object]]
) -> None:
    assert _findings(seed, actions, late) == _findings(seed, actions, 0)


@settings(max_examples=100)
@given(st.integers(0, 1000), st.lists(_actions, max_size=40))
def test_a_program_that_waits_for_all_it_did_is_silent(
    seed: int, actions: list[tuple[str, object, object]]
) -> None:
    pair = _Pair(seed)
    for action in actions:
        pair.run(*action)
        for stream in range(_NUM_STREAMS):
            pair.drain(stream, None)
        for completion, _ in pair.batches:
            completion.synchronize()
    assert all("I/O job" in v.sentence for v in pair.device.violations)  # two jobs of one batch
    assert {v.kind for v in pair.device.violations} <= {ViolationKind.RACE}
    before = len(pair.device.violations)
    pair.memory.free()
    pair.device.close()
    assert len(pair.device.violations) == before
