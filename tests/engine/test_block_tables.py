"""Block tables on the device: whatever came before, a step finds its own, and little is sent."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from coldpage.engine.forward.block_tables import BlockTables

CPU = torch.device("cpu")
ROWS, BLOCKS = 4, 6

row = st.lists(st.integers(-1, 9), min_size=0, max_size=BLOCKS)
step = st.lists(st.tuples(row, row), min_size=0, max_size=ROWS)


def apply(tables: BlockTables, rows: list[tuple[list[int], list[int]]]) -> int:
    """One step of two layer groups; how many entries were sent."""
    groups = [[np.array(both[group], np.int32) for both in rows] for group in range(2)]
    changes = tables.changes(groups)
    assert len(set(changes.places.tolist())) == len(changes.places)
    tables.apply(torch.from_numpy(changes.places), torch.from_numpy(changes.slots))
    for group, own in enumerate(groups):
        for index, slots in enumerate(own):
            assert tables.tables[group, index, : len(slots)].tolist() == slots.tolist()
    return len(changes.places)


@given(st.lists(step, max_size=8))
def test_each_step_finds_its_own_and_nothing_is_sent_twice(
    steps: list[list[tuple[list[int], list[int]]]],
) -> None:
    tables = BlockTables(2, ROWS, BLOCKS, CPU)
    for rows in steps:
        apply(tables, rows)
        assert apply(tables, rows) == 0


def test_a_sequence_that_goes_on_sends_what_is_new() -> None:
    tables = BlockTables(2, ROWS, BLOCKS, CPU)
    assert apply(tables, [([3, 4], [7]), ([5], [8, 9])]) == 6
    assert apply(tables, [([3, 4, 6], [7]), ([5], [8, 9])]) == 1
    assert apply(tables, [([3, 4, 6], [-1]), ([5], [8, 9])]) == 1  # a page left by its window
    assert apply(tables, [([5], [8, 9])]) == 3  # a row less: the second moves up


def test_what_was_not_applied_is_sent_again() -> None:
    tables = BlockTables(2, ROWS, BLOCKS, CPU)
    groups = [[np.array([1, 2], np.int32)], [np.array([-1], np.int32)]]
    tables.changes(groups)
    assert tables.tables.eq(-1).all()
    tables.forget()
    assert apply(tables, [([1, 2], [-1])]) == 3
