from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.config import ReuseScope
from coldpage.engine.admission import (
    EngineLimits,
    Footprint,
    HotCapacity,
    common_prefix_tokens,
    refuse_prompt,
    refuse_sampling,
    working_set_blocks,
)
from coldpage.engine.messages import SamplingParams
from coldpage.engine.planning import missing_chunk, prefill_chunk
from coldpage.errors import ConfigurationError
from coldpage.types import BlockOrdinal, HalfOpenRange, Int32Array


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("prompt", "context", "code", "numbers"),
    [
        ([], 100, "empty_prompt", ()),
        ([1, 50], 100, "invalid_token", ("50", "49")),
        ([-1], 100, "invalid_token", ("-1",)),
        ([1] * 20, 20, "context_length_exceeded", ("20", "19")),
        ([1] * 36, 100, "hot_level_too_small", ("36", "10", "9")),
    ],
)
def test_what_can_never_run_names_the_limit(
    prompt: list[int], context: int, code: str, numbers: tuple[str, ...]
) -> None:
    capacity = HotCapacity(num_blocks=10, allowed_tokens=36, tokens_per_block=4)
    refusal = refuse_prompt(ints(*prompt), capacity, context, vocab_size=50)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (400, code)
    for number in numbers:
        assert number in refusal.sentence


def test_the_longest_prompts_that_can_run() -> None:
    capacity = HotCapacity(num_blocks=10, allowed_tokens=36, tokens_per_block=4)
    assert capacity.allowed_blocks == 9
    assert refuse_prompt(ints(*[1] * 35), capacity, 100, 50) is None
    assert refuse_prompt(ints(*[1] * 19), capacity, 20, 50) is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=0),
        SamplingParams(temperature=-0.1),
        SamplingParams(temperature=float("nan")),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.1),
        SamplingParams(top_k=-1),
        SamplingParams(stop=("a", "")),
    ],
)
def test_sampling_that_means_nothing_is_refused(params: SamplingParams) -> None:
    refusal = refuse_sampling(params)
    assert refusal is not None
    assert refusal.status == 400


def test_sampling_limits_are_allowed() -> None:
    assert refuse_sampling(SamplingParams(max_tokens=1, temperature=0, top_p=1.0, top_k=0)) is None


def test_limits_that_hold_no_block_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one block of 16"):
        EngineLimits(prefill_tokens_beside_decode=15).check(16)
    with pytest.raises(ConfigurationError, match="at least 1"):
        EngineLimits(max_batch=0).check(16)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(first: list[int], second: list[int]) -> None:
    num = common_prefix_tokens(ints(*first), ints(*second))
    assert first[:num] == second[:num]
    assert num == min(len(first), len(second)) or first[num] != second[num]


def test_shared_blocks_count_once() -> None:
    scope, other_scope = ReuseScope(), ReuseScope(salt="x")
    system = list(range(10))
    first = Footprint(ints(*system, 20, 21), 0, scope, 4)
    shares = Footprint(ints(*system, 30, 31), 10, scope, 4)  # 2 whole blocks of 4 are shared
    unmatched = Footprint(ints(*system, 30, 31), 0, scope, 4)  # equal, but computed apart
    stranger = Footprint(ints(*system, 30, 31), 10, other_scope, 4)
    assert working_set_blocks([first], 4) == 4
    assert working_set_blocks([first, shares], 4) == 6
    assert working_set_blocks([first, unmatched], 4) == 8
    assert working_set_blocks([first, stranger], 4) == 8
    assert working_set_blocks([shares, first], 4) == 8  # nobody matched the other's
    assert working_set_blocks([first, shares, shares], 4) == 8


@given(st.integers(0, 200), st.integers(1, 200), st.integers(1, 100), st.sampled_from([1, 4, 16]))
def test_prefill_chunks_cover_everything_within_the_budget(
    start: int, num: int, budget: int, block: int
) -> None:
    stop, position = start + num, start
    while position < stop:
        chunk = prefill_chunk(position, stop, budget, block)
        assert chunk.start == position
        assert 1 <= len(chunk) <= budget
        # Chunks end at a block's end, so that pages are completed and shared as early as possible.
        reaches_an_end = (position // block + 1) * block <= position + budget
        assert chunk.stop == stop or chunk.stop % block == 0 or not reaches_an_end
        position = chunk.stop
    assert position == stop


def test_missing_chunks_are_contiguous_whole_blocks() -> None:
    missing = [BlockOrdinal(n) for n in (1, 2, 3, 7)]
    chunk = missing_chunk(missing, history_length=30, budget=8, tokens_per_block=4)
    assert (chunk.ordinals, chunk.positions) == ((1, 2), HalfOpenRange(4, 12))
    chunk = missing_chunk(missing, history_length=30, budget=100, tokens_per_block=4)
    assert (chunk.ordinals, chunk.positions) == ((1, 2, 3), HalfOpenRange(4, 16))
    chunk = missing_chunk(missing[3:], history_length=30, budget=4, tokens_per_block=4)
    assert (chunk.ordinals, chunk.positions) == ((7,), HalfOpenRange(28, 30))
