"""Opening finds what was written: the same by the index and by the headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldpage.store import BLANK_KEY, Recovered, recover, write_sidecar
from coldpage.store.sidecar import SIDECAR_NAME
from tests.unit.store_rig import SlotRig, key_of, name_of, payload_of

_IDENTITY = b"i" * 32
_KEYS = [key_of(seed) for seed in range(4)]


class _Tier:
    """Two files of one directory."""

    def __init__(self, directory: Path, num_slots: int = 6) -> None:
        self.directory = directory
        self.rigs = [SlotRig(directory / f"pool-{i}.slots", num_slots=num_slots) for i in range(2)]

    def recover(self, **options: object) -> Recovered:
        files = [rig.slots for rig in self.rigs]
        return recover(self.directory, files, _IDENTITY, self.rigs[0].device.io, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        for rig in self.rigs:
            rig.close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[_Tier]:
    tier = _Tier(tmp_path)
    yield tier
    tier.close()


def _places(found: Recovered) -> list[tuple[int, int, bytes]]:
    columns = (found.index.entries[name].tolist() for name in ("pool", "slot", "key"))
    return list(zip(*columns, strict=True))


def test_nothing_is_found_in_new_files(tier: _Tier) -> None:
    found = tier.recover()
    assert _places(found) == []
    assert (found.is_from_sidecar, found.num_damaged) == (False, 0)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(-1, 3), st.integers(0, 1)),
        max_size=12,
    )
)
def test_both_ways_find_the_newest_of_each_page(
    writes: list[tuple[int, int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """-1 stands for a page without a key."""
    directory = tmp_path_factory.mktemp("tier")
    tier = _Tier(directory)
    model: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for number, (pool, slot, seed, layer_group) in enumerate(writes):
        name = name_of(max(seed, 0), layer_group)
        name = dataclasses.replace(name, key=BLANK_KEY) if seed < 0 else name
        assert tier.rigs[pool].write(slot, payload_of(number), name=name)
        model[pool, slot] = (number, seed, layer_group, number)
    newest: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {}
    for place, (number, seed, layer_group, _) in model.items():
        if seed >= 0:
            held = newest.get((seed, layer_group), (-1, (0, 0)))
            newest[seed, layer_group] = max(held, (number, place))
    expected = {place: payload_of(number) for number, place in newest.values()}
    old = {p for p, (_, seed, _, _) in model.items() if seed >= 0} - set(expected)
    tier.close()

    tier = _Tier(directory)
    scanned = tier.recover()
    write_sidecar(directory, _IDENTITY, scanned.index)
    tier.close()
    tier = _Tier(directory)
    read = tier.recover()
    assert (scanned.is_from_sidecar, read.is_from_sidecar) == (False, True)
    assert not (directory / SIDECAR_NAME).exists()
    assert read.index.entries.tobytes() == scanned.index.entries.tobytes()
    assert read.index.tokens.tolist() == scanned.index.tokens.tolist()
    assert [(p, s) for p, s, _ in _places(read)] == sorted(expected)
    entries = scanned.outdated.entries
    assert set(zip(entries["pool"].tolist(), entries["slot"].tolist(), strict=True)) == old
    for pool in range(2):
        for slot in range(6):
            assert tier.rigs[pool].read(slot) == expected.get((pool, slot))
    tier.close()


def test_what_is_cut_off_or_damaged_is_free(tmp_path: Path) -> None:
    tier = _Tier(tmp_path)
    for slot in range(6):
        assert tier.rigs[0].write(slot, payload_of(slot))
    tier.rigs[0].put_on_disk(1, b"\xff", 7)
    index = tier.recover().index
    tier.close()
    for has_sidecar in (True, False):
        if has_sidecar:
            write_sidecar(tmp_path, _IDENTITY, index)
        tier = _Tier(tmp_path, num_slots=4)
        found = tier.recover()
        assert [slot for _, slot, _ in _places(found)] == [0, 2, 3]
        assert found.num_damaged == (0 if has_sidecar else 1)
        tier.close()


def test_a_damaged_index_is_replaced_by_a_scan(tmp_path: Path) -> None:
    tier = _Tier(tmp_path)
    assert tier.rigs[1].write(3, payload_of(3))
    write_sidecar(tmp_path, _IDENTITY, tier.recover().index)
    path = tmp_path / SIDECAR_NAME
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    found = tier.recover()
    assert not found.is_from_sidecar
    assert _places(found) == [(1, 3, key_of(3))]
    tier.close()


def test_progress_is_shown(tmp_path: Path) -> None:
    tier = _Tier(tmp_path, num_slots=300)
    seen: list[tuple[int, int]] = []
    tier.recover(progress=lambda done, total: seen.append((done, total)))
    assert seen == [(256, 600), (300, 600), (556, 600), (600, 600)]
    tier.close()


def test_writes_after_a_recovery_are_newer_than_what_was_found(tier: _Tier) -> None:
    """Also where the clock has gone back meanwhile."""
    one = np.array([1], np.int32)
    first = tier.rigs[0]
    first.slots.adopt(one, np.array([1 << 61]))
    assert first.write(1, payload_of(1))
    assert tier.recover().index.entries["write_number"].tolist() == [(1 << 61) + 1]
    assert first.write(2, payload_of(2), name=name_of(1))
    found = tier.recover()
    assert _places(found) == [(0, 2, key_of(1))]
    assert found.outdated.entries["slot"].tolist() == [1]


def test_and_so_they_are_in_another_file(tier: _Tier) -> None:
    first, second = tier.rigs
    first.slots.adopt(np.array([1], np.int32), np.array([1 << 61]))
    assert first.write(1, payload_of(1))
    tier.recover()
    assert second.write(0, payload_of(2), name=name_of(1))
    found = tier.recover()
    assert _places(found) == [(1, 0, key_of(1))]
    assert found.outdated.entries["slot"].tolist() == [1]
    assert second.read(0) == payload_of(2)


def test_of_equal_write_numbers_the_last_place_counts(tier: _Tier) -> None:
    """The clock went back between them: either is good, and always the same one is taken."""
    for rig in tier.rigs:
        rig.slots.adopt(np.array([1], np.int32), np.array([1 << 61]))
        assert rig.write(1, payload_of(1))
    for _ in range(2):
        assert _places(tier.recover()) == [(1, 1, key_of(1))]
