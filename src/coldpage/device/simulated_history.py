"""What the simulated device knows of memory: which ranges live, who touched which bytes last.

Each stream is a component of the vector clocks, each I/O batch has a flag of its own, and the host
(the one thread that submits) is always "now". An operation's order is all known when it is
submitted, since an event exists before anything waits for it: accesses are checked then, whatever
order they run in later. Where the ranges of one are known only when it runs, the checks of what was
submitted after it wait for them, so that all are made in the order of submission.

Per byte only the frontier is kept (FastTrack): the last write, and the reads after it that no later
read follows. What is unordered with an older access is unordered with the frontier too.
"""

from __future__ import annotations

import enum
import os
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from coldpage.types import ByteRange

__all__ = [
    "AccessHistory",
    "CallSite",
    "Clock",
    "IoOrder",
    "LateCheck",
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
    OUT_OF_REACH = "out of reach"  # I/O on memory that the host can not reach
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
    """When the host learnt that an I/O batch is done; what it submits later comes after."""

    observed_at: int | None = None  # the number of the last origin before that

    @property
    def is_observed(self) -> bool:
        """Whether the host knows that the batch is done."""
        return self.observed_at is not None


@dataclass(slots=True, eq=False)
class Origin:
    """An operation, as the source of accesses: what it comes after, and its place in a stream or
    its I/O batch. Origins are numbered as the host makes them.
    """

    what: str
    site: CallSite
    number: int
    clock: Clock
    stream_index: int = -1
    epoch: int = 0
    io: IoOrder | None = None

    def is_before(self, later: Origin) -> bool:
        """Whether ``later``, which the host made after this one, is ordered after it."""
        if self.io is not None:
            return self.io.observed_at is not None and self.io.observed_at < later.number
        index = self.stream_index
        return index < len(later.clock) and later.clock[index] >= self.epoch

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"


@dataclass(slots=True)
class _Allocation:
    """A range of which the first ``num_bytes`` live, cut into segments with one frontier each."""

    base: int
    num_bytes: int
    freed_at: CallSite | None = None  # where its end was cut off last, or all of it
    freed_stop: int = 0  # below this address it lived once
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


@dataclass(slots=True, eq=False)
class LateCheck:
    """The check of an operation; its ranges may still be unknown. The host's own accesses leave
    nothing to remember: all it submits later comes after.
    """

    origin: Origin
    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)
    is_known: bool = False
    is_remembered: bool = True


class AccessHistory:
    """Checks each access against the live allocations and the accesses before it."""

    def __init__(self, *, raise_on_violation: bool) -> None:
        self.raise_on_violation = raise_on_violation
        self.violations: list[Violation] = []
        self._known: set[tuple[object, ...]] = set()
        self._bases: list[int] = []
        self._allocations: list[_Allocation] = []
        self._waiting: deque[LateCheck] = deque()  # in the order of submission

    @property
    def is_waiting(self) -> bool:
        """Whether the ranges of something submitted are not known yet."""
        return not all(check.is_known for check in self._waiting)

    def add(self, base: int, num_bytes: int) -> None:
        """A new allocation, above all others."""
        allocation = _Allocation(base, 0)
        self._bases.append(base)
        self._allocations.append(allocation)
        self.grow(base, num_bytes)

    def grow(self, base: int, num_bytes: int) -> None:
        """The allocation at ``base`` gets fresh bytes at its end, so that it has ``num_bytes``."""
        allocation = self._allocations[bisect_left(self._bases, base)]
        if allocation.num_bytes < num_bytes:
            allocation.starts.append(allocation.stop)
            allocation.writes.append(None)
            allocation.reads.append(())
            allocation.num_bytes = num_bytes

    def cut_off(self, base: int, num_bytes: int, origin: Origin) -> None:
        """The host frees all but the first ``num_bytes`` of the allocation at ``base``.

        Only when nothing is waiting.
        """
        self._make_known_checks()
        assert not self._waiting, "what comes before is checked first"
        allocation = self._allocations[bisect_left(self._bases, base)]
        size = allocation.num_bytes - num_bytes
        if size <= 0:
            return
        first, _ = allocation.cut(base + num_bytes, size)
        doubtful = [
            user
            for write, reads in zip(
                allocation.writes[first:], allocation.reads[first:], strict=True
            )
            for user in (*reads, *((write,) if write is not None else ()))
            if not user.is_before(origin)
        ]
        del allocation.starts[first:], allocation.writes[first:], allocation.reads[first:]
        allocation.freed_at = origin.site
        allocation.freed_stop = max(allocation.freed_stop, allocation.stop)
        allocation.num_bytes = num_bytes
        for user in doubtful:
            self.report(
                ViolationKind.USE_AFTER_FREE,
                f"memory freed at {origin.site} while {user} may still use it",
                (origin.site, user.site),
            )

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

    def check(self, reads: Iterable[Range], writes: Iterable[Range], origin: Origin) -> bool:
        """Check the accesses of an operation that is submitted now, and remember them.

        Returns whether all of them lie in memory that exists, so that the operation can run at all.
        """
        check = self.check_late(origin)
        return self.resolve(check, reads, writes)

    def check_host(self, reads: Iterable[Range], writes: Iterable[Range], origin: Origin) -> None:
        """Check what the host does now."""
        check = self.check_late(origin)
        check.is_remembered = False
        self.resolve(check, reads, writes)

    def check_late(self, origin: Origin) -> LateCheck:
        """The check of an operation that is submitted now, and whose ranges will be known later."""
        check = LateCheck(origin)
        self._waiting.append(check)
        return check

    def resolve(self, check: LateCheck, reads: Iterable[Range], writes: Iterable[Range]) -> bool:
        """The ranges of ``check`` are known; none when its operation does not run after all.

        Returns whether all of them lie in memory that exists, so that the operation can run at all.
        """
        assert not check.is_known, "an operation names its ranges once"
        lost: list[tuple[str, Range]] = []
        for verb, ranges, kept in (("read", reads, check.reads), ("write", writes, check.writes)):
            for piece in ranges:
                if self._find(*piece) is None:
                    lost.append((verb, piece))
                else:
                    kept.append(piece)
        check.is_known = True
        for verb, piece in lost:
            self._report_lost(verb, *piece, check.origin)
        self._make_known_checks()
        return not lost

    def _make_known_checks(self) -> None:
        while self._waiting and self._waiting[0].is_known:
            check = self._waiting.popleft()
            for start, size in check.reads:
                self._access(start, size, check, False)
            for start, size in check.writes:
                self._access(start, size, check, True)

    def _access(self, start: int, size: int, check: LateCheck, is_write: bool) -> None:
        allocation, origin = self._find(start, size), check.origin
        assert allocation is not None, "memory is freed only when nothing is waiting"
        if not check.is_remembered:
            self._find_races(allocation, allocation.covering(start, size), origin, is_write)
            return
        first, last = allocation.cut(start, size)
        self._find_races(allocation, (first, last), origin, is_write)
        if is_write:
            allocation.starts[first:last] = [start]
            allocation.writes[first:last] = [origin]
            allocation.reads[first:last] = [()]
            return
        for index in range(first, last):
            after = [r for r in allocation.reads[index] if not r.is_before(origin)]
            if not after or after[-1] is not origin:
                after.append(origin)
            allocation.reads[index] = tuple(after)

    def _find_races(
        self, allocation: _Allocation, segments: tuple[int, int], origin: Origin, is_write: bool
    ) -> None:
        verb = "writes" if is_write else "reads"
        for index in range(*segments):
            write = allocation.writes[index]
            if write is not None and write is not origin and not write.is_before(origin):
                self._report_race(f"{origin} {verb}", f"{write} writes", (origin, write))
            for read in allocation.reads[index] if is_write else ():
                if read is not origin and not read.is_before(origin):
                    self._report_race(f"{origin} {verb}", f"{read} reads", (origin, read))

    def _nearest(self, start: int) -> _Allocation | None:
        index = bisect_right(self._bases, start) - 1
        return self._allocations[index] if index >= 0 else None

    def _find(self, start: int, size: int) -> _Allocation | None:
        """The allocation in which all the bytes live; None when there is none."""
        allocation = self._nearest(start)
        if allocation is None or size <= 0 or start + size > allocation.stop:
            return None
        return allocation

    def _report_lost(self, verb: str, start: int, size: int, origin: Origin) -> None:
        allocation = self._nearest(start)
        would = f"{origin} would {verb} {size} bytes at {start:#x}, "
        if allocation is None or size <= 0 or start + size > allocation.freed_stop:
            self.report(
                ViolationKind.OUT_OF_BOUNDS, would + "which lie in no allocation", (origin.site,)
            )
            return
        assert allocation.freed_at is not None, "what does not live any more was freed"
        self.report(
            ViolationKind.USE_AFTER_FREE,
            would + f"in memory that was freed at {allocation.freed_at}",
            (origin.site, allocation.freed_at),
        )

    def _report_race(self, this: str, that: str, origins: tuple[Origin, Origin]) -> None:
        self.report(
            ViolationKind.RACE,
            f"{this} bytes that {that}, and nothing orders the two",
            tuple(origin.site for origin in origins),
        )
