"""Requests end once, whatever happens, and never with another text."""

from __future__ import annotations

from typing import Any

import pytest

from coldpage.engine.messages import Failed, Finished
from tests.engine.faulty_manager import FaultyCache
from tests.engine.pattern_runner import VOCAB


def prompt(num: int, seed: int = 0) -> list[int]:
    return [(7 * n + 13 * seed + n * n * seed) % VOCAB for n in range(num)]


def test_aborting_answers_everybody_once(new_rig: Any) -> None:
    rig = new_rig(20)
    for n in range(4):
        rig.submit(str(n), prompt(30, seed=n), 50)
    for _ in range(3):
        rig.step()
    failed = rig.scheduler.abort_all(503, "shutting_down", "The engine is shutting down.")
    assert sorted(one.request_id for one in failed) == ["0", "1", "2", "3"]
    assert rig.step().replies == ()
    assert rig.manager.open_caches == []


def test_a_hole_in_the_history_fails_the_step_instead_of_the_text(
    new_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    rig.submit("a", prompt(20), 30)
    rig.run_until(lambda: len(rig.tokens["a"]) >= 5)
    page_indices = FaultyCache.page_indices

    def with_a_hole(self: FaultyCache, layer_group_id: Any) -> Any:
        slots = page_indices(self, layer_group_id).copy()
        slots[2] = -1
        return slots

    with monkeypatch.context() as broken:
        broken.setattr(FaultyCache, "page_indices", with_a_hole)
        num_tokens = len(rig.tokens["a"])
        rig.step()
    assert (rig.failed("a").status, rig.failed("a").code) == (500, "engine_error")
    assert "hole" in rig.failed("a").sentence
    assert len(rig.tokens["a"]) == num_tokens
    rig.answer("b", prompt(20), 3)


def test_every_answer_ends_once(new_rig: Any) -> None:
    rig = new_rig(30)
    for n in range(6):
        rig.submit(str(n), prompt(3 + 5 * n, seed=n), 1 + n)
    rig.run()
    assert all(isinstance(end, Finished | Failed) for end in rig.ends.values())
    counters = rig.scheduler.counters
    assert counters["requests"] == counters["finished"] == len(rig.ends) == 6
    assert counters["generated_tokens"] == sum(range(1, 7))
