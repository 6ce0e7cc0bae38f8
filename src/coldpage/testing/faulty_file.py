"""Files that fail as disks do: calls that move less than asked, errors, waits; and a power cut,
which loses or tears what was not synced.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from coldpage.device.file import DIRECT_ALIGNMENT, BlockFile

__all__ = [
    "Fault",
    "FaultPlan",
    "FaultyFile",
    "FileCall",
    "PowerCutFile",
    "PowerSupply",
]

# What disks write whole or not at all: most 4 KiB; those that only say so, 512.
_TEAR_SIZES: Final = (512, DIRECT_ALIGNMENT)


class FileCall(enum.Enum):
    """The calls that can fail."""

    READ = "read"
    WRITE = "write"
    SYNC = "sync"


class Fault(enum.Enum):
    """What goes wrong with one call."""

    SHORT = "short"  # it moves a part and says so; a sync just works
    EIO = "EIO"
    ENOSPC = "ENOSPC"
    DELAY = "delay"  # it works, late


class FaultPlan:
    """Which calls of one file, or of several, fail, and how. Any thread may ask it.

    Faults that were ``add``-ed for a kind of call come first, one a call, in order; then each fault
    of ``rates`` for that kind strikes with its probability, by a generator of its own.
    """

    def __init__(
        self,
        rates: Mapping[FileCall, Mapping[Fault, float]] | None = None,
        *,
        seed: int = 0,
        delay_s: float = 0.01,
    ) -> None:
        self.delay_s = delay_s
        self.rates = dict(rates or {})
        self.num_faults: Counter[tuple[FileCall, Fault]] = Counter()
        self._scripts: dict[FileCall, deque[Fault | None]] = {call: deque() for call in FileCall}
        self._rng = random.Random(seed)
        self._lock = threading.Lock()

    def add(self, call: FileCall, faults: Iterable[Fault | None]) -> None:
        """The next calls of this kind go like that; None is a call that works."""
        with self._lock:
            self._scripts[call].extend(faults)

    def clear(self) -> None:
        """Nothing fails from now on."""
        with self._lock:
            self.rates = {}
            for script in self._scripts.values():
                script.clear()

    def next_fault(self, call: FileCall) -> Fault | None:
        """How the call that is made now goes."""
        with self._lock:
            fault = self._choose(call)
            if fault is not None:
                self.num_faults[call, fault] += 1
            return fault

    def _choose(self, call: FileCall) -> Fault | None:
        if self._scripts[call]:
            return self._scripts[call].popleft()
        dice = self._rng.random()
        for fault, rate in self.rates.get(call, {}).items():
            dice -= rate
            if dice < 0:
                return fault
        return None


class FaultyFile(BlockFile):
    """A file whose calls go as ``plan`` says. Without one they work, until there is one."""

    def __init__(self, path: str | Path, num_bytes: int, plan: FaultPlan | None = None) -> None:
        super().__init__(path, num_bytes)
        self.plan = plan or FaultPlan()

    def sync(self) -> None:
        """Sync, or fail, or be late."""
        self._strike(FileCall.SYNC)
        super().sync()

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        if self._strike(FileCall.READ) is Fault.SHORT:
            buffers = _first_part(buffers)
        return super()._read_some(buffers, offset)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        if self._strike(FileCall.WRITE) is Fault.SHORT:
            buffers = _first_part(buffers)
        return super()._write_some(buffers, offset)

    def _strike(self, call: FileCall) -> Fault | None:
        fault = self.plan.next_fault(call)
        if fault is Fault.EIO:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
        if fault is Fault.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        if fault is Fault.DELAY:
            time.sleep(self.plan.delay_s)
        return fault


def _first_part(buffers: Sequence[memoryview]) -> list[memoryview]:
    """About half of the bytes in whole blocks, at least one block where there are several."""
    num_bytes = sum(map(len, buffers))
    left = max(num_bytes // 2 // DIRECT_ALIGNMENT, 1) * DIRECT_ALIGNMENT
    part: list[memoryview] = []
    for buffer in buffers:
        if left <= 0:
            break
        part.append(buffer[:left])
        left -= len(part[-1])
    return part


class PowerSupply:
    """The files that one power cut hits together; each is of ``kind``."""

    def __init__(
        self, kind: type[PowerCutFile] | None = None, tear_bytes: int = DIRECT_ALIGNMENT
    ) -> None:
        self.files: list[PowerCutFile] = []
        self._kind = kind or PowerCutFile
        self._tear_bytes = tear_bytes

    def open_file(self, path: str | Path, num_bytes: int) -> PowerCutFile:
        """A new file on this supply; takes the place of BlockFile."""
        self.files.append(self._kind(path, num_bytes, self._tear_bytes))
        return self.files[-1]

    @property
    def num_unsynced(self) -> int:
        """Writes that a power cut could lose now."""
        return sum(file.num_unsynced for file in self.files)

    def cut(self, rng: random.Random) -> None:
        """Cut the power of every file. Any thread."""
        for file in self.files:
            file.power_cut(rng)


class PowerCutFile(BlockFile):
    """A file on a disk with a volatile cache: a write is firm after a ``sync`` that began when it
    had ended.

    ``power_cut`` leaves the file as a disk might be found: of what was not firm, each write is
    there, or not, or in pieces of ``tear_bytes`` each of which is there or not; of several to one
    place any may be the last. Sizes are firm at once. The file takes no more calls then.
    """

    def __init__(
        self, path: str | Path, num_bytes: int, tear_bytes: int = DIRECT_ALIGNMENT
    ) -> None:
        assert tear_bytes in _TEAR_SIZES, "a size in which disks write"
        super().__init__(path, num_bytes)
        self.tear_bytes = tear_bytes
        self.num_lost = 0  # writes that the power cut took, wholly
        self.num_torn = 0  # writes of which it took a part
        self._lock = threading.RLock()
        # Writes since they were last firm, in order, and what was firm below them by piece.
        self._unsynced: list[tuple[int, bytes]] = []
        self._firm: dict[int, bytes] = {}
        self._is_dead = False

    @property
    def num_unsynced(self) -> int:
        """Writes that a power cut could lose now, or could have lost when there was one."""
        return len(self._unsynced)

    def sync(self) -> None:
        """Make firm what has been written."""
        with self._lock:
            self._check_alive()
            super().sync()
            self._unsynced.clear()
            self._firm.clear()

    def resize(self, num_bytes: int) -> None:
        """Resize; what was cut off is gone for good."""
        with self._lock:
            self._check_alive()
            super().resize(num_bytes)
            self._unsynced = [
                (offset, data[: num_bytes - offset])
                for offset, data in self._unsynced
                if offset < num_bytes
            ]
            self._firm = {at: data for at, data in self._firm.items() if at < num_bytes}

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._check_alive()
        return super()._read_some(buffers, offset)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(buffers)
        with self._lock:  # whole or not begun when the power goes; what tears it is the cut
            self._check_alive()
            self._keep_firm(offset, len(data))
            num_written = super()._write_some(buffers, offset)
            self._unsynced.append((offset, data[:num_written]))
            return num_written

    def _keep_firm(self, offset: int, num_bytes: int) -> None:
        size = self.tear_bytes
        with open(self.path, "rb", buffering=0) as file:
            for at in range(offset // size * size, offset + num_bytes, size):
                if at not in self._firm:
                    self._firm[at] = os.pread(file.fileno(), size, at)

    def power_cut(self, rng: random.Random) -> None:
        """Lose and tear what is not firm. Any thread; idempotent."""
        with self._lock:
            if self._is_dead:
                return
            self._is_dead = True
            pieces = dict(self._firm)
            # In order: losing later ones makes any of several to one place the last.
            for offset, data in self._unsynced:
                self._write_back(pieces, offset, data, rng)
            with open(self.path, "r+b", buffering=0) as file:
                for at, data in pieces.items():
                    os.pwrite(file.fileno(), data, at)
                os.fsync(file.fileno())

    def _write_back(
        self, pieces: dict[int, bytes], offset: int, data: bytes, rng: random.Random
    ) -> None:
        """Some pieces of one write, none or all."""
        size = self.tear_bytes
        starts = range(offset // size * size, offset + len(data), size)
        share = rng.choice((0.0, 0.5, 1.0))
        survives = [rng.random() < share for _ in starts]
        self.num_lost += not any(survives)
        self.num_torn += any(survives) and not all(survives)
        for at, is_there in zip(starts, survives, strict=True):
            if is_there:
                low, high = max(at, offset), min(at + size, offset + len(data))
                old = pieces[at]
                pieces[at] = old[: low - at] + data[low - offset : high - offset] + old[high - at :]

    def _check_alive(self) -> None:
        if self._is_dead:
            raise OSError(errno.EIO, "the power is off", str(self.path))
