"""Layouts, against counting positions and bytes one by one."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from coldpage.config import AttentionLayerConfig, BufferConfig
from coldpage.layout import LayerGroup, cold_layout, hot_layout
from coldpage.types import (
    BlockOrdinal,
    BufferRole,
    LayerGroupId,
    LayerId,
    PageClass,
    PoolGroupIndex,
)

_ROLES = ("key", "value", "key_scale", "state")


def _layer(
    layer_id: int, *sizes: int, window: int | None = None, sinks: int = 0
) -> AttentionLayerConfig:
    buffers = tuple(BufferConfig(BufferRole(r), n) for r, n in zip(_ROLES, sizes, strict=False))
    return AttentionLayerConfig(LayerId(layer_id), buffers, window, sinks)


@st.composite
def _models(draw: st.DrawFn) -> list[AttentionLayerConfig]:
    sizes = st.lists(st.sampled_from([24, 64, 64, 100, 4096]), min_size=1, max_size=4)
    windows = st.sampled_from([None, None, 1, 40, 512, 9000, 9001, 9002, 9003, 9004])
    return [
        _layer(5 * i + 3, *draw(sizes), window=draw(windows), sinks=draw(st.sampled_from([0, 4])))
        for i in range(draw(st.integers(1, 8)))
    ]


# ---------------------------------------------------------------------- stale blocks


@settings(max_examples=300)
@given(
    history=st.integers(0, 60),
    window=st.none() | st.integers(1, 40),
    sinks=st.integers(0, 20),
    per_block=st.integers(1, 8),
)
def test_a_block_is_stale_when_no_later_query_sees_a_position_of_it(
    history: int, window: int | None, sinks: int, per_block: int
) -> None:
    group = LayerGroup(LayerGroupId(0), (LayerId(0),), window, sinks)

    def is_seen(position: int) -> bool:
        # Of all queries from ``history`` on the first one looks back the furthest.
        return position < sinks or window is None or position > history - window

    def is_stale(block: int) -> bool:
        return not any(is_seen(p) for p in range(block * per_block, (block + 1) * per_block))

    num_blocks = -(-history // per_block)
    expected = [b for b in range(num_blocks + 3) if is_stale(b)]
    assert list(group.stale_blocks(history, per_block)) == expected
    live = sum(not is_stale(b) for b in range(num_blocks))
    assert group.live_blocks(history, per_block) == live


@given(
    window=st.integers(1, 40),
    sinks=st.integers(0, 20),
    per_block=st.integers(1, 8),
    history=st.integers(0, 80),
)
def test_what_is_stale_stays_stale(window: int, sinks: int, per_block: int, history: int) -> None:
    group = LayerGroup(LayerGroupId(0), (LayerId(0),), window, sinks)
    now, later = (set(group.stale_blocks(h, per_block)) for h in (history, history + 1))
    assert now <= later


# ---------------------------------------------------------------------- hot layout


@given(layers=_models())
def test_layers_of_one_window_and_sinks_are_a_group(layers: list[AttentionLayerConfig]) -> None:
    layout = hot_layout(layers)
    kinds = list(dict.fromkeys((m.sliding_window_tokens, m.num_sink_tokens) for m in layers))
    assert [(g.sliding_window_tokens, g.num_sink_tokens) for g in layout.layer_groups] == kinds
    for index, group in enumerate(layout.layer_groups):
        members = [
            m.layer_id
            for m in layers
            if (m.sliding_window_tokens, m.num_sink_tokens) == kinds[index]
        ]
        assert group.layer_group_id == index
        assert list(group.layer_ids) == members
    assert [lc.life_cycle_id for lc in layout.life_cycles] == list(range(len(kinds)))
    assert [lc.layer_group_id for lc in layout.life_cycles] == list(range(len(kinds)))


@given(layers=_models())
def test_buffers_tile_the_pools_of_their_group(layers: list[AttentionLayerConfig]) -> None:
    layout = hot_layout(layers)
    by_id = {layer.layer_id: layer for layer in layers}
    for life_cycle in layout.life_cycles:
        members = layout.layer_groups[life_cycle.layer_group_id].layer_ids
        wanted = {(m, b.role): b.num_bytes for m in members for b in by_id[m].buffers}
        placed = {(p.buffer_id.layer_id, p.buffer_id.role): p.num_bytes for p in life_cycle.buffers}
        assert placed == wanted
        assert len(life_cycle.buffers) == len(wanted)
        slot_bytes = layout.slot_bytes[life_cycle.hot_pool_group]
        for pool, pool_bytes in enumerate(slot_bytes):
            inside = [p for p in life_cycle.buffers if p.pool_index == pool]
            assert len({p.num_bytes for p in inside}) == 1, "buffers of one size a pool"
            end = 0
            for placement in sorted(inside, key=lambda p: p.offset_bytes):
                assert placement.offset_bytes == end
                end += placement.num_bytes
            assert end == pool_bytes
        # All buffers of one size, so as few and as large segments as there can be.
        assert len(slot_bytes) == len(set(wanted.values()))
        assert layout.page_bytes(life_cycle.life_cycle_id) == sum(wanted.values())


@given(layers=_models())
def test_equal_buffers_of_a_layer_are_neighbours(layers: list[AttentionLayerConfig]) -> None:
    for life_cycle in hot_layout(layers).life_cycles:
        placed = {p.buffer_id: p for p in life_cycle.buffers}
        for layer in layers:
            mine = [p for i, p in placed.items() if i.layer_id == layer.layer_id]
            for size in {p.num_bytes for p in mine}:
                equal = [p for p in mine if p.num_bytes == size]
                for before, after in itertools.pairwise(equal):
                    assert after.offset_bytes == before.offset_bytes + size


@given(layers=_models())
def test_groups_of_equal_slots_share_a_pool_group(layers: list[AttentionLayerConfig]) -> None:
    layout = hot_layout(layers)
    assert len(set(layout.slot_bytes)) == len(layout.slot_bytes)
    for life_cycle in layout.life_cycles:
        totals: Counter[int] = Counter()
        for placement in life_cycle.buffers:
            totals[placement.num_bytes] += placement.num_bytes
        expected = tuple(totals[size] for size in sorted(totals, reverse=True))
        assert layout.slot_bytes[life_cycle.hot_pool_group] == expected


@given(layers=_models())
def test_sinks_are_a_life_cycle_of_their_own_if_asked(layers: list[AttentionLayerConfig]) -> None:
    alike, apart = hot_layout(layers), hot_layout(layers, separate_sinks=True)
    assert (alike.num_classes, apart.num_classes) == (1, 2)
    assert {lc.page_class for lc in alike.life_cycles} == {PageClass.BODY}
    # Hot pages of the classes do not differ.
    assert (apart.layer_groups, apart.slot_bytes) == (alike.layer_groups, alike.slot_bytes)
    for lc in alike.life_cycles:
        pair = apart.life_cycles[2 * lc.life_cycle_id : 2 * lc.life_cycle_id + 2]
        assert [p.page_class for p in pair] == [PageClass.SINK, PageClass.BODY]
        assert [p.life_cycle_id for p in pair] == [2 * lc.life_cycle_id, 2 * lc.life_cycle_id + 1]
        for member in pair:
            assert member.layer_group_id == lc.layer_group_id
            assert (member.hot_pool_group, member.buffers) == (lc.hot_pool_group, lc.buffers)
            assert apart.page_bytes(member.life_cycle_id) == alike.page_bytes(lc.life_cycle_id)


@given(layers=_models(), separate=st.booleans())
def test_recent_blocks_are_the_last_life_cycle_of_a_group_if_asked(
    layers: list[AttentionLayerConfig], separate: bool
) -> None:
    without = hot_layout(layers, separate_sinks=separate)
    layout = hot_layout(layers, separate_sinks=separate, num_recent_blocks=3)
    assert (without.num_recent_blocks, layout.num_recent_blocks) == (0, 3)
    assert layout.page_classes == (*without.page_classes, PageClass.RECENT)
    # Hot pages of the classes do not differ, so a page may change its class where it is.
    assert (layout.layer_groups, layout.slot_bytes) == (without.layer_groups, without.slot_bytes)
    num_classes = layout.num_classes
    for number, life_cycle in enumerate(layout.life_cycles):
        other = without.life_cycles[life_cycle.layer_group_id * without.num_classes]
        assert life_cycle.life_cycle_id == number
        assert life_cycle.layer_group_id == number // num_classes
        assert life_cycle.page_class is layout.page_classes[number % num_classes]
        assert (life_cycle.hot_pool_group, life_cycle.buffers) == (
            other.hot_pool_group,
            other.buffers,
        )


@given(
    layers=_models(),
    separate=st.booleans(),
    num_recent=st.sampled_from([0, 2]),
    is_recent=st.booleans(),
    ordinal=st.sampled_from([0, 1, 2, 100]),
)
def test_the_life_cycle_of_a_page_is_that_of_its_group_and_class(
    layers: list[AttentionLayerConfig],
    separate: bool,
    num_recent: int,
    is_recent: bool,
    ordinal: int,
) -> None:
    layout = hot_layout(layers, separate_sinks=separate, num_recent_blocks=num_recent)
    page_class = PageClass.RECENT if is_recent and num_recent else PageClass.BODY
    if separate and ordinal == 0:
        page_class = PageClass.SINK
    for group in layout.layer_groups:
        found = layout.life_cycle_of(
            group.layer_group_id, BlockOrdinal(ordinal), is_recent=is_recent
        )
        life_cycle = layout.life_cycles[found]
        assert life_cycle.layer_group_id == group.layer_group_id
        assert life_cycle.page_class is page_class


@given(layers=_models(), separate=st.booleans())
def test_each_layer_group_is_in_one_hot_pool_group(
    layers: list[AttentionLayerConfig], separate: bool
) -> None:
    layout = hot_layout(layers, separate_sinks=separate)
    members = [
        layout.layer_groups_of(PoolGroupIndex(index)) for index in range(len(layout.slot_bytes))
    ]
    listed = [group for groups in members for group in groups]
    assert sorted(listed) == [group.layer_group_id for group in layout.layer_groups]
    for life_cycle in layout.life_cycles:
        assert life_cycle.layer_group_id in members[life_cycle.hot_pool_group]


# ---------------------------------------------------------------------- cold layout


@given(sizes=st.lists(st.sampled_from([8, 64, 80, 5000]), min_size=1, max_size=8))
def test_life_cycles_with_equal_cold_pages_share_a_cold_pool_group(sizes: list[int]) -> None:
    cold = cold_layout(sizes)
    for life_cycle, size in enumerate(sizes):
        assert cold.slot_bytes[cold.pool_group_of[life_cycle]] == size
    assert sorted(cold.slot_bytes) == sorted(set(sizes))


def test_one_hot_pool_group_may_be_two_cold_ones_and_two_hot_ones_one() -> None:
    hot = hot_layout([_layer(0, 100), _layer(1, 100, window=9000)])
    assert [lc.hot_pool_group for lc in hot.life_cycles] == [0, 0]
    assert cold_layout([100, 25]).pool_group_of == (0, 1)
    hot = hot_layout([_layer(0, 100), _layer(1, 40, 60, window=1024)])
    assert [lc.hot_pool_group for lc in hot.life_cycles] == [0, 1]
    assert cold_layout([80, 80]).pool_group_of == (0, 0)
