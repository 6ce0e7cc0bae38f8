"""Named conversations: the suspended caches of the sessions that no request runs in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coldpage.config import ReuseScope

if TYPE_CHECKING:
    from coldpage.sequence import KVCache

__all__ = ["SessionKey", "SessionStore"]


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session's name within its scope: equal names of two tenants are two sessions."""

    scope: ReuseScope
    name: str


class SessionStore:
    """At most ``max_sessions`` idle sessions; the one idle the longest is closed first.

    The store owns the caches put into it until they are taken. A closed session is not lost: its
    blocks stay in the cache as droppable ones and are found again by content.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._idle: OrderedDict[SessionKey, KVCache] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, key: SessionKey) -> KVCache | None:
        """Hand the session's cache over to the caller; None when it is new or in use."""
        return self._idle.pop(key, None)

    def put(self, key: SessionKey, kv_cache: KVCache) -> None:
        """Keep a suspended cache for the session's next turn, instead of an earlier one of that
        name.
        """
        earlier = self._idle.pop(key, None)
        if earlier is not None:
            earlier.close()
        self._idle[key] = kv_cache
        while len(self._idle) > self._max_sessions:
            _, oldest = self._idle.popitem(last=False)
            oldest.close()

    def close(self) -> None:
        """Close every session."""
        while self._idle:
            _, kv_cache = self._idle.popitem()
            kv_cache.close()
