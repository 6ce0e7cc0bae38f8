"""What other conversations feel of a slow disk: their p99 time a token with every read delayed by
200 ms.

    python -m benchmarks slow_disk
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.kv import evict_all
from benchmarks.rows import Row, scratch_directory
from coldpage import DeviceTierConfig, DiskTierConfig
from coldpage.device.file import BlockFile
from coldpage.engine.assembly import block_bytes, build_manager
from coldpage.engine.forward.runner import ModelRunner
from coldpage.engine.messages import Finished, SamplingParams
from coldpage.engine.model.model import LoadedModel, load_model
from coldpage.engine.model.texts import documentation_tokens
from coldpage.engine.proof.conversations import serve_tokens
from coldpage.engine.requests import GenerationRequest
from coldpage.engine.scheduler import Scheduler

__all__ = ["run"]

TOKENS_PER_BLOCK = 16
READ_DELAY_S = 0.2
CONTEXT_TOKENS = 320  # of each conversation
NUM_COLD = 4
NUM_DECODING = 2
DECODED_TOKENS = 150
ROUNDS = 3


@contextmanager
def _slow_reads(delay_s: float) -> Iterator[None]:
    """Every read of a disk tier waits first."""
    read_some = BlockFile._read_some

    def slow(self: BlockFile, buffers: list[memoryview], offset: int) -> int:
        time.sleep(delay_s)
        return read_some(self, buffers, offset)

    BlockFile._read_some = slow  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        BlockFile._read_some = read_some  # type: ignore[method-assign]


def _request(name: str, prompt: np.ndarray, num_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, prompt, sampling, time.monotonic())


def _token_times_ms(model: LoadedModel, delay_s: float) -> list[float]:
    """Milliseconds between tokens of conversations that decode while others come back from disk."""
    pieces = documentation_tokens(
        model.tokenizer, [CONTEXT_TOKENS + 32] * NUM_COLD + [64] * NUM_DECODING
    )
    per_block = block_bytes(model, TOKENS_PER_BLOCK)
    hot_blocks = (NUM_COLD + NUM_DECODING + 1) * (CONTEXT_TOKENS + 200) // TOKENS_PER_BLOCK
    with scratch_directory() as directory, _slow_reads(delay_s):
        tiers = [
            DeviceTierConfig(hot_blocks * per_block),
            DiskTierConfig(directory, 4 * hot_blocks * per_block),
        ]
        with build_manager(model, tiers, TOKENS_PER_BLOCK) as manager:
            scheduler = Scheduler(
                ModelRunner(model, manager), manager, serve_tokens(model, manager)
            )
            for index in range(NUM_COLD):
                scheduler.submit(_request(f"cold {index}", pieces[index][:CONTEXT_TOKENS], 1))
            _run_all(scheduler, manager.wait_for_progress, NUM_COLD)
            evict_all(manager)
            for index in range(NUM_DECODING):
                scheduler.submit(
                    _request(f"decoding {index}", pieces[NUM_COLD + index], DECODED_TOKENS)
                )
            for _ in range(10):
                scheduler.step()
            # One comes back at a time, spread over the decoding, in both runs at the same tokens.
            gaps, last, num_steps = [], time.perf_counter(), 0
            num_left = NUM_COLD + NUM_DECODING
            while num_left:
                if num_steps % 30 == 0 and num_steps < 30 * NUM_COLD:
                    index = num_steps // 30
                    scheduler.submit(_request(f"back {index}", pieces[index], 1))
                result = scheduler.step()
                num_left -= sum(isinstance(reply, Finished) for reply in result.replies)
                if any(name.startswith("decoding 0") for name, _ in result.tokens):
                    now = time.perf_counter()
                    gaps.append(1e3 * (now - last))
                    last = now
                    num_steps += 1
                elif not result.tokens:
                    manager.wait_for_progress(0.02)
            scheduler.close()
    return gaps[1:]


def _run_all(scheduler: Scheduler, wait: object, num_requests: int) -> None:
    while num_requests:
        num_requests -= sum(isinstance(reply, Finished) for reply in scheduler.step().replies)


def run(is_quick: bool) -> list[Row]:
    """p99 of both, the rounds alternating."""
    model = load_model(None, torch.bfloat16, print)
    slow, fast = [], []
    for _ in range(1 if is_quick else ROUNDS):
        fast.append(float(np.percentile(_token_times_ms(model, 0.0), 99)))
        slow.append(float(np.percentile(_token_times_ms(model, READ_DELAY_S), 99)))
    config = f"p99 of {DECODED_TOKENS} tokens beside {NUM_COLD} conversations from disk"
    return [Row("reads 200 ms late", config, "no delay", slow, fast, "<= 1.1", False)]
