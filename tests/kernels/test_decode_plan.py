"""How the work of a decoding step is cut: whatever the batch, each visible block once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coldpage.kernels.decode_plan import DecodeParts, DecodePrograms, plan_decode


@dataclass(frozen=True)
class Step:
    """What a plan is made for."""

    num_tokens: tuple[int, ...]
    tokens_per_block: int
    num_kv_heads: int
    programs: DecodePrograms
    window: int | None
    num_sink_tokens: int

    def plan(self, num_tokens: tuple[int, ...] | None = None) -> DecodeParts:
        settings: dict[str, Any] = {
            "tokens_per_block": self.tokens_per_block,
            "num_kv_heads": self.num_kv_heads,
            "programs": self.programs,
            "window": self.window,
            "num_sink_tokens": self.num_sink_tokens,
        }
        lengths = self.num_tokens if num_tokens is None else num_tokens
        return plan_decode(np.array(lengths, np.int32), **settings)

    def visible_blocks(self, length: int) -> list[int]:
        """Of a row, position by position."""
        position = np.arange(length)
        is_visible = position >= (0 if self.window is None else length - self.window)
        is_visible |= position < self.num_sink_tokens
        return [int(block) for block in np.unique(position[is_visible] // self.tokens_per_block)]


PROGRAMS = DecodePrograms(528, 4)
SHORT = st.integers(0, 100)
LENGTHS = st.lists(SHORT | st.integers(0, 20_000), max_size=24)
STEPS = st.builds(
    Step,
    LENGTHS.map(tuple),
    st.sampled_from([1, 16, 32]),
    st.integers(1, 16),
    st.builds(DecodePrograms, st.integers(1, 2_000), st.integers(1, 4)),
    st.none() | st.integers(1, 5_000),
    st.integers(0, 100),
)


@given(STEPS)
def test_items_are_each_visible_block_once_in_order(step: Step) -> None:
    items, first_items, _ = step.plan()
    assert items.dtype == first_items.dtype == np.int32 and (items[:, 3] == 0).all()
    assert first_items.shape == (len(step.num_tokens) + 1,) and first_items[0] == 0
    for row, length in enumerate(step.num_tokens):
        own = items[first_items[row] : first_items[row + 1]]
        assert (own[:, 0] == row).all() and (own[:, 1] < own[:, 2]).all()
        blocks = [block for _, first, stop, _ in own for block in range(first, stop)]
        assert blocks == step.visible_blocks(length)
    assert first_items[-1] <= len(items) and (items[first_items[-1] :, 0] < 0).all()


@given(STEPS, st.data())
def test_sizes_of_a_plan_do_not_depend_on_lengths(step: Step, data: st.DataObject) -> None:
    batch = len(step.num_tokens)
    others = data.draw(st.lists(st.integers(0, 200_000), min_size=batch, max_size=batch))
    shapes = ([part.shape for part in step.plan(lengths)] for lengths in (None, tuple(others)))
    assert next(shapes) == next(shapes)


@given(STEPS)
def test_every_item_has_one_share(step: Step) -> None:
    _, first_items, shares = step.plan()
    assert shares.dtype == np.int32 and shares[0] == 0
    assert (np.diff(shares) >= 0).all() and shares[-1] == first_items[-1]


@given(STEPS)
def test_shares_are_even(step: Step) -> None:
    items, first_items, shares = step.plan()
    used = items[: first_items[-1]]
    sizes = used[:, 2] - used[:, 1]
    # An item costs what eight blocks do. What is below is not cut, nor cut off.
    crumb = 8
    costs = np.append(0, np.cumsum(sizes + crumb))
    of_shares = np.diff(costs[shares])
    num_at_a_time = max(1, step.programs.num_at_a_time // step.num_kv_heads)
    even = -(-int(costs[-1]) // num_at_a_time)  # also of several waves, none is larger
    assert of_shares.max(initial=0) <= max(even, 3 * crumb) + 3 * crumb


@given(STEPS)
def test_equal_steps_have_equal_plans(step: Step) -> None:
    for first, second in zip(step.plan(), step.plan(), strict=True):
        assert np.array_equal(first, second)


def test_one_long_sequence_is_for_all_programs() -> None:
    items, first_items, shares = Step((64_000,), 16, 8, PROGRAMS, None, 0).plan()
    assert first_items[1] == 528 // 8
    assert np.array_equal(shares, np.minimum(np.arange(len(shares)), 528 // 8))
    sizes = items[: first_items[1], 2] - items[: first_items[1], 1]
    # The first item of a row costs its start, as do all others.
    assert sizes[1:].max() - sizes[1:].min() <= 1 and sizes.max() - sizes.min() <= 9


def test_short_sequences_are_not_cut() -> None:
    step = Step((1, 16, 100, 0, 128), 16, 8, PROGRAMS, None, 0)
    assert step.plan().first_items.tolist() == [0, 1, 2, 3, 3, 4]
    assert step.plan().shares.tolist()[:5] == [0, 1, 2, 3, 4]


def test_much_work_comes_in_waves_of_smaller_and_smaller_shares() -> None:
    items, _, shares = Step((8_192,) * 64, 16, 8, PROGRAMS, None, 0).plan()
    blocks = np.append(0, np.cumsum(items[:, 2] - items[:, 1]))
    of_shares = np.diff(blocks[shares])
    assert len(of_shares) == 4 * 528 // 8 and of_shares.min() > 0
    waves = of_shares.reshape(4, -1).sum(1)
    assert (np.abs(waves[1:] / waves[:-1] - 0.6) < 0.05).all()


def test_a_single_wave_is_even() -> None:
    items, _, shares = Step((8_192,) * 64, 16, 8, DecodePrograms(528), None, 0).plan()
    blocks = np.append(0, np.cumsum(items[:, 2] - items[:, 1]))
    of_shares = np.diff(blocks[shares])
    assert len(of_shares) == 528 // 8 and np.ptp(of_shares) <= 3 * 8
