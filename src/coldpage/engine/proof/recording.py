"""What a run did, step by step, exact enough to be run again: tokens, logits, and
restored pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from coldpage.engine.forward.hot_pages import layer_pages
from coldpage.engine.model.model import LoadedModel
from coldpage.engine.planning import ItemPurpose
from coldpage.engine.steps import ScheduledItem
from coldpage.types import BlockOrdinal, Int32Array, LayerGroupId, LayerId

if TYPE_CHECKING:
    from coldpage.manager import KVCacheManager
    from coldpage.sequence import KVCache

__all__ = [
    "PageContents",
    "PageDigests",
    "PageHasher",
    "Place",
    "RecordedItem",
    "RecordedRestore",
    "RecordedStep",
    "Recorder",
]

# Of a page in its cache.
Place = tuple[LayerGroupId, BlockOrdinal]
# A 128-bit hash of the bytes of all the page's written positions.
PageDigests = dict[Place, bytes]
# Of the parts of a page, in order.
PageContents = list[torch.Tensor]


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
    """A cache that came back hot before step ``step_index``.

    ``partial`` has the contents of its pages that tokens do not fill, if they were asked for.
    """

    step_index: int
    request_id: str
    history_length: int
    digests: PageDigests
    partial: dict[Place, PageContents] = field(default_factory=dict)


class PageHasher:
    """Hashes the hot pages of a cache, and copies them. They are quiescent."""

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
        blocks are left out.
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

    def is_partial(self, place: Place, num_tokens: int) -> bool:
        """Whether so many tokens leave a part of the page's positions unwritten."""
        return (place[1] + 1) * self._tokens_per_block > num_tokens

    def read(self, kv_cache: KVCache, place: Place) -> PageContents:
        """A copy of what a page holds."""
        slot = int(kv_cache.page_indices(place[0])[place[1]])
        return [buffer[slot].clone() for buffer in self._buffers[place[0]]]

    def write(self, kv_cache: KVCache, place: Place, contents: PageContents) -> None:
        """Overwrite a page with what another held."""
        slot = int(kv_cache.page_indices(place[0])[place[1]])
        for buffer, part in zip(self._buffers[place[0]], contents, strict=True):
            buffer[slot] = part

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
    request. ``keeps_partial``: what pages held that tokens did not fill is kept too.
    """

    def __init__(self, hasher: PageHasher, *, keeps_partial: bool = False) -> None:
        self._hasher = hasher
        self._keeps_partial = keeps_partial
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
        partial: dict[Place, PageContents] = {}
        if self._keeps_partial:
            places = [place for place in digests if self._hasher.is_partial(place, history)]
            partial = {place: self._hasher.read(kv_cache, place) for place in places}
        self.restores.append(
            RecordedRestore(len(self.steps), request_id, history, digests, partial)
        )
