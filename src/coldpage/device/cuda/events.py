"""Events of CUDA streams, whose handles return to a pool when the event is known to be done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from coldpage.device.base import Event
from coldpage.device.cuda.driver import Context, Driver
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
        self.num_created = 0

    def take(self) -> int:
        """A handle. The context is current."""
        if self._free:
            return self._free.pop()
        self.num_created += 1
        return self.driver.create_event()

    def give_back(self, handle: int) -> None:
        """The handle is free for the next event."""
        self._free.append(handle)

    def close(self) -> None:
        """Destroy the handles, all of which are free. The context is current."""
        for handle in self._free:
            self.driver.call("cuEventDestroy_v2", handle)
        self._free.clear()


class CudaEvent(Event):
    """A point of a stream's timeline."""

    def __init__(self, timeline: Timeline, handle: int, host_work: tuple[HostWork, ...]) -> None:
        self.timeline = timeline
        self.handle: int | None = handle  # None: known to be done
        self.host_work = host_work

    def is_done(self) -> bool:
        """Whether the work has completed. Raises DeviceError when a host function failed."""
        if self.handle is not None and not self.timeline.is_done(self.handle):
            return False
        self._note_done()
        return True

    def synchronize(self) -> None:
        """Block until the work has completed. Raises DeviceError when a host function failed."""
        if self.handle is not None:
            self.timeline.synchronize(self.handle)
        self._note_done()

    def _note_done(self) -> None:
        if self.handle is not None:
            self.timeline.note_done(self)
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

    def record(self, stream: int, host_work: tuple[HostWork, ...]) -> CudaEvent:
        """A new event at the end of the stream. The context is current."""
        self.sweep()
        handle = self._pool.take()
        self._driver.call("cuEventRecord", handle, stream)
        event = CudaEvent(self, handle, host_work)
        self._events.append(event)
        return event

    def sweep(self) -> bool:
        """Let go of the oldest events as far as they are done; whether there was one."""
        is_any = False
        while self._events:
            handle = self._events[0].handle
            assert handle is not None, "events that are done have left"
            if not self._driver.is_event_done(handle):
                break
            self._release_first()
            is_any = True
        return is_any

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

    def raise_failure(self, host_work: tuple[HostWork, ...]) -> None:
        """Raise DeviceError when one of the functions failed."""
        for work in host_work:
            if work.failure is not None:
                self.num_failures_told += 1
                raise DeviceError(
                    f"work on stream {self.name!r} failed: {work.failure!r}"
                ) from work.failure
