"""Prompts as large as the hot level, and too large, among others."""

from __future__ import annotations

from typing import Any

from tests.engine.rig import VOCAB

HOT_BLOCKS = 20
BLOCK = 4


def _prompt(num_tokens: int, seed: int) -> list[int]:
    return [(7 * seed + 3 * i + i * i) % VOCAB for i in range(num_tokens)]


def test_a_prompt_of_most_of_the_hot_level_runs_to_its_end(new_rig: Any) -> None:
    """Also while others fill that level: it is never given up in the middle of its prefill."""
    rig = new_rig(HOT_BLOCKS)
    for number in range(3):
        rig.submit(f"small {number}", _prompt(5 * BLOCK, number), 6)
    large = _prompt(HOT_BLOCKS * BLOCK * 9 // 10 - 4, 9)
    assert len(large) > HOT_BLOCKS * BLOCK // 2
    rig.submit("large", large, 3)
    rig.run()
    rig.check_tokens()
    assert len(rig.tokens["large"]) == 3


def test_one_request_that_can_never_fit_fails_alone(new_rig: Any) -> None:
    rig = new_rig(HOT_BLOCKS)
    rig.submit("first", _prompt(10, 1), 8)
    rig.step()
    rig.submit("huge", _prompt(HOT_BLOCKS * BLOCK + 1, 2), 8)
    rig.submit("second", _prompt(12, 3), 8)
    rig.run()
    assert rig.failed("huge").code == "hot_level_too_small"
    rig.check_tokens("first", "second")
    assert rig.scheduler.counters["failed"] == 1


def test_a_prompt_beside_a_sliding_window_takes_the_steps_that_fit(new_rig: Any) -> None:
    """All of it at once would need twice the pages: the window's, of blocks it never sees again."""
    rig = new_rig(HOT_BLOCKS, has_sliding_window=True)
    longest = rig.manager.max_sequence_tokens
    with rig.manager.create_kv_cache() as cache:
        assert cache.resume()
        assert cache.max_capacity < longest
    large = _prompt(longest - 2 * BLOCK, 9)
    assert len(large) > HOT_BLOCKS * BLOCK
    rig.submit("large", large, 3)
    rig.run()
    rig.check_tokens()
    assert len(rig.tokens["large"]) == 3
