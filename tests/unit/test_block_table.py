"""The block table against lists of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldpage.block_table import BlockTable
from coldpage.types import NO_PAGE

_NUM_LIFE_CYCLES = 2


class _Machine(RuleBasedStateMachine):
    """Every operation, done to the table and to a list a life cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(_NUM_LIFE_CYCLES)
        self.rows: list[list[int]] = [[] for _ in range(_NUM_LIFE_CYCLES)]

    @rule(data=st.data(), num_blocks=st.integers(0, 20))
    def append(self, data: st.DataObject, num_blocks: int) -> None:
        row = st.lists(st.integers(0, 99), min_size=num_blocks, max_size=num_blocks)
        new = [data.draw(row) for _ in range(_NUM_LIFE_CYCLES)]
        self.table.append(np.array(new, np.int32).reshape(_NUM_LIFE_CYCLES, num_blocks))
        for row_before, added in zip(self.rows, new, strict=True):
            row_before.extend(added)

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        keep = data.draw(st.integers(0, len(self.rows[0])))
        removed = self.table.cut(keep)
        assert removed.tolist() == [p for row in self.rows for p in row[keep:] if p != NO_PAGE]
        for row in self.rows:
            del row[keep:]

    @rule(data=st.data(), life_cycle=st.integers(0, _NUM_LIFE_CYCLES - 1))
    def take(self, data: st.DataObject, life_cycle: int) -> None:
        row = self.rows[life_cycle]
        start = data.draw(st.integers(0, len(row)))
        stop = data.draw(st.integers(start, len(row)))
        taken = self.table.take(life_cycle, start, stop)
        assert taken.tolist() == [p for p in row[start:stop] if p != NO_PAGE]
        row[start:stop] = [NO_PAGE] * (stop - start)

    @precondition(lambda self: self.rows[0])
    @rule(data=st.data())
    def write_through_the_view(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, len(self.rows[0]) - 1))
        self.table.pages[1, block] = 55
        self.rows[1][block] = 55

    @rule()
    def go_on_with_a_copy(self) -> None:
        old, self.table = self.table, self.table.copy()
        old.append(np.full((_NUM_LIFE_CYCLES, 3), 77, np.int32))
        old.pages[:] = 78
        old.cut(0)

    @invariant()
    def they_agree(self) -> None:
        assert self.table.num_blocks == len(self.rows[0])
        assert self.table.pages.tolist() == self.rows
        assert self.table.pages.dtype == np.int32
        live = self.table.live_pages()
        assert live.tolist() == [p for row in self.rows for p in row if p != NO_PAGE]


_Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
test_the_table_is_a_list_a_life_cycle = _Machine.TestCase


def test_what_is_taken_does_not_change_with_the_table() -> None:
    table = BlockTable(1)
    table.append(np.array([[3, 4, 5]], np.int32))
    taken, cut = table.take(0, 0, 1), table.cut(1)
    table.append(np.array([[8, 9]], np.int32))
    assert taken.tolist() == [3]
    assert cut.tolist() == [4, 5]


def test_life_cycles_are_in_the_order_that_append_takes() -> None:
    table = BlockTable(3)
    life_cycles = table.life_cycles(4)
    table.append(life_cycles.reshape(3, 4).astype(np.int32))
    for life_cycle in range(3):
        assert table.pages[life_cycle].tolist() == [life_cycle] * 4
