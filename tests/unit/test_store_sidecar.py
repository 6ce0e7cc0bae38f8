"""The index beside the slots: it comes back whole, or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from coldpage.store import SlotIndex, write_sidecar
from coldpage.store.sidecar import (
    ENTRY,
    SIDECAR_NAME,
    fill_entry,
    read_sidecar,
    take_away_sidecar,
)
from coldpage.types import PageClass
from tests.unit.store_rig import TOKENS_PER_BLOCK, name_of

_IDENTITY = b"i" * 32


def index_of(num_entries: int) -> SlotIndex:
    """Entries with something of their own in each field."""
    tokens = np.zeros((num_entries, TOKENS_PER_BLOCK), np.int32)
    index = SlotIndex(np.zeros(num_entries, ENTRY), tokens)
    for row in range(num_entries):
        classes = (PageClass.BODY, PageClass.SINK)
        fill_entry(index, row, name_of(row, row % 3, classes[row % 2], row % 5))
        entry = index.entries[row]
        entry["pool"], entry["slot"], entry["priority"] = row % 2, row, row - 2
        entry["write_number"], entry["last_use"] = 1 << 60, (1 << 60) + row
    return index


@pytest.mark.parametrize("num_entries", [0, 1, 7])
def test_an_index_comes_back(tmp_path: Path, num_entries: int) -> None:
    index = index_of(num_entries)
    write_sidecar(tmp_path, _IDENTITY, index)
    back = read_sidecar(tmp_path, _IDENTITY)
    assert back is not None
    assert back.entries.tobytes() == index.entries.tobytes()
    assert back.tokens.tolist() == index.tokens.tolist()
    assert [name.tokens.tolist() for name in back.names()] == [
        list(range(row, row + row % 5)) for row in range(num_entries)
    ]
    for row, name in enumerate(back.names()):
        given = name_of(row, row % 3)
        assert (name.key, name.parent_key, name.ordinal, name.layer_group_id) == (
            given.key,
            given.parent_key,
            given.ordinal,
            given.layer_group_id,
        )
        assert name.page_class is (PageClass.BODY, PageClass.SINK)[row % 2]
    assert stat.S_IMODE((tmp_path / SIDECAR_NAME).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [SIDECAR_NAME]


def test_every_flipped_bit_and_every_cut_is_found(tmp_path: Path) -> None:
    write_sidecar(tmp_path, _IDENTITY, index_of(2))
    path = tmp_path / SIDECAR_NAME
    good = path.read_bytes()
    for index in range(len(good)):
        for bit in range(8):
            flipped = bytearray(good)
            flipped[index] ^= 1 << bit
            path.write_bytes(flipped)
            assert read_sidecar(tmp_path, _IDENTITY) is None, (index, bit)
        path.write_bytes(good[:index])
        assert read_sidecar(tmp_path, _IDENTITY) is None, index
    path.write_bytes(good + b"\0")
    assert read_sidecar(tmp_path, _IDENTITY) is None
    path.write_bytes(good)
    assert read_sidecar(tmp_path, _IDENTITY) is not None


def test_an_index_of_another_tier_is_not_used(tmp_path: Path) -> None:
    write_sidecar(tmp_path, _IDENTITY, index_of(2))
    assert read_sidecar(tmp_path, b"j" * 32) is None


def test_an_index_is_replaced_and_taken_away(tmp_path: Path) -> None:
    write_sidecar(tmp_path, _IDENTITY, index_of(5))
    write_sidecar(tmp_path, _IDENTITY, index_of(2))
    back = read_sidecar(tmp_path, _IDENTITY)
    assert back is not None
    assert back.entries.size == 2
    take_away_sidecar(tmp_path)
    take_away_sidecar(tmp_path)
    assert read_sidecar(tmp_path, _IDENTITY) is None
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_can_not_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / SIDECAR_NAME).mkdir()
    assert read_sidecar(tmp_path, _IDENTITY) is None
