"""A manager under test, and everything that must hold whatever was done with it.

The naive model keeps the tokens and the holes of each sequence, and which whole-block prefixes were
ever committed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from coldpage import KVCacheManager, ReuseScope, SubmissionError
from coldpage.device.base import Stream
from coldpage.device.simulated import SimulatedDevice, SimulatedFaults
from coldpage.events import level_names
from coldpage.testing.pattern_engine import Bytes, PatternEngine, PatternSequence
from coldpage.types import BlockOrdinal, LayerGroupId
from tests.property.exactness import Exactness
from tests.property.levels import Levels
from tests.property.setups import (
    ROOMY_BLOCKS,
    Setup,
    build_manager,
    simulated,
    small_index_chunks,
)
from tests.property.watcher import Watcher

SCOPES = (ReuseScope(), ReuseScope(salt="another tenant"))
NUM_STREAMS = 3
# How often work that luck refuses is tried again.
MAX_TRIES = 200
# Operations between looks at what is large: the whole prefix tree, sequences nobody has touched.
TREE_PERIOD = 8
# What a device makes ready while somebody waits, where it does that late.
BYTES_A_WAIT = 4096  # a sixteenth of the ring
IDLE_PERIOD = 4

Prefix = tuple[int, ...]


def high_bits(pages: Bytes) -> Bytes:
    """What the lossy codecs keep."""
    kept: Bytes = pages & 0xF0
    return kept


class CheckedManager:
    """A manager on a simulated device with the sequences that live on it."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self._patches = contextlib.ExitStack()
        if setup.is_ring_tiny:
            self._patches.enter_context(small_index_chunks())
        self._directory = tempfile.TemporaryDirectory(prefix="coldpage-test-")
        self.device: SimulatedDevice = simulated(seed, is_prepared_late=setup.is_prepared_late)
        self.device.prepared_bytes_a_wait = BYTES_A_WAIT
        self.manager: KVCacheManager = build_manager(
            setup, self.device, Path(self._directory.name) / "disk"
        )
        self._slow_down_time()
        self.engine = PatternEngine(self.manager, view=high_bits if setup.is_lossy else None)
        self.exactness = Exactness(self.engine, setup.per_block, setup.num_whole_blocks)
        self.watcher = Watcher(self.manager)
        self.levels = Levels(setup, self.manager)
        self.streams: list[Stream | None] = [None]
        self.streams += [self.device.create_stream(f"compute {i}") for i in range(NUM_STREAMS - 1)]
        self.sequences: list[PatternSequence] = []
        self.operations: Counter[str] = Counter()
        self._committed: dict[ReuseScope, set[Prefix]] = {scope: set() for scope in SCOPES}
        # Prefixes that vanish when nobody holds them.
        self._planned: dict[ReuseScope, set[Prefix]] = {scope: set() for scope in SCOPES}
        self._missing: dict[PatternSequence, set[BlockOrdinal]] = {}
        self._holes: dict[PatternSequence, set[BlockOrdinal]] = {}
        self._with_holes: set[PatternSequence] = set()  # whose losses become holes
        # Where each sequence was ready; it must say so again as long as its pages did not change.
        self._ready: set[PatternSequence] = set()
        # Late reads are failures.
        self._had_failures = setup.read_deadline_rounds > 0
        self._num_lost = 0
        self._num_checks = 0

    def _slow_down_time(self) -> None:
        """Disks go by the rounds of the simulated device, so that a seed repeats a walk."""

        def clock() -> float:
            return float(self.device._world._round)

        storage = self.manager._storage
        if storage._disk_moves is not None:
            storage._disk_moves.end.clock = clock
        for level in storage.levels:
            if level.is_disk:
                health, sync = level.disk.health, level.disk._sync
                health._writes._clock = health._reads._clock = clock
                assert sync is not None
                sync._clock = clock

    # ------------------------------------------------------------------ faults

    @property
    def faults(self) -> SimulatedFaults:
        """What the device does wrong from now on."""
        return self.device.faults

    def set_faults(self, *, submission: float, io: float, delay: float) -> None:
        self.faults.submission_failure_rate = submission
        self.faults.io_failure_rate = io
        self.faults.io_delay_rate = delay
        self._had_failures |= submission > 0 or io > 0

    def fail_next_submission(self, stream_name: str) -> None:
        """The next use of a migration stream is refused."""
        self.operations["fail next submission"] += 1
        self._had_failures = True
        self.device.fail_next_submission(stream_name)

    def _retry(self, work: Callable[[], object]) -> None:
        """Do the engine's own work, which the device may refuse too."""
        for _ in range(MAX_TRIES):
            try:
                work()
            except SubmissionError:
                continue
            return
        raise AssertionError("the device refuses everything")

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """Everything that must hold after every operation."""
        self.manager.check_integrity()
        self._check_losses()
        self.levels.note_usage()
        self._num_checks += 1
        if self._num_checks % TREE_PERIOD == 0:
            self.watcher.check()
        for sequence in self.sequences:
            if sequence in self._ready:
                # Another sequence may have recomputed a page that both share: then it waits again.
                if not sequence.cache.is_ready():
                    self._ready.discard(sequence)
                    continue
                self._retry(sequence.check)
                self._retry(lambda: self.exactness.check(sequence))  # noqa: B023 -- called at once
        self.assert_clean()

    def forget(self, sequence: PatternSequence) -> None:
        """Close a sequence that is not in the list any more."""
        sequence.cache.close()
        self._missing.pop(sequence)
        self._holes.pop(sequence)
        self._with_holes.discard(sequence)
        self._ready.discard(sequence)
        self.exactness.forget(sequence)
        self.check()

    def assert_clean(self) -> None:
        assert not self.device.violations, "\n".join(map(str, self.device.violations))
        assert not self.engine.problems, "\n".join(self.engine.problems)
        assert not self.watcher.problems, "\n".join(self.watcher.problems)

    def _check_losses(self) -> None:
        """Blocks go missing, or become holes where losses do, only if the manager has counted a
        loss.
        """
        num_lost = self.manager._storage.events.totals.get("lost_held_pages", 0)
        was_loss = num_lost > self._num_lost
        self._num_lost = num_lost
        if not was_loss and self._num_checks % IDLE_PERIOD:
            return
        for sequence, known in self._missing.items():
            now = set(sequence.cache.missing_blocks())
            if now - known:
                assert was_loss, f"blocks {now - known} went missing and no loss was counted"
            self._missing[sequence] = now
            self._check_holes(sequence, was_loss=was_loss)
        roomy = self.setup.disk_blocks >= ROOMY_BLOCKS and not self._had_failures
        assert not (num_lost and roomy), "a page was lost although the disk had room"

    def _check_holes(self, sequence: PatternSequence, *, was_loss: bool) -> None:
        now, known = set(sequence.cache.holes()), self._holes[sequence]
        if sequence not in self._with_holes:
            assert now == known, f"holes {now}, not {known}"
            return
        assert known <= now, f"holes {known - now} have been filled"
        assert was_loss or now == known, f"holes {now - known} and no loss was counted"
        self._holes[sequence] = now
        num_full = sequence.cache.history_length // self.setup.per_block
        is_whole = sequence.cache.history_length % self.setup.per_block == 0
        last = set() if is_whole else {num_full}
        assert self._missing[sequence] <= last, "a full block is missing where it should be a hole"

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Close every sequence, fill the hot level once more, and look for leaks."""
        self.set_faults(submission=0.0, io=0.0, delay=0.0)
        self.device._world.planned_failures.clear()
        while self.sequences:
            self.forget(self.sequences.pop())
        self.faults.is_io_held = False  # a test that failed may have left it so
        self.device.prepare(self.device.num_unprepared_bytes)
        self.manager.finish_transfers()
        self.manager.poll()
        self.manager.finish_transfers()
        self.check()
        self.watcher.check()
        self.assert_clean()
        stats = self.manager.stats()
        num_in_tree = sum(
            len(self.manager._tree.pages_of(group.layer_group_id))
            for group in self.manager.layout.layer_groups
        )
        assert stats.num_pages == num_in_tree, "a page that nobody holds has not been freed"
        self._fill_hot_level()
        self.final_stats = self.manager.stats()
        self.manager.close()
        for stream in self.streams:
            if stream is not None:
                stream.synchronize()
        self.device.close()
        self.assert_clean()
        self.abandon()

    def abandon(self) -> None:
        """Free what a failed test leaves behind."""
        self._patches.close()
        self._directory.cleanup()

    def _fill_hot_level(self) -> None:
        """The whole hot level can be had by one sequence."""
        sequence = self.engine.create()
        tokens = self.manager.max_sequence_tokens
        assert sequence.resume()
        if not self.setup.has_windows:
            assert sequence.step([0] * tokens, num_committed=0), "hot slots have leaked"
            sequence.check()
        sequence.cache.close()
        self.manager.check_integrity()

    def device_counts(self) -> dict[str, int]:
        counts = self.device.counts
        return {
            "device: failed submissions": counts.failed_submissions,
            "device: failed I/O jobs": counts.failed_io_jobs,
            "device: late I/O jobs": counts.delayed_io_jobs,
        }

    def transcoded_paths(self) -> set[str]:
        """Those between cold levels of different codecs."""
        names = level_names([tier.tier for tier in self.manager.config.cache_tiers])
        return {
            f"{source}-{target}"
            for i, source in enumerate(names)
            for j, target in enumerate(names)
            if i != j and self.setup.is_transcoded(i, j)
        }

    def page_indices(self, index: int) -> list[list[int]]:
        cache = self.sequences[index].cache
        groups = range(len(self.manager.layout.layer_groups))
        return [cache.page_indices(LayerGroupId(group)).tolist() for group in groups]
