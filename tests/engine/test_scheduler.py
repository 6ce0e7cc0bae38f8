from __future__ import annotations

from typing import Any

import pytest

from coldpage.engine.admission import EngineLimits
from coldpage.engine.planning import ItemPurpose
from coldpage.engine.steps import StepState
from tests.engine.pattern_runner import VOCAB, expected_tokens
from tests.engine.rig import BLOCK


def prompt(num: int, seed: int = 0) -> list[int]:
    return [(7 * n + 13 * seed + n * n * seed) % VOCAB for n in range(num)]


def test_one_request(new_rig: Any) -> None:
    rig = new_rig()
    end = rig.answer("a", prompt(10), 5)
    assert end.finish_reason == "length"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (10, 5)
    assert end.usage.cached_tokens_by_tier == {"hot": 0, "host": 0, "disk": 0}
    assert end.usage.time_to_first_token_ms > 0
    assert rig.text["a"] == "".join(f"[{token}]" for token in rig.tokens["a"])
    assert rig.step().state is StepState.IDLE


def test_many_requests_run_together_and_first_come_first_served(new_rig: Any) -> None:
    rig = new_rig(400, limits=EngineLimits(max_batch=3))
    for n in range(7):
        rig.submit(str(n), prompt(9 + n, seed=n), 5 + n)
    rig.run()
    rig.check_tokens()
    assert rig.max_running == 3
    assert list(rig.ends) == [str(n) for n in range(7)]
    assert max(len(step) for step in rig.recorder.steps) == 3


def test_a_long_prompt_is_chunked_and_does_not_stop_the_others(new_rig: Any) -> None:
    limits = EngineLimits(prefill_tokens=16, prefill_tokens_beside_decode=8)
    rig = new_rig(200, limits=limits)
    rig.submit("a", prompt(6), 30)
    rig.step()
    rig.submit("b", prompt(99, seed=1), 3)
    while "b" not in rig.tokens:
        before = len(rig.tokens["a"])
        assert rig.step().num_batched_tokens <= 8 + 1
        assert len(rig.tokens["a"]) == before + 1
    assert rig.purposes("b")["prefill"] == 13
    rig.run()
    rig.check_tokens()
    alone = new_rig(200, limits=limits)
    alone.answer("b", prompt(99, seed=1), 3)
    assert alone.purposes("b")["prefill"] == 7


@pytest.mark.parametrize("num_more", [0, 3, 40])
def test_a_prefix_is_found_by_content(new_rig: Any, num_more: int) -> None:
    rig = new_rig(100)
    first = prompt(40)
    rig.answer("a", first)
    end = rig.answer("b", first + prompt(num_more, seed=3))
    # The last token of a prompt that is matched whole is computed once more for its logits.
    assert end.usage.cached_tokens_by_tier == {
        "hot": 39 if not num_more else 40,
        "host": 0,
        "disk": 0,
    }
    assert rig.scheduler.hits_tokens["hot"] == end.usage.cached_tokens_by_tier["hot"]
    assert rig.answer("c", first, salt="tenant").usage.cached_tokens_by_tier["hot"] == 0


@pytest.mark.parametrize(("num_host_blocks", "name"), [(100, "host"), (0, "disk")])
def test_reused_tokens_are_counted_where_they_lay(
    new_rig: Any, num_host_blocks: int, name: str
) -> None:
    rig = new_rig(100, num_host_blocks=num_host_blocks)
    rig.answer("a", prompt(40))
    rig.manager.offload_everything()
    rig.manager.faults.polls_to_onboard = 3
    end = rig.answer("b", [*prompt(40), 1, 2])
    assert end.usage.cached_tokens_by_tier[name] == 40
    assert sum(end.usage.cached_tokens_by_tier.values()) == 40
    assert end.usage.restore_ms > 0
    assert rig.recorder.restored == [("a", []), ("b", [])]


def test_others_decode_while_one_onboards(new_rig: Any) -> None:
    rig = new_rig(100)
    rig.answer("old", prompt(40))
    rig.manager.offload_everything()
    rig.submit("a", prompt(9, seed=5), 40)
    rig.step()
    rig.manager.faults.polls_to_onboard = 10
    rig.submit("b", [*prompt(40), 1], 3)
    for _ in range(10):
        result = rig.step()
        assert [request_id for request_id, _ in result.tokens] == ["a"]
    rig.run()
    rig.check_tokens()


def test_blocked_and_idle_are_told_apart(new_rig: Any) -> None:
    rig = new_rig(100)
    assert rig.step().state is StepState.IDLE
    rig.answer("old", prompt(40))
    rig.manager.offload_everything()
    rig.manager.faults.polls_to_onboard = 2
    rig.submit("b", [*prompt(40), 1], 1)
    states: list[StepState] = []
    while StepState.IDLE not in states:
        states.append(rig.step().state)
        rig.manager.finish_transfers()
    assert states[0] is StepState.BLOCKED
    assert states[-2:] == [StepState.WORKED, StepState.IDLE]


def test_pages_that_are_not_quiescent_are_not_written(new_rig: Any) -> None:
    rig = new_rig(100)
    rig.manager.faults.polls_to_grow = 3
    rig.answer("a", prompt(10), 12)
    # The naive cache counts polls; a step that computed too early would have skipped some.
    assert rig.manager.polls > 12 + 3 * 4


def test_sessions_continue_a_partial_block(new_rig: Any) -> None:
    rig = new_rig(100)
    rig.answer("a", prompt(10), 4, session="s")
    assert rig.scheduler.num_sessions == 1
    second = prompt(10) + rig.tokens["a"] + [3, 4, 5]
    end = rig.answer("b", second, session="s")
    # 13 of 14 tokens are in the cache: the last one generated was never fed.
    assert end.usage.cached_tokens_by_tier == {"hot": 13, "host": 0, "disk": 0}
    assert rig.answer("c", second).usage.cached_tokens_by_tier["hot"] == 16
    assert rig.scheduler.num_sessions == 1


def test_an_edited_session_keeps_the_common_part_only(new_rig: Any) -> None:
    rig = new_rig(100)
    rig.answer("a", prompt(30), session="s")
    edited = [*prompt(30)[:21], 90, 91, 92]
    assert sum(rig.answer("b", edited, session="s").usage.cached_tokens_by_tier.values()) == 21
    rig.answer("c", prompt(20, seed=9), session="s")
    # The tree still knows the first version, and is better than what the session holds now.
    end = rig.answer("d", prompt(30), session="s")
    assert sum(end.usage.cached_tokens_by_tier.values()) == 28


def test_sessions_of_two_tenants_are_two(new_rig: Any) -> None:
    rig = new_rig(100)
    rig.answer("a", prompt(10), session="s", salt="one")
    end = rig.answer("b", prompt(10), session="s", salt="two")
    assert sum(end.usage.cached_tokens_by_tier.values()) == 0
    assert rig.scheduler.num_sessions == 2


def test_the_oldest_idle_session_is_closed_first(new_rig: Any) -> None:
    rig = new_rig(100, limits=EngineLimits(max_sessions=2))
    for n, name in enumerate(["x", "y", "x", "z"]):
        rig.answer(str(n), prompt(10, seed=n), 2, session=name)
    assert rig.scheduler.num_sessions == 2
    held = {tuple(cache.tokens[:10].tolist()) for cache in rig.manager.open_caches}
    assert held == {tuple(prompt(10, seed=2)), tuple(prompt(10, seed=3))}


def test_two_requests_of_one_session_at_once(new_rig: Any) -> None:
    rig = new_rig(100)
    rig.answer("a", prompt(20), session="s")
    rig.submit("b", [*prompt(20), 1], session="s")
    rig.submit("c", [*prompt(20), 2], session="s")
    rig.run()
    rig.check_tokens()
    assert rig.scheduler.num_sessions == 1


def test_preemption_loses_nothing(new_rig: Any) -> None:
    rig = new_rig(20)
    rig.submit("a", prompt(20), 40)
    rig.submit("b", prompt(16, seed=1), 40)
    rig.run()
    rig.check_tokens()
    assert rig.scheduler.counters["preemptions"] > 0
    assert rig.max_running == 2
    assert [len(rig.tokens[name]) for name in "ab"] == [40, 40]
    assert list(rig.ends) == ["a", "b"]  # the older one is never the victim


def test_a_preempted_request_comes_back_before_those_that_never_ran(new_rig: Any) -> None:
    rig = new_rig(20)
    rig.submit("a", prompt(20), 40)
    rig.submit("b", prompt(16, seed=1), 40)
    rig.step()
    rig.submit("c", prompt(16, seed=2), 40)
    rig.run()
    rig.check_tokens()
    assert list(rig.ends) == ["a", "b", "c"]


def test_a_prompt_that_needs_room_takes_the_item_of_its_victim_back(new_rig: Any) -> None:
    rig = new_rig(40, limits=EngineLimits(prefill_tokens=4, prefill_tokens_beside_decode=4))
    rig.answer("warm", prompt(4, seed=1), 1)
    rig.manager.finish_transfers()
    rig.submit("a", prompt(140), 2)
    rig.submit("b", prompt(4, seed=1), 50)  # matched whole: it decodes at once
    num_steps = 0
    while not rig.scheduler.counters["preemptions"]:
        num_steps = len(rig.recorder.steps)
        rig.step()
        rig.manager.finish_transfers()
    rig.run_until(lambda: len(rig.recorder.steps) > num_steps)
    step = [(one.request_id, one.purpose) for one in rig.recorder.steps[num_steps]]
    assert step == [("a", ItemPurpose.PREFILL)]
    rig.run()
    rig.check_tokens()


def test_what_does_not_fit_beside_the_others_waits_instead_of_thrashing(new_rig: Any) -> None:
    rig = new_rig(20)
    for n in range(3):
        rig.submit(str(n), prompt(40, seed=n), 8)
    rig.run()
    rig.check_tokens()
    assert rig.max_running == 1
    assert rig.scheduler.counters["preemptions"] == 0


def test_room_that_others_are_making_is_waited_for(new_rig: Any) -> None:
    rig = new_rig(20)
    rig.submit("a", prompt(10), 20)
    rig.submit("b", prompt(10, seed=1), 20)
    rig.step()
    rig.manager.faults.refuse_resize = True
    for _ in range(10):
        rig.step()
    rig.manager.faults.refuse_resize = False
    rig.run()
    rig.check_tokens()
    assert rig.scheduler.counters["preemptions"] == 0


def test_requests_under_pressure_with_everything_at_once(new_rig: Any) -> None:
    rig = new_rig(30, limits=EngineLimits(max_batch=4, prefill_tokens_beside_decode=8))
    rig.manager.faults.polls_to_onboard = 2
    rig.manager.faults.polls_to_grow = 1
    system = prompt(12, seed=99)
    for n in range(12):
        session = f"s{n % 3}" if n % 2 else None
        rig.submit(str(n), system + prompt(5 + 3 * n, seed=n), 20 + n, session=session)
        for _ in range(n):
            rig.step()
        if n % 4 == 0:
            rig.manager.offload_everything()
    rig.run()
    rig.check_tokens()
    assert len(rig.ends) == 12


def test_sharers_of_a_prefix_run_together_where_apart_they_would_not_fit(new_rig: Any) -> None:
    rig = new_rig(24)
    system = prompt(40)
    rig.answer("warm", system, 1)
    for n in range(4):
        rig.submit(str(n), [*system, n], 4)
    rig.run()
    rig.check_tokens()
    assert rig.max_running == 4
    assert rig.scheduler.counters["preemptions"] == 0


def test_a_waiting_request_finds_what_others_committed_meanwhile(new_rig: Any) -> None:
    rig = new_rig(200, limits=EngineLimits(max_batch=1))
    system = prompt(40)
    for n in range(3):
        rig.submit(str(n), [*system, n], 2)
    rig.run()
    cached = [sum(rig.finished(str(n)).usage.cached_tokens_by_tier.values()) for n in range(3)]
    assert cached == [0, 40, 40]


@pytest.mark.parametrize("prefetch_depth", [0, 4])
def test_a_request_that_did_not_fit_finds_what_others_committed_meanwhile(
    new_rig: Any, prefetch_depth: int
) -> None:
    rig = new_rig(20, limits=EngineLimits(prefetch_depth=prefetch_depth))
    shared = prompt(52)
    for n in range(2):  # 15 blocks each
        rig.submit(str(n), [*shared, n, 7, 7], 4)
    rig.run()
    rig.check_tokens()
    assert rig.max_running == 1
    assert sum(rig.finished("1").usage.cached_tokens_by_tier.values()) == 52


def test_waiting_requests_are_pulled_off_the_disk(new_rig: Any) -> None:
    rig = new_rig(200, limits=EngineLimits(max_batch=1, prefetch_depth=2))
    for n in range(4):
        rig.answer(f"old{n}", prompt(20, seed=n), 1)
    rig.manager.offload_everything()
    for n in range(4):
        rig.submit(str(n), [*prompt(20, seed=n), 1, 2], 3)
    rig.step()
    assert [cache.prefetched_to for cache in rig.manager.open_caches] == [[], [1], [1]]
    rig.run()
    rig.check_tokens()


def test_what_can_never_run_fails_at_once(new_rig: Any) -> None:
    rig = new_rig(10, context_tokens=30)
    rig.submit("long", prompt(30))
    rig.submit("empty", [])
    rig.submit("token", [VOCAB])
    rig.submit("sampling", [1], top_p=0.0)
    rig.step()
    codes = ["context_length_exceeded", "empty_prompt", "invalid_token", "invalid_sampling"]
    assert [rig.failed(name).code for name in rig.prompts] == codes
    assert rig.scheduler.counters["failed"] == 4


def test_the_hot_level_bounds_a_sequence_like_the_context_does(new_rig: Any) -> None:
    rig = new_rig(10)  # 9 blocks of 4 may run
    end = rig.answer("a", prompt(20), 100)
    assert end.finish_reason == "length"
    assert len(rig.tokens["a"]) == 36 - 20
    by_context = new_rig(100, context_tokens=25)
    by_context.submit("b", prompt(20), None)
    by_context.run()
    by_context.check_tokens()
    assert len(by_context.tokens["b"]) == 5


def test_the_queue_is_bounded(new_rig: Any) -> None:
    rig = new_rig(100, limits=EngineLimits(max_waiting=2))
    for n in range(3):
        rig.submit(str(n), prompt(5, seed=n))
    rig.run()
    rig.check_tokens("0", "1")
    assert (rig.failed("2").status, rig.failed("2").code) == (503, "queue_full")


def test_end_tokens_stop_and_are_not_text(new_rig: Any) -> None:
    answer = expected_tokens(prompt(10), 8)
    eos = answer[4]
    assert eos not in answer[:4]
    rig = new_rig(100, eos=frozenset({eos}))
    end = rig.answer("a", prompt(10))
    assert (end.finish_reason, end.usage.completion_tokens) == ("stop", 5)
    assert rig.text["a"] == "".join(f"[{token}]" for token in answer[:4])
    assert rig.answer("b", prompt(10), ignore_eos=True).finish_reason == "length"


def test_stop_strings_end_the_text_before_them(new_rig: Any) -> None:
    answer = expected_tokens(prompt(10), 8)
    rig = new_rig(100)
    end = rig.answer("a", prompt(10), stop=(f"[{answer[3]}]",))
    assert end.finish_reason == "stop"
    assert rig.text["a"] == "".join(f"[{token}]" for token in answer[:3])
    assert len(rig.tokens["a"]) == 4


def test_sampled_answers_repeat_with_a_seed_whatever_runs_beside_them(new_rig: Any) -> None:
    rig = new_rig(200)
    rig.submit("alone", prompt(10), 12, temperature=5.0, seed=3)
    rig.run()
    for n in range(4):
        rig.submit(f"n{n}", prompt(12, seed=n), 20, temperature=5.0, seed=n)
    rig.submit("again", prompt(10), 12, temperature=5.0, seed=3)
    rig.run()
    assert rig.tokens["alone"] == rig.tokens["again"]
    assert rig.tokens["alone"] != expected_tokens(prompt(10), 12)


@pytest.mark.parametrize("num_steps", range(6))
def test_cancelling_frees_at_once_in_every_phase(new_rig: Any, num_steps: int) -> None:
    rig = new_rig(20, limits=EngineLimits(prefill_tokens=8))
    rig.answer("old", prompt(24), 1)
    rig.manager.offload_everything()
    rig.manager.faults.polls_to_onboard = 3
    rig.submit("a", prompt(24) + prompt(8, seed=2), 5)
    rig.submit("b", prompt(30, seed=1), 5)  # waits
    for _ in range(num_steps):
        rig.step()
    for name in ("a", "b", "nobody"):
        rig.scheduler.cancel(name)
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (0, 0)
    assert rig.manager.open_caches == []
    assert rig.step().state is StepState.IDLE
    assert rig.ends.keys() == {"old"}


def test_a_cancelled_session_keeps_its_history(new_rig: Any) -> None:
    rig = new_rig(100)
    rig.submit("a", prompt(30), 50, session="s")
    for _ in range(5):
        rig.step()
    rig.scheduler.cancel("a")
    assert rig.manager.num_locked() == 0
    end = rig.answer("b", [*prompt(30), 1], session="s")
    assert sum(end.usage.cached_tokens_by_tier.values()) == 30


def test_a_failed_forward_costs_only_the_requests_of_its_step(new_rig: Any) -> None:
    rig = new_rig(20)
    rig.submit("a", prompt(20), 8)
    rig.submit("b", prompt(60, seed=1), 8)  # does not fit beside it
    rig.step()
    rig.runner.fail_next = RuntimeError("out of\n memory")
    rig.run()
    failed = rig.failed("a")
    assert (failed.status, failed.code) == (500, "engine_error")
    assert failed.sentence == "The engine failed (RuntimeError): out of memory"
    rig.check_tokens("b")
    rig.answer("c", prompt(20))


def test_logits_that_are_not_finite_fail_their_request(new_rig: Any) -> None:
    rig = new_rig(100)
    rig.submit("a", prompt(20), 8)
    rig.submit("b", prompt(20, seed=1), 8)
    rig.runner.poison_next = True
    rig.run()
    assert rig.failed("a").status == 500
    rig.check_tokens("b")


@pytest.mark.parametrize("lost", [{0}, {3}, {1, 2, 5}, {9}, set(range(10))])
def test_lost_blocks_are_recomputed_and_nothing_else(new_rig: Any, lost: set[int]) -> None:
    rig = new_rig(100, num_host_blocks=0, limits=EngineLimits(prefill_tokens=8))
    rig.answer("a", prompt(40), 1)
    rig.manager.offload_everything()
    rig.manager.faults.flip_on_disk = set(lost)
    end = rig.answer("b", [*prompt(40), 5], 3)
    positions = [
        position
        for step in rig.recorder.steps
        for one in step
        if one.request_id == "b" and one.purpose.value == "recompute"
        for position in range(one.item.start, one.item.start + len(one.item.token_ids))
    ]
    expected = [BLOCK * n + k for n in sorted(lost) for k in range(BLOCK)]
    assert positions == expected
    assert ("b", sorted(lost)) in rig.recorder.restored
    assert end.usage.cached_tokens_by_tier == {"hot": 0, "disk": 40 - len(expected)}
    assert rig.scheduler.counters["recomputed_blocks"] == len(lost)


def test_a_lost_partial_block_of_a_session(new_rig: Any) -> None:
    rig = new_rig(100, num_host_blocks=0)
    rig.answer("a", prompt(10), 4, session="s")  # 13 tokens: the last block holds one
    rig.manager.offload_everything()
    rig.manager.faults.flip_on_disk = {3}
    rig.answer("b", prompt(10) + rig.tokens["a"] + [3], session="s")
    assert rig.purposes("b")["recompute"] == 1


def test_a_lost_page_that_two_sequences_share_is_recomputed_once(new_rig: Any) -> None:
    rig = new_rig(100, num_host_blocks=1, limits=EngineLimits(max_batch=2))
    rig.answer("warm", prompt(40), 1)
    rig.manager.offload_everything()
    for name, tokens in {"x": [3], "y": [4], "a": [*prompt(40), 1], "b": [*prompt(40), 2]}.items():
        rig.submit(name, tokens, 3)
    rig.step()
    assert len(rig.manager.open_caches) == 4  # a and b wait with pages, and start together
    rig.manager.faults.flip_on_disk = {2, 6}
    rig.run()
    rig.check_tokens()
    # Which of them is ready first is the disk's choice; either way each block is computed once.
    assert [2, 6] in [missing for _, missing in rig.recorder.restored]
    assert rig.purposes("a")["recompute"] + rig.purposes("b")["recompute"] == 2


def test_recomputing_goes_on_while_others_decode_and_after_preemption(new_rig: Any) -> None:
    rig = new_rig(24, num_host_blocks=0, limits=EngineLimits(prefill_tokens_beside_decode=4))
    rig.answer("warm", prompt(32), 1)
    rig.manager.offload_everything()
    rig.submit("a", prompt(12, seed=4), 60)
    rig.step()
    rig.manager.faults.flip_on_disk = set(range(8))
    rig.submit("b", [*prompt(32), 1], 30)
    rig.run()
    rig.check_tokens()
    assert rig.scheduler.counters["preemptions"] > 0


def test_sliding_windows_start_again_from_what_still_matches(new_rig: Any) -> None:
    rig = new_rig(100, num_host_blocks=0, has_sliding_window=True)
    rig.answer("a", prompt(40), 1)
    rig.manager.offload_everything()
    rig.manager.faults.flip_on_disk = {5}
    end = rig.answer("b", [*prompt(40), 5], 3)
    assert rig.purposes("b")["recompute"] == 0
    first = next(one for step in rig.recorder.steps for one in step if one.request_id == "b")
    assert first.item.start == 20
    assert sum(end.usage.cached_tokens_by_tier.values()) == 20


def test_sliding_windows_give_up_on_a_prefix_that_is_lost_again_and_again(new_rig: Any) -> None:
    rig = new_rig(100, num_host_blocks=0, has_sliding_window=True)
    rig.answer("a", prompt(40), 1)
    rig.manager.offload_everything()
    rig.manager.faults.flip_one_every_time = True
    rig.manager.faults.offload_on_close = True
    end = rig.answer("b", [*prompt(40), 5], 3)
    assert rig.scheduler.counters["rebuilt_sequences"] == 3
    assert sum(end.usage.cached_tokens_by_tier.values()) == 0


def test_sliding_windows_start_again_in_the_middle_of_an_answer(new_rig: Any) -> None:
    rig = new_rig(20, num_host_blocks=0, has_sliding_window=True)
    rig.submit("a", prompt(20), 50)
    rig.submit("b", prompt(16, seed=1), 50)
    rig.run_until(lambda: rig.scheduler.counters["preemptions"])
    rig.manager.offload_everything()
    rig.manager.faults.flip_on_disk = {2}
    rig.run()
    rig.check_tokens()
    assert rig.scheduler.counters["rebuilt_sequences"] == 1
    assert sum(rig.finished("b").usage.cached_tokens_by_tier.values()) == 0


def test_sliding_windows_never_cut_a_cache_back(new_rig: Any) -> None:
    rig = new_rig(100, has_sliding_window=True)
    rig.answer("a", prompt(40), 4, session="s")
    cut: list[int] = []
    kept = rig.manager.open_caches[0]
    kept.truncate = cut.append
    end = rig.answer("b", prompt(40), session="s")  # matched whole
    assert end.usage.cached_tokens_by_tier["hot"] == 36
    rig.answer("c", prompt(40) + rig.tokens["b"][:7] + [1, 2], session="s")
    assert cut == []


def test_nothing_hangs_when_nothing_fits_although_it_should(new_rig: Any) -> None:
    limits = EngineLimits(admission_deadline_s=0.02, room_patience_s=0.01, room_deadline_s=0.05)
    rig = new_rig(10, limits=limits)
    rig.manager.faults.refuse_resume = True
    rig.submit("a", prompt(10))
    rig.run()
    assert (rig.failed("a").status, rig.failed("a").code) == (503, "hot_level_full")
    assert "3 blocks" in rig.failed("a").sentence
    assert "10" in rig.failed("a").sentence
    rig.manager.faults.refuse_resume = False
    rig.manager.faults.refuse_resize = True
    rig.submit("b", prompt(10))
    rig.submit("c", prompt(10, seed=1))
    rig.run()
    assert {rig.failed(name).status for name in "bc"} == {503}
    rig.manager.faults.refuse_resize = False
    rig.answer("d", prompt(10))


def test_nothing_hangs_when_pages_never_arrive(new_rig: Any) -> None:
    rig = new_rig(100, limits=EngineLimits(onboarding_deadline_s=0.02))
    rig.answer("a", prompt(40), 1)
    rig.manager.offload_everything()
    rig.manager.faults.polls_to_onboard = 1_000_000
    rig.submit("b", [*prompt(40), 5], 3)
    rig.run()
    assert (rig.failed("b").status, rig.failed("b").code) == (503, "restore_timeout")
