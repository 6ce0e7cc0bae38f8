"""Operations on numbered sequences of a manager under test, and after each of them every check."""

from __future__ import annotations

from collections.abc import Sequence

from coldpage import ReuseScope
from coldpage.errors import OutOfPagesError
from coldpage.sequence import DroppedBlocks, KVCache, OnMissing
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import (
    NO_SLOT,
    BlockOrdinal,
    CacheLevel,
    HalfOpenRange,
    LayerGroupId,
    PoolGroupIndex,
    Priority,
)
from tests.property.checks import NUM_STREAMS, SCOPES, CheckedManager

__all__ = ["MAX_TOKENS", "NUM_STREAMS", "SCOPES", "Driver"]

MAX_TOKENS = 40
MAX_WAITS = 2000


class Driver(CheckedManager):
    """Does what sequences and managers can do, and predicts what comes of it."""

    def create(
        self,
        tokens: Sequence[int],
        scope: ReuseScope,
        priority: int = 35,
        on_missing: OnMissing = OnMissing.RECOMPUTE,
    ) -> None:
        if len(self.sequences) >= self.setup.max_sequences:
            return
        self.operations["create"] += 1
        sequence = self.engine.create(
            tokens, scope=scope, priority=Priority(priority), on_missing=on_missing
        )
        self.sequences.append(sequence)
        if on_missing is OnMissing.HOLE:
            self._with_holes.add(sequence)
        cache = sequence.cache
        matched, per_block = cache.num_committed_tokens, self.setup.per_block
        assert matched == cache.history_length == cache.capacity
        assert matched % per_block == 0
        assert sum(cache.cached_tokens_by_level) == matched
        self.operations["create matched blocks"] += matched // per_block
        # With windows, what a sequence had given up before it committed is not there to be reused.
        best = max(
            (n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in self._committed[scope]),
            default=0,
        )
        assert matched <= best, f"matched {matched} of {best} committed tokens"
        kept = self._committed[scope] - self._planned[scope]
        sure = 0
        while tuple(tokens[: sure + per_block]) in kept and sure + per_block <= len(tokens):
            sure += per_block
        if self.setup.kind == "full" and self.nothing_was_lost():
            assert matched >= sure, f"matched only {matched} of {sure} committed tokens"
        self._missing[sequence], self._holes[sequence] = set(), set()
        assert cache.missing_blocks() == [], "a match of blocks that are missing"
        assert cache.holes() == [], "a match of blocks that are holes"
        self.check()

    def adopt(self, sequence: PatternSequence) -> PatternSequence:
        """Check a sequence that a test has made and drives itself, and close it at the end."""
        self.sequences.append(sequence)
        self._missing[sequence] = set(sequence.cache.missing_blocks())
        self._holes[sequence] = set(sequence.cache.holes())
        return sequence

    def nothing_was_lost(self) -> bool:
        totals = self.manager._storage.events.totals
        return not (totals.get("dropped_pages", 0) or totals.get("lost_held_pages", 0))

    def resume(self, index: int, stream_index: int) -> None:
        sequence = self.sequences[index]
        if sequence.is_active:
            return
        self.operations["resume"] += 1
        stream = self.streams[stream_index]
        must_fit = self._fits_after(sequence, sequence.cache.num_blocks, self._resume_limit())
        is_resumed = sequence.resume(stream)
        if not is_resumed and must_fit and not self._had_failures:
            self.operations["resume again"] += 1
            self._come_to_rest()
            is_resumed = sequence.resume(stream)
            assert is_resumed, "there is room, nothing is in motion, and it does not fit"
        self.operations["resume refused"] += not is_resumed
        self.check()

    def _come_to_rest(self) -> None:
        """Nothing is in flight, and all memory is ready."""
        if self.device.prepare(self.device.num_unprepared_bytes):
            self.manager.poll()
        self.manager.finish_transfers()

    def _resume_limit(self) -> int:
        """A number of blocks that certainly fit the hot level at the utilization of a resume."""
        per_block = self.setup.per_block
        full_only = self.setup.kind == "full"
        return self.manager.max_sequence_tokens // per_block if full_only else 0

    def _fits_after(self, sequence: PatternSequence, num_blocks: int, limit: int) -> bool:
        """Whether so many blocks of the sequence fit beside the active ones, sharing nothing."""
        others = sum(s.cache.num_blocks for s in self.sequences if s.is_active and s != sequence)
        return others + num_blocks <= limit

    def suspend(self, index: int) -> None:
        sequence = self.sequences[index]
        if not sequence.is_active:
            return
        self.operations["suspend"] += 1
        sequence.cache.suspend()
        self.exactness.let_go(sequence)
        assert sequence.cache.capacity == sequence.cache.history_length
        self._ready.discard(sequence)
        self.check()

    def resize(self, index: int, capacity: int, history: int | None = None) -> bool:
        sequence = self.sequences[index]
        cache = sequence.cache
        if not sequence.is_active:
            return False
        low = cache.num_committed_tokens
        history = None if history is None else max(low, min(history, cache.history_length))
        capacity = max(capacity, cache.history_length if history is None else history)
        self.operations["resize"] += 1
        before = (cache.capacity, cache.history_length, cache.num_blocks)
        try:
            is_done = cache.resize(capacity, history)
        except OutOfPagesError:
            assert self._can_never_fit(cache, capacity, before[1] if history is None else history)
            is_done = False
        if not is_done and not self._had_failures and self._must_fit(sequence, capacity):
            self.operations["resize again"] += 1
            self._come_to_rest()
            is_done = cache.resize(capacity, history)
            assert is_done, "there is room, nothing is in motion, and it does not fit"
        if is_done:
            kept = before[1] if history is None else history
            assert (cache.capacity, cache.history_length) == (capacity, kept)
            if kept < before[1]:
                sequence.forget_from(kept)
                self._went_back(sequence)
        else:
            self.operations["resize refused"] += 1
            assert (cache.capacity, cache.history_length, cache.num_blocks) == before
        self._ready.discard(sequence)
        self.check()
        return is_done

    def _can_never_fit(self, cache: KVCache, capacity: int, history: int) -> bool:
        """Counted block by block: what it has, what it lacks at that history, and what is new."""
        per_block, layout = self.setup.per_block, self.manager.layout
        num_blocks = -(-capacity // per_block)
        for index, pools in enumerate(self.manager.stats().levels[0].pool_groups):
            needed = 0
            for group in layout.layer_groups_of(PoolGroupIndex(index)):
                stale = layout.layer_groups[group].stale_blocks(history, per_block)
                holes = [hole for hole in cache.holes(group) if hole < history // per_block]
                needed += len(set(range(num_blocks)) - set(stale) - set(holes))
            if needed > pools.total_slots:
                return True
        return False

    def _must_fit(self, sequence: PatternSequence, capacity: int) -> bool:
        """Whether so much fits the hot level even if every page of the sequence must be copied."""
        if self.setup.kind != "full":
            return False
        num_blocks = -(-capacity // self.setup.per_block) + sequence.cache.num_blocks
        return self._fits_after(sequence, num_blocks, self.levels.blocks[0])

    def ready(self, index: int) -> bool:
        """Wait for the sequence and recompute what is missing; whether it is active."""
        sequence = self.sequences[index]
        if not sequence.is_active:
            return False
        if sequence not in self._ready:
            self.operations["synchronize"] += 1
            if not self._becomes_ready(sequence):
                return False
            self._ready.add(sequence)
        self._retry(sequence.recompute)
        self.check()
        return True

    def _becomes_ready(self, sequence: PatternSequence) -> bool:
        """Wait; False when lost pages need a place and other active sequences leave none."""
        for _ in range(MAX_WAITS):
            if sequence.cache.is_ready():
                return True
            self.manager.wait_for_progress(1.0)
        hot = self.manager.stats().levels[0]
        is_full = hot.used_slots == hot.total_slots
        assert is_full or self.setup.has_windows, "never ready, though there is room"
        assert sum(s.is_active for s in self.sequences) > 1, "never ready, alone"
        self.operations["not ready"] += 1
        return False

    def ask_ready(self, index: int) -> None:
        sequence = self.sequences[index]
        if sequence.is_active and sequence.cache.is_ready():
            self.operations["found ready"] += 1
            self._ready.add(sequence)
        self.check()

    def step(self, index: int, tokens: Sequence[int], num_committed: int) -> None:
        """What an engine does in one step: room, wait, recompute, write, commit some of it."""
        sequence = self.sequences[index]
        cache = sequence.cache
        start = cache.history_length
        if not sequence.is_active or start + len(tokens) > MAX_TOKENS:
            return
        if not self.resize(index, start + len(tokens)):
            return
        if not self.ready(index):
            return
        self.operations["step"] += 1
        self._retry(lambda: sequence.write(tokens))
        self.exactness.wrote(sequence, start, start + len(tokens))
        num_new = min(num_committed, start + len(tokens) - cache.num_committed_tokens)
        self._commit(sequence, num_new)
        if cache.history_length < start + len(tokens):
            # Written beyond what is committed, as with tokens that may still be taken back.
            if not cache.resize(cache.capacity, start + len(tokens)):
                sequence.forget_from(cache.history_length)
            self._ready.discard(sequence)
        self.check()

    def commit(self, index: int, num_tokens: int) -> None:
        """Commit what was written before."""
        sequence = self.sequences[index]
        cache = sequence.cache
        num_new = min(num_tokens, cache.history_length - cache.num_committed_tokens)
        if sequence.is_active and num_new > 0:
            self.operations["commit"] += 1
            self._commit(sequence, num_new)
            self.check()

    def _commit(self, sequence: PatternSequence, num_new: int) -> None:
        cache, per_block = sequence.cache, self.setup.per_block
        stop = cache.num_committed_tokens + num_new
        cache.commit(sequence.tokens[cache.num_committed_tokens : stop])
        assert cache.num_committed_tokens == stop
        # What was computed with holes before it is not for others.
        num_shared = min([stop // per_block, *self._holes[sequence]])
        for block in range(num_shared):
            self._committed[sequence.scope].add(tuple(sequence.tokens[: (block + 1) * per_block]))

    def fork(self, index: int) -> None:
        if len(self.sequences) >= self.setup.max_sequences:
            return
        self.operations["fork"] += 1
        sequence = self.sequences[index]
        other = sequence.fork()
        cache = other.cache
        assert cache.history_length == cache.capacity == sequence.cache.history_length
        assert cache.num_committed_tokens == sequence.cache.num_committed_tokens
        self.sequences.append(other)
        self.exactness.forked(sequence, other)
        self._missing[other] = set(cache.missing_blocks())
        self._holes[other] = set(self._holes[sequence])
        assert set(cache.holes()) == self._holes[other], "a fork has the same holes"
        if sequence in self._with_holes:
            self._with_holes.add(other)
        self.check()

    def truncate(self, index: int, num_tokens: int) -> None:
        self.operations["truncate"] += 1
        sequence = self.sequences[index]
        cache = sequence.cache
        num_tokens = min(num_tokens, cache.history_length)
        committed = min(cache.num_committed_tokens, num_tokens)
        sequence.truncate(num_tokens)
        assert cache.history_length == cache.capacity == num_tokens
        assert cache.num_committed_tokens == committed
        self._went_back(sequence)
        self._ready.discard(sequence)
        self.check()

    def _went_back(self, sequence: PatternSequence) -> None:
        """A hole that will be written again is none, and what is left of it is missing. Blocks may
        be visible now that a sliding window had given up.
        """
        self.exactness.went_back(sequence)
        cache = sequence.cache
        reopened = BlockOrdinal(cache.history_length // self.setup.per_block)
        holes = self._holes[sequence]
        if reopened in holes:
            self._missing[sequence].add(reopened)
        self._holes[sequence] = {hole for hole in holes if hole < reopened}
        if self.setup.has_windows:
            self._missing[sequence] = set(cache.missing_blocks())
            if sequence in self._with_holes:
                self._holes[sequence] |= set(cache.holes())

    def drop_blocks(self, index: int, start: int, stop: int) -> None:
        """Whole blocks of the positions become holes; nothing else changes, for nobody."""
        self.operations["drop blocks"] += 1
        sequence, per_block = self.sequences[index], self.setup.per_block
        cache = sequence.cache
        expected = self._dropped(start, stop, cache.history_length)
        numbers = (
            cache.num_committed_tokens,
            cache.history_length,
            cache.capacity,
            cache.num_blocks,
        )
        others = [i for i in range(len(self.sequences)) if i != index]
        before = {i: self._filled_indices(i) for i in others}
        own = self.page_indices(index)
        assert cache.drop_blocks(HalfOpenRange(start, stop)) == expected
        assert numbers == (
            cache.num_committed_tokens,
            cache.history_length,
            cache.capacity,
            cache.num_blocks,
        )
        for row, old in zip(self.page_indices(index), own, strict=True):
            for block, (slot, old_slot) in enumerate(zip(row, old, strict=True)):
                is_gone = block in expected.dropped
                assert slot == (NO_SLOT if is_gone else old_slot)
        assert before == {i: self._filled_indices(i) for i in others}, "not its own"
        self._holes[sequence] |= set(expected.dropped)
        self._missing[sequence] -= set(expected.dropped)
        assert self._holes[sequence] <= set(cache.holes())
        assert all(hole < cache.history_length // per_block for hole in cache.holes())
        self._ready.discard(sequence)
        self.check()

    def _dropped(self, start: int, stop: int, history: int) -> DroppedBlocks:
        """By the positions themselves."""
        per_block = self.setup.per_block
        named = set(range(max(0, start), min(stop, history)))
        blocks = sorted({position // per_block for position in named})
        places = {b: set(range(b * per_block, (b + 1) * per_block)) for b in blocks}
        return DroppedBlocks(
            tuple(BlockOrdinal(b) for b in blocks if places[b] <= named),
            tuple(BlockOrdinal(b) for b in blocks if not places[b] <= named),
        )

    def _filled_indices(self, index: int) -> list[list[int]]:
        """The hot slots that hold something: blank ones come and go with whoever locks them."""
        cache = self.sequences[index].cache
        rows = self.page_indices(index)
        for group, row in enumerate(rows):
            for block in cache.missing_blocks(LayerGroupId(group)):
                row[block] = NO_SLOT
        return rows

    def plan_drop(self, index: int, first_block: int) -> None:
        self.operations["plan drop"] += 1
        sequence, per_block = self.sequences[index], self.setup.per_block
        sequence.cache.plan_drop(first_block)
        for block in range(first_block, sequence.cache.num_committed_tokens // per_block):
            self._planned[sequence.scope].add(tuple(sequence.tokens[: (block + 1) * per_block]))
        self.check()

    def resize_level(self, level: int, num_blocks: int) -> None:
        if not self.levels.can_resize(level):
            return
        self.operations["resize level"] += 1
        outcome = self.levels.resize(
            level, num_blocks, self.sequences, had_failures=self._had_failures
        )
        self.operations[f"resize level: {outcome}"] += 1
        if level == 0:
            self.engine.refresh()
        self.check()

    def defragment(self, level: int) -> None:
        """Pages move to lower slots; those of active sequences stay where they are."""
        self.operations["defragment"] += 1
        active = [i for i, sequence in enumerate(self.sequences) if sequence.is_active]
        before = [self.page_indices(i) for i in active]
        self.operations["defragment moved pages"] += self.manager.defragment(CacheLevel(level))
        for index, rows in zip(active, before, strict=True):
            for row, old_row in zip(self.page_indices(index), rows, strict=True):
                # What was on its way has arrived meanwhile.
                stays = [slot for slot, old in zip(row, old_row, strict=True) if old != NO_SLOT]
                assert stays == [slot for slot in old_row if slot != NO_SLOT], "moved in use"
        self.check()

    def take_peaks(self, level: int) -> None:
        self.operations["take peaks"] += 1
        self.levels.take_peaks(level)

    def prefetch(self, index: int, level: int) -> None:
        sequence = self.sequences[index]
        if not sequence.is_active:
            self.operations["prefetch"] += 1
            sequence.cache.prefetch(CacheLevel(min(level, len(self.levels) - 1)))
            self.check()

    def close_sequence(self, index: int) -> None:
        self.operations["close"] += 1
        self.forget(self.sequences.pop(index))

    def poll(self) -> None:
        self.operations["poll"] += 1
        events = self.manager._storage.events
        num_lost, num_failures = events.totals["lost_held_pages"], events.codec_failures.total()
        self.manager.poll()
        if not self._had_failures and events.codec_failures.total() == num_failures:
            now = events.totals["lost_held_pages"]
            assert now == num_lost, "room was made at the cost of pages that sequences hold"
        self.check()

    def prepare(self, num_bytes: int) -> None:
        self.operations["prepare"] += 1
        self.device.prepare(num_bytes)
        self.check()

    def wait(self) -> None:
        self.operations["wait"] += 1
        self.manager.wait_for_progress(1.0)
