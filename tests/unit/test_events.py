"""Level names, counters, and who is told of what."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.events import StorageEvents, level_names
from coldpage.types import CacheLevel, CacheTier, Int32Array

_GPU, _HOST, _DISK = CacheTier.GPU, CacheTier.HOST, CacheTier.DISK
_NAMES = ("hot", "host", "disk")


@pytest.mark.parametrize(
    ("tiers", "names"),
    [
        ([_GPU], ("hot",)),
        ([_GPU, _HOST, _DISK], ("hot", "host", "disk")),
        ([_GPU, _HOST, _HOST, _DISK, _HOST], ("hot", "host", "host2", "disk", "host3")),
        ([_GPU, _GPU, _HOST, _GPU], ("hot", "gpu", "host", "gpu2")),
        ([_GPU, *[_DISK] * 7], ("hot", "disk", *(f"disk{i}" for i in range(2, 8)))),
    ],
)
def test_a_medium_that_is_used_twice_is_numbered(
    tiers: list[CacheTier], names: tuple[str, ...]
) -> None:
    assert level_names(tiers) == names


class _Diary:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def on_moved(self, pages: Int32Array, source: CacheLevel, target: CacheLevel) -> None:
        self.entries.append(("moved", pages.tolist(), source, target))

    def on_lost(self, pages: Int32Array, cause: str) -> None:
        self.entries.append(("lost", pages.tolist(), cause))

    def on_forgotten(self, nodes: Int32Array, life_cycles: npt.NDArray[np.int16]) -> None:
        self.entries.append(("forgotten", nodes.tolist(), life_cycles.tolist()))


def _pages(*ids: int) -> Int32Array:
    return np.array(ids, np.int32)


_MOVES = st.tuples(
    st.lists(st.integers(1, 99), max_size=4),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 9),
)


@given(moves=st.lists(_MOVES, max_size=20))
def test_moves_add_up_by_path_and_each_is_told_once(
    moves: list[tuple[list[int], int, int, int]],
) -> None:
    events, diary = StorageEvents(_NAMES), _Diary()
    events.observers.append(diary)
    pages_by_path: Counter[str] = Counter()
    bytes_by_path: Counter[str] = Counter()
    told = []
    for ids, source, target, page_bytes in moves:
        events.moved(_pages(*ids), CacheLevel(source), CacheLevel(target), page_bytes)
        for _ in ids:
            pages_by_path[f"{_NAMES[source]}-{_NAMES[target]}"] += 1
            bytes_by_path[f"{_NAMES[source]}-{_NAMES[target]}"] += page_bytes
        # A move of nothing is no news, and leaves no path behind.
        told += [("moved", ids, source, target)] if ids else []
    assert dict(events.moved_pages) == dict(pages_by_path)
    assert dict(events.moved_bytes) == dict(bytes_by_path)
    assert diary.entries == told


def test_two_levels_of_one_medium_have_paths_of_their_own() -> None:
    events = StorageEvents(level_names([_GPU, _HOST, _HOST]))
    for source, target in ((0, 1), (1, 2), (2, 2)):
        events.moved(_pages(1), CacheLevel(source), CacheLevel(target), 8)
    assert list(events.moved_pages) == ["hot-host", "host-host2", "host2-host2"]


def test_all_observers_are_told_in_order_also_those_that_come_late() -> None:
    events, early, late = StorageEvents(_NAMES), _Diary(), _Diary()
    events.observers.append(early)
    events.lost(_pages(3, 4), "no room")
    events.observers.append(late)
    events.forgotten(_pages(7, 8), np.array([0, 1], np.int16))
    assert early.entries == [("lost", [3, 4], "no room"), ("forgotten", [7, 8], [0, 1])]
    assert late.entries == [("forgotten", [7, 8], [0, 1])]


def test_what_was_never_counted_is_zero() -> None:
    events = StorageEvents(_NAMES)
    assert events.totals["never counted"] == 0
    assert not events.moved_pages
