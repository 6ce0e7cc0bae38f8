"""Running a recorded run again with the same batches on a hot level that holds everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from coldpage.engine.forward.runner import LogitsWanted, ModelRunner, StepItem
from coldpage.engine.planning import ItemPurpose
from coldpage.engine.proof.recording import (
    PageHasher,
    Place,
    RecordedItem,
    RecordedRestore,
    Recorder,
)
from coldpage.types import BlockOrdinal

if TYPE_CHECKING:
    from coldpage.manager import KVCacheManager
    from coldpage.sequence import KVCache

__all__ = ["Comparison", "Replay"]

# Logits after a recomputed block: another chunk shape rounds differently (float32).
_RECOMPUTED_TOLERANCE: Final = 1e-4
# The same where storing rounds: a number on the border goes to the other side. 0.002 was seen with
# q8_0; logits of another text differ by more than 1.
_RECOMPUTED_LOSSY_TOLERANCE: Final = 0.25
# Differences described one by one; further ones are only counted.
_MAX_SENTENCES: Final = 10


@dataclass(slots=True)
class Comparison:
    """What was compared, and what differed."""

    tolerance: float = _RECOMPUTED_TOLERANCE  # of logits after a recomputed block
    num_pages: int = 0  # restored pages equal byte for byte
    num_rows: int = 0  # logit rows equal bit for bit
    num_close_rows: int = 0  # logit rows after a recomputed block, equal within the tolerance
    num_tokens: int = 0
    largest_close_difference: float = 0.0
    num_differences: int = 0
    sentences: list[str] = field(default_factory=list)

    def differ(self, sentence: str) -> None:
        """Note a difference."""
        self.num_differences += 1
        if len(self.sentences) < _MAX_SENTENCES:
            self.sentences.append(sentence)


class Replay:
    """Replays one recording. ``conversation_of`` maps a request to what its cache is kept under.

    Subclasses compare in other ways.
    """

    def __init__(
        self,
        recorder: Recorder,
        conversation_of: Callable[[str], str],
        manager: KVCacheManager,
        runner: ModelRunner,
        hasher: PageHasher,
        *,
        is_lossy: bool = False,
    ) -> None:
        """``is_lossy``: hot pages hold rounded numbers."""
        self._recorder = recorder
        self.conversation_of = conversation_of
        self._manager = manager
        self._runner = runner
        self.hasher = hasher
        self._caches: dict[str, KVCache] = {}
        # The first recomputed block of each conversation that has one.
        self.first_recomputed: dict[str, BlockOrdinal] = {}
        self._expected: dict[str, int] = {}  # the token that the replay chose last, by request
        self.comparison = Comparison(
            _RECOMPUTED_LOSSY_TOLERANCE if is_lossy else _RECOMPUTED_TOLERANCE
        )

    def run(self, on_step: Callable[[int], None]) -> Comparison:
        """Replay everything; ``on_step`` gets the number of steps done."""
        restores = list(self._recorder.restores)
        for index, step in enumerate(self._recorder.steps):
            while restores and restores[0].step_index <= index:
                restore = restores.pop(0)
                kv_cache = self._caches.get(self.conversation_of(restore.request_id))
                if kv_cache is not None:
                    self.compare_pages(restore, kv_cache)
            self._run_step(step.items)
            on_step(index + 1)
        for kv_cache in self._caches.values():
            kv_cache.close()
        return self.comparison

    def compare_pages(self, restore: RecordedRestore, kv_cache: KVCache) -> None:
        """Of a cache that came back, with the replay's own."""
        for place in self.differing(restore, kv_cache):
            self.differ(restore, place)

    def differing(self, restore: RecordedRestore, kv_cache: KVCache) -> list[Place]:
        """Which of the pages that came back have other bytes here; the others are counted."""
        # Another chunk shape rounds differently, in that block and in what was computed after it.
        stop = self.first_recomputed.get(self.conversation_of(restore.request_id))
        expected = self.hasher.digests(
            kv_cache, min(restore.history_length, kv_cache.history_length)
        )
        compared = [p for p in restore.digests if stop is None or p[1] < stop]
        wrong = [p for p in compared if expected.get(p) != restore.digests[p]]
        self.comparison.num_pages += len(compared) - len(wrong)
        return wrong

    def differ(self, restore: RecordedRestore, place: Place) -> None:
        """Note that a page came back with other bytes."""
        self.comparison.differ(
            f"{restore.request_id}: block {place[1]} of layer group {place[0]} came back "
            "with other bytes"
        )

    def _run_step(self, items: tuple[RecordedItem, ...]) -> None:
        block = self._manager.tokens_per_block
        forks: list[KVCache] = []
        step_items: list[StepItem] = []
        for item in items:
            kv_cache = self._cache_for(item)
            if item.purpose is ItemPurpose.RECOMPUTE:
                # The same rows take part in the step, but the reference keeps its own bytes.
                self._note_recomputed(item)
                kv_cache = kv_cache.fork()
                forks.append(kv_cache)
                self._resume(kv_cache)
            if kv_cache.history_length > item.start:
                # A whole block that was lost while nobody held it: prefilled again, it has other
                # bytes, and content may lead back to either version.
                if item.start // block < kv_cache.history_length // block:
                    self._note_recomputed(item)
                kv_cache.truncate(item.start)
            stop = item.start + item.token_ids.size
            assert kv_cache.history_length == item.start, "the replay lacks history"
            assert kv_cache.resize(stop), "the replay's hot level is too small"
            kv_cache.synchronize()
            wanted = LogitsWanted.LAST if item.wants_logits else LogitsWanted.NONE
            step_items.append(StepItem(kv_cache, item.start, item.token_ids, wanted))
        outputs = self._runner.forward(step_items)
        for item, step_item, output in zip(items, step_items, outputs, strict=True):
            self.compare_tokens(item)
            if item.purpose is not ItemPurpose.RECOMPUTE:
                self._caches[self.conversation_of(item.request_id)].commit(step_item.token_ids)
            if output is not None and item.logits is not None:
                self.compare_logits(item, item.logits, output)
        for fork in forks:
            fork.close()

    def _note_recomputed(self, item: RecordedItem) -> None:
        conversation = self.conversation_of(item.request_id)
        ordinal = BlockOrdinal(item.start // self._manager.tokens_per_block)
        first = self.first_recomputed.get(conversation, ordinal)
        self.first_recomputed[conversation] = min(first, ordinal)

    def _cache_for(self, item: RecordedItem) -> KVCache:
        conversation = self.conversation_of(item.request_id)
        if conversation not in self._caches:
            self._caches[conversation] = self._manager.create_kv_cache()
            self._resume(self._caches[conversation])
        return self._caches[conversation]

    @staticmethod
    def _resume(kv_cache: KVCache) -> None:
        assert kv_cache.resume(), "the replay's hot level is too small"
        kv_cache.synchronize()

    def compare_tokens(self, item: RecordedItem) -> None:
        """A decoded token is fed to the next step: it must be the one that the replay chose."""
        if item.purpose is not ItemPurpose.DECODE or item.request_id not in self._expected:
            return
        expected = self._expected.pop(item.request_id)
        self.comparison.num_tokens += 1
        if expected != int(item.token_ids[0]):
            self.comparison.differ(
                f"{item.request_id}: token {int(item.token_ids[0])} at position {item.start}, "
                f"the replay chose {expected}"
            )

    def compare_logits(
        self, item: RecordedItem, seen: torch.Tensor, expected: torch.Tensor
    ) -> None:
        """What the run computed, with what the replay does."""
        comparison = self.comparison
        where = f"{item.request_id}: logits at position {item.start + item.token_ids.size - 1}"
        self._expected[item.request_id] = int(np.argmax(expected[-1].numpy()))
        if self.conversation_of(item.request_id) not in self.first_recomputed:
            if torch.equal(seen, expected):
                comparison.num_rows += len(seen)
            else:
                comparison.differ(f"{where} differ")
            return
        largest = float((seen - expected).abs().max())
        comparison.largest_close_difference = max(comparison.largest_close_difference, largest)
        if largest <= comparison.tolerance:
            comparison.num_close_rows += len(seen)
        else:
            comparison.differ(f"{where} differ by {largest:.1e} after a recomputed block")
