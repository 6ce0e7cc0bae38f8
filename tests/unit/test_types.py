"""The small value types: what they promise, against Python's own ranges and bytes."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.types import (
    HOT_LEVEL,
    NO_PAGE,
    NO_SLOT,
    PAGE_INDEX_PAIR,
    ByteRange,
    CacheTier,
    HalfOpenRange,
    MemAddress,
    PageIndexLocation,
    PageStatus,
)

_SMALL = st.integers(-20, 20)


@given(start=_SMALL, stop=_SMALL, value=_SMALL)
def test_a_half_open_range_is_a_python_range(start: int, stop: int, value: int) -> None:
    ours, theirs = HalfOpenRange(start, stop), range(start, stop)
    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs)
    assert (value in ours) == (value in theirs)
    assert bool(ours) == bool(theirs)


def test_value_types_can_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HalfOpenRange(0, 1).start = 5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ByteRange(MemAddress(0), 1).num_bytes = 5  # type: ignore[misc]


def test_an_index_pair_is_eight_little_endian_bytes_destination_first() -> None:
    pairs = np.zeros(2, PAGE_INDEX_PAIR)
    pairs["dst"], pairs["src"] = [1, -2], [0x01020304, 7]
    assert PAGE_INDEX_PAIR.itemsize == 8
    assert pairs.tobytes() == struct.pack("<iiii", 1, 0x01020304, -2, 7)


def test_sentinels_can_be_told_from_ids() -> None:
    assert NO_PAGE == 0  # so that a zeroed block table names no page
    assert NO_SLOT == -1  # so that no kernel-facing slot id is taken for it
    assert HOT_LEVEL == 0


def test_states_and_media_are_the_words_of_the_glossary() -> None:
    assert [t.value for t in CacheTier] == ["gpu", "host", "disk"]
    assert [s.value for s in PageStatus] == ["locked", "held", "droppable"]
    assert [p.value for p in PageIndexLocation] == ["host", "device"]
