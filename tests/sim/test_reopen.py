"""What a disk level holds is found again by the next manager on its path."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldpage.errors import StorageError
from coldpage.store.sidecar import SIDECAR_NAME
from coldpage.testing.example_codecs import CoarseCodec, PaddingCodec
from tests.property.setups import MANY_GROUPS
from tests.sim.persistent import DISK, PER_BLOCK, Place, prompt

_ROOT = Path(__file__).resolve().parents[2]

Make = Callable[..., Place]
PROMPTS = [prompt(4, first) for first in range(3)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Make]:
    places: list[Place] = []

    def make(**settings: object) -> Place:
        places.append(Place(tmp_path / "tier", **settings))
        return places[-1]

    yield make
    for made in places:
        made.close()


def _is_kept(place: Place) -> None:
    assert (place.directory / SIDECAR_NAME).exists()


def _is_removed(place: Place) -> None:
    (place.directory / SIDECAR_NAME).unlink()


def _is_damaged(place: Place) -> None:
    sidecar = place.directory / SIDECAR_NAME
    data = bytearray(sidecar.read_bytes())
    data[len(data) // 2] ^= 1
    sidecar.write_bytes(data)


def _is_cut_off(place: Place) -> None:
    sidecar = place.directory / SIDECAR_NAME
    sidecar.write_bytes(sidecar.read_bytes()[:-9])


_FATES = [_is_kept, _is_removed, _is_damaged, _is_cut_off]


@pytest.mark.parametrize("fate", _FATES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "mixed"},
        {"kind": "mixed-sizes"},
        {"kind": "window"},
        {"separate_sinks": True},
        {"kind": "mixed-sizes", "separate_sinks": True},
        {"separate_sinks": True, "codec": lambda: CoarseCodec(keeps_sinks=True)},
        {"kind": "many", "hot": 6},
        {"host": 8},
        {"codec": lambda: PaddingCodec(64)},
    ],
    ids=lambda settings: "-".join(map(str, settings)) or "full",
)
def test_everything_is_found_again(
    place: Make, settings: dict[str, object], fate: Callable[[Place], None]
) -> None:
    where = place(**settings)
    first = where.open()
    is_exact = settings.get("codec") is None or "separate_sinks" not in settings
    first.put(*PROMPTS)
    assert first.manager.flush(10.0) == 0
    first.put(PROMPTS[1])  # used again: its place in the order is another now
    keys, order = first.keys(), first.pages_by_value()
    num_found = [first.num_found(tokens) for tokens in PROMPTS]
    assert num_found == [PER_BLOCK * 4] * 3
    first.close()
    fate(where)
    progress: list[tuple[int, int]] = []
    second = where.open(on_progress=lambda done, total: progress.append((done, total)))
    assert bool(progress) == (fate is not _is_kept)
    if progress:
        assert progress[-1][0] == progress[-1][1] == second.manager.stats().levels[-1].total_slots
    assert not (where.directory / SIDECAR_NAME).exists(), "it says nothing while pages come and go"
    assert second.keys() == keys
    if fate is _is_kept:
        assert second.pages_by_value() == order
    for tokens in PROMPTS:
        cache = second.manager.create_kv_cache(tokens)
        assert cache.history_length == len(tokens)
        assert cache.cached_tokens_by_level[-1] > 0
        cache.close()
    if is_exact:
        assert [second.read(tokens) for tokens in PROMPTS] == [0, 0, 0]
    second.manager.check_integrity()
    second.engine.problems.clear() if not is_exact else None


def test_it_goes_on_over_many_lives(place: Make) -> None:
    where = place(kind="mixed-sizes", disk=12)
    for life in range(6):
        session = where.open()
        if life:
            assert session.num_found(prompt(3, life - 1)) == 12
            assert session.read(prompt(3, life - 1)) == 0
        session.put(prompt(3, life))
        session.manager.flush(10.0)
        if life % 2:
            session.close()
            _is_removed(where)
        else:
            session.close()


def test_what_was_used_last_is_given_up_last(place: Make) -> None:
    where = place(hot=8, disk=12)
    first = where.open()
    first.put(*PROMPTS)
    assert first.manager.flush(10.0) == 0
    first.put(PROMPTS[0])
    first.close()
    second = where.open()
    assert second.used[DISK] == 12
    second.put(prompt(4, 8))
    assert second.manager.flush(10.0) == 0
    assert [second.num_found(tokens) for tokens in PROMPTS] == [16, 0, 16]


def test_after_a_scan_the_ends_of_prompts_are_given_up_and_new_ones_are_not(place: Make) -> None:
    """All that is known is in which order pages were written: beginnings first."""
    where = place(hot=16, disk=12)
    first = where.open()
    first.put(*PROMPTS)
    assert first.manager.flush(10.0) == 0
    first.close()
    _is_removed(where)
    second = where.open()
    second.put(prompt(2, 9))
    assert second.manager.flush(10.0) == 0
    assert sorted(second.num_found(tokens) for tokens in PROMPTS) == [8, 16, 16]
    assert second.num_found(prompt(2, 9)) == 8


def test_two_disk_tiers_are_one_tree(place: Make) -> None:
    """Blocks of one sequence lie on both, in any order, and some on both."""
    where = place(hot=4, disk2=6, disk=20)
    first = where.open()
    first.put(*PROMPTS)
    assert first.manager.flush(10.0) == 0, "what the first disk has no room for is on the second"
    num_found = [first.num_found(tokens) for tokens in PROMPTS]
    assert first.used[1] > 0 < first.used[2]
    on_disk = first.keys()
    first.close()
    second = where.open()
    assert second.keys() == on_disk
    assert [second.num_found(tokens) for tokens in PROMPTS] == num_found
    assert [second.read(tokens) for tokens in PROMPTS] == [0, 0, 0]


def test_first_blocks_on_the_colder_of_two_disks_are_found(place: Make) -> None:
    where = place(hot=8, disk2=4, disk=20)
    first = where.open()
    tokens = prompt(4)
    first.put(tokens)
    storage, table = first.manager._storage, first.manager._storage.table
    pages = first.manager._tree.pages_of(first.engine.layer_groups[0])
    pages = pages[table.ordinal[pages].argsort()]
    send = storage._escalation.send_below
    hot, warm, cold = storage.levels
    send(hot, pages[2:], warm)
    send(hot, pages[:3], cold)
    first.manager.finish_transfers()
    assert first.used == [4, 2, 3]
    first.close()
    second = where.open()
    assert second.num_found(tokens) == 16
    assert second.used == [0, 2, 2], "one copy of a page is enough"
    assert second.read(tokens) == 0
    assert second.manager.flush(10.0) == 0
    assert second.moved("hot-disk") == second.moved("hot-disk2") == 0


_OTHERS: dict[str, dict[str, object]] = {
    "model": {"fingerprint": b"another"},
    "geometry": {"kind": "mixed"},
    "window": {"kind": "window"},
    "tokens a block": {"per_block": 2},
    "codec": {"codec": CoarseCodec},
    "codec of the tier": {"disk_codec": CoarseCodec},
    "codec parameters": {"codec": lambda: PaddingCodec(64)},
    "page classes": {"separate_sinks": True},
}


@pytest.mark.parametrize("changes", _OTHERS.values(), ids=_OTHERS)
def test_another_identity_reuses_nothing_and_loses_nothing(
    place: Make, changes: dict[str, object]
) -> None:
    where = place()
    first = where.open()
    first.put(*PROMPTS)
    assert first.manager.flush(10.0) == 0
    first.close()
    other = where.open(**changes)
    assert len(list((where.path / "paged").iterdir())) == 2
    assert other.keys() == set()
    other.put(prompt(3, 7))
    other.manager.flush(10.0)
    other.engine.problems.clear()
    other.close()
    again = where.open()
    assert [again.num_found(tokens) for tokens in PROMPTS] == [16, 16, 16]
    assert [again.read(tokens) for tokens in PROMPTS] == [0, 0, 0]


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("changes", _OTHERS.values(), ids=_OTHERS)
def test_an_instance_of_another_identity_is_refused_untouched(
    place: Make, changes: dict[str, object]
) -> None:
    where = place(instance_id="mine")
    first = where.open()
    first.put(*PROMPTS)
    assert first.manager.flush(10.0) == 0
    first.close()
    before = _files(where.directory)
    with pytest.raises(StorageError, match=r"holds pages of something else: .* differ\. Nothing"):
        where.open(**changes)
    after = _files(where.directory)
    assert after == before
    again = where.open()
    assert [again.read(tokens) for tokens in PROMPTS] == [0, 0, 0]


def test_two_instances_live_on_one_path_and_a_taken_one_is_refused(place: Make) -> None:
    where = place()
    one, two = where.open(instance_id="one"), where.open(instance_id="two")
    one.put(PROMPTS[0])
    two.put(PROMPTS[1])
    assert one.num_found(PROMPTS[1]) == two.num_found(PROMPTS[0]) == 0
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()} .* started at 20"):
        where.open(instance_id="two")
    assert two.manager.flush(10.0) == 0
    two.close()
    assert where.open(instance_id="two").read(PROMPTS[1]) == 0


@pytest.mark.parametrize("has_sidecar", [True, False])
@pytest.mark.parametrize("num_blocks", [5, 9, 40])
def test_another_quota_keeps_what_lies_within(
    place: Make, num_blocks: int, has_sidecar: bool
) -> None:
    where = place(disk=12, instance_id="mine")
    first = where.open()
    first.put(*PROMPTS)
    assert first.manager.flush(10.0) == 0
    first.close()
    if not has_sidecar:
        _is_removed(where)
    second = where.open(disk=num_blocks)
    assert second.manager.stats().levels[DISK].total_slots == num_blocks
    num_found = sum(second.num_found(tokens) for tokens in PROMPTS)
    assert num_found == PER_BLOCK * second.used[DISK]
    assert num_found == 48 if num_blocks > 12 else 0 < num_found <= PER_BLOCK * num_blocks
    assert [second.read(tokens) for tokens in PROMPTS] == [0, 0, 0]
    second.put(prompt(4, 9))
    num_left = second.manager.flush(10.0)
    assert num_left == max(0, second.manager.stats().num_pages - num_blocks)
    second.close()
    third = where.open(disk=num_blocks)
    assert third.num_found(prompt(4, 9)) == 16
    assert third.read(prompt(4, 9)) == 0


def test_blocks_whose_parent_is_gone_are_not_served_and_cost_nothing(place: Make) -> None:
    where = place()
    first = where.open()
    first.put(*PROMPTS)
    assert first.manager.flush(10.0) == 0
    blobs = first.filled(PROMPTS[0])
    second_block = blobs.cache.blobs_on_disk()[1]
    blobs.cache.close()
    first.close()
    _is_removed(where)
    with second_block.path.open("r+b") as file:  # its header is gone
        file.seek(second_block.offset_bytes - 4096)
        file.write(bytes(4096))
    second = where.open()
    assert [second.num_found(tokens) for tokens in PROMPTS] == [4, 16, 16]
    assert second.used[DISK] == 9, "two blocks that nobody can ask for have no slots"
    second.put(PROMPTS[0])
    assert second.manager.flush(10.0) == 0
    assert second.used[DISK] == 12


def test_a_payload_that_was_damaged_meanwhile_is_computed_again(place: Make) -> None:
    where = place()
    first = where.open()
    sequence = first.filled(PROMPTS[0])
    assert first.manager.flush(10.0) == 0
    blob = sequence.cache.blobs_on_disk()[2]
    sequence.cache.close()
    first.close()
    with blob.path.open("r+b") as file:
        file.seek(blob.offset_bytes + 3)
        (byte,) = file.read(1)
        file.seek(blob.offset_bytes + 3)
        file.write(bytes([byte ^ 1]))
    second = where.open()
    assert second.read(PROMPTS[0]) == 1
    assert second.quarantined[DISK] == 1
    assert second.state == "ok"


def test_an_index_of_files_that_are_gone_is_not_believed(place: Make) -> None:
    where = place()
    first = where.open()
    first.put(PROMPTS[0])
    assert first.manager.flush(10.0) == 0
    first.close()
    for file in where.directory.glob("*.slots"):
        file.unlink()
    second = where.open()
    assert second.keys() == set()
    assert second.used[DISK] == 0


def test_a_copy_of_an_older_day_is_read_as_what_it_was(place: Make, tmp_path: Path) -> None:
    """Slot files and index come back from a backup while their place has moved on."""
    where = place(disk=8)
    first = where.open()
    first.put(PROMPTS[0], PROMPTS[1])
    assert first.manager.flush(10.0) == 0
    first.close()
    shutil.copytree(where.directory, tmp_path / "backup")
    second = where.open()
    second.put(prompt(4, 7), prompt(4, 8))
    assert second.manager.flush(10.0) == 0
    second.close()
    shutil.copy(tmp_path / "backup" / SIDECAR_NAME, where.directory)  # an old index, new slots
    third = where.open()
    assert third.num_found(PROMPTS[0]) == 16, "by the old index"
    assert third.read(PROMPTS[0]) == 4, "and no slot vouches for it"


@pytest.mark.parametrize("seed", range(8))
def test_walks_over_many_lives(place: Make, seed: int) -> None:
    """Small disks, prompts that share beginnings, other quotas, indices that are there or not."""
    rng = random.Random(seed)
    where = place(
        kind=rng.choice(["full", "mixed", "mixed-sizes", "window"]),
        hot=14,
        host=rng.choice([0, 6]),
        disk2=rng.choice([0, 0, 8]),
        separate_sinks=rng.random() < 0.4,
        write_behind=rng.random() < 0.5,
        instance_id="mine",
    )
    num_reused = 0
    for _ in range(8):
        session = where.open(disk=rng.choice([10, 14, 20]))
        for _ in range(rng.randrange(1, 10)):
            tokens = [rng.randrange(2), *range(9, 12), rng.randrange(3), *range(20, 23)]
            tokens += [rng.randrange(3), *range(30, 30 + 4 * rng.randrange(1, 4) - 1)]
            num_reused += session.num_found(tokens)
            sequence = session.engine.create(tokens)
            assert sequence.resume()
            session.becomes_ready(sequence)
            assert sequence.cache.missing_blocks() == []
            assert sequence.step(tokens[sequence.cache.history_length :])
            sequence.check()
            sequence.cache.close()
            for _ in range(rng.randrange(3)):
                session.manager.poll()
            session.check()
        if rng.random() < 0.7:
            session.manager.flush(rng.choice([0.0, 10.0]))
        session.close()
        for sidecar in where.path.parent.rglob(SIDECAR_NAME):
            if rng.random() < 0.5:
                sidecar.unlink()
    assert num_reused > 0


_CHILD = """
import os, sys
from pathlib import Path
from tests.sim.persistent import Place, prompt
session = Place(Path(sys.argv[1]), kind="mixed-sizes", disk=200).open()
for first in range(3):
    session.put(prompt(4, first))
assert session.manager.flush(10.0) == 0
session.put(prompt(4, 3))
print("flushed", flush=True)
for life in range(4, 10_000):
    session.put(prompt(4, life % 12))
    session.manager.poll()
    session.manager.flush(0.002)
"""


def test_what_was_flushed_survives_a_kill(place: Make) -> None:
    where = place(kind="mixed-sizes", disk=200)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(where.path)],
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": f"{_ROOT}/src:{_ROOT}"},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"flushed\n"
        with pytest.raises(StorageError, match=f"in use by process {child.pid} "):
            where.open()
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not (where.directory / SIDECAR_NAME).exists()
    session = where.open()
    for first in range(12):
        if session.num_found(prompt(4, first)):
            assert session.read(prompt(4, first)) == 0
    assert [session.num_found(tokens) for tokens in PROMPTS] == [16, 16, 16]


def test_two_layer_groups_need_both_their_files(place: Make) -> None:
    """Of a block that only one of them still has, nothing is reused."""
    assert MANY_GROUPS > 2
    where = place(kind="mixed-sizes")
    first = where.open()
    first.put(PROMPTS[0])
    assert first.manager.flush(10.0) == 0
    first.close()
    (where.directory / "pool-0.slots").unlink()
    second = where.open()
    assert second.num_found(PROMPTS[0]) == 0
    second.put(PROMPTS[0])
    assert second.read(PROMPTS[0]) == 0
