"""The small value types: what they promise, against Python's own ranges and bytes."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.errors import UsageError
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
    token_array,
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


_SENTENCES: list[tuple[Any, str]] = [
    ([1.5], "tokens must be one row of whole numbers, and not float64 [1]"),
    ([1, 2.0], "tokens must be one row of whole numbers, and not float64 [2]"),
    (np.zeros(3), "tokens must be one row of whole numbers, and not float64 [3]"),
    (np.zeros((4, 5), np.int32), "tokens must be one row of whole numbers, and not int32 [4, 5]"),
    ([[1, 2]], "tokens must be one row of whole numbers, and not int64 [1, 2]"),
    (7, "tokens must be one row of whole numbers, and not int64 []"),
    ("ab", "tokens must be one row of whole numbers, and not str64 []"),
    (["a"], "tokens must be one row of whole numbers, and not str32 [1]"),
    (b"abcd", "tokens must be one row of whole numbers, and not bytes32 []"),
    (None, "tokens must be one row of whole numbers, and not object []"),
    (np.array([True]), "tokens must be one row of whole numbers, and not bool [1]"),
    (
        [[1], [2, 3]],
        "tokens must be one row of whole numbers in host memory, and not rows of many lengths",
    ),
    ([5, 2**40], f"{2**40} is no token id: ids lie between {-(2**31)} and {2**31 - 1}, in 32 bits"),
    ([2**70], f"{2**70} is no token id: ids lie between {-(2**31)} and {2**31 - 1}, in 32 bits"),
    (
        np.array([0, -(2**31) - 1]),
        f"{-(2**31) - 1} is no token id: ids lie between {-(2**31)} and {2**31 - 1}, in 32 bits",
    ),
    (
        np.array([2**63], np.uint64),
        f"{2**63} is no token id: ids lie between {-(2**31)} and {2**31 - 1}, in 32 bits",
    ),
]


@pytest.mark.parametrize(("tokens", "sentence"), _SENTENCES, ids=lambda value: str(value)[:20])
def test_what_is_no_row_of_token_ids_is_refused(tokens: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        token_array(tokens)
    assert str(raised.value) == sentence


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_token_ids_are_taken_as_they_are(ids: list[int]) -> None:
    forms = [ids, tuple(ids), [np.int64(i) for i in ids], np.array(ids, np.int64)]
    forms += [np.array(ids, np.int32), np.array(ids, ">i8"), np.repeat(np.array(ids, "i4"), 2)[::2]]
    for form in forms:
        found = token_array(form)
        assert found.dtype == np.int32
        assert found.tolist() == ids


def test_a_row_of_32_bits_is_not_copied() -> None:
    row = np.arange(5, dtype=np.int32)
    assert token_array(row) is row
    assert token_array(range(3)).tolist() == [0, 1, 2]
    assert token_array(()).size == token_array(np.zeros(0)).size == 0
