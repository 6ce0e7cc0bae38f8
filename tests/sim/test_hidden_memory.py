"""A hot level that the host can not reach, and work on the caller's own stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldpage import ReuseScope
from coldpage.snapshot import Origin, state_read, state_write
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import LayerGroupId
from tests.sim.scenes import Build, filled, prompt, push_out, resumed, suspended

ORIGIN = Origin("tokenizer", "uint8")


@pytest.mark.parametrize("level", ["host", "gpu"])
def test_with_a_stream_a_sequence_is_ready_as_soon_as_all_is_enqueued(
    build: Build, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """The first step may be launched while its pages are still on their way."""
    rig = build(hot=8, **{level: 8})
    stream = rig.streams[1]
    sequence = suspended(rig, prompt(4), stream=stream)
    push_out(rig, 8)
    with monkeypatch.context() as patch:
        patch.setattr(rig.device._world, "_run_one", lambda: False)
        num_executed = rig.device.counts.executed_ops
        assert sequence.resume(stream)
        assert sequence.cache.is_ready()
        assert (sequence.cache.page_indices(LayerGroupId(0)) >= 0).all()
        assert rig.device.counts.executed_ops == num_executed, "nothing has run yet"
    sequence.check()  # on the stream: the device finds what comes too early
    rig.check()


def test_without_a_stream_it_is_ready_when_its_pages_are_there(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build(hot=8, host=8)
    sequence = suspended(rig, prompt(4))
    push_out(rig, 8)
    with monkeypatch.context() as patch:
        patch.setattr(rig.device._world, "_run_one", lambda: False)
        assert sequence.resume()
        assert not sequence.cache.is_ready()
    sequence.cache.synchronize()
    sequence.check()


def test_from_disk_it_is_ready_when_the_last_decode_is_enqueued(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build(hot=8, disk=20)
    stream = rig.streams[1]
    sequence = suspended(rig, prompt(4), stream=stream)
    push_out(rig, 8)
    rig.device.faults.is_io_held = True
    assert sequence.resume(stream)
    assert not sequence.cache.is_ready()
    rig.device.faults.is_io_held = False
    while rig.device.io._queue:
        rig.device.step()
    with monkeypatch.context() as patch:
        patch.setattr(rig.device._world, "_run_one", lambda: False)
        assert sequence.cache.is_ready()
    sequence.check()


def test_slots_are_used_again_only_after_the_work_on_the_stream(build: Build) -> None:
    """What was launched before the suspend still reads and writes when others ask for room."""
    rig = build(hot=4, host=8)
    stream, other = rig.streams[1], rig.streams[2]
    first = filled(rig, prompt(4), stream=stream)
    first.cache.suspend()
    second = filled(rig, prompt(4, 1), stream=other)
    second.cache.suspend()
    resumed(rig, first, stream)
    first.cache.suspend()
    resumed(rig, second, other)


def test_a_session_is_saved_and_read_again(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "one.cpsn"
    rig = build(hot=8, host=8)
    sequence = suspended(rig, [*prompt(4), 5])
    push_out(rig, 8)
    state_write(rig.manager, [sequence.cache], path, origin=ORIGIN)
    tokens = sequence.tokens
    other = build(hot=8, gpu=8)
    (cache,) = state_read(other.manager, path, origin=ORIGIN)
    resumed(other, other.adopt(PatternSequence(other.engine, cache, ReuseScope(), tokens)))
