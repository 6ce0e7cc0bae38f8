"""Whether a disk can be trusted now: a tier that fails is left alone for a while and tried again,
and serving goes on without it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = [
    "FIRST_RETRY_S",
    "LAST_RETRY_S",
    "MAX_READ_FAILURES",
    "MAX_WRITE_FAILURES",
    "HealthState",
    "TierHealth",
]

_log = logging.getLogger(__name__)

# One failure in a row may be that slot's; three writes (a full disk, a lost mount) are the tier's.
# Reads fail one by one where slots are damaged, so it takes more of them.
MAX_WRITE_FAILURES: Final = 3
MAX_READ_FAILURES: Final = 8
# The wait before a tier is tried again doubles from one to the other.
FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0


class HealthState(enum.Enum):
    """What a tier is good for."""

    OK = "ok"
    READ_ONLY = "read_only"  # writes failed in a row: what it has is still served
    OFF = "off"  # reads failed in a row: everything on it is a miss


class _Breaker:
    """Counts failures in a row of one kind, and says when to try again."""

    def __init__(self, max_failures: int, clock: Callable[[], float]) -> None:
        self._max_failures = max_failures
        self._clock = clock
        self._num_in_row = 0
        self._is_trying = False
        self._retry_at = 0.0
        self.retry_s = FIRST_RETRY_S
        self.is_open = False

    def may(self) -> bool:
        """Whether to do it: always, or as the one try of this while."""
        if not self.is_open:
            return True
        if self._clock() < self._retry_at:
            return False
        self._is_trying = True
        # If nobody tells how the try ended, there will be another.
        self._retry_at = self._clock() + self.retry_s
        return True

    def note(self, ok: bool) -> None:
        """How one ended."""
        if ok:
            self._num_in_row, self.retry_s = 0, FIRST_RETRY_S
            self.is_open = self._is_trying = False
            return
        self._num_in_row += 1
        if not self.is_open and self._num_in_row >= self._max_failures:
            self.is_open, self._is_trying = True, False
            self._retry_at = self._clock() + self.retry_s
        elif self._is_trying:  # what was under way when it opened fails too, and says nothing new
            self._is_trying = False
            self.retry_s = min(2 * self.retry_s, LAST_RETRY_S)
            self._retry_at = self._clock() + self.retry_s

    def close_on_trial(self) -> None:
        """Do it again; the next failure opens it at once."""
        self.is_open = self._is_trying = False
        self._num_in_row = self._max_failures - 1


class TierHealth:
    """The state of one tier, by how its I/O ended. One thread owns it.

    While writes (or reads) are off, ``may_write`` (``may_read``) says True once a while: what is
    done then is the try, and how it ends decides. Each change is one line in the log.
    """

    def __init__(
        self, name: str = "the disk tier", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = HealthState.OK
        self.num_write_failures = 0
        self.num_read_failures = 0
        self.num_changes = 0
        self._name = name
        self._writes = _Breaker(MAX_WRITE_FAILURES, clock)
        self._reads = _Breaker(MAX_READ_FAILURES, clock)

    def may_write(self) -> bool:
        """Whether to write now. A tier that is off is tried by a write too: it may have nothing
        left to read.
        """
        if self._reads.is_open:
            return self._reads.may()
        return self._writes.may()

    def may_read(self) -> bool:
        """Whether to read now; if not, what is asked for is a miss."""
        return self._reads.may()

    def note_write(self, ok: bool, reason: str = "") -> None:
        """How a write ended; ``reason`` is a sentence for the log."""
        self.num_write_failures += not ok
        if ok and self._reads.is_open:
            self._reads.close_on_trial()
        elif self._reads.is_open:
            self._reads.note(False)
        self._writes.note(ok)
        self._update(reason)

    def note_read(self, ok: bool, reason: str = "") -> None:
        """How a read ended; one that missed its deadline did not end well."""
        self.num_read_failures += not ok
        self._reads.note(ok)
        self._update(reason)

    def _update(self, reason: str) -> None:
        state = HealthState.OK
        if self._reads.is_open:
            state = HealthState.OFF
        elif self._writes.is_open:
            state = HealthState.READ_ONLY
        if state is self.state:
            return
        self.state = state
        self.num_changes += 1
        because = f" ({reason})" if reason else ""
        if state is HealthState.OK:
            _log.warning("%s works again: it is read and written as before", self._name)
        elif state is HealthState.READ_ONLY:
            _log.error(
                "%s is read-only now: %d writes in a row failed%s; the next try is in %g s",
                self._name,
                MAX_WRITE_FAILURES,
                because,
                self._writes.retry_s,
            )
        else:
            _log.error(
                "%s is off now: %d reads in a row failed or took too long%s; the next try is in "
                "%g s, and what is on it is recomputed meanwhile",
                self._name,
                MAX_READ_FAILURES,
                because,
                self._reads.retry_s,
            )
