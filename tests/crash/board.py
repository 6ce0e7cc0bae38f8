"""What a process shows of its writes in shared memory, so that whoever kills it can tell what it
was doing, and which slots it had begun to write again.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from coldpage.device.file import DIRECT_ALIGNMENT, BlockFile, Buffer
from coldpage.testing.faulty_file import FaultyFile, PowerCutFile

NUM_LANES = 16  # threads that may write at once
NUM_FILES = 2
MAX_SLOTS = 256  # of each file
_WORDS = 1 + NUM_LANES + NUM_FILES * MAX_SLOTS
# A piece of a slot now and then waits: more time inside writes, and pieces in between.
_PAUSE_S = 0.001


class Board:
    """Counters that outlive the process that moves them."""

    def __init__(self, path: Path | None = None) -> None:
        """In the file, shared by all who map it, or in memory of this process's own."""
        if path is None:
            words = np.zeros(_WORDS, np.int64)
        else:
            if not path.exists():
                np.zeros(_WORDS, np.int64).tofile(path)
            words = np.memmap(path, np.int64, "r+")
        self.is_ready = words[:1]  # 1 once the tier is open
        self.in_write = words[1 : 1 + NUM_LANES]  # 1 while a thread writes a slot
        # How many writes of each slot have begun.
        self.num_begun = words[1 + NUM_LANES :].reshape(NUM_FILES, MAX_SLOTS)


class _Watched:
    """What both kinds of file note."""

    def watch(self, board: Board, slot_bytes: int) -> None:
        name = Path(self.path).name  # type: ignore[attr-defined]
        self.board = board
        self.begun = board.num_begun[int(name.removeprefix("pool-").removesuffix(".slots"))]
        self.slot_bytes = slot_bytes

    def note(self, offset: int) -> None:
        self.begun[offset // self.slot_bytes] += 1


class WatchedFile(BlockFile, _Watched):
    """Writes each slot in pieces of a sector, in any order: a kill finds it half written."""

    _lanes = itertools.count()
    _own = threading.local()

    def writev(self, offset: int, buffers: Sequence[Buffer]) -> None:
        lane = self._lane()
        self.note(offset)
        self.board.in_write[lane] = 1
        pieces = list(_sectors(offset, buffers))
        random.shuffle(pieces)
        try:
            for at, piece in pieces:
                if random.random() < 0.5:
                    time.sleep(_PAUSE_S)
                super().writev(at, [piece])
        finally:
            self.board.in_write[lane] = 0

    def _lane(self) -> int:
        if not hasattr(self._own, "lane"):
            self._own.lane = next(self._lanes) % NUM_LANES
        return int(self._own.lane)


class WatchedPowerFile(PowerCutFile, _Watched):
    """Notes which slots were written; what is lost is the power cut's choice. ``after_write`` is
    called when something has been, and nobody has synced it yet.
    """

    after_write: Callable[[], None] | None = None

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            num_written = super()._write_some(buffers, offset)
            self.note(offset)
        if self.after_write is not None:
            self.after_write()
        return num_written


class WatchedFaultyFile(FaultyFile, _Watched):
    """Notes which slots were begun to be written."""

    def writev(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self.note(offset)
        super().writev(offset, buffers)


def _sectors(offset: int, buffers: Sequence[Buffer]) -> list[tuple[int, memoryview]]:
    pieces = []
    for buffer in buffers:
        view = buffer if isinstance(buffer, memoryview) else buffer.data
        for start in range(0, len(view), DIRECT_ALIGNMENT):
            piece = view[start : start + DIRECT_ALIGNMENT]
            pieces.append((offset, piece))
            offset += len(piece)
    return pieces
