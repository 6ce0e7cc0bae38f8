"""One request on its way through the scheduler: tokens, cache, phase and what it cost."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from coldpage.config import ReuseScope
from coldpage.engine.admission import Footprint
from coldpage.engine.messages import SamplingParams, Usage
from coldpage.engine.sampling import SamplingRow
from coldpage.engine.sessions import SessionKey
from coldpage.types import BlockOrdinal, Int32Array

if TYPE_CHECKING:
    from coldpage.sequence import KVCache

__all__ = ["GenerationRequest", "LiveRequest", "RequestPhase", "TextStream"]


class TextStream(Protocol):
    """Turns the tokens of one answer into text as they come, and looks for its stop strings."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string ended the answer."""
        ...

    def flush(self) -> str:
        """The text still held back."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate from. ``received_at_s`` is ``time.monotonic()`` when the request came in."""

    request_id: str
    prompt: Int32Array
    sampling: SamplingParams
    received_at_s: float
    session: str | None = None
    scope: ReuseScope = field(default_factory=ReuseScope)
    retain: bool = False  # keep its pages before those of others

    @property
    def session_key(self) -> SessionKey | None:
        """The session this request continues, if it names one."""
        return None if self.session is None else SessionKey(self.scope, self.session)


class RequestPhase(enum.Enum):
    """Where a request is. Cancelling, failing or a deadline leaves any of them."""

    WAITING = "waiting"  # in the queue: no cache yet, or a suspended one
    ONBOARDING = "onboarding"  # its pages are locked and on their way to the hot level
    RUNNING = "running"  # its pages are hot: steps may compute it
    ENDED = "ended"  # nothing is held for it any more


class LiveRequest:
    """The mutable state of one request. Only the scheduler changes it.

    ``tokens[:num_tokens]`` are the prompt and what was generated; those at ``kv.history_length``
    and after are still to be computed. A request that only waits for its next token has exactly one
    of them, so a prompt, a decoding step and a restart after preemption are the same thing with
    other counts.
    """

    def __init__(
        self,
        request: GenerationRequest,
        text: TextStream,
        generator: torch.Generator | None,
        max_new_tokens: int,
    ) -> None:
        self.request = request
        self.text = text
        self.sampling_row = SamplingRow(request.sampling, generator)
        self.max_new_tokens = max_new_tokens
        self.num_prompt_tokens = len(request.prompt)
        self.num_tokens = self.num_prompt_tokens
        self._tokens = np.empty(self.num_prompt_tokens + max_new_tokens, dtype=np.int32)
        self._tokens[: self.num_tokens] = request.prompt

        self.kv: KVCache | None = None
        self.phase = RequestPhase.WAITING
        self.missing: list[BlockOrdinal] = []  # lost blocks still to be recomputed, ascending
        self.num_matched_tokens = 0  # came with the cache, so their pages may be shared
        self.num_rebuilds = 0
        self.admission_number = 0
        self.is_prefetched = False
        self.was_admitted = False  # what others commit meanwhile is looked for until then

        self.phase_since_s = request.received_at_s
        self.waiting_for_room_since_s: float | None = None
        self.num_victims = 0  # preempted since then
        self.first_token_at_s: float | None = None
        self.restore_s = 0.0
        self.cached_tokens: list[int] = []  # prompt tokens reused, by level

    @property
    def request_id(self) -> str:
        """The id that replies carry."""
        return self.request.request_id

    @property
    def cache(self) -> KVCache:
        """The request's cache, where there must be one."""
        assert self.kv is not None
        return self.kv

    @property
    def tokens(self) -> Int32Array:
        """Prompt and generated tokens [num_tokens]."""
        return self._tokens[: self.num_tokens]

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that have not been computed."""
        return self.num_tokens - self.cache.history_length

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def enter(self, phase: RequestPhase, now_s: float) -> None:
        """Change the phase; its clock starts at ``now_s``."""
        self.phase = phase
        self.phase_since_s = now_s
        self.forget_waiting()

    def forget_waiting(self) -> None:
        """There is room, or none is asked for."""
        self.waiting_for_room_since_s = None
        self.num_victims = 0

    def footprint(self, num_blocks: int) -> Footprint:
        """The request as admission sees it, holding ``num_blocks``."""
        return Footprint(self.tokens, self.num_matched_tokens, self.request.scope, num_blocks)

    def set_cached_tokens(self, by_level: Sequence[int], total: int) -> None:
        """Count ``total`` prompt tokens as reused, spread over the levels as ``by_level`` says.

        Tokens too many (the last one is computed again for its logits) or too few (a partial block
        that only the session itself holds) go to the coldest level that has any.
        """
        counts = list(by_level)
        coldest = max((level for level, num in enumerate(counts) if num), default=0)
        counts[coldest] += max(0, total - sum(counts))
        self.cached_tokens = counts
        self.uncache_tokens(sum(counts) - total)

    def uncache_tokens(self, num_tokens: int) -> None:
        """``num_tokens`` of those counted as reused had to be computed after all."""
        for level in reversed(range(len(self.cached_tokens))):
            taken = min(num_tokens, self.cached_tokens[level])
            self.cached_tokens[level] -= taken
            num_tokens -= taken

    def usage(self, tier_names: Sequence[str]) -> Usage:
        """The counts to answer with."""
        first_s = self.first_token_at_s
        waited_s = 0.0 if first_s is None else first_s - self.request.received_at_s
        cached = [*self.cached_tokens, *([0] * len(tier_names))]
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_new_tokens,
            cached_tokens_by_tier=dict(zip(tier_names, cached, strict=False)),
            time_to_first_token_ms=1000.0 * waited_s,
            restore_ms=1000.0 * self.restore_s,
        )
