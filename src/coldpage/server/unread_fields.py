"""Request fields that nobody reads: a misspelled one would else be lost without a word."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from coldpage.server.metrics import ServerMetrics

__all__ = ["UnreadFields"]

_LOG = logging.getLogger(__name__)

# Names come from clients: neither the log nor memory grows without end.
_MAX_NAMES: Final = 100
_MAX_NAME_CHARS: Final = 64


class UnreadFields:
    """Counts the requests that have any, and logs each name once."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._seen: set[str] = set()

    def note(self, names: Sequence[str], known: Iterable[str]) -> None:
        """Those of one request; ``known`` are the names that it might have meant."""
        if not names:
            return
        self._metrics.count_unread_fields()
        for name in names:
            short = name[:_MAX_NAME_CHARS]
            if short in self._seen or len(self._seen) >= _MAX_NAMES:
                continue
            self._seen.add(short)
            near = difflib.get_close_matches(short, known, n=1, cutoff=0.8)
            hint = f"; {near[0]!r} is the name of one that is" if near else ""
            _LOG.warning("the request field %r is not read by this server%s", short, hint)
