"""Level names and counters."""

from __future__ import annotations

import pytest

from coldpage.events import Counters, level_names
from coldpage.types import CacheTier

_GPU, _HOST, _DISK = CacheTier.GPU, CacheTier.HOST, CacheTier.DISK


@pytest.mark.parametrize(
    ("tiers", "names"),
    [
        ([_GPU], ("hot",)),
        ([_GPU, _HOST, _DISK], ("hot", "host", "disk")),
        ([_GPU, _HOST, _HOST, _DISK, _HOST], ("hot", "host", "host2", "disk", "host3")),
        ([_GPU, *[_DISK] * 7], ("hot", "disk", *(f"disk{i}" for i in range(2, 8)))),
    ],
)
def test_a_medium_that_is_used_twice_is_numbered(
    tiers: list[CacheTier], names: tuple[str, ...]
) -> None:
    assert level_names(tiers) == names


def test_moves_add_up_by_path() -> None:
    counters = Counters()
    counters.count_move("hot-host", 3, 300)
    counters.count_move("hot-host", 2, 200)
    counters.count_move("host-hot", 1, 100)
    assert counters.moved_pages == {"hot-host": 5, "host-hot": 1}
    assert counters.moved_bytes == {"hot-host": 500, "host-hot": 100}


def test_an_empty_move_leaves_no_path_behind() -> None:
    counters = Counters()
    counters.count_move("hot-disk", 0, 0)
    assert not counters.moved_pages
    assert not counters.moved_bytes
    assert counters.totals["never counted"] == 0
