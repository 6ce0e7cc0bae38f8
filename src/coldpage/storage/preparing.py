"""Memory that a device prepares in the background: levels and staging grow into it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from coldpage.pools import LevelPools
from coldpage.staging import StagingRing
from coldpage.types import HOT_LEVEL, CacheLevel

__all__ = ["Preparing"]

_logger = logging.getLogger(__name__)

# Without anything new for so long nobody waits for the rest any more: it may never come.
_MAX_IDLE_S: Final = 5.0


class Preparing:
    """The levels of which the device still prepares memory, and the staging ring, if there is
    one.
    """

    def __init__(self, levels: Sequence[LevelPools], ring: StagingRing | None) -> None:
        self._all = levels
        self._ring = ring
        self._levels: list[LevelPools] = []
        self._num_ready = 0
        self._began_s = self._last_growth_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Look for what is not ready: at the start, and when a level has another size."""
        self._levels = [level for level in self._all if not level.is_complete]
        self._num_ready = self._count()
        self._began_s = self._last_growth_s = time.monotonic()

    def is_going_on(self, above: CacheLevel = HOT_LEVEL) -> bool:
        """Whether there will soon be more room below the level ``above``, or more staging. What is
        ready and was not taken yet, since nobody polled, counts however old it is; it is now.
        """
        before = self._num_ready
        self.advance()
        if self._num_ready != before:
            return True
        ring = self._ring
        is_staging_complete = ring is None or ring.num_ready_bytes == ring.num_bytes
        if is_staging_complete and not any(level.level > above for level in self._levels):
            return False
        return time.monotonic() - self._last_growth_s < _MAX_IDLE_S

    def advance(self) -> None:
        """Give the levels what is ready now."""
        for level in self._levels:
            for group in level.groups:
                group.take_ready()
            if level.is_complete:
                _logger.info(
                    "all memory of the %s tier is ready, after %.1f s",
                    level.name,
                    time.monotonic() - self._began_s,
                )
        if (num_ready := self._count()) != self._num_ready:
            self._num_ready, self._last_growth_s = num_ready, time.monotonic()
        self._levels = [level for level in self._levels if not level.is_complete]

    def _count(self) -> int:
        """Grows with whatever gets ready, and never shrinks but by a resize."""
        slots = sum(group.slots.num_ready for level in self._all for group in level.groups)
        return slots + (0 if self._ring is None else self._ring.num_ready_bytes)
