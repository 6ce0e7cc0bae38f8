"""File I/O of the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from coldpage.device.base import IoBatch, IoExecutor, IoJob
from coldpage.device.simulated_history import IoOrder, ViolationKind, ranges_of
from coldpage.device.simulated_stream import MAX_STEPS_PER_POLL
from coldpage.device.simulated_world import World
from coldpage.errors import DeviceError, UsageError

__all__ = ["SimulatedIo", "SimulatedIoBatch"]


class SimulatedIoBatch(IoBatch):
    """I/O jobs submitted together; they may end in any order."""

    def __init__(self, world: World, num_jobs: int) -> None:
        self._world = world
        self._ok = np.zeros(num_jobs, dtype=np.bool_)
        self._num_left = num_jobs
        self._error: Exception | None = None
        self._order = IoOrder()

    def is_done(self) -> bool:
        """Whether every job has ended; some queued work may run first."""
        self._world.step(self._world.schedule.randint(0, MAX_STEPS_PER_POLL))
        if self._num_left:
            return False
        self._observe()
        return True

    def synchronize(self) -> None:
        """Run queued work until every job has ended."""
        self._world.run_until(lambda: self._num_left == 0)
        self._observe()
        self._raise_error()

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Per job whether it succeeded. Does not order anything: ``is_done`` does."""
        if self._num_left:
            raise UsageError("the I/O batch is in flight: wait for is_done() before reading ok")
        self._raise_error()
        return self._ok

    def _observe(self) -> None:
        self._world.observe_io(self._order, self._world.wait_site())

    def _raise_error(self) -> None:
        if self._error is not None:
            raise DeviceError(
                f"an I/O job raised instead of returning False: {self._error!r}"
            ) from self._error


@dataclass(slots=True, eq=False)
class _QueuedJob:
    batch: SimulatedIoBatch
    index: int
    job: IoJob
    first_round: int  # of the scheduler, in which it may end

    def run(self, *, fails: bool) -> None:
        if not fails:
            try:
                self.batch._ok[self.index] = self.job.run()
            except Exception as error:  # kept, and raised to the owner
                self.batch._error = self.batch._error or error
        self.batch._num_left -= 1


class SimulatedIo(IoExecutor):
    """Jobs start in submission order on ``num_threads`` threads, and end in any order."""

    def __init__(self, world: World, num_threads: int) -> None:
        self._world = world
        self._num_threads = num_threads
        self._queue: list[_QueuedJob] = []
        self._batches: list[SimulatedIoBatch] = []

    def submit(self, jobs: Sequence[IoJob]) -> SimulatedIoBatch:
        """Queue the jobs. Their accesses are checked now."""
        world = self._world
        world.check_open()
        batch = SimulatedIoBatch(world, len(jobs))
        for index, job in enumerate(jobs):
            origin = world.origin(f"I/O job {index}", world.host_clock, io=batch._order)
            can_run = world.history.check(ranges_of(job.reads), ranges_of(job.writes), origin)
            if any(
                part.address in hidden
                for part in (*job.reads, *job.writes)
                for hidden in world.hidden
            ):
                sentence = f"{origin} would use memory that the host can not reach"
                world.history.report(ViolationKind.OUT_OF_REACH, sentence, (origin.site,))
            queued = _QueuedJob(
                batch, index, job if can_run else IoJob(bool), world.first_io_round()
            )
            self._queue.append(queued)
        if jobs:
            self._batches = [b for b in self._batches if not b._order.is_observed]
            self._batches.append(batch)
        return batch

    def close(self) -> None:
        """Run what is queued."""
        self._world.run_until(lambda: not self._queue)

    def runnable(self, round_index: int) -> Sequence[Callable[[], None]]:
        """The jobs on the threads that are not held back."""
        jobs = [job for job in self._in_flight() if job.first_round <= round_index]
        return [partial(self._run, job) for job in jobs]

    def next_round(self) -> int | None:
        """The first round in which a job on a thread may end."""
        return min((job.first_round for job in self._in_flight()), default=None)

    def num_unknown_batches(self) -> int:
        """How many batches the host does not know to be done."""
        return sum(not batch._order.is_observed for batch in self._batches)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue

    def _in_flight(self) -> list[_QueuedJob]:
        return [] if self._world.faults.is_io_held else self._queue[: self._num_threads]

    def _run(self, job: _QueuedJob) -> None:
        self._queue.remove(job)
        world = self._world
        fails = world.luck.random() < world.faults.io_failure_rate
        world.counts.failed_io_jobs += fails
        world.counts.executed_io_jobs += not fails
        job.run(fails=fails)
