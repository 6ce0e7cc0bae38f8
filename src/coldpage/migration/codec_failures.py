"""Calls of codecs that fail for good: counted, logged, and remembered of the pages that can not be
encoded, so that nobody asks for it again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from coldpage.codecs import statistics_names
from coldpage.events import StorageEvents
from coldpage.migration.codec_calls import CodecFailedError
from coldpage.page import PageTable
from coldpage.pools import LevelPools
from coldpage.types import HOT_LEVEL, Int32Array

__all__ = ["CodecFailures"]

_logger = logging.getLogger(__name__)


class CodecFailures:
    """What codecs of one manager have failed at. Owned by its thread."""

    def __init__(
        self,
        levels: Sequence[LevelPools],
        table: PageTable,
        events: StorageEvents,
        class_names: Sequence[str],
    ) -> None:
        """``class_names`` is the page class of each life cycle."""
        self._cold_levels = levels[HOT_LEVEL + 1 :]
        self._table = table
        self._events = events
        self._class_names = class_names
        self._logged: set[tuple[str, ...]] = set()
        codecs = list({level.codec.identity: level.codec for level in self._cold_levels}.values())
        names = statistics_names(codecs)
        self._labels = {c.identity: name for c, name in zip(codecs, names, strict=True)}
        for label in self._labels.values():  # there from the start: a rate needs a sample
            events.codec_failures.update({(label, "encode"): 0, (label, "decode"): 0})

    def note(
        self, error: CodecFailedError, pages: Int32Array, source: LevelPools, target: LevelPools
    ) -> None:
        """The move of the pages has failed: what they were to become is void."""
        codec, call = error.codec, error.call
        self._events.codec_failures[self._labels[codec.identity], call] += 1
        if call == "encode":
            for level in self._cold_levels:
                if level.codec is codec:
                    self._table.failed_encodes[pages] |= level.bit
        elif target.level != HOT_LEVEL:  # they can not be made into another codec's form
            self._table.failed_encodes[pages] |= target.bit
        self._log(error, pages, target if call == "encode" else source)

    def _log(self, error: CodecFailedError, pages: Int32Array, level: LevelPools) -> None:
        """Once for each kind of pages, with one traceback for all kinds."""
        life_cycles = np.unique(self._table.life_cycle[pages]).tolist()
        classes = " and ".join(sorted({self._class_names[i] for i in life_cycles}))
        call = error.codec.identity, error.call
        kind = (*call, level.name, classes)
        if kind in self._logged:
            return
        is_first = call not in self._logged
        self._logged |= {call, kind}
        _logger.error(
            "%s failed in %s of %s pages of the %s tier, which are recomputed when they are "
            "needed: give the tier another codec (codec_failures counts, logged once): %r",
            error.codec.name_and_package,
            error.call,
            classes,
            level.name,
            error.__cause__,
            exc_info=error.__cause__ if is_first else None,
        )
