"""What the simulated device knows of memory: which ranges live, who touched which bytes last.

Each stream is a component of the vector clocks, each I/O batch has a flag of its own, and the host
(the one thread that submits) is always "now". An operation's order is all known when it is
submitted, since an event exists before anything waits for it: accesses are checked then, whatever
order they run in later.

Per byte only the frontier is kept (FastTrack): the last write, and the reads after it that no later
read follows. What is unordered with an older access is unordered with the frontier too.
"""

from __future__ import annotations

import enum
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from coldpage.types import ByteRange

__all__ = [
    "AccessHistory",
    "CallSite",
    "Clock",
    "IoOrder",
    "Origin",
    "Range",
    "Violation",
    "ViolationError",
    "ViolationKind",
    "call_site",
    "join_clocks",
    "ranges_of",
]

# Per stream, how many of its operations are known to have completed: index is the stream's number.
Clock = tuple[int, ...]

# First address and number of bytes.
Range = tuple[int, int]

_DEVICE_DIRECTORY = os.path.dirname(__file__) + os.sep

# Enough to see who called the codec that called the stream.
_SITE_DEPTH = 3


def ranges_of(ranges: Sequence[ByteRange]) -> list[Range]:
    """The ranges as plain pairs."""
    return [(r.address, r.num_bytes) for r in ranges]


class ViolationKind(enum.Enum):
    """What went wrong."""

    RACE = "race"  # two overlapping accesses, at least one a write, that nothing orders
    USE_AFTER_FREE = (
        "use after free"  # an access to freed memory, or a free that work in flight needs
    )
    OUT_OF_BOUNDS = "out of bounds"  # a range that lies in no allocation
    LEAK = "leak"  # at close: work nobody waited for, or memory nobody freed


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding. ``sites`` are the places ("file.py:12") of the accesses it names."""

    kind: ViolationKind
    sentence: str
    sites: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.sentence}"


class ViolationError(AssertionError):
    """A violation, raised where it was found because ``raise_on_violation`` is set."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a call came into the device from, innermost caller first."""

    frames: tuple[tuple[str, int], ...]

    @property
    def key(self) -> tuple[str, int]:
        """The caller's file name without directories, and its line."""
        path, line = self.frames[0]
        return os.path.basename(path), line

    def __str__(self) -> str:
        return " < ".join(f"{os.path.basename(path)}:{line}" for path, line in self.frames)


def call_site(forwarding_files: Collection[str] = ()) -> CallSite:
    """The nearest callers outside this package and outside files of these names."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_DEVICE_DIRECTORY)
        or os.path.basename(frame.f_code.co_filename) in forwarding_files
    ):
        frame = frame.f_back
    frames = [(frame.f_code.co_filename, frame.f_lineno)]
    while frame.f_back is not None and len(frames) < _SITE_DEPTH:
        frame = frame.f_back
        frames.append((frame.f_code.co_filename, frame.f_lineno))
    return CallSite(tuple(frames))


def join_clocks(a: Clock, b: Clock) -> Clock:
    """What either knows to have completed. A shorter clock knows nothing of younger streams."""
    if len(a) < len(b):
        a, b = b, a
    return tuple(map(max, a, b)) + a[len(b) :]


@dataclass(slots=True)
class IoOrder:
    """Whether the host knows that an I/O batch is done; what it submits then comes after."""

    is_observed: bool = False


@dataclass(slots=True, eq=False)
class Origin:
    """An operation, as the source of accesses: its place in a stream, or its I/O batch."""

    what: str
    site: CallSite
    stream_index: int = -1
    epoch: int = 0
    io: IoOrder | None = None

    def is_before(self, clock: Clock) -> bool:
        """Whether an operation submitted now with ``clock`` comes after this one."""
        if self.io is not None:
            return self.io.is_observed
        return self.stream_index < len(clock) and clock[self.stream_index] >= self.epoch

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"


@dataclass(slots=True)
class _Allocation:
    """A live or freed range, cut into segments with one frontier each."""

    base: int
    num_bytes: int
    site: CallSite
    freed_at: CallSite | None = None
    starts: list[int] = field(default_factory=list)
    writes: list[Origin | None] = field(default_factory=list)
    reads: list[tuple[Origin, ...]] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The address after the last byte."""
        return self.base + self.num_bytes

    def covering(self, start: int, size: int) -> tuple[int, int]:
        """The half-open range of segments that ``size`` bytes at ``start`` touch."""
        return bisect_right(self.starts, start) - 1, bisect_left(self.starts, start + size)

    def cut(self, start: int, size: int) -> tuple[int, int]:
        """The half-open range of segments that are exactly these bytes, split where needed."""
        first = self._cut_at(start)
        if start + size == self.stop:
            return first, len(self.starts)
        return first, self._cut_at(start + size)

    def _cut_at(self, address: int) -> int:
        index = bisect_left(self.starts, address)
        if index == len(self.starts) or self.starts[index] != address:
            self.starts.insert(index, address)
            self.writes.insert(index, self.writes[index - 1])
            self.reads.insert(index, self.reads[index - 1])
        return index


class AccessHistory:
    """Checks each access against the live allocations and the accesses before it."""

    def __init__(self, *, raise_on_violation: bool) -> None:
        self.raise_on_violation = raise_on_violation
        self.violations: list[Violation] = []
        self._known: set[tuple[object, ...]] = set()
        self._bases: list[int] = []
        self._allocations: list[_Allocation] = []

    def add(self, base: int, num_bytes: int) -> None:
        """A new allocation, above all others."""
        allocation = _Allocation(base, num_bytes, call_site())
        allocation.starts, allocation.writes, allocation.reads = [base], [None], [()]
        self._bases.append(base)
        self._allocations.append(allocation)

    def remove(self, base: int, clock: Clock) -> None:
        """The host frees the allocation at ``base``, knowing ``clock``."""
        allocation = self._allocations[bisect_left(self._bases, base)]
        site = call_site()
        for write, reads in zip(allocation.writes, allocation.reads, strict=True):
            for origin in (*reads, *((write,) if write is not None else ())):
                if not origin.is_before(clock):
                    self.report(
                        ViolationKind.USE_AFTER_FREE,
                        f"memory freed at {site} while {origin} may still use it",
                        (site, origin.site),
                    )
        allocation.freed_at = site
        allocation.starts, allocation.writes, allocation.reads = [], [], []

    def report(self, kind: ViolationKind, sentence: str, sites: tuple[CallSite, ...]) -> None:
        """Record a violation, once per kind and call sites; raise it where that is asked for."""
        key = (kind, *sites) if kind is not ViolationKind.LEAK else (kind, sentence)
        if key in self._known:
            return
        self._known.add(key)
        violation = Violation(kind, sentence, tuple(str(site) for site in sites))
        self.violations.append(violation)
        if self.raise_on_violation:
            raise ViolationError(str(violation))

    def check(
        self, reads: Iterable[Range], writes: Iterable[Range], origin: Origin, clock: Clock
    ) -> bool:
        """Check the accesses of an operation that comes after ``clock``, and remember them.

        Returns whether all of them lie in memory that exists, so that the operation can run at all.
        """
        # A list: every range is checked even after one failed.
        checked = [self._check_read(start, size, origin, clock) for start, size in reads]
        checked += [self._check_write(start, size, origin, clock) for start, size in writes]
        return all(checked)

    def check_host(
        self, reads: Iterable[Range], writes: Iterable[Range], origin: Origin, clock: Clock
    ) -> None:
        """Check what the host does now. Nothing to remember: all it submits later comes after."""
        for start, size in reads:
            allocation = self._find("read", start, size, origin)
            if allocation is not None:
                self._find_races(allocation, allocation.covering(start, size), origin, clock, False)
        for start, size in writes:
            allocation = self._find("write", start, size, origin)
            if allocation is not None:
                self._find_races(allocation, allocation.covering(start, size), origin, clock, True)

    def _check_read(self, start: int, size: int, origin: Origin, clock: Clock) -> bool:
        allocation = self._find("read", start, size, origin)
        if allocation is None:
            return False
        segments = allocation.cut(start, size)
        self._find_races(allocation, segments, origin, clock, False)
        for index in range(*segments):
            after = [r for r in allocation.reads[index] if not r.is_before(clock)]
            if not after or after[-1] is not origin:
                after.append(origin)
            allocation.reads[index] = tuple(after)
        return True

    def _check_write(self, start: int, size: int, origin: Origin, clock: Clock) -> bool:
        allocation = self._find("write", start, size, origin)
        if allocation is None:
            return False
        first, last = allocation.cut(start, size)
        self._find_races(allocation, (first, last), origin, clock, True)
        allocation.starts[first:last] = [start]
        allocation.writes[first:last] = [origin]
        allocation.reads[first:last] = [()]
        return True

    def _find_races(
        self,
        allocation: _Allocation,
        segments: tuple[int, int],
        origin: Origin,
        clock: Clock,
        is_write: bool,
    ) -> None:
        verb = "writes" if is_write else "reads"
        for index in range(*segments):
            write = allocation.writes[index]
            if write is not None and write is not origin and not write.is_before(clock):
                self._report_race(f"{origin} {verb}", f"{write} writes", (origin, write))
            for read in allocation.reads[index] if is_write else ():
                if read is not origin and not read.is_before(clock):
                    self._report_race(f"{origin} {verb}", f"{read} reads", (origin, read))

    def _find(self, verb: str, start: int, size: int, origin: Origin) -> _Allocation | None:
        index = bisect_right(self._bases, start) - 1
        allocation = self._allocations[index] if index >= 0 else None
        if allocation is None or size <= 0 or start + size > allocation.stop:
            self.report(
                ViolationKind.OUT_OF_BOUNDS,
                f"{origin} would {verb} {size} bytes at {start:#x}, which lie in no allocation",
                (origin.site,),
            )
            return None
        if allocation.freed_at is not None:
            self.report(
                ViolationKind.USE_AFTER_FREE,
                f"{origin} would {verb} {size} bytes at {start:#x}, "
                f"in memory that was freed at {allocation.freed_at}",
                (origin.site, allocation.freed_at),
            )
            return None
        return allocation

    def _report_race(self, this: str, that: str, origins: tuple[Origin, Origin]) -> None:
        self.report(
            ViolationKind.RACE,
            f"{this} bytes that {that}, and nothing orders the two",
            tuple(origin.site for origin in origins),
        )
