"""The files of one disk level together: their directory, what was found in them, and whether the
medium can be trusted now.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import IoExecutor
from coldpage.device.file import BlockFile
from coldpage.store import (
    FileIdentity,
    InstanceDirectory,
    InstanceIdentity,
    Recovered,
    SlotFile,
    SlotIndex,
    SyncBatcher,
    TierHealth,
    recover,
    slot_bytes_of,
    write_sidecar,
)
from coldpage.store.recovery import Progress

__all__ = ["DiskTier"]

_logger = logging.getLogger(__name__)

_PREFIX: Final = "pool-"
# How often pages that have lived too long are looked for: every one is looked at.
_EXPIRY_INTERVAL_S: Final = 1.0


class DiskTier:
    """Opened by the manager's builder; ``close`` leaves an index for the next start."""

    def __init__(
        self,
        directory: InstanceDirectory,
        identity: InstanceIdentity,
        read_deadline_s: float,
        time_to_live_s: float | None = None,
    ) -> None:
        self.directory = directory
        self.read_deadline_s = read_deadline_s
        self._time_to_live_s = time_to_live_s
        self._next_expiry_s = 0.0
        self.files: list[SlotFile] = []
        self.new_files: list[Path] = []  # that were not there before
        self.health = TierHealth()
        self._identity = identity
        self._sync: SyncBatcher | None = None

    def open_files(self, identities: list[FileIdentity], num_slots: list[int]) -> None:
        """One file for each pool group. Raises StorageError when one can not be had."""
        for pool, (identity, count) in enumerate(zip(identities, num_slots, strict=True)):
            path = self.directory.path / f"{_PREFIX}{pool}.slots"
            if not path.exists():
                self.new_files.append(path)
            file = BlockFile(path, count * slot_bytes_of(identity))
            self.files.append(SlotFile(file, count, identity))

    def recover(self, io: IoExecutor, progress: Progress | None) -> Recovered:
        """What the files hold. Blocks while headers are read."""
        self._sync = SyncBatcher(self.files, io)
        return recover(self.directory.path, self.files, self._identity.digest, io, progress)

    def note_writes(self, ok: npt.NDArray[np.bool_]) -> None:
        """How writes ended, one by one."""
        for is_good in ok.tolist():
            self.health.note_write(is_good)
        if self._sync is not None and ok.any():
            self._sync.note(int(np.count_nonzero(ok)))

    def note_reads(self, ok: npt.NDArray[np.bool_]) -> None:
        """How reads ended, one by one; one that took too long did not end well."""
        for is_good in ok.tolist():
            self.health.note_read(is_good)

    def expiry_ns(self) -> int | None:
        """The time of day before which a last use is too long ago; None when it is not time to
        look, or pages live for ever.
        """
        now_s = time.monotonic()
        if self._time_to_live_s is None or now_s < self._next_expiry_s:
            return None
        self._next_expiry_s = now_s + _EXPIRY_INTERVAL_S
        return time.time_ns() - int(1e9 * self._time_to_live_s)

    def poll(self) -> None:
        """Start making durable what was written, when it is time. Never blocks."""
        if self._sync is not None:
            self._sync.poll()

    def sync(self) -> None:
        """Block until what was written is durable; a failure is noted as one of a write."""
        for file in self.files:
            try:
                file.sync()
            except OSError as error:
                self.health.note_write(False, f"{self.directory.path} can not be synced: {error}")

    def write_index(self, index: SlotIndex) -> None:
        """Leave an index of what the files hold, after making that durable. Blocks. Where it can
        not be written the next start reads the headers instead, and this says so.
        """
        try:
            for file in self.files:
                file.sync()
            write_sidecar(self.directory.path, self._identity.digest, index)
        except OSError as error:
            _logger.warning(
                "%s: no index could be written (%s): the next start will read every header",
                self.directory.path,
                error,
            )

    def close(self) -> None:
        """Close the files and give the directory back. No job may be in flight."""
        for file in self.files:
            file.close()
        self.directory.close()

    def remove_new_files(self) -> None:
        """After a start that failed: leave nothing that was not there."""
        for path in self.new_files:
            path.unlink(missing_ok=True)
