"""What a codec loses on live pages: a sample of them is decoded again, and an alarm goes off when
that comes back worse than the format allows.

Whoever moves pages asks ``take`` which of them to check. Results come in from any thread by
``report`` and are counted when the codec's own thread next looks, so nobody waits for anybody.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coldpage.codecs.base import CodecErrors
from coldpage.kernels.cold.formats import ColdFormat
from coldpage.types import LayerGroupId

__all__ = ["ALARM_ERRORS", "CHECK_INTERVAL_PAGES", "CodecGuard"]

_logger = logging.getLogger(__name__)

CHECK_INTERVAL_PAGES: Final = 1000
"""One page of so many is checked."""

ALARM_ERRORS: Final[Mapping[ColdFormat, float | None]] = {
    ColdFormat.INT8: 0.02,
    ColdFormat.FP8: 0.06,
    ColdFormat.INT4_TOKEN: 0.2,
    ColdFormat.INT4_CHANNEL: 0.2,
    ColdFormat.TURBO4: 0.2,
    ColdFormat.TURBO3: 0.4,
    ColdFormat.INT4_BLOCK: None,
}
"""The relative error of a page, length of the difference over length, that is too large: about
twice that of Gaussian numbers (0.007, 0.026, 0.09, 0.07, 0.097, 0.19). None: nothing is."""

# Results that nobody has looked at; older ones are forgotten.
_MAX_WAITING: Final = 1024

# Squared lengths of the difference and of the page.
_Squares = tuple[float, float]


@dataclass(slots=True)
class _Group:
    """One layer group's numbers so far."""

    threshold: float | None
    num_samples: int = 0
    num_not_finite: int = 0
    sum_errors: float = 0.0
    max_error: float = 0.0
    last_error: float = 0.0
    is_alarmed: bool = False


class CodecGuard:
    """Counts of one codec. All but ``report`` and ``give_up`` is for one thread."""

    def __init__(self, codec_id: str, interval_pages: int) -> None:
        """An interval of 0 checks nothing."""
        self._codec_id = codec_id
        self._interval_pages = interval_pages
        self._num_pages = 0
        self._waiting: deque[tuple[LayerGroupId, _Squares]] = deque(maxlen=_MAX_WAITING)
        self._groups: dict[LayerGroupId, _Group] = {}
        self._has_failed = False

    def watch(self, layer_group_id: LayerGroupId, formats: frozenset[ColdFormat]) -> None:
        """The layer group has pages in these formats, of which the coarsest counts."""
        limits = [ALARM_ERRORS[cold_format] for cold_format in formats]
        known = [limit for limit in limits if limit is not None]
        threshold = max(known) if known and len(known) == len(limits) else None
        self._groups[layer_group_id] = _Group(threshold)

    def take(self, num_pages: int) -> range:
        """Which of the next pages are to be checked: the first ever and every so many after it."""
        start, self._num_pages = self._num_pages, self._num_pages + num_pages
        if not self._interval_pages:
            return range(0)
        return range(-start % self._interval_pages, num_pages, self._interval_pages)

    def report(self, layer_group_id: LayerGroupId, squares: _Squares) -> None:
        """The squared lengths of a page's error and of the page. Any thread may."""
        self._waiting.append((layer_group_id, squares))

    def give_up(self, error: Exception) -> None:
        """A page could not be checked, which is logged once: its move goes on. Any thread may."""
        if not self._has_failed:
            self._has_failed = True
            _logger.warning(
                "codec %s could not check a page (logged once): %r", self._codec_id, error
            )

    def count(self) -> None:
        """Take in what was reported, and say so once when a layer group loses too much."""
        while self._waiting:
            layer_group_id, (difference, length) = self._waiting.popleft()
            group = self._groups[layer_group_id]
            group.num_samples += 1
            if not (math.isfinite(difference) and math.isfinite(length)):
                group.num_not_finite += 1
                self._alarm(layer_group_id, group, "has numbers that are not finite")
                continue
            error = math.sqrt(difference / length) if length else float(difference > 0)
            group.sum_errors += error
            group.max_error = max(group.max_error, error)
            group.last_error = error
            if group.threshold is not None and error > group.threshold:
                text = f"came back with an error of {error:.3g}, over {group.threshold}"
                self._alarm(layer_group_id, group, text)

    def _alarm(self, layer_group_id: LayerGroupId, group: _Group, what: str) -> None:
        if not group.is_alarmed:
            group.is_alarmed = True
            _logger.warning(
                "codec %s loses too much of layer group %d: a page that was checked %s "
                "(logged once)",
                self._codec_id,
                layer_group_id,
                what,
            )

    def errors(self) -> tuple[CodecErrors, ...]:
        """The numbers now, by layer group; those that nothing was checked of are among them."""
        self.count()
        return tuple(
            CodecErrors(
                layer_group_id,
                group.num_samples,
                group.num_not_finite,
                group.sum_errors / max(1, group.num_samples - group.num_not_finite),
                group.max_error,
                group.last_error,
            )
            for layer_group_id, group in sorted(self._groups.items())
        )
