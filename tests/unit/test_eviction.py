"""The order in which pages are given up, against a sort that spells the rule out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpage.eviction import PriorityLru, least_valuable, num_outranking
from coldpage.page import PageTable
from coldpage.types import Int32Array, Int64Array, Priority


@dataclass(frozen=True)
class _Page:
    priority: int
    last_use: int
    ordinal: int
    is_protected: bool

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Smaller goes first."""
        return self.priority, self.last_use, self.is_protected, -self.ordinal


# Few values, so that ties in each field are common; the extremes, so that no field spills over.
_PAGES = st.lists(
    st.builds(
        _Page,
        st.sampled_from([0, 1, 35, 36, 127]),
        st.sampled_from([0, 1, 2, 1000, (1 << 36) - 2, (1 << 36) - 1]),
        st.sampled_from([0, 1, 2, 5000, (1 << 19) - 2, (1 << 19) - 1]),
        st.booleans(),
    ),
    max_size=60,
)


def _table(pages: list[_Page]) -> tuple[PageTable, Int32Array]:
    table = PageTable(num_levels=2)
    ids = table.create(
        np.zeros(len(pages), np.int16),
        np.array([p.ordinal for p in pages], np.int32),
        Priority(0),
    )
    table.priority[ids] = [p.priority for p in pages]
    table.last_use[ids] = [p.last_use for p in pages]
    table.is_protected[ids] = [p.is_protected for p in pages]
    return table, ids


def _choose(table: PageTable, pages: Int32Array, count: int) -> Int32Array:
    return least_valuable(PriorityLru(), table, pages, count)


@settings(max_examples=200)
@given(pages=_PAGES, count=st.integers(-1, 70), data=st.data())
def test_it_chooses_what_a_full_sort_chooses(
    pages: list[_Page], count: int, data: st.DataObject
) -> None:
    table, ids = _table(pages)
    order = data.draw(st.permutations(range(len(pages))))
    chosen = _choose(table, ids[np.array(order, np.int64)], count)
    assert len(set(chosen.tolist())) == chosen.size
    by_id = dict(zip(ids.tolist(), pages, strict=True))
    ranks = [by_id[i].rank for i in chosen.tolist()]
    assert ranks == sorted(p.rank for p in pages)[: max(count, 0)]


@pytest.mark.parametrize("count", [1, 7, 500, 4999, 5000])
def test_it_chooses_right_among_thousands(count: int) -> None:
    rng = np.random.default_rng(count)
    columns = zip(*(rng.integers(0, high, 5000).tolist() for high in (3, 40, 200, 2)), strict=True)
    pages = [_Page(*row[:3], is_protected=bool(row[3])) for row in columns]
    table, ids = _table(pages)
    chosen = _choose(table, ids, count)
    by_id = dict(zip(ids.tolist(), pages, strict=True))
    assert [by_id[i].rank for i in chosen.tolist()] == sorted(p.rank for p in pages)[:count]


@given(pages=_PAGES.filter(lambda p: len(p) > 1))
def test_sinks_and_the_newest_block_are_last_of_what_was_used_together(pages: list[_Page]) -> None:
    together = [_Page(35, 7, p.ordinal, p.is_protected) for p in pages]
    table, ids = _table(together)
    chosen = _choose(table, ids, len(together))
    is_protected = table.is_protected[chosen].tolist()
    assert is_protected == sorted(is_protected)


def test_of_one_prompt_the_deepest_blocks_go_first() -> None:
    table, ids = _table([_Page(35, 7, i, i in {0, 9}) for i in range(10)])
    chosen = _choose(table, ids, 10)
    assert table.ordinal[chosen].tolist() == [8, 7, 6, 5, 4, 3, 2, 1, 9, 0]


def test_protection_does_not_outlive_a_later_use_of_something_else() -> None:
    table, ids = _table([_Page(35, 8, 4, False), _Page(35, 7, 0, True)])
    assert _choose(table, ids, 1).tolist() == [ids[1]]


@pytest.mark.parametrize(
    ("low", "high"),
    [(-32768, 0), (-1, 5), (127, 32767), (35, 200)],
)
def test_a_priority_out_of_range_counts_as_the_nearest(low: int, high: int) -> None:
    table, ids = _table([_Page(high, 0, 0, False), _Page(low, 0, 5, False)])
    assert _choose(table, ids, 1).tolist() == [ids[1]]


def test_depths_and_uses_beyond_the_fields_do_not_spill_over() -> None:
    huge = _Page(35, (1 << 40), (1 << 30), False)
    table, ids = _table([huge, _Page(36, 0, 0, False), _Page(35, (1 << 36) - 1, 0, True)])
    assert _choose(table, ids, 3).tolist() == [ids[0], ids[2], ids[1]]


def test_nothing_to_choose_from() -> None:
    table, ids = _table([])
    assert _choose(table, ids, 5).size == 0


# ---------------------------------------------------------------------- newcomers and residents


@settings(max_examples=300)
@given(newcomers=_PAGES, residents=_PAGES, data=st.data())
def test_of_newcomers_and_residents_the_most_valuable_stay(
    newcomers: list[_Page], residents: list[_Page], data: st.DataObject
) -> None:
    table, ids = _table([*newcomers, *residents])
    new, old = np.split(ids, [len(newcomers)])
    old = _choose(table, old, old.size)
    # Who is asked about no more residents than there are newcomers gets the same answer.
    some = old[: data.draw(st.integers(min(new.size, old.size), old.size))]
    count = num_outranking(PriorityLru(), table, new, some)
    # The residents come first among equals: nobody moves for nothing.
    contest = [(page.rank, False) for page in newcomers] + [(page.rank, True) for page in residents]
    stay = sorted(contest, reverse=True)[: len(residents)]
    assert count == sum(not is_resident for _, is_resident in stay)


class _ByOrdinal:
    """A policy of somebody else's."""

    def score(self, table: PageTable, pages: Int32Array) -> Int64Array:
        return table.ordinal[pages].astype(np.int64)


def test_value_is_what_the_policy_says() -> None:
    table, ids = _table([_Page(100 - i, 9, i, False) for i in range(6)])
    assert least_valuable(_ByOrdinal(), table, ids[::-1], 3).tolist() == ids[:3].tolist()
    assert num_outranking(_ByOrdinal(), table, ids[3:], ids[:3]) == 3
    assert num_outranking(PriorityLru(), table, ids[3:], ids[2::-1]) == 0


def test_asking_changes_nothing() -> None:
    table, ids = _table([_Page(35, 9 - i, i, False) for i in range(9)])
    order = ids.copy()
    _choose(table, ids, 4)
    num_outranking(PriorityLru(), table, ids[:4], ids[:3:-1])
    assert ids.tolist() == order.tolist()
