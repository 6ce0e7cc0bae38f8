"""Quotas to weights to slot counts, against counting pages and dividing bytes naively."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coldpage.config import AttentionLayerConfig, BatchDesc, BufferConfig, KVCacheDesc
from coldpage.errors import ConfigurationError
from coldpage.layout import HotLayout, Partition, cold_layout, hot_layout, partition, slot_counts
from coldpage.types import BufferRole, LayerId, PageClass

_ROLES = ("key", "value")
_PER_BLOCK = 4


def _layer(
    layer_id: int, *sizes: int, window: int | None = None, sinks: int = 0
) -> AttentionLayerConfig:
    buffers = tuple(BufferConfig(BufferRole(r), n) for r, n in zip(_ROLES, sizes, strict=False))
    return AttentionLayerConfig(LayerId(layer_id), buffers, window, sinks)


def _batch(*sequences: tuple[int, int], prompt: int = 0) -> BatchDesc:
    return BatchDesc(tuple(KVCacheDesc(c, h) for c, h in sequences), prompt)


@st.composite
def _layouts(draw: st.DrawFn) -> HotLayout:
    """One to four groups in one to three hot pool groups, with sinks and recent blocks apart or
    not.
    """
    sizes = st.sampled_from([(24,), (24, 24), (64, 100)])
    windows = draw(st.lists(st.sampled_from([None, 1, 7, 16]), min_size=1, max_size=4, unique=True))
    layers = [
        _layer(i, *draw(sizes), window=window, sinks=draw(st.sampled_from([0, 4, 5])))
        for i, window in enumerate(windows)
    ]
    return hot_layout(
        layers,
        separate_sinks=draw(st.booleans()),
        num_recent_blocks=draw(st.sampled_from([0, 0, 1, 3])),
    )


@st.composite
def _batches(draw: st.DrawFn) -> BatchDesc:
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        capacity = draw(st.integers(1, 40))
        sequences.append((capacity, draw(st.integers(0, capacity))))
    return _batch(*sequences, prompt=draw(st.integers(0, min(c for c, _ in sequences))))


def _kept_pages(layout: HotLayout, layer_group: int, batch: BatchDesc) -> Counter[PageClass]:
    """The pages by class, one by one, by the positions that are seen."""
    group = layout.layer_groups[layer_group]
    pages: set[tuple[object, int]] = set()
    newest: set[tuple[object, int]] = set()
    for sequence, desc in enumerate(batch.kv_caches):
        num_blocks = -(-desc.capacity // _PER_BLOCK)
        for block in range(num_blocks):
            positions = range(block * _PER_BLOCK, (block + 1) * _PER_BLOCK)
            window = group.sliding_window_tokens
            is_shared = positions.stop <= batch.system_prompt_length
            page = ("everybody" if is_shared else sequence, block)
            if layout.num_recent_blocks and num_blocks - block <= layout.num_recent_blocks + 1:
                newest.add(page)
            if any(
                window is None or p < group.num_sink_tokens or p > desc.history_length - window
                for p in positions
            ):
                pages.add(page)
    return Counter(
        PageClass.SINK if page[1] == 0 else PageClass.RECENT if page in newest else PageClass.BODY
        for page in pages
    )


def _slot_weights(layout: HotLayout, batch: BatchDesc) -> list[Fraction]:
    """Pages by life cycle. Every group and class has some weight."""
    weights = []
    for lc in layout.life_cycles:
        kept = _kept_pages(layout, lc.layer_group_id, batch)
        total = Fraction(max(1, kept.total()))
        if PageClass.SINK not in layout.page_classes:
            kept[PageClass.BODY] += kept.pop(PageClass.SINK, 0)
        own = {it: max(1, kept[it]) for it in layout.page_classes}
        weights.append(total * Fraction(own[lc.page_class], sum(own.values())))
    return weights


def _shares(values: Sequence[Fraction | int | float]) -> tuple[Fraction, ...]:
    total = sum(Fraction(v) for v in values)
    return tuple(Fraction(v) / total for v in values)


def _group_page_bytes(layout: HotLayout, layer_group: int) -> int:
    return next(
        sum(layout.slot_bytes[lc.hot_pool_group])
        for lc in layout.life_cycles
        if lc.layer_group_id == layer_group
    )


def _by_group(layout: HotLayout, batch: BatchDesc) -> list[int]:
    """The pages of a batch by layer group."""
    return [_kept_pages(layout, g, batch).total() for g in range(len(layout.layer_groups))]


def _as_bytes(layout: HotLayout, pages: Sequence[int]) -> tuple[Fraction, ...]:
    return _shares([max(1, n) * _group_page_bytes(layout, g) for g, n in enumerate(pages)])


# ---------------------------------------------------------------------- weights


@settings(max_examples=300)
@given(layout=_layouts(), batch=_batches())
def test_a_typical_step_weighs_the_bytes_it_keeps(layout: HotLayout, batch: BatchDesc) -> None:
    made = Partition(layout, _PER_BLOCK, typical_step=batch)
    assert made.layer_group_weights == _as_bytes(layout, _by_group(layout, batch))


@given(layout=_layouts(), constraints=st.lists(_batches(), min_size=1, max_size=3))
def test_constraints_weigh_the_most_bytes_that_any_keeps(
    layout: HotLayout, constraints: list[BatchDesc]
) -> None:
    made = Partition(layout, _PER_BLOCK, constraints=constraints)
    most = [max(n) for n in zip(*(_by_group(layout, b) for b in constraints), strict=True)]
    assert made.layer_group_weights == _as_bytes(layout, most)


@given(layout=_layouts())
def test_else_one_sequence_of_typical_length_decides(layout: HotLayout) -> None:
    made = Partition(layout, _PER_BLOCK)
    by_batch = Partition(layout, _PER_BLOCK, typical_step=_batch((4096, 4096)))
    assert made.layer_group_weights == by_batch.layer_group_weights


def test_the_typical_length_is_read_when_a_partition_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = hot_layout([_layer(0, 24), _layer(1, 24, window=4)])
    monkeypatch.setattr(partition, "TYPICAL_SEQUENCE_TOKENS", 3 * _PER_BLOCK)
    made = Partition(layout, _PER_BLOCK)
    # Three blocks, and of the window the last: two of its positions are seen from position 12.
    assert made.layer_group_weights == (Fraction(3, 4), Fraction(1, 4))


@given(layout=_layouts(), data=st.data(), batch=_batches())
def test_a_given_ratio_is_taken_before_all_and_normalised(
    layout: HotLayout, data: st.DataObject, batch: BatchDesc
) -> None:
    num = len(layout.layer_groups)
    share = st.floats(1e-3, 1e3) | st.integers(1, 9)
    ratio = data.draw(st.lists(share, min_size=num, max_size=num))
    made = Partition(
        layout, _PER_BLOCK, initial_pool_ratio=ratio, typical_step=batch, constraints=[batch]
    )
    assert made.layer_group_weights == _shares(ratio)


@given(layout=_layouts(), typical=_batches(), constraint=_batches())
def test_a_typical_step_is_taken_before_constraints(
    layout: HotLayout, typical: BatchDesc, constraint: BatchDesc
) -> None:
    made = Partition(layout, _PER_BLOCK, typical_step=typical, constraints=[constraint])
    alone = Partition(layout, _PER_BLOCK, typical_step=typical)
    assert made.layer_group_weights == alone.layer_group_weights


def test_a_ratio_of_another_length_is_refused_with_a_list_of_the_groups() -> None:
    layers = [_layer(3, 24), _layer(4, 24, window=512, sinks=4), _layer(5, 24, window=512, sinks=4)]
    with pytest.raises(ConfigurationError) as raised:
        Partition(hot_layout(layers, separate_sinks=True), 16, initial_pool_ratio=(1, 2, 3, 4))
    assert str(raised.value) == (
        "initial_pool_ratio has 4 shares for 2 layer groups (0: layer 3 with no window; "
        "1: 2 layers from 4 on with a window of 512 tokens and 4 sink tokens): "
        "give one share for each, in this order"
    )


@given(layout=_layouts(), batch=_batches(), data=st.data())
def test_all_weights_are_positive_and_one_in_sum(
    layout: HotLayout, batch: BatchDesc, data: st.DataObject
) -> None:
    made = Partition(layout, _PER_BLOCK, typical_step=batch)
    num = len(layout.life_cycles)
    cold = cold_layout(data.draw(st.lists(st.integers(1, 3), min_size=num, max_size=num)))
    strides = [size + 4096 for size in cold.slot_bytes]
    for weights, size in (
        (made.layer_group_weights, len(layout.layer_groups)),
        (made.hot_byte_weights(), len(layout.slot_bytes)),
        (made.cold_byte_weights(cold, strides), len(cold.slot_bytes)),
    ):
        assert len(weights) == size
        assert min(weights) > 0
        assert sum(weights) == 1


# ---------------------------------------------------------------------- projection


@given(layout=_layouts(), data=st.data())
def test_a_hot_pool_group_weighs_what_its_layer_groups_do(
    layout: HotLayout, data: st.DataObject
) -> None:
    num = len(layout.layer_groups)
    ratio = data.draw(st.lists(st.integers(1, 9), min_size=num, max_size=num))
    expected = [0] * len(layout.slot_bytes)
    for lc in layout.life_cycles:
        if lc.page_class is PageClass.BODY:
            expected[lc.hot_pool_group] += ratio[lc.layer_group_id]
    made = Partition(layout, _PER_BLOCK, initial_pool_ratio=ratio)
    assert made.hot_byte_weights() == _shares(expected)


@settings(max_examples=300)
@given(layout=_layouts(), batch=_batches(), data=st.data())
def test_slot_counts_of_layer_groups_keep_their_proportions_on_every_level(
    layout: HotLayout, batch: BatchDesc, data: st.DataObject
) -> None:
    num = len(layout.life_cycles)
    # Few sizes: cold pool groups are shared across hot ones, and hot ones across cold ones.
    sizes = data.draw(st.lists(st.sampled_from([10, 24, 900]), min_size=num, max_size=num))
    cold = cold_layout(sizes)
    padding = data.draw(st.sampled_from([0, 1, 4096]))
    strides = [size + padding for size in cold.slot_bytes]
    made = Partition(layout, _PER_BLOCK, typical_step=batch)
    pages = _slot_weights(layout, batch)
    hot_bytes = [sum(pools) for pools in layout.slot_bytes]
    for mapping, slot_bytes, weights in (
        ([lc.hot_pool_group for lc in layout.life_cycles], hot_bytes, made.hot_byte_weights()),
        (cold.pool_group_of, strides, made.cold_byte_weights(cold, strides)),
    ):
        wanted = [
            sum((p for p, g in zip(pages, mapping, strict=True) if g == group), Fraction(0))
            for group in range(len(slot_bytes))
        ]
        assert weights == _shares([w * size for w, size in zip(wanted, slot_bytes, strict=True)])
        quota = data.draw(st.sampled_from([0, 999, 99_991, 1 << 30]))
        counts = slot_counts(quota, slot_bytes, weights, [0] * len(weights), "a tier")
        for (count, want), (other, other_want) in itertools.product(
            zip(counts, wanted, strict=True), repeat=2
        ):
            # Whole slots: each count is less than one away from its share.
            assert abs(count * other_want - other * want) < want + other_want


def test_groups_that_share_a_hot_pool_group_keep_their_blocks_in_two_cold_ones() -> None:
    layout = hot_layout([_layer(0, 1000), _layer(1, 1000, window=9)])
    assert layout.slot_bytes == ((1000,),)
    made = Partition(layout, _PER_BLOCK, initial_pool_ratio=(3, 1))
    assert made.hot_byte_weights() == (1,)
    cold = cold_layout([10, 900])
    weights = made.cold_byte_weights(cold, [10, 900])
    # Three slots to one, so 30 bytes to 900.
    assert weights == (Fraction(30, 930), Fraction(900, 930))
    assert slot_counts(9_300, [10, 900], weights, [1, 1], "a cold tier") == (30, 10)


def test_groups_of_two_hot_pool_groups_keep_their_blocks_in_one_cold_one() -> None:
    layers = [_layer(0, 1000), _layer(1, 40, 60, window=9), _layer(2, 8, window=7)]
    layout = hot_layout(layers)
    assert len(layout.slot_bytes) == 3
    # Hot slots 1 : 2 : 5.
    made = Partition(layout, _PER_BLOCK, initial_pool_ratio=(1000, 200, 40))
    hot_weights = made.hot_byte_weights()
    assert slot_counts(12_400, [1000, 100, 8], hot_weights, [1] * 3, "hot") == (10, 20, 50)
    cold = cold_layout([80, 80, 20])
    assert cold.pool_group_of == (0, 0, 1)
    weights = made.cold_byte_weights(cold, [80, 20])
    assert slot_counts(3_400, [80, 20], weights, [1, 1], "a cold tier") == (30, 50)


def test_a_disk_slot_weighs_what_it_takes_there() -> None:
    layout = hot_layout([_layer(0, 100), _layer(1, 100, window=9)])
    made = Partition(layout, _PER_BLOCK, initial_pool_ratio=(1, 1))
    cold = cold_layout([100, 25])
    strides = [4196, 4121]
    weights = made.cold_byte_weights(cold, strides)
    assert slot_counts(7 * sum(strides), strides, weights, [1, 1], "a disk tier") == (7, 7)


def test_sinks_are_one_page_a_sequence_and_the_body_is_the_rest() -> None:
    layout = hot_layout([_layer(0, 100)], separate_sinks=True)
    cold = cold_layout([100, 25])
    # 3 first blocks, and 9 + 1 + 1 others.
    typical = _batch((40, 40), (8, 8), (7, 0))
    made = Partition(layout, _PER_BLOCK, typical_step=typical)
    assert made.hot_byte_weights() == (1,)
    weights = made.cold_byte_weights(cold, [100, 25])
    assert weights == _shares([3 * 100, 11 * 25])
    # A ratio says nothing of classes: the typical step still does.
    made = Partition(layout, _PER_BLOCK, initial_pool_ratio=(7,), typical_step=typical)
    assert made.cold_byte_weights(cold, [100, 25]) == weights
    # One of 1,024 blocks.
    made = Partition(layout, _PER_BLOCK, initial_pool_ratio=(7,))
    assert made.cold_byte_weights(cold, [100, 25]) == _shares([100, 1023 * 25])


def test_recent_pages_are_so_many_a_sequence_and_the_one_that_is_not_full() -> None:
    layout = hot_layout([_layer(0, 100)], separate_sinks=True, num_recent_blocks=2)
    # Whole pages share a pool group: 3 first blocks, and 3 + 1 + 1 newest ones; 6 are packed.
    cold = cold_layout([100, 25, 100])
    assert cold.pool_group_of == (0, 1, 0)
    made = Partition(layout, _PER_BLOCK, typical_step=_batch((40, 40), (8, 8), (7, 0)))
    assert made.cold_byte_weights(cold, [100, 25]) == _shares([8 * 100, 6 * 25])
    # One sequence of 1,024 blocks.
    made = Partition(layout, _PER_BLOCK)
    assert made.cold_byte_weights(cold, [100, 25]) == _shares([4 * 100, 1020 * 25])


def test_the_sinks_of_a_shared_prompt_are_one_page() -> None:
    layout = hot_layout([_layer(0, 100)], separate_sinks=True)
    made = Partition(layout, _PER_BLOCK, typical_step=_batch((12, 12), (12, 12), prompt=11))
    weights = made.cold_byte_weights(cold_layout([1, 2]), [1, 1])
    # Two shared blocks, one of them first, and the last block of each.
    assert weights == (Fraction(1, 4), Fraction(3, 4))


def test_a_class_that_the_batch_does_not_have_gets_a_share() -> None:
    windowed = hot_layout([_layer(0, 100, window=4)], separate_sinks=True)
    made = Partition(windowed, _PER_BLOCK, typical_step=_batch((40, 36)))
    # The first block is stale, and two others are not.
    weights = made.cold_byte_weights(cold_layout([1, 2]), [1, 1])
    assert weights == (Fraction(1, 3), Fraction(2, 3))
    short = Partition(windowed, _PER_BLOCK, typical_step=_batch((4, 0), (4, 0)))
    weights = short.cold_byte_weights(cold_layout([1, 2]), [1, 1])
    assert weights == (Fraction(2, 3), Fraction(1, 3))


# ---------------------------------------------------------------------- floors


@settings(max_examples=200)
@given(layout=_layouts(), constraints=st.lists(_batches(), max_size=3))
def test_hot_floors_hold_each_constraint_and_one_block(
    layout: HotLayout, constraints: list[BatchDesc]
) -> None:
    made = Partition(layout, _PER_BLOCK, constraints=constraints)
    group_of = {lc.layer_group_id: lc.hot_pool_group for lc in layout.life_cycles}
    for index in range(len(layout.slot_bytes)):
        members = [g for g, pool_group in group_of.items() if pool_group == index]
        needs = [sum(_by_group(layout, b)[g] for g in members) for b in constraints]
        assert made.hot_floors[index] == max([len(members), *needs])


@given(layout=_layouts(), typical=_batches(), constraints=st.lists(_batches(), max_size=2))
def test_constraints_clamp_the_hot_level_and_no_other(
    layout: HotLayout, typical: BatchDesc, constraints: list[BatchDesc]
) -> None:
    made = Partition(layout, _PER_BLOCK, typical_step=typical, constraints=constraints)
    free = Partition(layout, _PER_BLOCK, typical_step=typical)
    hot_bytes = [sum(pools) for pools in layout.slot_bytes]
    floors = made.hot_floors
    quota = sum(f * size for f, size in zip(floors, hot_bytes, strict=True))
    assert slot_counts(quota, hot_bytes, made.hot_byte_weights(), floors, "hot") == floors
    cold = cold_layout(range(10, 10 + len(layout.life_cycles)))
    weights = made.cold_byte_weights(cold, cold.slot_bytes)
    assert weights == free.cold_byte_weights(cold, cold.slot_bytes)


def test_a_cold_level_needs_one_slot_of_each_and_no_more() -> None:
    layout = hot_layout([_layer(0, 100), _layer(1, 64, window=4)])
    constraint = _batch((400, 400))
    made = Partition(layout, _PER_BLOCK, constraints=[constraint])
    assert made.hot_floors == (100, 1)
    cold = cold_layout([50, 30])
    weights = made.cold_byte_weights(cold, [50, 30])
    assert slot_counts(80, [50, 30], weights, [1, 1], "a cold tier") == (1, 1)
    # 100 slots to 1, but for the minimum.
    assert slot_counts(1_030, [50, 30], weights, [1, 1], "a cold tier") == (20, 1)


# ---------------------------------------------------------------------- slots


@dataclass(frozen=True)
class _Quota:
    quota_bytes: int
    slot_bytes: list[int]
    weights: list[Fraction | int | float]
    floors: list[int]

    def counts(self) -> tuple[int, ...]:
        return slot_counts(self.quota_bytes, self.slot_bytes, self.weights, self.floors, "the tier")

    def used(self, counts: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(counts, self.slot_bytes, strict=True))


@st.composite
def _quotas(draw: st.DrawFn) -> _Quota:
    num = draw(st.integers(1, 4))

    def each(items: st.SearchStrategy[int] | st.SearchStrategy[float]) -> list[int | float]:
        return draw(st.lists(items, min_size=num, max_size=num))

    slot_bytes = [int(size) for size in each(st.sampled_from([1, 3, 100, 4096]))]
    floors = [int(floor) for floor in each(st.integers(0, 4))]
    weights = each(st.floats(0, 1e3) if draw(st.booleans()) else st.integers(0, 5))
    least = sum(floor * size for floor, size in zip(floors, slot_bytes, strict=True))
    quota = least + draw(st.integers(0, 300) | st.integers(0, 1 << 44))
    return _Quota(quota, slot_bytes, list(weights), floors)


def _naive_shares(quota: _Quota) -> dict[int, Fraction]:
    """Tries every set of groups that may stay at their floors, for the one where just those groups
    would get less by weight: what the others get.
    """
    groups = range(len(quota.weights))
    weights = [Fraction(w) for w in quota.weights]
    found = []
    for num in range(len(groups) + 1):
        for at_floor in itertools.combinations(groups, num):
            others = [g for g in groups if g not in at_floor]
            total = sum(weights[g] for g in others)
            rest = quota.quota_bytes - sum(quota.floors[g] * quota.slot_bytes[g] for g in at_floor)
            if rest < 0 or (others and total == 0):
                continue
            share = {g: rest * weights[g] / (total * quota.slot_bytes[g]) for g in others}
            by_weight = {
                g: rest * weights[g] / (total * quota.slot_bytes[g]) if total else Fraction(0)
                for g in at_floor
            }
            if all(share[g] >= quota.floors[g] and weights[g] > 0 for g in others) and all(
                by_weight[g] < quota.floors[g] or weights[g] == 0 or not others for g in at_floor
            ):
                found.append(share)
    return found[0]


@settings(max_examples=500)
@given(quota=_quotas())
def test_counts_are_the_shares_rounded_and_never_below_a_floor(quota: _Quota) -> None:
    counts = quota.counts()
    shares = _naive_shares(quota)
    left = quota.quota_bytes - quota.used(counts)
    assert left >= 0
    for group, count in enumerate(counts):
        assert count >= quota.floors[group]
        if group not in shares:
            assert count == quota.floors[group]
            continue
        assert abs(count - shares[group]) < 1
        # As large as the quota allows.
        assert count >= shares[group] or quota.slot_bytes[group] > left


@given(quota=_quotas(), too_few=st.integers(1, 5000))
def test_what_the_floors_take_is_enough_and_less_is_refused(quota: _Quota, too_few: int) -> None:
    least = quota.used(quota.floors)
    enough = _Quota(least, quota.slot_bytes, quota.weights, quota.floors)
    assert enough.counts() == tuple(quota.floors)
    small = _Quota(least - too_few, quota.slot_bytes, quota.weights, quota.floors)
    with pytest.raises(ConfigurationError) as raised:
        small.counts()
    sentence = str(raised.value)
    assert sentence.startswith("the tier of ")
    assert "\n" not in sentence
    found = re.search(r"give it at least ([\d,]+) bytes$", sentence)
    assert found, sentence
    assert int(found[1].replace(",", "")) == least


def test_a_quota_that_is_too_small_says_what_it_must_hold() -> None:
    with pytest.raises(ConfigurationError) as raised:
        slot_counts(2_199, [1000, 200], [1, 1], [2, 1], "the hot tier")
    assert str(raised.value) == (
        "the hot tier of 2,199 bytes can not hold the pages it must (2 of 1,000 bytes, "
        "1 of 200 bytes): give it at least 2,200 bytes"
    )


@settings(max_examples=300)
@given(
    slots=st.lists(
        st.tuples(st.integers(1, 1000), st.sampled_from([1, 24, 100, 1 << 20])),
        min_size=1,
        max_size=6,
    ),
    num_blocks=st.integers(1, 1000),
    as_float=st.booleans(),
)
def test_a_quota_of_so_many_blocks_gives_so_many(
    slots: list[tuple[int, int]], num_blocks: int, as_float: bool
) -> None:
    pages, slot_bytes = [p for p, _ in slots], [size for _, size in slots]
    block_bytes = sum(p * size for p, size in slots)
    exact = [Fraction(p * size, block_bytes) for p, size in slots]
    weights = [float(w) for w in exact] if as_float else exact
    counts = slot_counts(num_blocks * block_bytes, slot_bytes, weights, [0] * len(slots), "a tier")
    assert counts == tuple(num_blocks * p for p in pages)


def test_rounded_weights_do_not_lose_a_slot() -> None:
    # 0.7 / (0.3 + 0.7) is less than 0.7, so its share is a trifle less than seven slots.
    assert slot_counts(1000, [100, 100], [0.3, 0.7], [0, 0], "a tier") == (3, 7)


def test_six_groups_in_one_pool_group_do_not_lose_a_slot() -> None:
    layout = hot_layout([_layer(i, 100, window=9000 + i) for i in range(6)])
    made = Partition(layout, 16)
    assert made.hot_floors == (6,)
    assert slot_counts(600, [100], made.hot_byte_weights(), made.hot_floors, "hot") == (6,)
    with pytest.raises(ConfigurationError, match="give it at least 600 bytes"):
        slot_counts(599, [100], made.hot_byte_weights(), made.hot_floors, "hot")


@given(quota=_quotas())
def test_a_group_without_weight_gets_its_floor(quota: _Quota) -> None:
    assume(0 in quota.weights)
    for count, weight, floor in zip(quota.counts(), quota.weights, quota.floors, strict=True):
        assert weight != 0 or count == floor
    nothing = _Quota(quota.quota_bytes, quota.slot_bytes, [0] * len(quota.weights), quota.floors)
    assert nothing.counts() == tuple(quota.floors)
