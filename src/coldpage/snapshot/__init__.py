"""Sequences in self-contained files: saved by one manager, restored by any of the same model."""

from coldpage.snapshot.format import (
    SNAPSHOT_VERSION,
    Origin,
    SavedSequence,
    SnapshotHeader,
    SnapshotIdentity,
)
from coldpage.snapshot.reading import read_header, state_read
from coldpage.snapshot.writing import state_write

__all__ = [
    "SNAPSHOT_VERSION",
    "Origin",
    "SavedSequence",
    "SnapshotHeader",
    "SnapshotIdentity",
    "read_header",
    "state_read",
    "state_write",
]
