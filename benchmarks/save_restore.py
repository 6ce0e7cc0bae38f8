"""Saving and restoring a session against copying its file, and the first token after a restart
against computing the prompt again.

python -m benchmarks save_restore
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.kv import TOKENS_PER_BLOCK, make_manager, write_cache
from benchmarks.resume import TURN_TOKENS, answer
from benchmarks.rows import Row, scratch_directory, timed_ms
from coldpage import DeviceTierConfig, DiskTierConfig
from coldpage.engine.assembly import block_bytes, build_manager
from coldpage.engine.forward.runner import ModelRunner
from coldpage.engine.model.model import LoadedModel, load_model
from coldpage.engine.model.texts import documentation_tokens
from coldpage.engine.proof.conversations import serve_tokens
from coldpage.engine.scheduler import Scheduler
from coldpage.snapshot import state_read, state_write

__all__ = ["run"]

REPETITIONS = 5
_COPY_BYTES = 8 << 20


def _copy(source: Path, target: Path) -> None:
    """A copy that survives a power cut, as a saved session does."""
    with open(source, "rb", buffering=0) as src, open(target, "wb", buffering=0) as dst:
        while data := src.read(_COPY_BYTES):
            dst.write(data)
        os.fsync(dst.fileno())


def _read(path: Path, buffer: np.ndarray) -> None:
    with open(path, "rb", buffering=0) as file:
        view = memoryview(buffer)
        while num_bytes := file.readinto(view):
            view = view[num_bytes:]


def _alternating(
    ours: Callable[[], object], rival: Callable[[], object], reset: Callable[[], object]
) -> tuple[list[float], list[float]]:
    samples: tuple[list[float], list[float]] = [], []
    for repetition in range(REPETITIONS + 1):
        for work, times in zip((ours, rival), samples, strict=True):
            reset()
            took_ms = timed_ms(work)
            if repetition:  # the first of each warms up
                times.append(took_ms)
    return samples


def _files(num_tokens: int, directory: Path) -> list[Row]:
    num_blocks = num_tokens // TOKENS_PER_BLOCK
    path, copy = directory / "saved", directory / "copy"
    with make_manager(num_blocks + 2) as manager:
        cache = write_cache(manager, num_blocks, 1)
        num_bytes = state_write(manager, [cache], path)
        assert num_bytes is not None

        def forget() -> None:
            for file in (directory / "again", copy):
                file.unlink(missing_ok=True)

        save, plain_copy = _alternating(
            lambda: state_write(manager, [cache], directory / "again"),
            lambda: _copy(path, copy),
            forget,
        )
        cache.close()
    buffer = np.ones(num_bytes, np.uint8)
    # Another manager, which has nothing of it: each time what came back is dropped again.
    with make_manager(num_blocks + 2) as fresh:

        def restore() -> None:
            (cache,) = state_read(fresh, path)
            assert cache.history_length == num_tokens
            cache.plan_drop()
            cache.close()

        back, plain_read = _alternating(restore, lambda: _read(path, buffer), lambda: None)
    config = f"{num_tokens:,} tokens, {num_bytes / 2**20:.0f} MiB"
    mb = num_bytes / 1e6
    return [
        Row(
            "save a session",
            config,
            "plain copy, synced",
            save,
            plain_copy,
            ">= 0.5",
            notes={"mb_per_s": round(mb / np.median(save) * 1e3)},
        ),
        Row(
            "restore a session",
            config,
            "plain read",
            back,
            plain_read,
            ">= 0.15",
            notes={"mb_per_s": round(mb / np.median(back) * 1e3)},
        ),
    ]


def _restarts(model: LoadedModel, num_tokens: int, repetitions: int) -> Row:
    """Each sample is another manager on the same directory, opened after the one before closed."""
    longest = num_tokens + TURN_TOKENS
    (tokens,) = documentation_tokens(model.tokenizer, [longest])
    num_bytes = (-(-longest // TOKENS_PER_BLOCK) + 2) * block_bytes(model, TOKENS_PER_BLOCK)
    hot = DeviceTierConfig(int(1.1 * num_bytes))
    ours, recomputed = [], []
    with scratch_directory() as directory:
        disk = DiskTierConfig(directory, (repetitions + 3) * num_bytes, write_behind=True)
        for repetition in range(repetitions + 1):
            with build_manager(model, [hot, disk], TOKENS_PER_BLOCK) as manager:
                runner = ModelRunner(model, manager)
                scheduler = Scheduler(runner, manager, serve_tokens(model, manager))
                if repetition:
                    usage = answer(scheduler, manager, tokens, "")
                    cached = usage.cached_tokens_by_tier["disk"]
                    assert cached == num_tokens // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK, usage
                    ours.append(usage.time_to_first_token_ms)
                    alone = answer(scheduler, manager, tokens, f"{repetition} {time.time()}")
                    recomputed.append(alone.time_to_first_token_ms)
                else:
                    answer(scheduler, manager, tokens[:num_tokens], "")
                scheduler.close()
                if not repetition:
                    assert manager.flush(60.0) == 0
    config = f"{num_tokens:,} tokens from disk, {TURN_TOKENS} new, bfloat16"
    return Row("first token after a restart", config, "recomputed", ours, recomputed, ">= 15")


def run(is_quick: bool) -> list[Row]:
    """On the bundled model and its geometry."""
    num_tokens = 1_504 if is_quick else 6_000
    with scratch_directory() as directory:
        rows = _files(num_tokens, Path(directory))
    model = load_model(None, torch.bfloat16, print)
    return [*rows, _restarts(model, num_tokens, 2 if is_quick else 3)]
