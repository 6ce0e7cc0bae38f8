"""What the parts of the simulated device share: scheduler, known order, faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coldpage.device.simulated_history import (
    AccessHistory,
    CallSite,
    Clock,
    IoOrder,
    Origin,
    call_site,
    join_clocks,
)
from coldpage.errors import ClosedError, SubmissionError

__all__ = ["SimulatedCounts", "SimulatedFaults", "WorkSource", "World"]


@dataclass(slots=True)
class SimulatedFaults:
    """What goes wrong, and how often (probabilities). May be changed at any time."""

    submission_failure_rate: float = 0.0  # launch, copy and upload raise SubmissionError
    io_failure_rate: float = 0.0  # an I/O job is not run and counts as failed
    io_delay_rate: float = 0.0  # an I/O job is held back ...
    io_delay_rounds: int = 50  # ... for 1 to this many rounds of the scheduler
    is_io_held: bool = False  # no I/O job runs at all: a disk that hangs


@dataclass(slots=True)
class SimulatedCounts:
    """What happened so far."""

    submissions: int = 0
    failed_submissions: int = 0
    executed_ops: int = 0
    executed_io_jobs: int = 0
    failed_io_jobs: int = 0
    delayed_io_jobs: int = 0


class WorkSource(Protocol):
    """Something with queued work: a stream, or the I/O."""

    def runnable(self, round_index: int) -> Sequence[Callable[[], None]]:
        """What may run next; running it also takes it off the queue."""

    def next_round(self) -> int | None:
        """The first round in which something held back may run; None when nothing is."""


class World:
    """What is queued, what the host knows to have completed, and what shall go wrong."""

    def __init__(self, seed: int, faults: SimulatedFaults, history: AccessHistory) -> None:
        self.faults = faults
        self.history = history
        self.counts = SimulatedCounts()
        self.schedule = random.Random(seed)
        # Apart, so that a fault more or less does not change the whole schedule.
        self.luck = random.Random(~seed)
        self.sources: list[WorkSource] = []
        self.host_clock: Clock = ()
        self.wait_sites: set[tuple[str, int]] = set()
        self.ordering_wait_sites: set[tuple[str, int]] = set()
        self.ignored_wait_sites: set[tuple[str, int]] = set()
        self.forwarding_files: set[str] = set()
        self.planned_failures: Counter[str | None] = Counter()
        self.hidden: list[range] = []  # addresses that the host can not reach
        self.is_closed = False
        self._round = 0
        self._num_origins = 0

    def check_open(self) -> None:
        """Raise ClosedError after the device was closed."""
        if self.is_closed:
            raise ClosedError("the device is closed")

    def step(self, num_ops: int) -> int:
        """Run up to ``num_ops`` queued operations in some legal order; how many there were."""
        for index in range(num_ops):
            if not self._run_one():
                return index
        return num_ops

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run queued operations until ``is_reached``, which they must lead to."""
        while not is_reached():
            assert self._run_one(), "what is waited for can never complete: I/O is held"

    def wait_site(self) -> CallSite:
        """The place that waits: the nearest caller that does not forward somebody else's wait."""
        return call_site(self.forwarding_files)

    def note_wait(self, site: CallSite, *, adds_order: bool) -> bool:
        """Remember that a wait was made at ``site``; whether it counts."""
        self.wait_sites.add(site.key)
        if adds_order:
            self.ordering_wait_sites.add(site.key)
        return site.key not in self.ignored_wait_sites

    def observe(self, clock: Clock, site: CallSite) -> None:
        """The host learnt at ``site`` that what ``clock`` says has completed."""
        joined = join_clocks(self.host_clock, clock)
        if self.note_wait(site, adds_order=joined != self.host_clock):
            self.host_clock = joined

    def observe_io(self, order: IoOrder, site: CallSite) -> None:
        """The host learnt at ``site`` that an I/O batch is done."""
        is_new = not order.is_observed
        if self.note_wait(site, adds_order=is_new) and is_new:
            order.observed_at = self._num_origins

    def origin(
        self, what: str, clock: Clock, place: tuple[int, int] = (-1, 0), io: IoOrder | None = None
    ) -> Origin:
        """The caller's next accesses, which come after ``clock``; ``place`` is the stream's number
        and the operation's in it.
        """
        self._num_origins += 1
        return Origin(what, call_site(), self._num_origins, clock, *place, io)

    def maybe_fail_submission(self, stream_name: str) -> None:
        """Raise SubmissionError where a fault is planned or luck has it."""
        self.counts.submissions += 1
        fails = self.luck.random() < self.faults.submission_failure_rate
        for name in (stream_name, None):
            if self.planned_failures[name] > 0:
                self.planned_failures[name] -= 1
                fails = True
                break
        if fails:
            self.counts.failed_submissions += 1
            raise SubmissionError(f"a fault was injected into stream {stream_name!r}")

    def first_io_round(self) -> int:
        """The first round of the scheduler in which an I/O job submitted now may end."""
        if self.luck.random() >= self.faults.io_delay_rate:
            return 0
        self.counts.delayed_io_jobs += 1
        return self._round + self.luck.randint(1, self.faults.io_delay_rounds)

    def _run_one(self) -> bool:
        self._round += 1
        choices = self._runnable()
        if not choices:
            later = [r for source in self.sources if (r := source.next_round()) is not None]
            if not later:
                return False
            self._round = min(later)  # nothing else to do: time passes
            choices = self._runnable()
        choices[self.schedule.randrange(len(choices))]()
        return True

    def _runnable(self) -> list[Callable[[], None]]:
        return [run for source in self.sources for run in source.runnable(self._round)]
