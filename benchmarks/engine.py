"""The engine, scheduler included, against transformers' generate with its own cache: same model,
same run.

    python -m benchmarks engine

Rounds of the two alternate, so that a slow minute of the machine falls on both.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, StoppingCriteriaList

from benchmarks.rows import Row
from coldpage import DeviceTierConfig, KVCacheManager, ReuseScope
from coldpage.engine.admission import EngineLimits
from coldpage.engine.assembly import block_bytes, build_manager
from coldpage.engine.forward.runner import ModelRunner
from coldpage.engine.messages import Finished, SamplingParams
from coldpage.engine.model.geometry import cache_argument
from coldpage.engine.model.model import load_model
from coldpage.engine.proof.conversations import serve_tokens
from coldpage.engine.requests import GenerationRequest
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.steps import StepState

__all__ = ["run"]

TOKENS_PER_BLOCK = 16
DECODE_STEPS = 24
CONTEXTS = (128, 1_500, 6_000)
BATCHES = (1, 4)
GOAL = ">= 0.9"


class _Sides:
    """One model twice: behind the scheduler, and as transformers runs it."""

    def __init__(self, dtype: torch.dtype, longest_tokens: int) -> None:
        model = load_model(None, dtype, print)
        self.rival: Any = load_model(None, dtype, print).model
        blocks = max(BATCHES) * (-(-longest_tokens // TOKENS_PER_BLOCK) + 4)
        hot = DeviceTierConfig(int(1.1 * blocks * block_bytes(model, TOKENS_PER_BLOCK)))
        self.manager: KVCacheManager = build_manager(model, [hot], TOKENS_PER_BLOCK)
        served = serve_tokens(model, self.manager)
        runner = ModelRunner(model, self.manager)
        self.scheduler = Scheduler(runner, self.manager, served, EngineLimits())
        self._cache_argument = cache_argument(self.rival)
        self._num_salts = 0

    def ours(self, prompts: np.ndarray, num_tokens: int) -> tuple[float, list[float]]:
        """Milliseconds until every prompt has its first token, and of each full step after that."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._num_salts += 1
            scope = ReuseScope(salt=str(self._num_salts))  # nothing is reused
            now_s = time.monotonic()
            request = GenerationRequest(f"r{index}", prompt, sampling, now_s, None, scope)
            self.scheduler.submit(request)
        num_open, seen, ends = len(prompts), set(), []
        while num_open:
            result = self.scheduler.step()
            seen.update(name for name, _ in result.tokens)
            if len(seen) == len(prompts) and len(result.tokens) == num_open:
                ends.append(time.perf_counter())
            num_open -= sum(isinstance(reply, Finished) for reply in result.replies)
            if result.state is StepState.BLOCKED:
                self.manager.wait_for_progress(0.02)
        return 1e3 * (ends[0] - started), [1e3 * (b - a) for a, b in itertools.pairwise(ends)]

    def theirs(self, prompts: np.ndarray, num_tokens: int) -> tuple[float, list[float]]:
        """The same of ``generate``."""
        ends: list[float] = []

        def record(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            ends.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        ids = torch.from_numpy(prompts.astype(np.int64))
        started = time.perf_counter()
        with torch.inference_mode():
            self.rival.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                stopping_criteria=StoppingCriteriaList([record]),
                **{self._cache_argument: DynamicCache(config=self.rival.config)},
            )
        return 1e3 * (ends[0] - started), [1e3 * (b - a) for a, b in itertools.pairwise(ends)]


def _measure(sides: _Sides, name: str, context: int, batch: int, repetitions: int) -> list[Row]:
    random = np.random.default_rng(context)
    first: dict[str, list[float]] = {"ours": [], "theirs": []}
    steps: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(repetitions):
        prompts = random.integers(5, 40_000, (batch, context)).astype(np.int32)
        for side in ("ours", "theirs"):
            prefill_ms, step_ms = getattr(sides, side)(prompts, DECODE_STEPS)
            first[side].append(prefill_ms)
            steps[side] += step_ms[1:]
    config = f"{name}, batch {batch}, {context:,} tokens"
    rival = "transformers generate"
    per_s = 1e3 * batch
    return [
        Row(
            "prefill",
            config,
            rival,
            first["ours"],
            first["theirs"],
            GOAL,
            notes={"ours_tokens_per_s": context * per_s / float(np.median(first["ours"]))},
        ),
        Row(
            "decode step",
            config,
            rival,
            steps["ours"],
            steps["theirs"],
            GOAL,
            notes={"ours_tokens_per_s": per_s / float(np.median(steps["ours"]))},
        ),
    ]


def run(is_quick: bool) -> list[Row]:
    """bfloat16 at every context, float32 at the shorter ones."""
    rows: list[Row] = []
    plans = [(torch.bfloat16, CONTEXTS[:2] if is_quick else CONTEXTS)]
    if not is_quick:
        plans.append((torch.float32, CONTEXTS[:2]))
    for dtype, contexts in plans:
        sides = _Sides(dtype, max(contexts) + DECODE_STEPS)
        name = str(dtype).removeprefix("torch.")
        _measure(sides, name, 64, 1, 1)  # warm up
        for context in contexts:
            for batch in BATCHES:
                repetitions = {128: 7, 1_500: 4}.get(context, 3 if batch == 1 else 1)
                rows += _measure(sides, name, context, batch, repetitions)
        sides.scheduler.close()
        sides.manager.close()
    return rows
