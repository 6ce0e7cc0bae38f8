"""Merging of copies, and the check that they do not overlap."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coldpage.device.copies import CopyList, has_overlap, merge_copies

_copies = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 8)), max_size=12
).map(lambda rows: tuple(np.array(rows, dtype=np.int64).reshape(-1, 3).T))


def _pairs(copies: CopyList) -> list[tuple[int, int]]:
    """Every (destination, source) byte, in order."""
    rows = zip(*(column.tolist() for column in copies), strict=True)
    return [(to + i, source + i) for to, source, size in rows for i in range(size)]


@given(_copies)
def test_merging_changes_no_byte(copies: CopyList) -> None:
    assert _pairs(merge_copies(*copies)) == _pairs(copies)


@given(_copies)
def test_nothing_is_left_to_merge(copies: CopyList) -> None:
    dst, src, num_bytes = merge_copies(*copies)
    assert (num_bytes > 0).all()
    dst_follows = dst[:-1] + num_bytes[:-1] == dst[1:]
    src_follows = src[:-1] + num_bytes[:-1] == src[1:]
    assert not (dst_follows & src_follows).any()


def test_a_run_of_pages_becomes_one_copy() -> None:
    starts = np.arange(100) * 4096
    dst, src, num_bytes = merge_copies(starts + 1, starts + 7, np.full(100, 4096))
    assert (dst.tolist(), src.tolist(), num_bytes.tolist()) == ([1], [7], [409_600])


@given(_copies)
def test_overlap_is_what_byte_sets_say(copies: CopyList) -> None:
    copies = merge_copies(*copies)
    pairs = _pairs(copies)
    written = [to for to, _ in pairs]
    read = {source for _, source in pairs}
    expected = len(set(written)) < len(written) or not read.isdisjoint(written)
    assert has_overlap(copies) == expected
