"""What a blob store knows of its slots: which blob is where, and which slots can be had."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coldpage.store.format import BlobName
from coldpage.store.operations import Key
from coldpage.store.recovery import Recovered
from coldpage.store.remains import Remains
from coldpage.store.sidecar import ENTRY, SlotIndex, fill_entry
from coldpage.store.slot_file import SlotFile
from coldpage.types import BlockKey, Int32Array, Int64Array, LayerGroupId

__all__ = ["BlobSlots"]


class BlobSlots:
    """A slot is free, taken by a blob that ``slot_of`` names, being written (pinned), or waits to
    be erased.
    """

    def __init__(self, file: SlotFile, found: Recovered) -> None:
        num_slots, per_block = file.num_slots, file.identity.tokens_per_block
        self.slot_of: dict[Key, int] = {}
        self.remains = Remains()
        # One row a slot; of those that ``slot_of`` names all fields but the write number are true.
        self.index = SlotIndex(
            np.zeros(num_slots, ENTRY), np.zeros((num_slots, per_block), np.int32)
        )
        self._is_taken: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._num_pins: Int32Array = np.zeros(num_slots, np.int32)
        self._last_use: Int64Array = np.zeros(num_slots, np.int64)
        self._to_erase: dict[int, None] = {}  # in the order in which they came
        entries = found.index.entries
        slots = entries["slot"]
        self.index.entries[slots], self.index.tokens[slots] = entries, found.index.tokens
        self._last_use[slots] = entries["last_use"]
        self._is_unread: npt.NDArray[np.bool_] = self.index.entries["is_unread"] != 0
        self._next_use = max(time.time_ns(), int(self._last_use.max()) + 1)
        self._is_taken[slots] = True
        self.slot_of.update(zip(_keys(entries), slots.tolist(), strict=True))
        outdated = found.outdated.entries
        for key, slot in zip(_keys(outdated), outdated["slot"].tolist(), strict=True):
            self.remains.add(slot, key)
            self.erase_later(slot)
        is_free = ~self._is_taken
        is_free[outdated["slot"]] = False
        # The last is taken first: low slots first, so that a young file is written in order.
        self._free: list[int] = np.flatnonzero(is_free)[::-1].tolist()

    def taken(self, slots: Int32Array) -> SlotIndex:
        """The rows of these slots, as they are written to an index."""
        entries = self.index.entries[slots]
        entries["slot"], entries["last_use"] = slots, self._last_use[slots]
        entries["is_unread"] = self._is_unread[slots]
        return SlotIndex(entries, self.index.tokens[slots])

    def touch(self, slot: int) -> None:
        """The slot's blob is used now."""
        self._last_use[slot] = self._next_use
        self._next_use += 1

    def is_unread(self, slot: int) -> bool:
        """Whether the slot's payload may never have been written."""
        return bool(self._is_unread[slot])

    def note_read(self, slot: int) -> None:
        """The slot's payload is what its header says."""
        self._is_unread[slot] = False

    def take_free(self, num_wanted: int) -> list[int]:
        """Up to so many free slots."""
        num_taken = min(num_wanted, len(self._free))
        return [self._free.pop() for _ in range(num_taken)]

    def evict(self, num_wanted: int) -> list[int]:
        """The slots of up to so many blobs, used longest ago, which are not found any more."""
        if num_wanted <= 0:
            return []
        candidates = np.flatnonzero(self._is_taken & (self._num_pins == 0))
        if candidates.size > num_wanted:
            oldest = np.argpartition(self._last_use[candidates], num_wanted - 1)[:num_wanted]
            candidates = candidates[oldest]
        slots: list[int] = candidates.tolist()
        for slot, key in zip(slots, _keys(self.index.entries[candidates]), strict=True):
            self._forget(slot, key)
        return slots

    def pin(self, slots: Sequence[int]) -> None:
        """The slots are being read or written."""
        np.add.at(self._num_pins, slots, 1)

    def unpin(self, slots: Sequence[int]) -> None:
        """Once for each ``pin``."""
        np.subtract.at(self._num_pins, slots, 1)
        assert (self._num_pins[slots] >= 0).all(), "an unpin without a pin"

    def add(self, slot: int, key: Key, name: BlobName) -> None:
        """The slot holds this blob."""
        self.slot_of[key] = slot
        self._is_taken[slot] = True
        self._is_unread[slot] = False
        fill_entry(self.index, slot, name)
        self.touch(slot)

    def discard(self, key: Key) -> int:
        """The blob is not found any more, and its slot is erased; which it was."""
        slot = self.slot_of[key]
        self._forget(slot, key)
        self.erase_later(slot)
        return slot

    def key_in(self, slot: int) -> Key | None:
        """The blob that the slot holds, if any."""
        return _keys(self.index.entries[slot : slot + 1])[0] if self._is_taken[slot] else None

    def _forget(self, slot: int, key: Key) -> None:
        del self.slot_of[key]
        self._is_taken[slot] = False
        self.remains.add(slot, key)

    def erase_later(self, slot: int) -> None:
        """The slot is free once it has been erased."""
        self._to_erase[slot] = None

    def erasable(self) -> list[int]:
        """Slots that wait to be erased and are not in use."""
        return [slot for slot in self._to_erase if not self._num_pins[slot]]

    def start_erasing(self, slots: Sequence[int]) -> None:
        """They are being erased."""
        self.pin(slots)
        for slot in slots:
            del self._to_erase[slot]

    def end_erasing(self, slot: int, ok: bool) -> None:
        """It is free now, or is to be erased again."""
        self.unpin([slot])
        if ok:
            self.remains.clear(slot)
            self._free.append(slot)
        else:
            self.erase_later(slot)

    def check_integrity(self, busy: Sequence[int]) -> None:
        """Every slot is exactly one of free, taken, waiting to be erased, or ``busy``: written or
        erased now.
        """
        taken = np.flatnonzero(self._is_taken).tolist()
        everything = sorted([*self._free, *taken, *self._to_erase, *busy])
        assert everything == list(range(self._is_taken.size)), "a slot is lost, or twice somewhere"
        assert sorted(self.slot_of.values()) == taken, "the index and the slots agree"
        assert all(self.key_in(slot) == key for key, slot in self.slot_of.items()), "by key too"
        assert not set(self._free) & self.remains.slots, "a free slot is blank"

    def check_pins(self, slots: Sequence[int]) -> None:
        """A slot is pinned as often as it is named here."""
        expected = np.bincount(slots, minlength=self._num_pins.size) if slots else 0
        assert (self._num_pins == expected).all(), "a pin is lost, or too many"


def _keys(entries: npt.NDArray[np.void]) -> list[Key]:
    keys, groups = entries["key"].tolist(), entries["layer_group"].tolist()
    return [(BlockKey(k), LayerGroupId(g)) for k, g in zip(keys, groups, strict=True)]
