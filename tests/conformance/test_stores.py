"""The shipped store kit on the store of this package, and on stores that break a promise each."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldpage.store import BlobStore, FileIdentity, KeyedStore
from coldpage.testing.store_kit import StoreConformance

_FINGERPRINT = b"f" * 32


def _open(path: Path, num_blobs: int, kind: type[BlobStore] = BlobStore) -> BlobStore:
    payload_bytes = StoreConformance.payload_bytes
    identity = FileIdentity(_FINGERPRINT, "raw:1:", payload_bytes, 4)
    return kind(
        path,
        model_fingerprint=_FINGERPRINT,
        codec="raw:1:",
        payload_bytes=payload_bytes,
        tokens_per_block=4,
        capacity_bytes=BlobStore.capacity_for(num_blobs, identity),
        max_sync_delay_s=0.002,
    )


class TestBlobStore(StoreConformance):
    def make_store(self, path: Path, num_blobs: int) -> KeyedStore:
        return _open(path, num_blobs)


class _MixesGroups(BlobStore):
    """Ignores the layer group when reading."""

    def get(self, keys, out, *, layer_group_id=0):  # type: ignore[no-untyped-def]
        return super().get(keys, out)


class _GivesWrongBytes(BlobStore):
    """Changes what it reads once in a while."""

    def _end_read(self, read):  # type: ignore[no-untyped-def]
        super()._end_read(read)
        read.target[17] ^= 1


class _ForgetsToErase(BlobStore):
    """Deletes in memory only, and dies."""

    def _start_erases(self) -> None:
        for slot in self._slots.erasable():
            self._slots.start_erasing([slot])
            self._slots.end_erasing(slot, True)

    def _leave_index(self) -> None:
        pass


class _EvictsTheNewest(BlobStore):
    """Gives up what was used last."""

    def _take_slots(self, num_wanted: int) -> list[int]:
        last_use = self._slots._last_use
        last_use *= -1
        slots = super()._take_slots(num_wanted)
        last_use *= -1
        return slots


class _WritesAgain(BlobStore):
    """Does not look whether a blob is there."""

    def _rows_to_write(self, ticket, rows, names, payloads):  # type: ignore[no-untyped-def]
        known, self._slots.slot_of = self._slots.slot_of, {}
        rows = super()._rows_to_write(ticket, rows, names, payloads)
        self._slots.slot_of = known
        return rows


class _ForgetsAtTheEnd(BlobStore):
    """Leaves an index of nothing."""

    def _leave_index(self) -> None:
        self._slots.slot_of.clear()
        super()._leave_index()


class _NeverSettles(BlobStore):
    """Syncs only when it is told to."""

    def poll(self) -> None:
        self._sync._max_delay_s = 1e9
        super().poll()


class _ForgetsUse(BlobStore):
    """A restart makes all blobs equally old."""

    def _leave_index(self) -> None:
        self._slots._last_use[:] = -self._slots._last_use
        super()._leave_index()


_BREACHES = [
    (_MixesGroups, "test_layer_groups_are_apart"),
    (_GivesWrongBytes, "test_what_was_put_comes_back"),
    (_ForgetsToErase, "test_a_restart_finds_nothing_deleted"),
    (_EvictsTheNewest, "test_what_is_used_stays"),
    (_WritesAgain, "test_a_blob_is_put_once"),
    (_ForgetsAtTheEnd, "test_a_restart_finds_everything"),
    (_ForgetsUse, "test_a_restart_keeps_the_order_of_use"),
    (_NeverSettles, "test_tickets_settle_by_polling"),
]


@pytest.mark.parametrize(("kind", "test"), _BREACHES, ids=[kind.__name__ for kind, _ in _BREACHES])
def test_the_kit_notices_what_is_wrong(
    tmp_path: Path, kind: type[BlobStore], test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldpage.testing.store_kit._DEADLINE_S", 0.3)
    opened: list[BlobStore] = []

    class _Kit(StoreConformance):
        def make_store(self, path: Path, num_blobs: int) -> KeyedStore:
            opened.append(_open(path, num_blobs, kind))
            return opened[-1]

    with pytest.raises(AssertionError):
        getattr(_Kit(), test)(tmp_path)
    for store in opened:
        store._resources.close()
