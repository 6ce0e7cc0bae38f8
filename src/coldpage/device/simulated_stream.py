"""Streams and events of the simulated device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Accesses, Event, PageParts, Stream, work_error
from coldpage.device.copies import (
    CopyList,
    has_overlap,
    launch_page_copy,
    merge_copies,
    page_copies,
    run_copies,
    write_bytes,
)
from coldpage.device.simulated_history import (
    CallSite,
    Clock,
    LateCheck,
    Origin,
    Range,
    ViolationError,
    ViolationKind,
    call_site,
    join_clocks,
    ranges_of,
)
from coldpage.device.simulated_world import World
from coldpage.types import PAGE_INDEX_PAIR, DeviceArray, Int64Array, MemAddress

__all__ = ["MAX_STEPS_PER_POLL", "SimulatedEvent", "SimulatedStream"]

# How much may run behind the caller's back in one ``is_done``.
MAX_STEPS_PER_POLL: Final = 3


class SimulatedEvent(Event):
    """The first ``num_ops`` operations of a stream."""

    def __init__(self, stream: SimulatedStream, num_ops: int, clock: Clock) -> None:
        self._stream = stream
        self._num_ops = num_ops
        self._clock = clock

    def is_done(self) -> bool:
        """Whether the work has completed; some queued work may run first."""
        world = self._stream._world
        world.step(world.schedule.randint(0, MAX_STEPS_PER_POLL))
        if not self._has_completed():
            return False
        self._observe()
        return True

    def synchronize(self) -> None:
        """Run queued work until this is done."""
        self._stream._world.run_until(self._has_completed)
        self._observe()

    def _has_completed(self) -> bool:
        return self._stream._num_completed >= self._num_ops

    def _observe(self) -> None:
        self._stream._raise_failure(self._num_ops)
        world = self._stream._world
        world.observe(self._clock, world.wait_site())


@dataclass(slots=True)
class _Op:
    """An entry of a stream's queue: work, or (``event``) a wait."""

    work: Callable[[], None] | None = None
    event: SimulatedEvent | None = None
    late: _LateAccesses | None = None


@dataclass(slots=True)
class _LateAccesses:
    """The accesses of work that names them when it runs."""

    check: LateCheck
    reads: Accesses
    writes: Accesses

    def name(self) -> tuple[list[Range], list[Range]]:
        """What the work will read and write, asked just before it runs."""
        return _named(self.reads), _named(self.writes)


def _named(accesses: Accesses) -> list[Range]:
    return ranges_of(accesses() if callable(accesses) else accesses)


class SimulatedStream(Stream):
    """A queue of the simulated device. Poisoned by work that raises, as a stream of the host is."""

    def __init__(self, world: World, name: str, index: int) -> None:
        self.name = name
        self._world = world
        self._index = index
        self._clock: Clock = (0,) * (index + 1)
        self._queue: deque[_Op] = deque()
        self._num_submitted = 0
        self._num_completed = 0
        self._failure: Exception | None = None
        self._failed_op = 0
        self._is_failure_reported = False

    def launch(
        self,
        work: Callable[[], None],
        *,
        reads: Accesses,
        writes: Accesses,
    ) -> None:
        """Enqueue ``work``. Its accesses are checked now or, where functions name them, when it
        runs, by the order that it has now.
        """
        work = self.named(work)
        if not (callable(reads) or callable(writes)):
            self._submit("launch", work, ranges_of(reads), ranges_of(writes))
            return
        origin = self._begin("launch")
        late = _LateAccesses(self._world.history.check_late(origin), reads, writes)
        self._enqueue(_Op(work=work, late=late), origin.clock)

    def copy(self, dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> None:
        """Enqueue the copies as one operation. Their accesses are checked now."""
        assert dst.shape == src.shape == num_bytes.shape, "three [num_copies] arrays"
        copies: CopyList = merge_copies(
            dst.astype(np.int64), src.astype(np.int64), num_bytes.astype(np.int64)
        )
        to, source, size = (column.tolist() for column in copies)
        self._check_apart("copy", copies, call_site())
        self._submit(
            "copy",
            lambda: run_copies(copies),
            list(zip(source, size, strict=True)),
            list(zip(to, size, strict=True)),
        )

    def copy_pages(self, parts: PageParts, pairs: DeviceArray) -> None:
        """Enqueue the copies as one operation. Their accesses are checked when it runs, and that
        the host has the same pairs.
        """
        site = call_site()
        expected = (
            None if pairs.host is None else page_copies(parts, pairs.host.view(PAGE_INDEX_PAIR))
        )

        def check(copies: CopyList) -> None:
            for found, wanted in zip(copies, expected or copies, strict=True):
                assert np.array_equal(found, wanted), "the pairs on the host are other ones"
            self._check_apart("copy of pages", merge_copies(*copies), site)

        launch_page_copy(self, parts, pairs, check)

    def _check_apart(self, what: str, copies: CopyList, site: CallSite) -> None:
        if has_overlap(copies):
            self._world.history.report(
                ViolationKind.RACE,
                f"{what} on stream {self.name!r} at {site} writes bytes that it also reads or "
                "writes elsewhere",
                (site,),
            )

    def upload(self, dst: MemAddress, data: npt.NDArray[np.uint8]) -> None:
        """Enqueue the copy of the array as it is now. Its access is checked now."""
        assert data.dtype == np.uint8 and data.ndim == 1, "bytes [num_bytes]"
        kept = data.tobytes()
        writes = [(int(dst), len(kept))] if kept else []
        self._submit("upload", lambda: write_bytes(dst, kept), [], writes)

    def record(self) -> SimulatedEvent:
        """An event for all work enqueued so far."""
        self._world.check_open()
        self._raise_failure()
        return SimulatedEvent(self, self._num_submitted, self._clock)

    def wait(self, event: Event) -> None:
        """Hold later work until ``event`` is done."""
        assert isinstance(event, SimulatedEvent), "an event of the simulated device"
        assert event._stream._world is self._world, "an event of this device"
        self._world.check_open()
        self._raise_failure()
        joined = join_clocks(self._clock, event._clock)
        known = join_clocks(self._clock, self._world.host_clock)
        adds_order = join_clocks(known, event._clock) != known
        if not self._world.note_wait(self._world.wait_site(), adds_order=adds_order):
            return
        self._enqueue(_Op(event=event), joined)

    def synchronize(self) -> None:
        """Run queued work until this stream is empty."""
        num_ops = self._num_submitted
        self._world.run_until(lambda: self._num_completed >= num_ops)
        self._raise_failure()
        self._world.observe(self._clock, self._world.wait_site())

    def _submit(
        self, what: str, work: Callable[[], None], reads: list[Range], writes: list[Range]
    ) -> None:
        origin = self._begin(what)
        can_run = self._world.history.check(reads, writes, origin)
        self._enqueue(_Op(work=work if can_run else None), origin.clock)

    def _begin(self, what: str) -> Origin:
        """The next operation, not enqueued yet. Raises where it can not be."""
        world = self._world
        world.check_open()
        self._raise_failure()
        world.maybe_fail_submission(self.name)
        epoch = self._num_submitted + 1
        clock = join_clocks(self._clock, world.host_clock)
        clock = (*clock[: self._index], epoch, *clock[self._index + 1 :])
        return world.origin(f"{what} on stream {self.name!r}", clock, (self._index, epoch))

    def _enqueue(self, op: _Op, clock: Clock) -> None:
        self._queue.append(op)
        self._num_submitted += 1
        # A wait is an operation too: an event recorded after it completes after it.
        self._clock = (*clock[: self._index], self._num_submitted, *clock[self._index + 1 :])

    def runnable(self, round_index: int) -> Sequence[Callable[[], None]]:
        """The head of the queue, unless it waits."""
        if not self._queue:
            return ()
        event = self._queue[0].event
        return (self._run_next,) if event is None or event._has_completed() else ()

    def next_round(self) -> int | None:
        """Streams hold nothing back."""
        return None

    def num_unknown_ops(self) -> int:
        """How many of the last operations the host does not know to have completed."""
        known = self._world.host_clock[self._index : self._index + 1]
        return self._num_submitted - (known[0] if known else 0)

    def raise_unreported_failure(self) -> None:
        """Raise DeviceError when work failed and no call has told so yet."""
        if not self._is_failure_reported:
            self._raise_failure()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue

    def _run_next(self) -> None:
        op = self._queue.popleft()
        try:
            self._run(op)
        except ViolationError:
            raise  # for whoever let the work run; the stream is not to blame
        except Exception as error:  # kept, and raised at the owner's next call
            self._failure, self._failed_op = error, self._num_completed
        finally:
            self._num_completed += 1
            self._world.counts.executed_ops += 1

    def _run(self, op: _Op) -> None:
        can_run = self._failure is None
        if op.late is not None:
            can_run = self._name_accesses(op.late)
        if not can_run:
            return
        if op.event is not None:
            op.event._stream._raise_failure(op.event._num_ops)
        elif op.work is not None:
            op.work()

    def _name_accesses(self, late: _LateAccesses) -> bool:
        """Let the check be made, of nothing where the work does not run; whether it can."""
        reads: list[Range] = []
        writes: list[Range] = []
        try:
            if self._failure is None:
                reads, writes = late.name()
        finally:
            can_run = self._world.history.resolve(late.check, reads, writes)
        return can_run and self._failure is None

    def _raise_failure(self, num_ops: int | None = None) -> None:
        if self._failure is not None and (num_ops is None or self._failed_op < num_ops):
            self._is_failure_reported = True
            raise work_error(self.name, self._failure) from self._failure
