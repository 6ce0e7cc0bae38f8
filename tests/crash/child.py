"""The process that is killed, and the one that forks it: importing takes longer than a life.

    python -m tests.crash.child

reads lives, JSON a line, and forks a child for each, which works until somebody kills it. All write
lines to the same pipe; a line is shorter than what a pipe takes whole.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

from tests.crash.board import Board, WatchedFile
from tests.crash.work import WORKS, Id, Place, Reporter

_MAX_ENTRIES = 40  # a line
_REOPEN_RATE = 0.02


def _say(**fields: object) -> None:
    line = (json.dumps(fields) + "\n").encode()
    assert len(line) <= 4096, "PIPE_BUF"
    os.write(1, line)


class PipeReporter(Reporter):
    """Tells the parent, in lines; of what is durable only news."""

    def __init__(self) -> None:
        self._said: dict[Id, Place] = {}

    def durable(self, places: dict[Id, Place]) -> None:
        news = [(i, place) for i, place in places.items() if self._said.get(i) != place]
        self._said.update(news)
        for start in range(0, len(news), _MAX_ENTRIES):
            _say(durable=news[start : start + _MAX_ENTRIES])

    def returning(self, ids: list[Id]) -> None:
        _say(returning=ids)

    def unsure(self, ids: list[Id]) -> None:
        for entry in ids:
            self._said.pop(entry, None)
        _say(unsure=ids)

    def gone(self, ids: list[Id]) -> None:
        _say(gone=ids)


def live(work_name: str, path: str, board_path: str, seed: int) -> None:
    """Work until killed."""
    rng = random.Random(seed)
    random.seed(seed)
    board, report = Board(Path(board_path)), PipeReporter()
    while True:
        work = WORKS[work_name](Path(path), board, rng, report, WatchedFile)
        board.is_ready[0] = 1
        while rng.random() >= _REOPEN_RATE:
            work.step()
            if work.wrong:
                _say(wrong=work.wrong[0])
                return
        work.close()


def _fork(fields: dict[str, object]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(60)  # in case nobody kills it
            live(**fields)  # type: ignore[arg-type]
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _say(pid=pid)
    _, status = os.waitpid(pid, 0)
    _say(ended=status)


if __name__ == "__main__":
    for request in sys.stdin:
        _fork(json.loads(request))
