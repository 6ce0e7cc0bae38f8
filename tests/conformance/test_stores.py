"""The shipped store kit on the store of this package, and on stores that break a promise each."""

from __future__ import annotations

from pathlib import Path

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
