"""Named conversations: the suspended caches of the sessions that no request runs in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coldpage.config import ReuseScope

if TYPE_CHECKING:
    from coldpage.sequence import KVCache

__all__ = ["SessionKey", "SessionStore"]

# Numbers of sessions that are in use, erased, or never came to be: beyond those of idle ones.
_SPARE_NUMBERS: Final = 4096


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session's name within its scope: equal names of two tenants are two sessions."""

    scope: ReuseScope
    name: str


class SessionStore:
    """At most ``max_sessions`` idle sessions; the one idle the longest is closed first.

    The store owns the caches put into it until they are taken. A closed session is not lost: its
    blocks stay in the cache as droppable ones and are found again by content.

    Each session has a number, its slot id: the lowest that is free when its name is first used,
    and its own until it is removed, or closed for want of room.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._idle: OrderedDict[SessionKey, KVCache] = OrderedDict()
        self._numbers: OrderedDict[SessionKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def numbers(self) -> Mapping[SessionKey, int]:
        """The slot id of every session that has one."""
        return self._numbers

    def key_of(self, number: int) -> SessionKey | None:
        """The session of a slot id."""
        return next((key for key, own in self._numbers.items() if own == number), None)

    def number(self, key: SessionKey, wanted: int | None = None) -> int:
        """The session's slot id; a new one is ``wanted``, which must be free, or the lowest."""
        if key not in self._numbers:
            taken = set(self._numbers.values())
            lowest = next(n for n in range(len(taken) + 1) if n not in taken)
            assert wanted is None or wanted not in taken, "a slot id that is taken"
            self._numbers[key] = lowest if wanted is None else wanted
            if len(self._numbers) > self._max_sessions + _SPARE_NUMBERS:
                oldest = next(k for k in self._numbers if k not in self._idle and k != key)
                del self._numbers[oldest]
        return self._numbers[key]

    def get(self, key: SessionKey) -> KVCache | None:
        """The session's cache, which stays here; None when it has none or is in use."""
        return self._idle.get(key)

    def take(self, key: SessionKey) -> KVCache | None:
        """Hand the session's cache over to the caller; None when it is new or in use."""
        self.number(key)
        return self._idle.pop(key, None)

    def put(self, key: SessionKey, kv_cache: KVCache) -> None:
        """Keep a suspended cache for the session's next turn, instead of an earlier one of that
        name.
        """
        self.number(key)
        earlier = self._idle.pop(key, None)
        if earlier is not None:
            earlier.close()
        self._idle[key] = kv_cache
        while len(self._idle) > self._max_sessions:
            name, oldest = self._idle.popitem(last=False)
            self._numbers.pop(name, None)
            oldest.close()

    def remove(self, key: SessionKey) -> None:
        """Close the session and give its number back."""
        self._numbers.pop(key, None)
        kv_cache = self._idle.pop(key, None)
        if kv_cache is not None:
            kv_cache.close()

    def close(self) -> None:
        """Close every session."""
        self._numbers.clear()
        while self._idle:
            _, kv_cache = self._idle.popitem()
            kv_cache.close()
