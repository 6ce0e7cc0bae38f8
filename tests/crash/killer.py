"""Kills processes at random moments and checks what they leave."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.crash.board import Board, WatchedFile
from tests.crash.ledger import Ledger, Tally
from tests.crash.work import WORKS, Reporter

# A life before the moment of its end is chosen, once the tier is open.
_MAX_LIFE_S = 0.12
_MAX_OPENING_S = 0.03
# How long to wait for a write to kill it in.
_MAX_WAIT_S = 1.0
_START_TIMEOUT_S = 60.0
CRASHES_A_TIER = 6


class Killer:
    """A tier that process after process works on, until it is killed; then another."""

    def __init__(self, work_name: str, directory: Path, seed: int) -> None:
        self.tally = Tally()
        self._work_name = work_name
        self._directory = directory
        self._rng = random.Random(seed)
        self._begin_tier()
        self._lines: list[dict[str, object]] = []
        self._rest = b""
        self._errors = open(directory / f"{work_name}.stderr", "w+")  # noqa: SIM115
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",  # it forks
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=Path(__file__).parents[2],
            env=environment,
        )

    def _begin_tier(self) -> None:
        """One that holds everything already is written to no more."""
        directory = self._directory / f"tier-{self.tally.num_crashes}"
        directory.mkdir()
        self._path = directory / self._work_name
        self._board_path = directory / "board"
        self._board = Board(self._board_path)
        self._ledger = Ledger(self._board, self.tally)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.close()
        self._server.kill()
        self._server.wait()
        self._server.stdout.close()
        self._errors.close()

    def kill_one(self) -> None:
        """One life, its end, and a look at what it left."""
        if self.tally.num_crashes and self.tally.num_crashes % CRASHES_A_TIER == 0:
            self._begin_tier()
        self._live_and_die()
        self._check()

    def _live_and_die(self) -> None:
        assert self._server.stdin
        self._board.is_ready[0], self._board.in_write[:] = 0, 0
        life = {
            "work_name": self._work_name,
            "path": str(self._path),
            "board_path": str(self._board_path),
            "seed": self._rng.getrandbits(32),
        }
        self._server.stdin.write((json.dumps(life) + "\n").encode())
        self._server.stdin.flush()
        pid = self._wait_for("pid", _START_TIMEOUT_S)
        self._wait_for_the_moment()
        if not any("ended" in line for line in self._lines):
            os.kill(pid, signal.SIGKILL)
        status = self._wait_for("ended", _START_TIMEOUT_S)
        for line in self._lines:
            self._note(line)
        self._lines.clear()
        assert status == signal.SIGKILL, f"it ended by itself ({status}): {self._read_errors()}"
        self.tally.num_crashes += 1
        self.tally.num_inside += bool(self._board.in_write.any())

    def _wait_for_the_moment(self) -> None:
        rng = self._rng
        if rng.random() < 0.1:
            self._drain(time.monotonic() + rng.uniform(0, _MAX_OPENING_S), lambda: False)
            return
        self._drain(time.monotonic() + _START_TIMEOUT_S, lambda: bool(self._board.is_ready[0]))
        self._drain(time.monotonic() + rng.uniform(0, _MAX_LIFE_S), lambda: False)
        if rng.random() < 0.85:
            is_writing = self._board.in_write.any
            self._drain(time.monotonic() + _MAX_WAIT_S, lambda: bool(is_writing()))

    def _drain(self, deadline_s: float, is_over: object) -> None:
        """Read what the child says until then; a full pipe would stop it."""
        assert callable(is_over)
        while not is_over() and time.monotonic() < deadline_s:
            self._read(0.0002)
            if any("ended" in line for line in self._lines):
                return

    def _read(self, timeout_s: float) -> None:
        assert self._server.stdout
        fd = self._server.stdout.fileno()
        if not select.select([fd], [], [], timeout_s)[0]:
            return
        data = os.read(fd, 1 << 16)
        assert data, f"the server has ended: {self._read_errors()}"
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines += [json.loads(line) for line in lines]

    def _wait_for(self, field: str, timeout_s: float) -> int:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for line in self._lines:
                if field in line:
                    value = line[field]
                    assert isinstance(value, int)
                    return value
            self._read(0.01)
        raise AssertionError(f"no {field} in time: {self._read_errors()}")

    def _note(self, line: dict[str, object]) -> None:
        for field, value in line.items():
            if field == "wrong":
                self.tally.wrong.append(str(value))
            elif field == "durable":
                assert isinstance(value, list)
                self._ledger.durable({i: tuple(place) for i, place in value})
            elif field in ("returning", "unsure", "gone"):
                getattr(self._ledger, field)(value)

    def _check(self) -> None:
        """Open what is left; sometimes with a clean end, so that the next life opens by it."""
        self._board.in_write[:] = 0
        work = WORKS[self._work_name](self._path, self._board, self._rng, Reporter(), WatchedFile)
        try:
            good = work.verify()
        finally:
            if self._rng.random() < 0.5:
                work.close()
            else:
                work.abandon()
        self.tally.num_read += work.num_checked
        self.tally.wrong += work.wrong
        self._ledger.settle(good, work)

    def _read_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:]
