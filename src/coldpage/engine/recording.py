"""What a run did, step by step, exact enough to be run again: tokens, logits, and
restored pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from coldpage.engine.hot_pages import layer_pages
from coldpage.engine.model import LoadedModel
from coldpage.engine.planning import ItemPurpose
from coldpage.engine.steps import ScheduledItem
from coldpage.types import BlockOrdinal, Int32Array, LayerGroupId, LayerId

if TYPE_CHECKING:
    from coldpage.manager import KVCacheManager
    from coldpage.sequence import KVCache

__all__ = [
    "PageDigests",
    "PageHasher",
    "RecordedItem",
    "RecordedRestore",
    "RecordedStep",
    "Recorder",
]

# (layer group, block) -> a 128-bit hash of the bytes of all the page's written positions.
PageDigests = dict[tuple[LayerGroupId, BlockOrdinal], bytes]


@dataclass(frozen=True, slots=True)
class RecordedItem:
    """One item of a step."""

    request_id: str
    purpose: ItemPurpose
    start: int
    token_ids: Int32Array
    wants_logits: bool
    logits: torch.Tensor | None  # f32 [rows, vocab]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The items that were computed together."""

    items: tuple[RecordedItem, ...]


@dataclass(frozen=True, slots=True)
class RecordedRestore:
    """A cache that came back hot before step ``step_index``."""

    step_index: int
    request_id: str
    history_length: int
    digests: PageDigests


class PageHasher:
    """Hashes the hot pages of a cache."""

    def __init__(self, model: LoadedModel, manager: KVCacheManager) -> None:
        self._tokens_per_block = manager.tokens_per_block
        # Views of [num_slots, tokens_per_block, ...]: values and scales, of keys and of values.
        self._buffers: dict[LayerGroupId, list[torch.Tensor]] = {}
        for index in range(len(model.layers)):
            layer_id = LayerId(index)
            buffers = self._buffers.setdefault(manager.layer_group_of(layer_id), [])
            pages = layer_pages(model, manager, layer_id)
            for part in (pages.keys, pages.values):
                buffers += [part.values] if part.scales is None else [part.values, part.scales]

    def digests(self, kv_cache: KVCache, num_tokens: int) -> PageDigests:
        """Hashes of the pages that hold the first ``num_tokens`` positions; missing and stale
        blocks are left out. The pages are quiescent.
        """
        missing = set(kv_cache.missing_blocks())
        found: PageDigests = {}
        for group_id, buffers in self._buffers.items():
            slots = kv_cache.page_indices(group_id)[: -(-num_tokens // self._tokens_per_block)]
            wanted = [b for b in np.flatnonzero(slots >= 0).tolist() if b not in missing]
            rows = torch.from_numpy(slots[wanted].astype(np.int64)).to(buffers[0].device)
            pages = [_bytes_of(buffer[rows]) for buffer in buffers]
            for place, block in enumerate(wanted):
                num_written = min(
                    self._tokens_per_block, num_tokens - block * self._tokens_per_block
                )
                found[group_id, BlockOrdinal(block)] = self._digest(
                    [page[place] for page in pages], num_written
                )
        return found

    @staticmethod
    def _digest(buffers: list[npt.NDArray[np.uint8]], num_tokens: int) -> bytes:
        digest = xxhash.xxh3_128()
        for buffer in buffers:
            digest.update(np.ascontiguousarray(buffer[:num_tokens]).data)
        return digest.digest()


def _bytes_of(pages: torch.Tensor) -> npt.NDArray[np.uint8]:
    """[num_pages, tokens_per_block, ...] as bytes [num_pages, tokens_per_block, bytes], on the
    host."""
    num_bytes: npt.NDArray[np.uint8] = pages.flatten(2).contiguous().view(torch.uint8).cpu().numpy()
    return num_bytes


class Recorder:
    """A scheduler's observer that keeps everything. ``caches`` are the caches seen last, by
    request.
    """

    def __init__(self, hasher: PageHasher) -> None:
        self._hasher = hasher
        self.steps: list[RecordedStep] = []
        self.restores: list[RecordedRestore] = []
        self.caches: dict[str, KVCache] = {}

    def on_step(
        self, items: Sequence[ScheduledItem], outputs: Sequence[torch.Tensor | None]
    ) -> None:
        """See StepObserver."""
        recorded = [
            RecordedItem(
                one.request_id,
                one.purpose,
                one.item.start,
                one.item.token_ids.copy(),
                output is not None,
                None if output is None else output.clone(),
            )
            for one, output in zip(items, outputs, strict=True)
        ]
        self.steps.append(RecordedStep(tuple(recorded)))

    def on_restored(self, request_id: str, kv_cache: KVCache) -> None:
        """See StepObserver."""
        self.caches[request_id] = kv_cache
        history = kv_cache.history_length
        digests = self._hasher.digests(kv_cache, history)
        self.restores.append(RecordedRestore(len(self.steps), request_id, history, digests))
