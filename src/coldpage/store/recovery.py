"""What the slots of a disk tier hold when it is opened: from the index that a clean end left, else
from the headers. Both ways give the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coldpage.device.base import IoExecutor
from coldpage.errors import StorageError
from coldpage.store.format import BLANK_KEY, SlotHeader
from coldpage.store.sidecar import (
    ENTRY,
    SlotIndex,
    fill_entry,
    read_sidecar,
    take_away_sidecar,
)
from coldpage.store.slot_file import SlotFile

__all__ = ["Progress", "Recovered", "recover"]

_log = logging.getLogger(__name__)

# Called with how many slots have been looked at, and how many there are.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """The slots that hold a page somebody can ask for; all others are free.

    ``index`` is ordered by pool and slot and names each (key, layer group) once.
    """

    index: SlotIndex
    is_from_sidecar: bool
    # Slots with an older copy of a page that ``index`` names. Free, but a later scan would find
    # that copy when the newer one is gone: erase them before the newer may be deleted.
    outdated: SlotIndex
    num_damaged: int  # headers that were neither good nor blank; only a scan sees them


def recover(
    directory: Path,
    files: Sequence[SlotFile],
    identity: bytes,
    io: IoExecutor,
    progress: Progress | None = None,
) -> Recovered:
    """Find what ``files``, the tier's pools in order, hold, and have them adopt it; the sidecar is
    gone afterwards. Blocks. Raises StorageError when the directory can not be changed.

    ``identity`` [32] is the tier's; the files are of one number of tokens a block.
    """
    (per_block,) = {file.identity.tokens_per_block for file in files}
    index = read_sidecar(directory, identity)
    is_from_sidecar = index is not None and index.tokens.shape[1] == per_block
    try:
        take_away_sidecar(directory)
    except OSError as error:
        raise StorageError(f"{directory} can not be changed ({error.strerror})") from error
    num_damaged = 0
    if index is None or not is_from_sidecar:
        index, num_damaged = _scan(files, per_block, io, progress)
    index = _in_range(index, files)
    is_newest = _newest(index.entries)
    outdated = SlotIndex(index.entries[~is_newest], index.tokens[~is_newest])
    index = SlotIndex(index.entries[is_newest], index.tokens[is_newest])
    highest = int(index.entries["write_number"].max(initial=0))
    for pool, file in enumerate(files):
        entries = index.of_pool(pool).entries
        file.adopt(entries["slot"].astype(np.int32), entries["write_number"].astype(np.int64))
        # A page may be written to another file next, and be the newer one there too.
        file.count_from(highest + 1)
    return Recovered(index, is_from_sidecar, outdated, num_damaged)


def _scan(
    files: Sequence[SlotFile], per_block: int, io: IoExecutor, progress: Progress | None
) -> tuple[SlotIndex, int]:
    """All good slots of all files, and how many are damaged."""
    jobs = [(pool, job, part) for pool, file in enumerate(files) for job, part in file.scan_jobs()]
    batches = [io.submit([job]) for _, job, _ in jobs]
    num_slots, num_done, num_damaged = sum(file.num_slots for file in files), 0, 0
    found: list[tuple[int, SlotHeader]] = []
    for (pool, _, part), batch in zip(jobs, batches, strict=True):
        batch.synchronize()
        found += [(pool, header) for header in part.found]
        num_damaged += part.num_damaged
        num_done += part.stop - part.start
        if progress is not None:
            progress(num_done, num_slots)
    if num_damaged:
        _log.warning("%d slots with a damaged header: free", num_damaged)
    entries = np.zeros(len(found), ENTRY)
    index = SlotIndex(entries, np.zeros((len(found), per_block), np.int32))
    for row, (pool, header) in enumerate(found):
        fill_entry(index, row, header.name)
        entry = entries[row]
        entry["pool"], entry["slot"], entry["is_unread"] = pool, header.slot, 1
        # What was written later was used later, as far as anybody knows.
        entry["write_number"] = entry["last_use"] = header.write_number
    return index, num_damaged


def _in_range(index: SlotIndex, files: Sequence[SlotFile]) -> SlotIndex:
    """Without slots that are not there any more and pages that nobody can ask for, in order."""
    entries = index.entries
    num_slots = np.array([file.num_slots for file in files] + [0])
    pools = np.minimum(entries["pool"], len(files))
    is_named = _words(entries["key"]).any(axis=1) if entries.size else np.zeros(0, np.bool_)
    assert not any(BLANK_KEY), "a blank key is all zeros"
    rows = np.flatnonzero((entries["slot"] < num_slots[pools]) & is_named)
    rows = rows[np.lexsort((entries["slot"][rows], entries["pool"][rows]))]
    return SlotIndex(entries[rows], index.tokens[rows])


def _newest(entries: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Per entry whether its write number is the highest of its (key, layer group), of equal ones
    the last entry. In one file that is the last write; in several, which hold a page twice after a
    crash while it changed its class, as long as the clock did not go back meanwhile. Any copy is
    good.
    """
    is_newest = np.ones(entries.size, np.bool_)
    words, groups = _words(entries["key"]), entries["layer_group"]
    order = np.lexsort((entries["write_number"], groups, *words.T))
    words, groups = words[order], groups[order]
    is_same_as_next = (words[:-1] == words[1:]).all(axis=1) & (groups[:-1] == groups[1:])
    is_newest[order[:-1][is_same_as_next]] = False
    return is_newest


def _words(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """Keys [n] as four numbers each [n, 4]."""
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 4)
