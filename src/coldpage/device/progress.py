"""The wake-up that completions signal and that ``wait_for_progress`` sleeps on."""

from __future__ import annotations

import threading

__all__ = ["Progress"]


class Progress:
    """A generation counter under a condition: a signal between two waits is never missed."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._generation = 0
        # What each waiting thread has seen, so that one waiter can not swallow another's wake-up.
        self._seen = threading.local()

    def signal(self) -> None:
        """Something completed: wake every waiter. Any thread may call this."""
        with self._condition:
            self._generation += 1
            self._condition.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Block until there was a signal since this thread's last wait, or the time is over.

        Returns whether there was one.
        """
        seen: int = getattr(self._seen, "generation", 0)
        with self._condition:
            if self._generation == seen:
                self._condition.wait(timeout_s)
            self._seen.generation = self._generation
            return self._generation != seen
