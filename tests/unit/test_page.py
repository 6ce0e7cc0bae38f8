"""Page columns against one dictionary a page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldpage.page import PageTable
from coldpage.types import NO_PAGE, PageStatus, Priority

_STATE = ("present", "reserved", "busy", "is_missing", "is_protected", "num_refs", "num_locks")
_REST = ("life_cycle", "ordinal", "node", "priority", "last_use", "num_accesses")


class _Machine(RuleBasedStateMachine):
    """Pages come, are used and go; each is a dictionary of what its row must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(num_levels=3)
        self.model: dict[int, dict[str, int]] = {}
        self.versions: dict[int, int] = {}
        self.clock = 0

    @rule(
        data=st.data(),
        count=st.sampled_from([0, 1, 2, 3, 7, 600]),
        priority=st.integers(0, 127),
    )
    def create(self, data: st.DataObject, count: int, priority: int) -> None:
        life_cycle, ordinal = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 1000))
        ordinals = np.arange(ordinal, ordinal + count, dtype=np.int32)
        ids = self.table.create(np.full(count, life_cycle, np.int16), ordinals, Priority(priority))
        assert ids.dtype == np.int32
        new = ids.tolist()
        assert len(new) == len(set(new)) == count
        assert NO_PAGE not in new
        assert not self.model.keys() & set(new)
        for page, place in zip(new, ordinals.tolist(), strict=True):
            self.model[page] = dict.fromkeys(_STATE + _REST, 0) | {
                "life_cycle": life_cycle,
                "ordinal": place,
                "priority": priority,
                "num_refs": 1,
                "last_use": self.clock,
            }
            # A page that reuses a row is not the page that a late transfer meant.
            version = int(self.table.version[page])
            assert version > self.versions.get(page, -1)
            self.versions[page] = version

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        pages = self._draw(data)
        self.table.touch(np.array(pages, np.int32))
        self.clock += 1
        for page in pages:
            self.model[page]["last_use"] = self.clock
            self.model[page]["num_accesses"] += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def change_and_destroy(self, data: st.DataObject) -> None:
        pages = np.array(self._draw(data), np.int32)
        self.table.is_missing[pages] = self.table.is_protected[pages] = True
        self.table.num_refs[pages] = 0
        self.table.destroy(pages)
        for page in pages.tolist():
            del self.model[page]

    def _draw(self, data: st.DataObject) -> list[int]:
        known = sorted(self.model)
        return data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1, max_size=6))

    @invariant()
    def rows_hold_what_the_model_says(self) -> None:
        assert self.table.num_pages == len(self.model)
        pages = np.array(sorted(self.model), np.int32)
        for name in _STATE + _REST:
            column = getattr(self.table, name)
            assert column[pages].tolist() == [self.model[p][name] for p in pages.tolist()], name
            assert column[NO_PAGE] == 0, f"{name} of no page"
        assert self.table.slot.shape == (3, self.table.present.size)


_Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
test_a_row_is_a_page = _Machine.TestCase


@given(bits=st.lists(st.integers(0, 15), max_size=20))
def test_the_level_is_the_hottest_with_a_copy(bits: list[int]) -> None:
    table = PageTable(num_levels=4)
    pages = table.create(np.zeros(len(bits), np.int16), np.zeros(len(bits), np.int32), Priority(1))
    table.present[pages] = bits
    expected = [next((lv for lv in range(4) if b >> lv & 1), 4) for b in bits]
    assert table.level_of(pages).tolist() == expected


def _one_page() -> tuple[PageTable, np.ndarray]:
    table = PageTable(num_levels=2)
    return table, table.create(np.zeros(1, np.int16), np.zeros(1, np.int32), Priority(1))


def test_the_status_is_the_strongest_hold() -> None:
    table, page = _one_page()
    assert table.status(page[0]) is PageStatus.HELD
    table.num_locks[page] = 1
    assert table.status(page[0]) is PageStatus.LOCKED
    table.num_locks[page] = table.num_refs[page] = 0
    assert table.status(page[0]) is PageStatus.DROPPABLE


@pytest.mark.parametrize("column", ["present", "reserved", "busy", "num_refs", "node"])
def test_what_is_still_in_use_can_not_be_destroyed(column: str) -> None:
    table, page = _one_page()
    table.num_refs[page] = 0
    getattr(table, column)[page] = 1
    with pytest.raises(AssertionError, match=r"a page (is still referred to|still owns slots)"):
        table.destroy(page)
    assert table.num_pages == 1


def test_growing_keeps_slots_on_every_level() -> None:
    table, page = _one_page()
    table.slot[:, page] = [[7], [9]]
    table.create(np.zeros(5000, np.int16), np.zeros(5000, np.int32), Priority(1))
    assert table.slot[:, page].ravel().tolist() == [7, 9]
