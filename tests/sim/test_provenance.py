"""What a block may have been through is in its key: what was computed on top of a lossy restore is
never taken for exact, nor for what another codec left.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from coldpage import ReuseScope, create_default_cold_page_codec
from coldpage.codecs import ColdPageCodec
from coldpage.prefix import block_key, root_key
from coldpage.testing.example_codecs import (
    CoarseCodec,
    DeviceIndexCodec,
    PaddingCodec,
    PositionCodec,
)
from coldpage.types import BlockKey
from tests.sim.rig import Rig
from tests.sim.scenes import Build, filled, prompt, push_out, suspended

TOKENS = prompt(4)


def keeps_sinks() -> ColdPageCodec:
    return CoarseCodec(keeps_sinks=True)


class NextCoarse(CoarseCodec):
    """The same parameters, another format."""

    version = 2


class Milder(CoarseCodec):
    """Loses less, under a name of its own."""

    codec_id = "milder"


LOSSY = {
    "all tiers": {"host": 4, "disk": 20, "codec": CoarseCodec},
    "other parameters": {"host": 4, "disk": 20, "codec": keeps_sinks},
    "another version": {"host": 4, "disk": 20, "codec": NextCoarse},
    "first blocks apart": {
        "host": 4,
        "disk": 20,
        "codec": CoarseCodec,
        "separate_sink_pages": True,
    },
    "another name": {"host": 4, "disk": 20, "codec": Milder},
    "two lossy ones": {"host": 4, "disk": 20, "host_codec": CoarseCodec, "disk_codec": Milder},
}
# Losing on the host or on disk only is the same: where a page has been is not known.
SAME = {
    "host": {"host": 4, "disk": 20, "host_codec": CoarseCodec},
    "disk": {"host": 4, "disk": 20, "disk_codec": CoarseCodec},
    "host alone": {"host": 8, "host_codec": CoarseCodec},
    "beside a lossless one": {
        "host": 4,
        "disk": 20,
        "host_codec": PaddingCodec,
        "disk_codec": CoarseCodec,
    },
}
EXACT = {
    "hot alone": {},
    "host": {"host": 8},
    "host and disk": {"host": 4, "disk": 20},
    "a second codec": {"host": 4, "disk": 20, "disk_codec": PaddingCodec},
    "another codec": {"host": 8, "codec": DeviceIndexCodec},
    "first blocks apart": {"host": 8, "separate_sink_pages": True},
    "two other codecs": {
        "host": 4,
        "disk": 20,
        "host_codec": PositionCodec,
        "disk_codec": DeviceIndexCodec,
    },
    "one codec twice": {
        "host": 4,
        "disk": 20,
        "host_codec": create_default_cold_page_codec,
        "disk_codec": create_default_cold_page_codec,
    },
}


def keys_of(rig: Rig) -> tuple[BlockKey, ...]:
    sequence = filled(rig, TOKENS)
    keys = sequence.cache.block_keys
    assert len(keys) == 4
    root = root_key(b"pattern", ReuseScope(), rig.manager.provenance)
    assert keys[0] == block_key(root, TOKENS[:2])
    sequence.cache.suspend()
    return keys


@pytest.mark.parametrize("setup", EXACT.values(), ids=EXACT.keys())
def test_lossless_codecs_keep_exact_keys(build: Build, setup: dict[str, object]) -> None:
    rig = build(hot=6, **setup)
    assert rig.manager.provenance == b"exact"
    assert keys_of(rig) == keys_of(build(hot=6))


@pytest.mark.parametrize("setup", (LOSSY | SAME).values(), ids=(LOSSY | SAME).keys())
def test_a_lossy_codec_in_any_tier_has_other_keys(build: Build, setup: dict[str, object]) -> None:
    rig = build(hot=6, **setup)
    assert rig.manager.provenance != b"exact"
    assert not set(keys_of(rig)) & set(keys_of(build(hot=6)))


def test_no_two_lossy_managers_share_keys_but_those_that_lose_the_same(build: Build) -> None:
    found = {name: set(keys_of(build(hot=6, **setup))) for name, setup in LOSSY.items()}
    for one, other in itertools.combinations(found, 2):
        assert not found[one] & found[other], (one, other)
    for setup in SAME.values():
        assert set(keys_of(build(hot=6, **setup))) == found["all tiers"]


def test_what_is_computed_after_a_lossy_restore_is_never_taken_for_exact(build: Build) -> None:
    lossy, exact = build(hot=6, host=8, codec=CoarseCodec), build(hot=6, host=8)
    keys: list[tuple[BlockKey, ...]] = []
    contents = []
    for rig in (lossy, exact):
        sequence = suspended(rig, TOKENS)
        push_out(rig, 6)
        assert sequence.cache.resume()
        sequence.cache.synchronize()
        contents.append(rig.contents(sequence.cache))
        # The next blocks are computed from what came back.
        cache = sequence.cache
        assert cache.resize(12)
        cache.synchronize()
        cache.commit([1, 2, 3, 4])
        keys.append(cache.block_keys)
        cache.suspend()
        assert rig.manager.stats().num_committed_blocks == 6
    assert not np.array_equal(contents[0][1], contents[1][1])
    assert np.array_equal(contents[0][1], contents[1][1] & 0xF0)
    assert len(keys[0]) == len(keys[1]) == 6
    assert not set(keys[0]) & set(keys[1])


def test_before_any_restore_a_key_says_what_may_happen_to_the_page(build: Build) -> None:
    """A page that never left the hot level is keyed as lossy too: it may leave at any time, and its
    key stays.
    """
    rig = build(hot=6, host=8, codec=CoarseCodec)
    before = keys_of(rig)
    assert rig.manager.stats().moved_pages == {}
    push_out(rig, 6)
    assert rig.manager.stats().moved_pages == {"hot-host": 4}
    assert rig.create(TOKENS).cache.block_keys == before


def test_a_manager_without_cold_tiers_loses_nothing(build: Build) -> None:
    assert keys_of(build(hot=6, codec=CoarseCodec)) == keys_of(build(hot=6))
