"""What the engine reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coldpage.codecs import CodecErrors
from coldpage.engine.messages import CodecErrorStats, CodecFailureStats
from coldpage.engine.telemetry import engine_stats, tier_stats
from coldpage.manager import CodecStats
from coldpage.types import LayerGroupId


def test_losses_are_counted_from_zero(new_rig: Any) -> None:
    rig = new_rig()
    counters = engine_stats(rig.manager, rig.scheduler).counters
    names = ["lost_held_pages", "dropped_pages", "read_misses", "write_errors"]
    names += ["recomputed_blocks", "preemptions"]
    assert [counters[name] for name in names] == [0] * 6


def test_what_the_runner_counts_is_reported(new_rig: Any) -> None:
    rig = new_rig()
    rig.answer("one", [1, 2, 3], 4)
    counted = engine_stats(rig.manager, rig.scheduler).counters["pattern_steps"]
    assert counted == len(rig.recorder.steps) > 0


def test_quarantined_slots_are_reported_as_blocks(new_rig: Any) -> None:
    rig = new_rig(has_sliding_window=True)  # a block is two pages
    (disk,) = [level for level in rig.manager._storage.levels if level.name == "disk"]
    pages = np.array([1, 2, 3], np.int32)
    slots = disk.groups[0].slots
    slots.quarantine(slots.allocate(pages))
    assert [tier.quarantined_blocks for tier in tier_stats(rig.manager)] == [0, 0, 2]


def test_what_codecs_lose_is_reported(new_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new_rig()
    assert engine_stats(rig.manager, rig.scheduler).codec_errors == ()
    errors = tuple(CodecErrors(LayerGroupId(group), 9, 1, 0.01, 0.02, 0.015) for group in (0, 1))
    stats = replace(rig.manager.stats(), codecs=(CodecStats("int8", errors),))
    monkeypatch.setattr(rig.manager, "stats", lambda: stats)
    assert engine_stats(rig.manager, rig.scheduler).codec_errors == tuple(
        CodecErrorStats("int8", group, 9, 1, 0.01, 0.02, 0.015) for group in (0, 1)
    )


def test_failures_of_codecs_are_reported_from_zero(new_rig: Any) -> None:
    rig = new_rig()
    found = engine_stats(rig.manager, rig.scheduler).codec_failures
    assert found == tuple(CodecFailureStats("concat", call, 0) for call in ("decode", "encode"))
    rig.manager._storage.events.codec_failures["concat", "encode"] += 2
    assert engine_stats(rig.manager, rig.scheduler).codec_failures[1].num_failures == 2
