"""The newest blocks of a sequence are a page class that moves with it: they leave the hot level
whole, and are ordinary pages once it has grown past them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coldpage import ReuseScope, StorageError
from coldpage.codecs import ColdPageCodec
from coldpage.config import BatchDesc, KVCacheDesc
from coldpage.device.base import Stream
from coldpage.snapshot import state_read, state_write
from coldpage.store.sidecar import SIDECAR_NAME
from coldpage.testing.example_codecs import CoarseCodec, PaddingCodec
from coldpage.testing.pattern_engine import PatternEngine, PatternSequence
from coldpage.types import PageClass
from tests.property.checks import high_bits
from tests.sim.persistent import PER_BLOCK as PERSISTENT_BLOCK
from tests.sim.persistent import Place, Session
from tests.sim.persistent import prompt as persistent_prompt
from tests.sim.rig import Rig
from tests.sim.scenes import Build, filled, moves, prompt, push_out, suspended

HOT_BIT, HOST_BIT, DISK_BIT = 1, 2, 4
SINK, BODY, RECENT = PageClass.SINK, PageClass.BODY, PageClass.RECENT


def past() -> ColdPageCodec:
    """Loses half of each page, but of recent ones."""
    return CoarseCodec(keeps_recent=True)


def ends() -> ColdPageCodec:
    """Nor of first ones."""
    return CoarseCodec(keeps_sinks=True, keeps_recent=True)


def made(build: Build, **settings: object) -> Rig:
    """A rig whose pattern engine looks at what every codec keeps, with as much room for recent
    blocks as for others.
    """
    typical = BatchDesc((KVCacheDesc(12, 12),))
    defaults = {"hot": 12, "codec": past, "num_recent_blocks": 2, "typical_step": typical}
    rig = build(**{**defaults, **settings})
    rig.engine = PatternEngine(rig.manager, view=high_bits)
    return rig


def classes_of(rig: Rig, sequence: PatternSequence, layer_group: int = 0) -> list[PageClass | None]:
    """By block; None where it has no page."""
    pages = rig.pages(sequence, layer_group)
    life_cycles = rig.manager.layout.life_cycles
    return [life_cycles[rig.table.life_cycle[page]].page_class if page else None for page in pages]


def exact_blocks(rig: Rig, sequence: PatternSequence, layer_group: int = 0) -> list[int]:
    """Which blocks of an active sequence are as they were written, every byte of their tokens."""
    wrong = {
        piece.ordinal
        for piece in sequence._pieces(0, sequence.cache.history_length)
        if piece.buffer.layer_group_id == layer_group
        and not np.array_equal(piece.place, piece.expected.ravel())
    }
    slots = sequence.cache.page_indices(rig.engine.layer_groups[layer_group]).tolist()
    return [block for block, slot in enumerate(slots) if slot >= 0 and block not in wrong]


def come_back(rig: Rig, sequence: PatternSequence) -> None:
    """Resume, and look at what came back."""
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.cache.missing_blocks() == []
    sequence.check()
    rig.check()


def sent_out(rig: Rig, sequence: PatternSequence, num_blocks: int = 12) -> None:
    """Suspend; the hot level is wanted by another."""
    sequence.cache.suspend()
    push_out(rig, num_blocks)
    slots = sequence.cache.page_indices(rig.engine.layer_groups[0])
    assert (slots < 0).all(), "none of its pages is hot"


def grown(rig: Rig, sequence: PatternSequence, num_tokens: int) -> None:
    assert sequence.step([7] * num_tokens)
    rig.check()


LEVELS: dict[str, dict[str, object]] = {
    "host": {"host": 20},
    "disk": {"disk": 20},
    "host, then disk": {"host": 3, "disk": 20},
    "copied at once": {"host": 20, "copies_behind": True},
    "a device level": {"gpu": 20},
    "another codec on disk": {"host": 1, "disk": 20, "codec": None, "disk_codec": past},
}


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_the_newest_full_blocks_and_the_last_come_back_whole(
    build: Build, levels: dict[str, object]
) -> None:
    rig = made(build, **levels)
    sequence = filled(rig, [*prompt(5), 1])  # and half a block
    sent_out(rig, sequence)
    come_back(rig, sequence)
    exact = exact_blocks(rig, sequence)
    assert exact[-3:] == [3, 4, 5]
    assert len(exact) < 6, "some have been packed"
    assert classes_of(rig, sequence) == [BODY] * 3 + [RECENT] * 3


def test_what_a_sequence_has_grown_past_is_packed(build: Build) -> None:
    rig = made(build, host=20)
    sequence = filled(rig, [*prompt(5), 1])
    sent_out(rig, sequence)
    come_back(rig, sequence)
    assert exact_blocks(rig, sequence) == [3, 4, 5]
    grown(rig, sequence, 4)  # seven full blocks and half of one
    assert exact_blocks(rig, sequence) == [3, 4, 5, 6, 7]
    sent_out(rig, sequence)
    assert classes_of(rig, sequence) == [BODY] * 5 + [RECENT] * 3
    come_back(rig, sequence)
    assert exact_blocks(rig, sequence) == [5, 6, 7]


def test_whole_pages_take_the_room_of_whole_pages(build: Build) -> None:
    rig = made(build, host=20, codec=ends, separate_sink_pages=True)
    sequence = filled(rig, prompt(6))
    sent_out(rig, sequence)
    packed, whole = sorted(rig.manager.stats().levels[1].pool_groups, key=lambda g: g.slot_bytes)
    assert whole.slot_bytes == 2 * packed.slot_bytes
    assert (packed.used_slots, whole.used_slots) == (3, 3), "the first block and the newest two"
    come_back(rig, sequence)
    assert classes_of(rig, sequence) == [SINK, BODY, BODY, BODY, RECENT, RECENT]
    assert exact_blocks(rig, sequence) == [0, 4, 5]


def test_a_short_sequence_is_whole(build: Build) -> None:
    for has_sinks in (False, True):
        rig = made(build, host=20, codec=ends, separate_sink_pages=has_sinks)
        sequence = filled(rig, [5, 6, 7])
        sent_out(rig, sequence)
        come_back(rig, sequence)
        assert classes_of(rig, sequence) == [SINK if has_sinks else RECENT, RECENT]
        assert exact_blocks(rig, sequence) == [0, 1]


def test_what_did_not_change_its_class_is_not_moved_again(build: Build) -> None:
    rig = made(build, host=20)
    sequence = filled(rig, prompt(6))
    sent_out(rig, sequence)
    assert moves(rig, "hot-host") == 6
    come_back(rig, sequence)
    sent_out(rig, sequence)
    assert moves(rig, "hot-host") == 6, "it is as it was"
    come_back(rig, sequence)
    grown(rig, sequence, 2)
    sent_out(rig, sequence)
    # The new block, and the one that it has taken the place of.
    assert moves(rig, "hot-host") == 8


def test_copies_of_one_form_are_kept(build: Build) -> None:
    """Where a codec loses nothing, a class is a name. On the other level it is another form."""
    for codec in (None, PaddingCodec):
        rig = made(build, host=20, codec=codec)
        sequence = filled(rig, prompt(6))
        sent_out(rig, sequence)
        come_back(rig, sequence)
        grown(rig, sequence, 4)
        sent_out(rig, sequence)
        assert moves(rig, "hot-host") == 8, "two new blocks"
        come_back(rig, sequence)
        assert exact_blocks(rig, sequence) == list(range(8))
    rig = made(build, host=20, disk=20, codec=None, disk_codec=past)
    sequence = filled(rig, prompt(4))
    sent_out(rig, sequence)
    rig.manager.flush(10.0)
    assert rig.levels_of(sequence) == [HOST_BIT | DISK_BIT] * 4
    come_back(rig, sequence)
    grown(rig, sequence, 2)
    sequence.cache.suspend()
    everywhere = HOT_BIT | HOST_BIT | DISK_BIT
    assert rig.levels_of(sequence)[:4] == [everywhere] * 2 + [HOT_BIT | HOST_BIT, everywhere]


def test_a_truncated_sequence_has_other_newest_blocks(build: Build) -> None:
    rig = made(build, host=20)
    sequence = filled(rig, prompt(7))
    sequence.truncate(9)  # four blocks and half of one
    sent_out(rig, sequence)
    come_back(rig, sequence)
    assert exact_blocks(rig, sequence) == [2, 3, 4]
    # What has been packed before is what it is; nothing more is lost of it.
    sequence.truncate(4)
    before = rig.contents(sequence.cache)
    sent_out(rig, sequence)
    come_back(rig, sequence)
    assert classes_of(rig, sequence) == [RECENT, RECENT]
    after = rig.contents(sequence.cache)
    assert all(np.array_equal(before[block], after[block]) for block in (0, 1))


# ---------------------------------------------------------------------- shared pages


def test_a_fork_keeps_its_newest_blocks_whole(build: Build) -> None:
    """Also when the other has long grown past them, and is evicted first."""
    rig = made(build, hot=16, host=30)
    parent = filled(rig, [*prompt(5), 1])
    child = rig.adopt(parent.fork())
    assert classes_of(rig, child) == [BODY] * 3 + [RECENT] * 3
    grown(rig, parent, 8)
    sent_out(rig, parent, 16)
    # The last block of the child is its own by now.
    assert classes_of(rig, parent)[:6] == [BODY] * 3 + [RECENT] * 2 + [BODY]
    come_back(rig, child)
    assert exact_blocks(rig, child) == [3, 4, 5]
    rig.close(child)
    come_back(rig, parent)
    assert exact_blocks(rig, parent) == [3, 4, 7, 8, 9]
    sent_out(rig, parent, 16)
    assert classes_of(rig, parent) == [BODY] * 7 + [RECENT] * 3, "nobody else holds them"
    come_back(rig, parent)
    assert exact_blocks(rig, parent) == [7, 8, 9]


def test_the_last_to_grow_past_a_shared_page_packs_it(build: Build) -> None:
    rig = made(build, hot=16, host=30)
    rig.close(suspended(rig, prompt(4)))
    first, second = (rig.create(prompt(4)) for _ in range(2))
    for sequence in (first, second):
        come_back(rig, sequence)
        assert exact_blocks(rig, sequence) == [0, 1, 2, 3]
        assert sequence.step([3 + len(rig.sequences)] * 6)
        sequence.cache.suspend()
        assert classes_of(rig, sequence)[:4] == [BODY, BODY, RECENT, RECENT]
    rig.close(first)
    come_back(rig, second)
    second.cache.suspend()
    assert classes_of(rig, second) == [BODY] * 5 + [RECENT] * 2


def test_a_closed_sequence_is_found_again_with_its_end_whole(build: Build) -> None:
    rig = made(build, host=20)
    tokens = prompt(6)
    for is_suspended in (True, False):
        sequence = filled(rig, tokens)
        if is_suspended:
            sequence.cache.suspend()
        rig.close(sequence)
        push_out(rig, 12)
        again = rig.create(tokens)
        come_back(rig, again)
        assert exact_blocks(rig, again) == [4, 5]
        rig.close(again)
        tokens = prompt(6, 50)


def test_a_prefix_that_another_has_grown_past_is_whole_from_now_on(build: Build) -> None:
    """A match that ends in the middle of packed blocks loses nothing more of them."""
    rig = made(build, host=20)
    rig.close(suspended(rig, prompt(8)))
    push_out(rig, 12)
    sequence = rig.create(prompt(4))
    come_back(rig, sequence)
    assert exact_blocks(rig, sequence) == []
    sequence.cache.suspend()
    assert classes_of(rig, sequence) == [BODY, BODY, RECENT, RECENT]
    # Closing what is suspended, or has never run, changes nothing.
    rig.close(sequence)
    other = rig.create(prompt(3))
    assert classes_of(rig, other) == [BODY, BODY, RECENT]
    page = rig.pages(other)[1]
    assert rig.table.present[page] & HOT_BIT
    rig.close(other)
    assert rig.manager.layout.life_cycles[rig.table.life_cycle[page]].page_class is BODY


def test_what_is_not_hot_stays_what_it_is(build: Build) -> None:
    """A sequence that is cut and suspended before its pages have come back."""
    rig = made(build, disk=40)
    sequence = suspended(rig, prompt(6))
    push_out(rig, 12)
    rig.device.faults.is_io_held = True
    assert sequence.resume()
    sequence.truncate(6)
    sequence.cache.suspend()
    rig.check()
    assert classes_of(rig, sequence) == [BODY] * 3
    rig.device.faults.is_io_held = False
    come_back(rig, sequence)
    sequence.cache.suspend()
    assert classes_of(rig, sequence) == [BODY, RECENT, RECENT]


# ---------------------------------------------------------------------- windows, transfers, layout


@pytest.mark.parametrize("kind", ["mixed", "mixed-sizes", "window"])
def test_layer_groups_with_windows(build: Build, kind: str) -> None:
    """Five tokens of window: of the stale blocks none stays, recent or not."""
    rig = made(build, kind=kind, host=40, disk=40, codec=ends, separate_sink_pages=True)
    sequence = filled(rig, prompt(6))
    sequence.cache.suspend()
    windowed = 1 if kind != "window" else 0
    live = classes_of(rig, sequence, windowed)
    assert live[4:] == [RECENT, RECENT] and BODY not in live
    push_out(rig, 12)
    for length in (9, 11):  # blocks; and half a block
        come_back(rig, sequence)
        for group in range(len(rig.layout.layer_groups)):
            assert set(exact_blocks(rig, sequence, group)) >= set(range(length - 5, length - 3))
        assert sequence.step([7] * (5 if length == 9 else 4))
        sent_out(rig, sequence)
    # The window has gone on: what the tree still has of stale blocks is ordinary.
    tree = rig.manager._tree
    pages = tree.pages_of(rig.engine.layer_groups[windowed])
    of_class = [
        (
            int(rig.table.ordinal[page]),
            rig.layout.life_cycles[rig.table.life_cycle[page]].page_class,
        )
        for page in pages.tolist()
    ]
    assert {block for block, it in of_class if it is RECENT} <= {8, 9, 10}


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_page_changes_its_class_while_it_is_being_written(build: Build, is_direct: bool) -> None:
    """What is on its way in the old form counts for nothing when it arrives, on either end."""
    disk_codec = {} if is_direct else {"disk_codec": ends}
    rig = made(build, hot=16, host=20, disk=30, copies_behind=True, **disk_codec)
    sequence = suspended(rig, prompt(6))
    rig.device.faults.is_io_held = True
    host, disk = rig.storage.levels[1:]
    pages = np.array(rig.pages(sequence), np.int32)
    rig.storage._escalation.send_below(host, pages, disk)
    assert (rig.table.reserved[pages] == DISK_BIT).all(), "on their way to disk"
    assert (rig.table.busy[pages] == (HOST_BIT if is_direct else 0)).all()
    come_back(rig, sequence)
    grown(rig, sequence, 8)
    sequence.cache.suspend()
    assert classes_of(rig, sequence) == [BODY] * 8 + [RECENT] * 2
    rig.check()
    changed = pages[4:]
    # Where the slot in host memory is not in use any more there is a copy in the new form already.
    copies = HOT_BIT if is_direct else HOT_BIT | HOST_BIT
    assert (rig.table.present[changed] == copies).all(), "no copy in the old form"
    assert (rig.table.reserved[changed] == DISK_BIT).all(), "which are still being written"
    rig.device.faults.is_io_held = False
    rig.manager.finish_transfers()
    rig.check()
    assert (rig.table.present[changed] == copies).all(), "nor one that has arrived since"
    assert not (rig.table.reserved[changed] | rig.table.busy[changed]).any()
    push_out(rig, 16)
    come_back(rig, sequence)
    assert exact_blocks(rig, sequence) == [8, 9]


def fail(rig: Rig, stream: Stream) -> None:
    """Have work fail on the stream."""

    def work() -> None:
        raise RuntimeError("a kernel failed")

    stream.launch(work, reads=(), writes=())
    rig.device.step(1000)


@pytest.mark.parametrize("how", ["suspend", "close"])
def test_what_is_whole_elsewhere_outlives_a_failed_stream(build: Build, how: str) -> None:
    """Also where its copies are of the class that it was of."""
    rig = made(build, hot=16, host=20)
    sequence = filled(rig, prompt(6))
    sent_out(rig, sequence, 16)
    stream = rig.device.create_stream("fails")
    assert sequence.resume(stream)
    sequence.cache.synchronize()
    assert sequence.step([7] * 8)

    fail(rig, stream)
    if how == "suspend":
        sequence.cache.suspend()
        assert classes_of(rig, sequence)[4:6] == [BODY] * 2, "which were recent"
        assert sequence.cache.missing_blocks() == [6, 7, 8, 9], "those that were written"
        rig.check()
    rig.close(sequence)
    assert rig.manager.stats().totals["torn_pages"] == 4
    rig.check()
    rig.device._streams.remove(stream)  # else its last work counts as never waited for


def test_what_a_window_has_left_outlives_a_failed_stream(build: Build) -> None:
    """The tree keeps it, in another class than that of its copies."""
    rig = made(build, kind="window", hot=16, host=20)
    sequence = filled(rig, prompt(6))
    sent_out(rig, sequence, 16)
    stream = rig.device.create_stream("fails")
    assert sequence.resume(stream)
    sequence.cache.synchronize()
    left = np.array(rig.pages(sequence)[4:6], np.int32)
    assert sequence.cache.resize(20)
    fail(rig, stream)
    assert sequence.cache.resize(20, 20)
    assert rig.pages(sequence)[4:6] == [0, 0]
    assert not rig.table.is_missing[left].any()
    assert (rig.table.present[left] == HOT_BIT).all()
    rig.check()
    rig.close(sequence)
    rig.check()
    rig.device._streams.remove(stream)  # else its last work counts as never waited for


def test_without_recent_blocks_nothing_is_other_than_before(build: Build) -> None:
    none, some, more = (build(hot=8, host=8, codec=past, num_recent_blocks=n) for n in (0, 1, 5))
    assert none.manager.layout.page_classes == (BODY,)
    assert some.manager.layout.page_classes == more.manager.layout.page_classes == (BODY, RECENT)
    assert none.manager.provenance == build(hot=8, host=8, codec=past).manager.provenance
    # What is on disk has the same forms whatever their number is.
    assert some.manager.provenance == more.manager.provenance != none.manager.provenance
    exact = build(hot=8, host=8, num_recent_blocks=3)
    assert exact.manager.provenance == b"exact"


# ---------------------------------------------------------------------- restart, saved sessions


def reopened(where: Place, **changes: object) -> Session:
    return where.open(view=high_bits, **changes)


def exact_after(session: Session, tokens: list[int]) -> list[int]:
    """Which blocks of a match are as they were written; all of it is found."""
    sequence = session.engine.create(tokens)
    assert sequence.cache.history_length == len(tokens)
    assert sequence.resume()
    session.becomes_ready(sequence)
    assert sequence.cache.missing_blocks() == []
    wrong = {
        piece.ordinal
        for piece in sequence._pieces(0, len(tokens))
        if not np.array_equal(piece.place, piece.expected.ravel())
    }
    sequence.cache.close()
    session.check()
    return [b for b in range(len(tokens) // PERSISTENT_BLOCK) if b not in wrong]


@pytest.mark.parametrize("has_sidecar", [True, False])
@pytest.mark.parametrize("codec", [past, ends])
def test_a_restart_finds_them_as_they_were(
    place: Callable[..., Place], codec: Callable[[], ColdPageCodec], has_sidecar: bool
) -> None:
    has_sinks = codec is ends
    where = place(
        codec=codec,
        num_recent_blocks=2,
        separate_sinks=has_sinks,
        instance_id="mine",
        write_behind=True,
    )
    tokens = persistent_prompt(6)
    first = reopened(where)
    sequence = first.filled(tokens[:-PERSISTENT_BLOCK])
    assert first.manager.flush(10.0) == 0, "four and a block that is recent no longer"
    assert sequence.resume()
    assert sequence.step(tokens[-PERSISTENT_BLOCK:])
    sequence.cache.close()
    assert first.manager.flush(10.0) == 0
    first.close()
    for num_blocks in (2, 5, 1):
        if not has_sidecar:
            (where.directory / SIDECAR_NAME).unlink()
        session = reopened(where, num_recent_blocks=num_blocks)
        assert exact_after(session, tokens) == ([0, 4, 5] if has_sinks else [4, 5])
        assert session.manager.flush(10.0) == 0
        session.close()
    with pytest.raises(StorageError, match="holds pages of something else"):
        reopened(where, num_recent_blocks=0)


def test_a_saved_session_comes_back_whole_and_is_packed_as_it_grows(
    build: Build, tmp_path: Path
) -> None:
    path = tmp_path / "one.cpsn"
    rig = made(build, host=20)
    sequence = suspended(rig, [*prompt(5), 1])
    state_write(rig.manager, [sequence.cache], path)
    for num_blocks, whole in ((2, [3, 4, 5]), (4, [1, 2, 3, 4, 5])):
        other = made(build, host=20, num_recent_blocks=num_blocks)
        restored = _restored(other, path)
        sent_out(other, restored)
        come_back(other, restored)
        assert exact_blocks(other, restored) == whole


def _restored(rig: Rig, path: Path) -> PatternSequence:
    """Active."""
    (cache,) = state_read(rig.manager, path)
    sequence = PatternSequence(rig.engine, cache, ReuseScope(), [*prompt(5), 1])
    rig.adopt(sequence)
    assert sequence.resume()
    sequence.cache.synchronize()
    return sequence
