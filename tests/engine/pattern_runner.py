"""A runner whose next token depends on every byte of the sequence's pages, and needs no model.

The entry of position p is a hash of the entry of p - 1 (read from its page) and the token, so a
page that is wrong, stale, blank or recomputed too early changes every later entry, and a token
after it. A second layer, where there is one, keeps the entries for a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from coldpage.engine.forward.runner import LogitsWanted, StepItem
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCacheStatus
from coldpage.types import BufferRole, LayerId

VOCAB = 97
ENTRY_BYTES = 8
WINDOW = 16
ROLE = BufferRole("key")
_MASK = (1 << 64) - 1


def next_entry(previous: int, token_id: int) -> int:
    mixed = ((previous ^ (token_id + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return mixed ^ (mixed >> 29)


def next_token(entries: Sequence[int]) -> int:
    return sum((index + 1) * entry for index, entry in enumerate(entries)) % _MASK % VOCAB


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a greedy answer must be, computed without any cache."""
    entries: list[int] = []
    new: list[int] = []
    for token_id in prompt:
        entries.append(next_entry(entries[-1] if entries else 0, token_id))
    while len(new) < num_tokens:
        new.append(next_token(entries))
        entries.append(next_entry(entries[-1], new[-1]))
    return new


class PatternRunner:
    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.counters = {"pattern_steps": 0}
        self._layers = [layer.layer_id for layer in manager.config.layers]
        self.fail_next: Exception | None = None
        self.poison_next = False

    def forward(self, items: Sequence[StepItem]) -> list[torch.Tensor | None]:
        assert len({id(item.kv_cache) for item in items}) == len(items)
        assert all(item.kv_cache.status is KVCacheStatus.ACTIVE for item in items)
        self.counters["pattern_steps"] += 1
        written = [page for item in items for page in self._written_slots(item)]
        assert len(set(written)) == len(written), "two items write to one page"
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return [self._compute(item) for item in items]

    def _written_slots(self, item: StepItem) -> list[int]:
        slots = item.kv_cache.page_indices(self._manager.layer_group_of(self._layers[0]))
        block = self._manager.tokens_per_block
        stop = item.start + len(item.token_ids)
        return [int(slots[n]) for n in range(item.start // block, -(-stop // block))]

    def _rows(self, item: StepItem, layer_id: LayerId) -> _Rows:
        return _Rows(
            self._manager.hot_array(layer_id, ROLE).view(np.uint64),
            item.kv_cache.page_indices(self._manager.layer_group_of(layer_id)),
            self._manager.tokens_per_block,
        )

    def _compute(self, item: StepItem) -> torch.Tensor | None:
        stop = item.start + len(item.token_ids)
        rows = self._rows(item, self._layers[0])
        entries = [rows.read(position) for position in range(item.start)]
        for position, token_id in enumerate(item.token_ids.tolist(), item.start):
            entries.append(next_entry(entries[-1] if entries else 0, token_id))
            rows.write(position, entries[-1])
        for layer_id in self._layers[1:]:
            window = self._rows(item, layer_id)
            for position in range(max(0, item.start + 1 - WINDOW), item.start):
                entries[position] = window.read(position)
            for position in range(item.start, stop):
                window.write(position, entries[position])
        if item.logits is LogitsWanted.NONE:
            return None
        logits = torch.zeros(1, VOCAB)
        logits[0, next_token(entries)] = 1.0
        if self.poison_next:
            self.poison_next = False
            logits[:] = float("nan")
        return logits


class _Rows:
    """The entries of one sequence in one layer, by position."""

    def __init__(
        self, hot: npt.NDArray[np.uint64], slots: npt.NDArray[np.int32], block: int
    ) -> None:
        self._hot, self._slots, self._block = hot, slots, block

    def read(self, position: int) -> int:
        slot = self._slots[position // self._block]
        assert slot >= 0
        return int(self._hot[slot, position % self._block])

    def write(self, position: int, entry: int) -> None:
        slot = self._slots[position // self._block]
        assert slot >= 0
        self._hot[slot, position % self._block] = entry
