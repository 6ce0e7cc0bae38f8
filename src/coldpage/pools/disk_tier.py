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
from coldpage.errors import StorageError
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
from coldpage.store.sidecar import ENTRY, take_away_sidecar

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
        self.health = TierHealth(f"the disk tier {directory.path}")
        self._identity = identity
        self._sync: SyncBatcher | None = None
        self._num_sync_failures = 0

    def open_files(self, identities: list[FileIdentity], num_slots: list[int]) -> None:
        """One file for each pool group. Raises StorageError when one can not be had."""
        for pool, (identity, count) in enumerate(zip(identities, num_slots, strict=True)):
            path = self.directory.path / f"{_PREFIX}{pool}.slots"
            is_new = not path.exists()
            file = BlockFile(path, count * slot_bytes_of(identity))
            if is_new:
                self.new_files.append(path)
            self.files.append(SlotFile(file, count, identity))

    def recover(self, io: IoExecutor, progress: Progress | None) -> Recovered:
        """What the files hold. Blocks while headers are read; new files have none."""
        self._sync = SyncBatcher(self.files, io)
        if self.new_files:
            try:
                take_away_sidecar(self.directory.path)  # of files that somebody has removed
            except OSError as error:
                raise StorageError(f"{self.directory.path} can not be changed ({error})") from error
        if len(self.new_files) < len(self.files):
            return recover(self.directory.path, self.files, self._identity.digest, io, progress)
        tokens = np.zeros((0, self.files[0].identity.tokens_per_block), np.int32)
        nothing = SlotIndex(np.zeros(0, ENTRY), tokens)
        return Recovered(nothing, False, nothing, 0)

    def note_writes(self, ok: npt.NDArray[np.bool_], reason: str = "") -> None:
        """How writes ended, one by one; ``reason`` is what the last failure says."""
        for is_good in ok.tolist():
            self.health.note_write(is_good, reason)
        if self._sync is not None and ok.any():
            self._sync.note(int(np.count_nonzero(ok)))

    def note_reads(self, ok: npt.NDArray[np.bool_], reason: str = "") -> None:
        """How reads ended, one by one; one that took too long did not end well. Damaged slots are
        not among them: the disk has answered.
        """
        for is_good in ok.tolist():
            self.health.note_read(is_good, reason)

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
            self._note_syncs(self._sync)

    def sync(self) -> bool:
        """Block until what was written is durable, and say whether it is; a failure is noted as one
        of a write.
        """
        if self._sync is None:
            return False
        self._sync.flush()
        self._note_syncs(self._sync)
        return not self._sync.has_failed

    def _note_syncs(self, sync: SyncBatcher) -> None:
        for _ in range(sync.num_failures - self._num_sync_failures):
            self.health.note_write(False, self.last_failure)
        self._num_sync_failures = sync.num_failures

    @property
    def last_failure(self) -> str:
        """What one of the files says about its last failure; empty when none has failed."""
        return next((file.last_failure for file in self.files if file.last_failure), "")

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
        """Close the files and give the directory back. No read or write may be in flight."""
        if self._sync is not None:
            self._sync.flush()
        for file in self.files:
            file.close()
        self.directory.close()

    def remove_new_files(self) -> None:
        """After a start that failed: leave nothing that was not there."""
        for path in self.new_files:
            path.unlink(missing_ok=True)
