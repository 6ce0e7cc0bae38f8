"""The way of pages through a codec: which ones, as what, and where they come back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from coldpage.bench.quality.hot_store import HotStore
from coldpage.bench.quality.passage import Passage
from coldpage.codecs import ColdPageCodec, create_default_cold_page_codec
from coldpage.config import AttentionLayerConfig, BufferConfig
from coldpage.device.host import HostDevice
from coldpage.testing.example_codecs import DeviceIndexCodec, PositionCodec
from coldpage.types import (
    BufferRole,
    HalfOpenRange,
    LayerGroupId,
    LayerId,
    PageClass,
    PageIndexLocation,
)
from tests.quality.rounding_codec import ForgetfulCodec, RoundingCodec

KEY, VALUE = BufferRole("key"), BufferRole("value")
TOKENS_PER_BLOCK = 4
NUM_BLOCKS = 10
ALL = HalfOpenRange(0, NUM_BLOCKS)
FULL, SLIDING = LayerGroupId(0), LayerGroupId(1)


@pytest.fixture
def store() -> Iterator[HotStore]:
    """Layers 0 and 2 see everything, layers 1 and 3 nine tokens: two groups in one pool group."""
    layers = tuple(
        AttentionLayerConfig(
            LayerId(index),
            (BufferConfig(KEY, 64), BufferConfig(VALUE, 64)),
            sliding_window_tokens=9 if index % 2 else None,
        )
        for index in range(4)
    )
    device = HostDevice()
    store = HotStore(device, layers, TOKENS_PER_BLOCK, NUM_BLOCKS, 3)
    random = np.random.default_rng(0)
    for index in range(4):
        for role in (KEY, VALUE):
            array = store.hot_array(LayerId(index), role)
            array[:] = random.integers(0, 256, array.shape, np.uint8)
    yield store
    device.close()


def original(store: HotStore, layer: int, role: BufferRole = KEY) -> np.ndarray:
    group = store.layer_group_of(LayerId(layer))
    live = store.live_ordinals(group, NUM_BLOCKS)
    return store.hot_array(LayerId(layer), role)[store.original_slots(group, live)]


def restored(store: HotStore, layer: int, role: BufferRole = KEY) -> np.ndarray:
    group = store.layer_group_of(LayerId(layer))
    live = store.live_ordinals(group, NUM_BLOCKS)
    return store.hot_array(LayerId(layer), role)[store.restored_slots(group, live)]


def run(
    store: HotStore,
    codec: ColdPageCodec,
    blocks: HalfOpenRange = ALL,
    *,
    separates_sinks: bool = True,
    num_recent_blocks: int = 0,
) -> None:
    passage = Passage(
        store, codec, separates_sinks=separates_sinks, num_recent_blocks=num_recent_blocks
    )
    passage.run(NUM_BLOCKS, blocks)
    passage.close()


def test_the_window_keeps_what_a_query_behind_the_context_sees(store: HotStore) -> None:
    assert store.layer_groups == (FULL, SLIDING)
    assert store.live_ordinals(FULL, NUM_BLOCKS).tolist() == list(range(10))
    # The query at position 40 sees positions 32 and on.
    assert store.live_ordinals(SLIDING, NUM_BLOCKS).tolist() == [8, 9]


def test_tables_name_live_blocks_in_the_parts_asked_for(store: HotStore) -> None:
    slots = {group: store.table(NUM_BLOCKS).page_indices(group) for group in (FULL, SLIDING)}
    assert slots[FULL][:10].tolist() == list(range(10))
    assert (slots[SLIDING][:8] == -1).all() and (slots[SLIDING][8:] >= 0).all()
    assert not set(slots[FULL].tolist()) & set(slots[SLIDING].tolist())
    own = store.table(NUM_BLOCKS, HalfOpenRange(2, 9)).page_indices(FULL)
    assert np.flatnonzero(own != slots[FULL]).tolist() == list(range(2, 9))
    assert set(own.tolist()) & set(range(10)) == {0, 1, 9}
    whole = store.table(NUM_BLOCKS, is_whole=True).page_indices(SLIDING)
    assert (whole >= 0).all() and (whole[8:] == slots[SLIDING][8:]).all()


@pytest.mark.parametrize("separates_sinks", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        create_default_cold_page_codec,
        DeviceIndexCodec,
        PositionCodec,
        lambda: PositionCodec(PageIndexLocation.DEVICE),
    ],
)
def test_a_lossless_codec_brings_back_every_byte(
    store: HotStore, make: type[ColdPageCodec], separates_sinks: bool
) -> None:
    before = [original(store, layer, role).copy() for layer in range(4) for role in (KEY, VALUE)]
    run(store, make(), separates_sinks=separates_sinks)
    after = [restored(store, layer, role) for layer in range(4) for role in (KEY, VALUE)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    still = [original(store, layer, role) for layer in range(4) for role in (KEY, VALUE)]
    for one, other in zip(before, still, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_codec_does_not_write_is_not_what_was_there(store: HotStore) -> None:
    run(store, create_default_cold_page_codec())
    run(store, ForgetfulCodec())
    for layer in range(4):
        assert (restored(store, layer) == 0xFF).all()


def test_pages_come_as_the_class_and_the_block_that_they_are(store: HotStore) -> None:
    codec = RoundingCodec(32)
    run(store, codec)
    seen = {lc.page_class: blocks for lc, blocks in codec.packed}
    # Layer groups of one pool group that are packed alike share a call.
    assert seen == {PageClass.SINK: [0], PageClass.BODY: [*range(1, 10), 8, 9]}
    codec = RoundingCodec(32)
    run(store, codec, num_recent_blocks=3)
    seen = {lc.page_class: blocks for lc, blocks in codec.packed}
    assert seen == {
        PageClass.SINK: [0],
        PageClass.BODY: [*range(1, 7)],
        PageClass.RECENT: [7, 8, 9, 8, 9],
    }
    codec = RoundingCodec(32)
    run(store, codec, HalfOpenRange(0, 9), separates_sinks=False)
    assert [(lc.page_class, blocks) for lc, blocks in codec.packed] == [
        (PageClass.BODY, [*range(9), 8])
    ]


def test_sizes_are_of_the_pages_that_move(store: HotStore) -> None:
    passage = Passage(store, create_default_cold_page_codec(), separates_sinks=True)
    assert passage.hot_bytes(NUM_BLOCKS, ALL) == (10 + 2) * 256
    assert passage.body_ratio() == 1.0
    passage.close()
