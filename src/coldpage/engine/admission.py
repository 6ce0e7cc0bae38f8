"""What may run: the bounds of the engine, what is refused at once, and the working set of what
runs.

Pure arithmetic on tokens and blocks; nothing here touches a cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpage.config import ReuseScope
from coldpage.engine.messages import SamplingParams
from coldpage.errors import ConfigurationError
from coldpage.types import Int32Array

__all__ = [
    "EngineLimits",
    "Footprint",
    "HotCapacity",
    "Refusal",
    "common_prefix_tokens",
    "refuse_prompt",
    "refuse_sampling",
    "working_set_blocks",
]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Every bound of the scheduler."""

    max_batch: int = 8  # sequences that hold locked pages at once
    # Prompt tokens a step when nothing decodes. On 2 cores 1,500 tokens of SmolLM2 in bfloat16 take
    # 1,410 ms in steps of 512, 1,350 in steps of 1,024 and 1,290 in one; a new request waits for
    # one step, 0.9 s at 1,024.
    prefill_tokens: int = 1024
    prefill_tokens_beside_decode: int = 256  # prompt tokens a step while others decode: their stall
    max_waiting: int = 1024  # requests in the queue
    max_sessions: int = 1024  # idle named conversations whose pages are held
    prefetch_depth: int = 4  # waiting requests whose pages are pulled up ahead
    admission_deadline_s: float = 30.0  # nothing runs and the next request does not fit
    onboarding_deadline_s: float = 120.0  # pages of a resumed sequence have not arrived
    room_patience_s: float = 0.2  # moving pages may make room: before somebody is preempted
    room_deadline_s: float = 10.0  # there is no room yet, whoever was preempted

    def check(self, tokens_per_block: int) -> None:
        """Raises ConfigurationError where the bounds can not work together."""
        counts = (self.max_batch, self.max_waiting, self.prefetch_depth + 1, self.max_sessions + 1)
        if min(counts) < 1:
            raise ConfigurationError(
                "max_batch and max_waiting must be at least 1; max_sessions and prefetch_depth, 0"
            )
        smallest = min(self.prefill_tokens, self.prefill_tokens_beside_decode)
        if smallest < tokens_per_block:
            raise ConfigurationError(
                f"a step of {smallest} prompt tokens can not hold one block "
                f"of {tokens_per_block} tokens"
            )


@dataclass(frozen=True, slots=True)
class HotCapacity:
    """What the hot level can hold for sequences that run."""

    num_blocks: int
    allowed_tokens: int  # of the longest sequence that can be resumed
    tokens_per_block: int

    @property
    def allowed_blocks(self) -> int:
        """Blocks that may be locked when a sequence is resumed."""
        return self.allowed_tokens // self.tokens_per_block

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.tokens_per_block)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can never be served: an HTTP status, a stable code and one sentence."""

    status: int
    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """One sequence as admission sees it. Its first ``num_matched`` tokens came with pages others
    may share.
    """

    tokens: Int32Array
    num_matched: int
    scope: ReuseScope
    num_blocks: int


def refuse_prompt(
    prompt: Int32Array, capacity: HotCapacity, context_tokens: int, vocab_size: int
) -> Refusal | None:
    """The reason why ``prompt`` and one new token can never run, or None."""
    num_tokens = len(prompt)
    if num_tokens == 0:
        return Refusal(400, "empty_prompt", "The prompt is empty; give at least one token.")
    for token_id in (int(prompt.min()), int(prompt.max())):
        if not 0 <= token_id < vocab_size:
            return Refusal(
                400,
                "invalid_token",
                f"The prompt has token id {token_id}; the model's are 0 to {vocab_size - 1}.",
            )
    if num_tokens + 1 > context_tokens:
        return Refusal(
            400,
            "context_length_exceeded",
            f"The prompt has {num_tokens} tokens; the model's context of {context_tokens} tokens "
            f"leaves room for prompts of at most {context_tokens - 1}.",
        )
    blocks = capacity.blocks_for(num_tokens + 1)
    if blocks > capacity.allowed_blocks:
        return Refusal(
            400,
            "hot_level_too_small",
            f"The prompt has {num_tokens} tokens and needs {blocks} blocks; the hot level can run "
            f"at most {capacity.allowed_blocks} blocks ({capacity.allowed_tokens} tokens).",
        )
    return None


def refuse_sampling(params: SamplingParams) -> Refusal | None:
    """The reason why ``params`` mean nothing, or None."""
    checks = (
        (
            params.max_tokens is None or params.max_tokens >= 1,
            f"max_tokens is {params.max_tokens}; it must be at least 1.",
        ),
        (
            math.isfinite(params.temperature) and params.temperature >= 0,
            f"temperature is {params.temperature}; it must be 0 or more.",
        ),
        (0 < params.top_p <= 1, f"top_p is {params.top_p}; it must be above 0 and at most 1."),
        (params.top_k >= 0, f"top_k is {params.top_k}; it must be 0 (no limit) or more."),
        (all(params.stop), "A stop string is empty."),
    )
    for holds, sentence in checks:
        if not holds:
            return Refusal(400, "invalid_sampling", sentence)
    return None


def common_prefix_tokens(first: Int32Array, second: Int32Array) -> int:
    """How many leading tokens are equal."""
    num = min(len(first), len(second))
    differs = first[:num] != second[:num]
    return int(np.argmax(differs)) if differs.any() else num


def working_set_blocks(footprints: Sequence[Footprint], tokens_per_block: int) -> int:
    """Blocks that the sequences lock together; what one matched and an earlier one holds too counts
    once.

    An estimate from above, up to blocks that two sequences computed apart: `resume` has the last
    word.
    """
    total = 0
    for index, one in enumerate(footprints):
        matched = one.tokens[: one.num_matched]
        shared_tokens = max(
            (
                common_prefix_tokens(matched, other.tokens)
                for other in footprints[:index]
                if other.scope == one.scope
            ),
            default=0,
        )
        total += one.num_blocks - shared_tokens // tokens_per_block
    return total
