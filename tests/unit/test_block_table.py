"""The block table against lists of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldpage.block_table import BlockTable
from coldpage.types import NO_PAGE

_NUM_LAYER_GROUPS = 2


class _Machine(RuleBasedStateMachine):
    """Every operation, done to the table and to two lists a layer group: pages, and holes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(_NUM_LAYER_GROUPS)
        self.rows: list[list[int]] = [[] for _ in range(_NUM_LAYER_GROUPS)]
        self.holes: list[list[bool]] = [[] for _ in range(_NUM_LAYER_GROUPS)]

    @rule(data=st.data(), num_blocks=st.integers(0, 20))
    def append(self, data: st.DataObject, num_blocks: int) -> None:
        row = st.lists(st.integers(0, 99), min_size=num_blocks, max_size=num_blocks)
        new = [data.draw(row) for _ in range(_NUM_LAYER_GROUPS)]
        self.table.append(np.array(new, np.int32).reshape(_NUM_LAYER_GROUPS, num_blocks))
        for row_before, holes, added in zip(self.rows, self.holes, new, strict=True):
            row_before.extend(added)
            holes.extend([False] * num_blocks)

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        keep = data.draw(st.integers(0, len(self.rows[0])))
        removed = self.table.cut(keep)
        assert removed.tolist() == [p for row in self.rows for p in row[keep:] if p != NO_PAGE]
        for row in [*self.rows, *self.holes]:
            del row[keep:]

    @rule(data=st.data(), layer_group=st.integers(0, _NUM_LAYER_GROUPS - 1))
    def take(self, data: st.DataObject, layer_group: int) -> None:
        row = self.rows[layer_group]
        start = data.draw(st.integers(0, len(row)))
        stop = data.draw(st.integers(start, len(row)))
        taken = self.table.take(layer_group, start, stop)
        assert taken.tolist() == [p for p in row[start:stop] if p != NO_PAGE]
        row[start:stop] = [NO_PAGE] * (stop - start)

    @rule(data=st.data())
    def make_holes(self, data: st.DataObject) -> None:
        num_blocks = len(self.rows[0])
        mask = st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks)
        entries = [data.draw(mask) for _ in range(_NUM_LAYER_GROUPS)]
        removed = self.table.make_holes(np.array(entries, np.bool_))
        expected = []
        for row, holes, chosen in zip(self.rows, self.holes, entries, strict=True):
            for block in (i for i, is_chosen in enumerate(chosen) if is_chosen):
                expected += [row[block]] if row[block] != NO_PAGE else []
                row[block], holes[block] = NO_PAGE, True
        assert removed.tolist() == expected

    @precondition(lambda self: self.rows[0])
    @rule(data=st.data(), is_hole=st.booleans())
    def write_through_the_views(self, data: st.DataObject, is_hole: bool) -> None:
        block = data.draw(st.integers(0, len(self.rows[0]) - 1))
        self.table.pages[1, block] = self.rows[1][block] = 55
        self.table.is_hole[0, block] = self.holes[0][block] = is_hole

    @rule()
    def go_on_with_a_copy(self) -> None:
        old, self.table = self.table, self.table.copy()
        old.append(np.full((_NUM_LAYER_GROUPS, 3), 77, np.int32))
        old.pages[:] = 78
        old.is_hole[:] = ~old.is_hole
        old.cut(0)

    @invariant()
    def they_agree(self) -> None:
        assert self.table.num_blocks == len(self.rows[0])
        assert self.table.pages.tolist() == self.rows
        assert self.table.pages.dtype == np.int32
        assert self.table.is_hole.tolist() == self.holes
        live = self.table.live_pages()
        assert live.tolist() == [p for row in self.rows for p in row if p != NO_PAGE]


_Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
test_the_table_is_two_lists_a_layer_group = _Machine.TestCase


def test_what_is_taken_does_not_change_with_the_table() -> None:
    table = BlockTable(1)
    table.append(np.array([[2, 3, 4, 5]], np.int32))
    holes = table.make_holes(np.array([[True, False, False, False]]))
    taken, cut = table.take(0, 0, 2), table.cut(1)
    table.append(np.array([[8, 9]], np.int32))
    assert holes.tolist() == [2]
    assert taken.tolist() == [3]
    assert cut.tolist() == [4, 5]


def test_a_hole_outlives_growth_and_not_a_cut() -> None:
    table = BlockTable(2)
    table.append(np.ones((2, 10), np.int32))
    table.make_holes(np.arange(20).reshape(2, 10) % 3 == 0)
    before = table.is_hole.copy()
    table.append(np.ones((2, 1000), np.int32))
    assert (table.is_hole[:, :10] == before).all()
    assert not table.is_hole[:, 10:].any()
    table.cut(0)
    table.append(np.ones((2, 1000), np.int32))
    assert not table.is_hole.any()
