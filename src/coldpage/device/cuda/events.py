"""Events of CUDA streams, whose handles return to a pool when the event is known to be done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from coldpage.device.base import Event, work_error
from coldpage.device.cuda.closing import run_all
from coldpage.device.cuda.driver import Context, Driver, DriverError
from coldpage.errors import DeviceError

__all__ = ["CudaEvent", "EventPool", "HostWork", "Timeline"]


class HostWork:
    """A host function on a stream, and the ones that it comes after. When one of those has failed
    it does not run; then, or when it raises, it has failed too.
    """

    def __init__(self, work: Callable[[], None], after: tuple[HostWork, ...]) -> None:
        self._work: Callable[[], None] | None = work
        self._after = after
        self.is_over = False
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Called by the driver. Never raises."""
        failed = [before.failure for before in self._after if before.failure is not None]
        if failed:
            self.failure = failed[0]
        else:
            assert self._work is not None
            try:
                self._work()
            except BaseException as raised:  # kept, and raised at the owner's next call
                self.failure = raised
        self._work, self._after = None, ()  # what it holds is needed no more
        self.is_over = True

    @property
    def is_fine(self) -> bool:
        """Whether it is over and nothing more need be known about it."""
        return self.is_over and self.failure is None


class EventPool:
    """Handles of events that nobody uses. A new event costs 1.5 us, one from here 0.1."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._free: list[int] = []

    def take(self) -> int:
        """A handle. The context is current."""
        if self._free:
            return self._free.pop()
        return self.driver.create_event()

    def give_back(self, handle: int) -> None:
        """The handle is free for the next event."""
        self._free.append(handle)

    def close(self, context: Context) -> None:
        """Destroy the handles, all of which are free."""
        handles, self._free = self._free, []
        with context:
            run_all(partial(self.driver.call, "cuEventDestroy_v2", handle) for handle in handles)


class CudaEvent(Event):
    """A point of a stream's timeline."""

    def __init__(self, timeline: Timeline, handle: int, host_work: tuple[HostWork, ...]) -> None:
        self.timeline = timeline
        self.handle: int | None = handle  # None: known to be done, or lost
        self.host_work = host_work
        self.is_lost = False  # its stream has ended, and nobody knows whether well

    def is_done(self) -> bool:
        """Whether the work has completed. Raises DeviceError when a host function failed, or the
        stream could not be finished.
        """
        if self.handle is not None and not self.timeline.is_done(self.handle):
            return False
        self._note_done()
        return True

    def synchronize(self) -> None:
        """Block until the work has completed. Raises DeviceError when a host function failed, or
        the stream could not be finished.
        """
        if self.handle is not None:
            self.timeline.synchronize(self.handle)
        self._note_done()

    def _note_done(self) -> None:
        if self.handle is not None:
            self.timeline.note_done(self)
        if self.is_lost:
            raise DeviceError(
                f"the stream {self.timeline.name!r} ended before this event was known to be done"
            )
        self.timeline.raise_failure(self.host_work)


class Timeline:
    """The events of one stream in order: when one is done, all before it are. It keeps each until
    then, so a handle is never used again while somebody could ask for its old event.
    """

    def __init__(self, name: str, context: Context, pool: EventPool) -> None:
        self.name = name
        self.num_failures_told = 0
        self._context = context
        self._pool = pool
        self._driver = pool.driver
        self._events: deque[CudaEvent] = deque()
        self._has_news = False

    def record(self, stream: int, host_work: tuple[HostWork, ...]) -> CudaEvent:
        """A new event at the end of the stream. The context is current."""
        self._sweep()
        handle = self._pool.take()
        try:
            self._driver.call("cuEventRecord", handle, stream)
        except DriverError:
            self._pool.give_back(handle)
            raise
        event = CudaEvent(self, handle, host_work)
        self._events.append(event)
        return event

    def _sweep(self) -> None:
        """Let go of the oldest events as far as they are done."""
        while self._events:
            handle = self._events[0].handle
            assert handle is not None, "events that are done have left"
            if not self._driver.is_event_done(handle):
                return
            self._release_first()

    def take_news(self) -> bool:
        """Whether an event was found done since the last call, now or by whoever asked before."""
        self._sweep()
        had_news, self._has_news = self._has_news, False
        return had_news

    @property
    def has_events(self) -> bool:
        """Whether an event is not known to be done."""
        return bool(self._events)

    def is_done(self, handle: int) -> bool:
        """Whether the event of this timeline has been reached."""
        return self._driver.is_event_done(handle)

    def synchronize(self, handle: int) -> None:
        """Block until the event of this timeline has been reached."""
        with self._context:
            self._driver.call("cuEventSynchronize", handle)

    def note_done(self, event: CudaEvent) -> None:
        """The event is done, and so are all before it."""
        while event.handle is not None:
            self._release_first()

    def _release_first(self) -> None:
        first = self._events.popleft()
        assert first.handle is not None
        self._pool.give_back(first.handle)
        first.handle = None
        self._has_news = True

    def raise_failure(self, host_work: tuple[HostWork, ...]) -> None:
        """Raise DeviceError when one of the functions failed."""
        for work in host_work:
            if work.failure is not None:
                self.num_failures_told += 1
                raise work_error(self.name, work.failure) from work.failure

    def close(self) -> None:
        """The stream has come to its end. Events that are not known to be done are lost then."""
        try:
            self._sweep()
        finally:
            while self._events:
                self._events[0].is_lost = True
                self._release_first()
