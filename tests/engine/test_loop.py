from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from coldpage.engine.loop import EngineLoop
from coldpage.engine.messages import (
    Cancel,
    Delta,
    Failed,
    Finished,
    Reply,
    SamplingParams,
    Shutdown,
    Stats,
)
from coldpage.engine.requests import GenerationRequest
from tests.engine.pattern_runner import expected_tokens
from tests.engine.rig import Rig


class Served:
    """A loop on this thread, and a script on another one that talks to it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.replies: list[Reply] = []
        self.loop = EngineLoop(rig.scheduler, rig.manager, self.replies.append)

    def run(self, script: Callable[[], None]) -> None:
        failures: list[BaseException] = []

        def play() -> None:
            try:
                script()
            except BaseException as error:
                failures.append(error)
            self.loop.commands.put(Shutdown())

        thread = threading.Thread(target=play)
        thread.start()
        self.loop.run()
        thread.join()
        if failures:
            raise failures[0]

    def submit(self, request_id: str, prompt: list[int], num_new: int) -> None:
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0)
        ids = np.array(prompt, dtype=np.int32)
        self.loop.commands.put(GenerationRequest(request_id, ids, sampling, time.monotonic()))

    def of(self, *kinds: type) -> list[Reply]:
        return [reply for reply in self.replies if isinstance(reply, kinds)]

    def wait_for(self, num: int, *kinds: type) -> None:
        deadline = time.monotonic() + 20
        while len(self.of(*kinds)) < num:
            assert time.monotonic() < deadline, self.replies
            time.sleep(0.002)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    rig = Rig(str(tmp_path), 60)
    yield Served(rig)
    rig.close()


def test_requests_are_answered_in_order(served: Served) -> None:
    def script() -> None:
        for n in range(3):
            served.submit(str(n), [n + 1] * 10, 6)
        served.wait_for(3, Finished)

    served.run(script)
    assert [end.request_id for end in served.of(Finished)] == ["0", "1", "2"]
    text = "".join(reply.text for reply in served.of(Delta) if reply.request_id == "1")
    assert text == "".join(f"[{token}]" for token in expected_tokens([2] * 10, 6))
    assert served.of(Failed) == []


def test_what_is_open_at_the_end_fails(served: Served) -> None:
    def script() -> None:
        served.submit("a", [1] * 10, 100)
        served.wait_for(1, Delta)

    served.run(script)
    (end,) = served.of(Finished, Failed)
    assert (end.status, end.code) == (503, "shutting_down")
    assert served.replies[-1] is end
    assert served.rig.scheduler.num_running == 0


def test_cancelling_while_it_runs(served: Served) -> None:
    def script() -> None:
        served.submit("a", [1] * 10, 200)
        served.wait_for(1, Delta)
        served.loop.commands.put(Cancel("a"))
        served.submit("b", [2] * 10, 2)
        served.wait_for(1, Finished)

    served.run(script)
    assert [end.request_id for end in served.of(Finished, Failed)] == ["b"]


def test_statistics_come_at_once_and_then_each_second(served: Served) -> None:
    def script() -> None:
        time.sleep(1.4)

    served.run(script)
    assert len(served.of(Stats)) == 2


def test_a_resting_loop_takes_few_steps_and_wakes_at_once(served: Served) -> None:
    polls: list[int] = []
    waits_s: list[float] = []

    def script() -> None:
        served.submit("a", [1] * 10, 2)
        served.wait_for(1, Finished)
        time.sleep(2.2)  # it looks after moving pages for a while
        polls.append(served.rig.manager.polls)
        time.sleep(0.6)
        polls.append(served.rig.manager.polls)
        for n in range(5):
            start_s = time.monotonic()
            served.submit(f"b{n}", [1] * 10, 1)
            served.wait_for(2 + n, Finished)
            waits_s.append(time.monotonic() - start_s)

    served.run(script)
    assert polls[1] - polls[0] <= 4
    assert min(waits_s) < 0.1


def test_a_blocked_loop_waits_for_pages_instead_of_spinning(served: Served) -> None:
    def script() -> None:
        served.submit("b", [1] * 40, 1)
        served.wait_for(2, Finished)

    served.rig.answer("a", [1] * 40, 1)
    served.replies.append(served.rig.finished("a"))
    served.rig.manager.offload_everything()
    # More polls than the wait for progress allows in that time would be a busy loop.
    served.rig.manager.faults.polls_to_onboard = 10
    start_s, polls = time.monotonic(), served.rig.manager.polls
    served.run(script)
    taken_s = time.monotonic() - start_s
    assert served.rig.manager.polls - polls < 30
    assert taken_s > 0.1


def test_it_stops_on_the_flag_alone(served: Served) -> None:
    threading.Timer(0.1, served.loop.request_stop).start()
    start_s = time.monotonic()
    served.loop.run()
    assert time.monotonic() - start_s < 2.0
