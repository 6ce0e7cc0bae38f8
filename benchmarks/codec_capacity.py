"""How many tokens come back from the same host memory with a codec that packs, and without one.

Conversations are read one after another, and then asked again, the latest first. What the host tier
still has of them is reused, and the rest is computed again.

python -m benchmarks codec_capacity
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.kv import evict_all
from benchmarks.resume import answer
from benchmarks.rows import Row
from coldpage import DeviceTierConfig, HostTierConfig
from coldpage.engine.assembly import block_bytes, build_manager
from coldpage.engine.forward.runner import ModelRunner
from coldpage.engine.model.cold_codecs import make_cold_codecs
from coldpage.engine.model.model import LoadedModel, load_model
from coldpage.engine.model.texts import documentation_tokens
from coldpage.engine.proof.conversations import serve_tokens
from coldpage.engine.scheduler import Scheduler
from coldpage.types import Int32Array

__all__ = ["Returned", "come_back", "make_prompts", "run"]

TOKENS_PER_BLOCK = 16
CONVERSATION_TOKENS = 1_500
TURN_TOKENS = 32
# What the host tier has room for without a codec.
NUM_HOST_CONVERSATIONS = 4
CODEC, RIVAL = "turbo4", "concat"
GOAL = 3.4


@dataclass(frozen=True)
class Returned:
    """Of the second turns of all conversations."""

    host_tokens: int  # reused from the host tier
    first_token_ms: float  # all their times to the first token together


def make_prompts(model: LoadedModel, num_conversations: int) -> list[Int32Array]:
    """Each with the words of its second turn at the end."""
    lengths = [CONVERSATION_TOKENS + TURN_TOKENS] * num_conversations
    return documentation_tokens(model.tokenizer, lengths)


def come_back(model: LoadedModel, codec: str, prompts: Sequence[Int32Array]) -> Returned:
    """On a hot level that has room for one conversation. The model is used up."""
    blocks = -(-(CONVERSATION_TOKENS + TURN_TOKENS) // TOKENS_PER_BLOCK) + 1
    conversation_bytes = blocks * block_bytes(model, TOKENS_PER_BLOCK)
    codecs = make_cold_codecs(model, TOKENS_PER_BLOCK, codec, None, print)
    tiers = (
        DeviceTierConfig(int(1.1 * conversation_bytes)),
        HostTierConfig(NUM_HOST_CONVERSATIONS * conversation_bytes, codecs.host),
    )
    with build_manager(model, tiers, TOKENS_PER_BLOCK) as manager:
        scheduler = Scheduler(ModelRunner(model, manager), manager, serve_tokens(model, manager))
        for prompt in prompts:
            answer(scheduler, manager, prompt[:CONVERSATION_TOKENS], "")
        evict_all(manager)  # nothing is found hot
        usages = [answer(scheduler, manager, prompt, "") for prompt in reversed(prompts)]
        scheduler.close()
    return Returned(
        sum(usage.cached_tokens_by_tier["host"] for usage in usages),
        sum(usage.time_to_first_token_ms for usage in usages),
    )


def run(is_quick: bool) -> list[Row]:
    """Second turns of more conversations than the codec has room for."""
    num_conversations = 4 * NUM_HOST_CONVERSATIONS + 1
    found: dict[str, list[Returned]] = {CODEC: [], RIVAL: []}
    for _ in range(1 if is_quick else 3):
        for codec, results in found.items():
            model = load_model(None, torch.bfloat16, print)
            prompts = make_prompts(model, num_conversations)
            results.append(come_back(model, codec, prompts))
    ours, theirs = ([one.host_tokens for one in results] for results in found.values())
    ratio = float(np.median(ours) / np.median(theirs))
    config = (
        f"{num_conversations} conversations of {CONVERSATION_TOKENS:,} tokens, SmolLM2, bfloat16, "
        f"host memory of {NUM_HOST_CONVERSATIONS}: {int(np.median(ours)):,} tokens reused from "
        f"host, {int(np.median(theirs)):,} with {RIVAL}"
    )
    return [
        Row(
            f"second turns with {CODEC}",
            config,
            RIVAL,
            [one.first_token_ms for one in found[CODEC]],
            [one.first_token_ms for one in found[RIVAL]],
            f"tokens {ratio:.2f} >= {GOAL}",
            notes={
                "reused_tokens": float(np.median(ours)),
                "rival_reused_tokens": float(np.median(theirs)),
                "reused_ratio": round(ratio, 3),
            },
        )
    ]
