"""The engine's loop: take commands, step, answer, report, and wait for whichever comes next."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from coldpage.engine.messages import Cancel, Reply, SessionCommand, Shutdown
from coldpage.engine.requests import GenerationRequest
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.session_control import SessionControl
from coldpage.engine.steps import StepState
from coldpage.engine.telemetry import engine_stats

if TYPE_CHECKING:
    from coldpage.manager import KVCacheManager

__all__ = ["Command", "EngineLoop"]

Command = GenerationRequest | Cancel | SessionCommand | Shutdown

# Commands that wait for the end of a step; whoever brings more waits too.
_MAX_COMMANDS: Final = 4096
_STATS_PERIOD_S: Final = 1.0
# While pages move a command waits this long at most.
_BLOCKED_WAIT_S: Final = 0.02
# With no requests a command is taken at once; this long a transfer or a signal may wait, first
# while what the last requests left behind is still being moved, then in rest.
_SETTLING_WAIT_S: Final = 0.02
_IDLE_WAIT_S: Final = 0.25
_SETTLING_S: Final = 2.0


class EngineLoop:
    """Runs a scheduler on the calling thread, which owns the manager, until it is told to stop.

    ``commands`` may be filled by any thread. ``send`` is called on the loop's thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        send: Callable[[Reply], None],
        control: SessionControl | None = None,
    ) -> None:
        """``control`` None: sessions can be listed and forked, and not saved."""
        self.commands: queue.Queue[Command] = queue.Queue(_MAX_COMMANDS)
        self._scheduler = scheduler
        self._manager = manager
        self._send = send
        self._control = control or SessionControl(scheduler, manager)
        self._is_stopping = False
        self._next_stats_s = time.monotonic()
        self._last_work_s = time.monotonic()

    def request_stop(self) -> None:
        """End ``run`` soon. Safe in a signal handler, so it takes no lock."""
        self._is_stopping = True

    def run(self) -> None:
        """Block until a ``Shutdown`` or ``request_stop``; then every open request has failed with
        status 503. The caches of sessions stay open. What a step raises comes out, with nothing
        answered.
        """
        while not self._is_stopping:
            self._take_commands()
            result = self._scheduler.step()
            for reply in result.replies:
                self._send(reply)
            for answer in self._control.advance():
                self._send(answer)
            self._send_stats_when_due()
            self._pause(result.state)
        self.fail_open_requests(503, "shutting_down", "The engine is shutting down.")

    def fail_open_requests(self, status: int, code: str, sentence: str) -> None:
        """Answer all that has come in and is not answered. For when ``run`` has ended."""
        self._take_commands()
        for reply in self._scheduler.abort_all(status, code, sentence):
            self._send(reply)
        for refusal in self._control.abort_all(status, code, sentence):
            self._send(refusal)

    def _take_commands(self) -> None:
        # Those that are here now, so that a flood of commands can not hold up the step.
        for _ in range(self.commands.qsize()):
            self._obey(self.commands.get())

    def _obey(self, command: Command) -> None:
        match command:
            case GenerationRequest():
                self._scheduler.submit(command)
            case Cancel(request_id=request_id):
                self._scheduler.cancel(request_id)
            case SessionCommand():
                self._control.submit(command)
            case Shutdown():
                self._is_stopping = True

    def _pause(self, state: StepState) -> None:
        now_s = time.monotonic()
        if state is not StepState.IDLE:
            self._last_work_s = now_s
        if state is StepState.BLOCKED:
            self._manager.wait_for_progress(_BLOCKED_WAIT_S)
        elif state is StepState.IDLE:
            is_settling = now_s - self._last_work_s < _SETTLING_S
            try:
                self._obey(
                    self.commands.get(timeout=_SETTLING_WAIT_S if is_settling else _IDLE_WAIT_S)
                )
            except queue.Empty:
                return

    def _send_stats_when_due(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_stats_s:
            self._next_stats_s = now_s + _STATS_PERIOD_S
            self._send(engine_stats(self._manager, self._scheduler))
