"""Pages that may still be found on disk in slots that hold something else by now, or nothing."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Remains"]


class Remains:
    """Which keys may still stand in which slots' headers, although nobody wants them there.

    Until the slot has been written or erased, a crash could bring such a page back: a deletion is
    done only when the key remains nowhere.
    """

    def __init__(self) -> None:
        self._keys: dict[int, set[Hashable]] = {}
        self._slots: dict[Hashable, set[int]] = {}

    def __len__(self) -> int:
        """The number of slots with remains."""
        return len(self._keys)

    @property
    def slots(self) -> frozenset[int]:
        """All slots with remains."""
        return frozenset(self._keys)

    def add(self, slot: int, key: Hashable) -> None:
        """The slot's header may name ``key`` until something overwrites it."""
        self._keys.setdefault(slot, set()).add(key)
        self._slots.setdefault(key, set()).add(slot)

    def clear(self, slot: int) -> None:
        """The slot's header has been overwritten."""
        for key in self._keys.pop(slot, ()):
            slots = self._slots[key]
            slots.discard(slot)
            if not slots:
                del self._slots[key]

    def slots_of(self, key: Hashable) -> frozenset[int]:
        """Where the key may still stand."""
        return frozenset(self._slots.get(key, ()))
