"""Progress of commands that take long: bars in a terminal, lines on the error stream elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

__all__ = ["StageProgress"]

_LINE_INTERVAL_S: Final = 10.0


class StageProgress(Progress):
    """Bars that are gone at the end. Where the console is no terminal, a line when a stage begins,
    and at most one each 10 seconds with how much of it is done, so that a log shows life while the
    output has tables and JSON alone.

    A stage is a task, or a description of a task without a total.
    """

    def __init__(
        self,
        *columns: str | ProgressColumn,
        console: Console,
        refresh_per_second: float = 10,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(
            *columns,
            console=console,
            transient=True,
            refresh_per_second=refresh_per_second,
            disable=not console.is_terminal,
        )
        self._clock = clock
        self._line_s: float | None = None  # when the last line was written
        self._last_line = ""

    def add_task(self, description: str, *args: Any, **kwargs: Any) -> TaskID:
        """Begins a stage."""
        task_id = super().add_task(description, *args, **kwargs)
        if self.disable:
            self._say(description)
        return task_id

    def update(self, task_id: TaskID, **kwargs: Any) -> None:
        """Goes on with a stage, or begins one."""
        super().update(task_id, **kwargs)
        if self.disable:
            self._report(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Goes on with a stage."""
        super().advance(task_id, advance)
        if self.disable:
            self._report(task_id)

    def _report(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        if task.total is None:
            self._say(task.description)
        elif self._line_s is None or self._clock() - self._line_s >= _LINE_INTERVAL_S:
            self._say(f"{task.description} {task.completed:,.0f}/{task.total:,.0f}".strip())

    def _say(self, line: str) -> None:
        if line and line != self._last_line:
            self._last_line, self._line_s = line, self._clock()
            print(line, file=sys.stderr, flush=True)
