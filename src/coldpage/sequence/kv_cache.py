"""One sequence's cache: its tokens, its block table, and the life between suspended and active."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Stream
from coldpage.errors import OutOfPagesError, UsageError
from coldpage.page import HOT_BIT, check_priority
from coldpage.prefix import block_key
from coldpage.sequence.arguments import (
    check_blocks,
    check_layer_group,
    check_stream,
    whole_number,
)
from coldpage.sequence.context import (
    DroppedBlocks,
    KVCacheStatus,
    OnMissing,
    ReusedPrefix,
)
from coldpage.sequence.state import SequenceState
from coldpage.types import (
    HOT_LEVEL,
    NO_PAGE,
    BlockOrdinal,
    CacheLevel,
    HalfOpenRange,
    Int32Array,
    LayerGroupId,
    Priority,
    token_array,
)

__all__ = ["KVCache"]

# A device may refuse the moves that make room for a while.
_MAX_STARVED_LOOKS: Final = 50


class KVCache(SequenceState):
    """A sequence's cache. Made suspended by ``KVCacheManager.create_kv_cache``; belongs to the
    manager's thread.

    ``num_committed_tokens <= history_length <= capacity``. Only positions in [history_length,
    capacity) may be written, and only after the ``resize`` that granted them since the last
    ``resume``, ``fork`` or ``truncate``, and once ``is_ready`` has said so, or ``synchronize``.

    As a context manager it closes itself.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # ------------------------------------------------------------------ losses

    def missing_blocks(self, layer_group_id: LayerGroupId | None = None) -> list[BlockOrdinal]:
        """Blocks of the history whose contents were lost, in any or in that layer group, ascending:
        recompute their positions in this order, then call ``fill_missing``. While active each has
        blank hot pages to write to.

        With ``OnMissing.HOLE`` only the last block can be one of them, while it is not full.
        """
        self._check_open()
        self._leave_holes()
        is_missing = self._coverage.missing(self._history_length)
        return self._blocks_of(is_missing, layer_group_id)

    def holes(self, layer_group_id: LayerGroupId | None = None) -> list[BlockOrdinal]:
        """Blocks that attention must skip, in any or in that layer group, ascending. What was
        computed with holes before it is never shared with other sequences.
        """
        self._check_open()
        self._leave_holes()
        return self._blocks_of(self._table.is_hole, layer_group_id)

    @staticmethod
    def _blocks_of(
        entries: npt.NDArray[np.bool_], layer_group_id: LayerGroupId | None
    ) -> list[BlockOrdinal]:
        if layer_group_id is not None:
            check_layer_group(layer_group_id, len(entries))
        rows = entries if layer_group_id is None else entries[[layer_group_id]]
        return [BlockOrdinal(i) for i in np.flatnonzero(rows.any(axis=0)).tolist()]

    # ------------------------------------------------------------------ activity

    def resume(self, stream: Stream | None = None) -> bool:
        """Lock every live page hot and start bringing them there; then poll ``is_ready``.

        With a ``stream``, work on the pages is ordered by events on it; without, the calling thread
        itself works on them. Returns False, changing nothing, when the pages do not fit the hot
        level now. Raises OutOfPagesError when even an empty hot level would not do.
        """
        self._check_status(KVCacheStatus.SUSPENDED, "resume")
        check_stream(stream)
        self._leave_holes()
        if self._lock_all(stream):
            return True
        if not self._room.can_resume(self._history_length):
            raise OutOfPagesError(
                f"the pages of this sequence of {self._history_length:,} tokens can never fit the "
                "hot level: give it more room, or truncate the sequence"
            )
        return False

    def _lock_all(self, stream: Stream | None) -> bool:
        pages = self._table.live_pages()
        last_use = self._storage.table.last_use[pages]
        if not self._storage.lock(pages, self._context.max_util_for_resume):
            return False
        self._status = KVCacheStatus.ACTIVE
        self._stream = stream
        self._is_ready = False
        self._writable_from = self._table.num_blocks
        if self._fill_lacking(self._history_length):
            return True
        # As if nobody had asked: the pages are evicted in the order they were.
        is_ours = np.isin(pages, self._table.live_pages())
        self._storage.unlock(pages[is_ours])
        self._storage.table.last_use[pages[is_ours]] = last_use[is_ours]
        self._status = KVCacheStatus.SUSPENDED
        self._stream = None
        return False

    def _fill_lacking(self, history_length: int) -> bool:
        """Give blank pages, marked missing, to blocks that should have one and have none."""
        self._release(self._coverage.leave_missing_tail(history_length))
        self._release(self._coverage.leave_missing_after_holes())
        lacking = self._coverage.lacking(history_length)
        if not lacking.any():
            return True
        layer_groups, blocks = np.nonzero(lacking)
        pages = self._create_pages(layer_groups, blocks.astype(np.int32))
        if pages is None:
            return False
        self._storage.table.is_missing[pages] = True
        self._table.pages[lacking] = pages
        self._is_ready = False
        return True

    def _create_pages(
        self, layer_groups: npt.NDArray[np.integer], blocks: Int32Array
    ) -> Int32Array | None:
        life_cycles = self._context.life_cycles(layer_groups, blocks)
        return self._storage.create(life_cycles, blocks, self._priority)

    def _leave_holes(self) -> None:
        """Where losses become holes, let go of full blocks that were lost."""
        if self._on_missing is OnMissing.RECOMPUTE:
            return
        full_blocks = self._history_length // self._context.tokens_per_block
        lost = self._coverage.missing(self._history_length)[:, :full_blocks]
        if lost.any():
            self._storage.events.totals["masked_pages"] += int(np.count_nonzero(lost))
            self._release(self._coverage.make_holes(lost))

    def is_ready(self) -> bool:
        """Whether every page is hot, verified and quiescent, so that attention may use it, and what
        ``resize`` granted may be written. Never blocks. What ``missing_blocks`` lists is to be
        computed first all the same.
        """
        self._check_status(KVCacheStatus.ACTIVE, "is_ready")
        num_fills = self._storage.num_fills
        if self._is_ready and self._num_fills_seen == num_fills:
            return True
        self._storage.advance()
        self._leave_holes()
        # Pages may have been lost since the resume, on their way up.
        is_hot = self._storage.are_hot(self._table.live_pages())
        self._is_starved = is_hot and not self._fill_lacking(self._history_length)
        if not is_hot or self._is_starved:
            return False
        self._is_ready = self._come_after(self._table.live_pages())
        self._num_fills_seen = num_fills
        return self._is_ready

    def _come_after(self, pages: Int32Array) -> bool:
        """Whether attention comes after all that is under way in the hot slots; a stream does."""
        events = self._storage.moves.outstanding(pages)
        if self._stream is None:
            return not events
        for event in events:
            self._stream.wait(event)
        return True

    def synchronize(self) -> None:
        """Block until ``is_ready``. Raises OutOfPagesError when that can not be: lost blocks need a
        place, other active sequences hold the hot level, and nothing is in motion.
        """
        self._check_status(KVCacheStatus.ACTIVE, "synchronize")
        num_starved = 0
        while not self.is_ready():
            is_starved = self._is_starved and not self._storage.is_in_motion
            num_starved = num_starved + 1 if is_starved else 0
            if num_starved > _MAX_STARVED_LOOKS:
                raise OutOfPagesError(
                    "blocks to be recomputed have no place on the hot level, which other active "
                    "sequences fill: suspend one of them, or this one"
                )
            self._context.wait_for_progress(0.05)

    def suspend(self) -> None:
        """Let the pages migrate. Never fails. ``capacity`` shrinks to ``history_length``."""
        self._check_status(KVCacheStatus.ACTIVE, "suspend")
        self._cut_capacity(self._history_length)
        # A page that no query will see is not worth moving, nor room at the next resume.
        self._release_stale()
        pages = self._table.live_pages()
        self._marks.protect()
        # First: copies of another class are given up, and may be all that is left of a page.
        self._storage.come_after(pages, self._stream)
        self._marks.classify(self._history_length)
        self._storage.unlock(pages)
        self._status = KVCacheStatus.SUSPENDED
        self._stream = None
        # A block that is not full is written again after the next resume: it would be for nothing.
        num_full = self._history_length // self._context.tokens_per_block
        if num_full < self._table.num_blocks:
            pages = self._table.live_pages(num_full)
        self._storage.copy_behind(pages)

    # ------------------------------------------------------------------ growing and shrinking

    def resize(self, capacity: int, history_length: int | None = None) -> bool:
        """Have room for ``capacity`` positions and grant writing [history_length, capacity).

        All or nothing: False, changing nothing, when the hot level has no room now or a block to be
        granted is still on its way there. Shared pages in the granted range are copied, and the
        copies may still be under way: poll ``is_ready``, or ``synchronize``, before you write.
        ``history_length``, if given, first becomes the number of written positions. A window may
        want blocks back when it is less than before: see ``missing_blocks``.

        Raises OutOfPagesError when even an empty hot level would not do: see ``max_capacity``.
        """
        self._check_status(KVCacheStatus.ACTIVE, "resize")
        capacity = whole_number(capacity, "a capacity")
        history = self._history_length
        if history_length is not None:
            history = whole_number(history_length, "a history length")
        if (
            not self._num_committed <= history <= max(capacity, self._capacity)
            or capacity < history
        ):
            raise UsageError(
                f"resize to capacity {capacity} and history {history} breaks "
                f"committed {self._num_committed} <= history <= capacity: to forget committed "
                "positions, truncate"
            )
        if (
            capacity > self._context.max_capacity_tokens()
        ):  # less would not be looked into each time
            self._check_room(capacity, history)
        old_capacity = self._capacity
        were_holes = self._coverage.fill_from(history)
        if not (
            self._grow(capacity) and self._grant_writing(history) and self._fill_lacking(history)
        ):
            self._cut_capacity(old_capacity)
            try:
                self._check_room(capacity, history)
            finally:
                self._coverage.reopen_holes(were_holes)
            return False
        self._history_length = history
        self._cut_capacity(capacity)
        # Blocks that will be written from their start have nothing to be recomputed.
        unwritten = self._table.pages[:, self._coverage.num_blocks(self._history_length) :]
        self._storage.table.is_missing[unwritten] = False
        self._release_stale()
        return True

    def _check_room(self, capacity: int, history: int) -> None:
        most = self._room.max_capacity(history)
        if capacity > most:
            raise OutOfPagesError(
                f"the hot level could never give this sequence {capacity:,} tokens in one step, "
                f"{most:,} at most: grow in smaller steps, or give it more room"
            )

    def _grant_writing(self, history: int) -> bool:
        first = history // self._context.tokens_per_block
        last = min(self._writable_from, self._table.num_blocks)
        if first >= last:
            return True
        entries = self._table.pages[:, first:last]
        has_page = entries != NO_PAGE
        pages = self._storage.make_writable(entries[has_page], self._stream)
        if pages is None:
            return False
        entries[has_page] = pages
        self._writable_from = first
        self._is_ready = False
        return True

    def _grow(self, capacity: int) -> bool:
        old = self._table.num_blocks
        num_new = -(-capacity // self._context.tokens_per_block) - old
        if num_new > 0:
            num_groups = len(self._context.layer_groups)
            blocks = np.concatenate([np.arange(old, old + num_new, dtype=np.int32)] * num_groups)
            pages = self._create_pages(np.arange(num_groups).repeat(num_new), blocks)
            if pages is None:
                return False
            self._table.append(pages.reshape(-1, num_new))
            self._writable_from = min(self._writable_from, old)
            self._is_ready = self._is_ready and self._come_after(pages)
        self._capacity = max(capacity, self._capacity)
        return True

    def _cut_capacity(self, capacity: int) -> None:
        self._capacity = capacity
        num_blocks = -(-capacity // self._context.tokens_per_block)
        if num_blocks < self._table.num_blocks:
            self._release(self._table.cut(num_blocks))
            self._writable_from = min(self._writable_from, num_blocks)

    def _release(self, pages: Int32Array) -> None:
        is_active = self._status is KVCacheStatus.ACTIVE
        self._storage.release(pages, self._stream, is_locked=is_active)

    def _release_stale(self) -> None:
        for layer_group, group in enumerate(self._context.layer_groups):
            stale = group.stale_blocks(self._history_length, self._context.tokens_per_block)
            if len(stale):
                pages = self._table.take(layer_group, stale.start, stale.stop)
                self._storage.come_after(pages, self._stream)  # first, as in ``suspend``
                self._storage.release(self._marks.outgrow(layer_group, pages), None, is_locked=True)

    def truncate(self, num_tokens: int) -> None:
        """Forget every position from ``num_tokens`` on; ``capacity`` and ``history_length`` become
        it.

        Blocks that a sliding window needs again and has given up are missing blocks afterwards, and
        so is a hole that is cut.
        """
        self._check_open()
        num_tokens = whole_number(num_tokens, "a number of tokens")
        if not 0 <= num_tokens <= self._history_length:
            raise UsageError(
                f"truncate to {num_tokens} tokens: this sequence has {self._history_length} written"
            )
        self._num_committed = min(self._num_committed, num_tokens)
        self._history_length = num_tokens
        del self._keys[self._num_committed // self._context.tokens_per_block :]
        self._cut_capacity(num_tokens)
        self._coverage.fill_from(num_tokens)
        self._release(self._coverage.leave_missing_tail(num_tokens))
        # The last block may be cut inside a page that others share or that is committed.
        self._writable_from = self._table.num_blocks
        # A window may need blocks again that have no pages.
        self._is_ready = False

    def drop_blocks(
        self, positions: HalfOpenRange, layer_group_id: LayerGroupId | None = None
    ) -> DroppedBlocks:
        """Make holes of the blocks that lie wholly in ``positions``, in all layer groups or in that
        one: they lose their pages, and attention skips them. Returns which those are, and which
        blocks were kept because the range covers only a part of them, or because they are not full
        yet.

        Other sequences and the prefix tree keep what they share. Counts and lengths stay as they
        are; this sequence's later blocks are no longer shared.
        """
        self._check_open()
        if layer_group_id is not None:
            check_layer_group(layer_group_id, self._table.num_layer_groups)
        outcome = self._coverage.whole_and_cut(positions, self._history_length)
        if outcome.dropped:
            entries = np.zeros(self._table.pages.shape, np.bool_)
            groups = slice(None) if layer_group_id is None else [layer_group_id]
            entries[groups, list(outcome.dropped)] = True
            entries &= ~self._table.is_hole
            self._release(self._table.make_holes(entries))
            self._storage.events.totals["masked_pages"] += int(entries.sum())
            # Lost pages after them may be others' too, and are no longer this sequence's to fill.
            self._is_ready = False
        return outcome

    # ------------------------------------------------------------------ content

    def commit(self, tokens: Sequence[int] | Int32Array) -> None:
        """The next tokens, for positions from ``num_committed_tokens`` on, are final and their K
        and V written.

        Each block that becomes full can be reused by other sequences from now on, unless a block
        before it is missing or a hole: what is committed then stays this sequence's own.
        """
        self._check_status(KVCacheStatus.ACTIVE, "commit")
        tokens = token_array(tokens)
        start, stop = self._num_committed, self._num_committed + len(tokens)
        if stop > self._capacity:
            raise UsageError(
                f"commit up to {stop} with a capacity of {self._capacity}: resize first"
            )
        if stop > self._tokens.size:
            grown = np.zeros(max(stop, 2 * self._tokens.size, 64), np.int32)
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start:stop] = tokens
        self._num_committed = stop
        self._history_length = max(self._history_length, stop)
        per_block = self._context.tokens_per_block
        if stop // per_block > start // per_block:
            self._commit_blocks(start // per_block, stop // per_block)
            self._release_stale()

    def _commit_blocks(self, start: int, stop: int) -> None:
        per_block = self._context.tokens_per_block
        is_missing = self._storage.table.is_missing
        is_lost = self._coverage.missing(self._history_length)
        taken: list[Int32Array] = []
        for block in range(start, stop):
            # Computed with blocks before it missing, a block is not what its tokens say.
            is_whole = not (self._table.is_hole[:, :block].any() or is_lost[:, :block].any())
            if len(self._keys) != block or not is_whole:
                break
            parent = self._keys[-1] if self._keys else self._root
            tokens = self._tokens[block * per_block : (block + 1) * per_block]
            key = block_key(parent, tokens)
            self._keys.append(key)
            pages = self._table.pages[:, block]
            pages = np.where(is_missing[pages], NO_PAGE, pages)
            taken.append(self._context.tree.insert(parent, key, tokens, pages))
            if self._context.recent_keys is not None:
                is_second = self._context.recent_keys.saw(key)
                self._storage.table.is_admitted[taken[-1]] = is_second
            self._storage.name(taken[-1])
            self._context.on_stored(parent, key, tokens, taken[-1])
        if self._stream is not None and taken:
            # Another sequence may read them from now on, and must come after what this stream
            # wrote.
            self._storage.moves.order_after(np.concatenate(taken), self._stream)

    def plan_drop(self, first_block: int = 0) -> None:
        """Drop the committed blocks from ``first_block`` on as soon as no sequence holds them,
        instead of keeping them for reuse: they are known to be of no use to others.
        """
        self._check_open()
        first_block = whole_number(first_block, "a block's ordinal")
        if first_block < 0:
            raise UsageError(f"there is no block {first_block}: blocks count from 0")
        pages = self._table.pages[:, first_block:].ravel()
        self._storage.plan_drop(pages[pages != NO_PAGE])

    def raise_priority(self, priority: Priority) -> None:
        """Give up other sequences' pages before this one's, those still to come included."""
        self._check_open()
        check_priority(priority)
        self._priority = max(self._priority, priority)
        pages, table = self._table.live_pages(), self._storage.table
        table.priority[pages] = np.maximum(table.priority[pages], priority)

    def fill_missing(self, ordinals: Sequence[BlockOrdinal]) -> None:
        """The pages of these blocks have been recomputed and are good again."""
        self._check_status(KVCacheStatus.ACTIVE, "fill_missing")
        check_blocks(ordinals, self._table.num_blocks)
        pages = self._table.pages[:, list(ordinals)].ravel()
        pages = pages[pages != NO_PAGE]
        self._storage.fill(pages, self._stream)

    def fork(self) -> KVCache:
        """A suspended cache with the same history. Every page is shared, the partial last block
        included, and copied by whoever writes to it first; a granted ``resize`` must be asked for
        again.
        """
        self._check_open()
        table = self._table.copy()
        table.cut(self._coverage.num_blocks(self._history_length))
        tokens = self._tokens[: self._num_committed]
        by_level = (0,) * len(self._storage.levels)
        prefix = ReusedPrefix(self._root, self._keys, table, tokens, by_level)
        other = KVCache(self._context, prefix, self._priority, self._on_missing)
        other._history_length = other._capacity = self._history_length
        if self._stream is not None:
            pages = self._table.live_pages()
            is_hot = (self._storage.table.present[pages] & HOT_BIT) != 0
            self._storage.moves.order_after(pages[is_hot], self._stream)
        other._marks.classify(self._history_length)  # locked by this one as long as it is active
        self._writable_from = self._table.num_blocks
        if self._table.is_hole.any():
            self._is_ready = False  # as after ``drop_blocks``
        return other

    def prefetch(self, level: CacheLevel = HOT_LEVEL) -> None:
        """Start pulling a suspended cache's pages up to ``level``, as far as there is room at no
        cost.
        """
        self._check_status(KVCacheStatus.SUSPENDED, "prefetch")
        level = CacheLevel(whole_number(level, "a level"))
        levels = self._storage.levels
        if not 0 <= level < len(levels):
            raise UsageError(f"there is no level {level}: this manager has 0 to {len(levels) - 1}")
        self._storage.prefetch(self._table.live_pages(), self._storage.levels[level])

    def close(self) -> None:
        """Let go of everything. Committed full blocks stay reusable until their room is needed.
        Idempotent.
        """
        if self._status is KVCacheStatus.CLOSED:
            return
        self._context.check_thread()
        if not self._context.is_open():  # the manager has freed everything already
            self._status = KVCacheStatus.CLOSED
            return
        self._marks.protect()
        if self._status is KVCacheStatus.ACTIVE:  # else it was done when it was suspended
            self._storage.come_after(self._table.live_pages(), self._stream)
            self._stream = None
            self._marks.classify(self._history_length)
        self._release(self._table.cut(0))
        self._status = KVCacheStatus.CLOSED
