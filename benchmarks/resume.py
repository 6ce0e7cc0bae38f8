"""Time to first token of a resumed conversation against recomputing it, on the real model.

python -m benchmarks resume
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.kv import evict_all
from benchmarks.rows import Row, scratch_directory, timed_ms
from coldpage import DeviceTierConfig, DiskTierConfig, HostTierConfig, KVCacheManager, ReuseScope
from coldpage.config import CacheTierConfig
from coldpage.engine.assembly import block_bytes, build_manager
from coldpage.engine.forward.runner import ModelRunner
from coldpage.engine.messages import Finished, SamplingParams, Usage
from coldpage.engine.model.geometry import cache_argument
from coldpage.engine.model.model import LoadedModel, load_model
from coldpage.engine.model.texts import documentation_tokens
from coldpage.engine.proof.conversations import serve_tokens
from coldpage.engine.requests import GenerationRequest
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.steps import StepState

__all__ = ["TURN_TOKENS", "answer", "run"]

TURN_TOKENS = 32
REPETITIONS = 5
TOKENS_PER_BLOCK = 16
GOALS = {("host", 1_500): 8, ("host", 6_000): 25, ("disk", 1_500): 6, ("disk", 6_000): 15}


def answer(scheduler: Scheduler, manager: KVCacheManager, prompt: np.ndarray, salt: str) -> Usage:
    """One greedy token after ``prompt``."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    scope = ReuseScope(salt=salt)
    scheduler.submit(GenerationRequest("r", prompt, sampling, time.monotonic(), None, scope))
    while True:
        result = scheduler.step()
        for reply in result.replies:
            assert isinstance(reply, Finished), reply
            return reply.usage
        if result.state is StepState.BLOCKED:
            manager.wait_for_progress(0.02)


def _measure(
    model: LoadedModel,
    rival: Any,
    tier_name: str,
    cold: CacheTierConfig,
    tokens: np.ndarray,
    num_tokens: int,
) -> list[Row]:
    per_block = block_bytes(model, TOKENS_PER_BLOCK)
    longest = num_tokens + (REPETITIONS + 1) * (TURN_TOKENS + 1)
    hot = DeviceTierConfig(int(1.1 * (-(-longest // TOKENS_PER_BLOCK) + 2) * per_block))
    argument = cache_argument(rival)

    def prefill_rival(prompt: np.ndarray) -> None:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        with torch.inference_mode():
            rival(input_ids=ids, logits_to_keep=1, **{argument: DynamicCache(config=rival.config)})

    ours, recomputed, theirs = [], [], []
    with (
        build_manager(model, [hot, cold], TOKENS_PER_BLOCK) as manager,
        build_manager(model, [hot], TOKENS_PER_BLOCK) as plain,
    ):
        scheduler = Scheduler(ModelRunner(model, manager), manager, serve_tokens(model, manager))
        plain_scheduler = Scheduler(ModelRunner(model, plain), plain, serve_tokens(model, plain))
        stop = num_tokens
        answer(scheduler, manager, tokens[:stop], "")
        for repetition in range(REPETITIONS + 1):
            evict_all(manager)
            stop += TURN_TOKENS
            usage = answer(scheduler, manager, tokens[:stop], "")
            cached = usage.cached_tokens_by_tier[tier_name]
            assert cached > stop - TURN_TOKENS - 2 * TOKENS_PER_BLOCK, usage
            again = answer(plain_scheduler, plain, tokens[:stop], str(repetition))
            if repetition:  # the first of each warms memory up
                ours.append(usage.time_to_first_token_ms)
                recomputed.append(again.time_to_first_token_ms)
                theirs.append(timed_ms(lambda: prefill_rival(tokens[:stop])))
        scheduler.close()
        plain_scheduler.close()
    config = f"{num_tokens:,} tokens from {tier_name}, {TURN_TOKENS} new, bfloat16"
    goal = f">= {GOALS[tier_name, num_tokens]}"
    return [
        Row("time to first token", config, "recomputed", ours, recomputed, goal),
        Row("recomputing", config, "transformers' prefill", recomputed, theirs, "<= 1.1", False),
    ]


def run(is_quick: bool) -> list[Row]:
    """The model's own prefill floor is one short step."""
    model = load_model(None, torch.bfloat16, print)
    rival: Any = load_model(None, torch.bfloat16, print).model
    rows: list[Row] = []
    for num_tokens in (1_500,) if is_quick else (1_500, 6_000):
        longest = num_tokens + (REPETITIONS + 1) * TURN_TOKENS
        (tokens,) = documentation_tokens(model.tokenizer, [longest])
        cold_bytes = (
            3 * (-(-longest // TOKENS_PER_BLOCK) + 2) * block_bytes(model, TOKENS_PER_BLOCK)
        )
        rows += _measure(model, rival, "host", HostTierConfig(cold_bytes), tokens, num_tokens)
        with scratch_directory() as directory:
            disk = DiskTierConfig(directory, cold_bytes)
            rows += _measure(model, rival, "disk", disk, tokens, num_tokens)
    return rows
