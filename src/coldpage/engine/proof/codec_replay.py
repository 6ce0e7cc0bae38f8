"""Replays of a run whose cold pages were packed by codecs that lose something.

One does to its pages what the codecs did: where a page that came back has other bytes than the
replay's, the replay's page goes through the codecs too, and must then have those. What is computed
on it afterwards must be equal bit for bit. The other replay leaves its pages as they were computed:
how far the run is from that is what the codecs cost, which is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from coldpage.engine.proof.recording import Place, RecordedItem, RecordedRestore
from coldpage.engine.proof.replay import Replay
from coldpage.engine.proof.round_trip import RoundTrip

if TYPE_CHECKING:
    from coldpage.sequence import KVCache

__all__ = ["CodecReplay", "CodecTrips", "Loss", "LosslessReplay"]

# Through how many codecs a page may have gone since it was last looked at: it changed its codec on
# the way to disk, or its copies were given up and made again.
_MAX_TRIPS: Final = 2


@dataclass(slots=True)
class CodecTrips:
    """What the pages of a run had been through."""

    num_pages: int = 0  # equal to the codecs' decode of their encode, byte for byte
    num_taken_over: int = 0  # that tokens did not fill, and which were taken as they came back
    num_rows: int = 0  # of logits after a recomputed block, which nothing is compared with


class CodecReplay(Replay):
    """Page by page and bit by bit, with the same codecs."""

    def __init__(self, *arguments: Any, trips: Sequence[RoundTrip], **more: Any) -> None:
        """``trips`` are over the pages of the replay's manager; the rest is as Replay's."""
        super().__init__(*arguments, **more)
        self._chains = [
            chain for length in range(1, _MAX_TRIPS + 1) for chain in product(trips, repeat=length)
        ]
        self.trips = CodecTrips()

    def compare_pages(self, restore: RecordedRestore, kv_cache: KVCache) -> None:
        """The replay's pages are afterwards as those that came back."""
        wrong = self.differing(restore, kv_cache)
        before = {place: self.hasher.read(kv_cache, place) for place in wrong}
        for chain in self._chains:
            if not wrong:
                return
            for trip in chain:
                trip.run(kv_cache, wrong)
            num_tokens = min(restore.history_length, kv_cache.history_length)
            found = self.hasher.digests(kv_cache, num_tokens)
            right = [place for place in wrong if found.get(place) == restore.digests[place]]
            self.trips.num_pages += len(right)
            wrong = [place for place in wrong if place not in right]
            for place in wrong:
                self.hasher.write(kv_cache, place, before[place])
        for place in wrong:
            self._settle(restore, kv_cache, place)

    def _settle(self, restore: RecordedRestore, kv_cache: KVCache, place: Place) -> None:
        """A codec may pack what lies behind the last token together with the tokens, and that is
        whatever the page held before."""
        contents = restore.partial.get(place)
        if contents is None:
            self.differ(restore, place)
        else:
            self.trips.num_taken_over += 1
            self.hasher.write(kv_cache, place, contents)

    def compare_tokens(self, item: RecordedItem) -> None:
        """As it does where nothing was recomputed."""
        if not self._is_recomputed(item):
            super().compare_tokens(item)

    def compare_logits(
        self, item: RecordedItem, seen: torch.Tensor, expected: torch.Tensor
    ) -> None:
        """Bit for bit, but where something was recomputed: it is rounded otherwise then, and the
        codecs make more of it."""
        if self._is_recomputed(item):
            self.trips.num_rows += len(seen)
        else:
            super().compare_logits(item, seen, expected)

    def _is_recomputed(self, item: RecordedItem) -> bool:
        return self.conversation_of(item.request_id) in self.first_recomputed


@dataclass(slots=True)
class Loss:
    """How far the distributions of next tokens are from those on pages that were never packed."""

    divergences: list[float] = field(default_factory=list)  # KL(lossless || run) in nats
    num_same_top: int = 0  # the likeliest token is the same

    def __str__(self) -> str:
        if not self.divergences:
            return "nothing to compare"
        mean, high = np.mean(self.divergences), np.quantile(self.divergences, 0.99)
        return (
            f"mean KL {mean:.1e}, 99th percentile {high:.1e}, "
            f"likeliest token equal in {self.num_same_top / len(self.divergences):.1%}"
        )


class LosslessReplay(Replay):
    """The same steps on pages as they were computed. Differences are measured."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.loss = Loss()

    def compare_pages(self, restore: RecordedRestore, kv_cache: KVCache) -> None:
        """They are other pages."""

    def compare_tokens(self, item: RecordedItem) -> None:
        """The replay is fed what the run chose."""

    def compare_logits(
        self, item: RecordedItem, seen: torch.Tensor, expected: torch.Tensor
    ) -> None:
        """Row by row."""
        own, lossless = (torch.log_softmax(rows.double(), -1) for rows in (seen, expected))
        divergences = (lossless.exp() * (lossless - own)).nan_to_num(0.0).sum(-1)
        self.loss.divergences += divergences.tolist()
        self.loss.num_same_top += int((seen.argmax(-1) == expected.argmax(-1)).sum())
