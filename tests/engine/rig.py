"""A scheduler on a small cache and the pattern runner, driven by hand."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from coldpage.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManagerConfig,
    ReuseScope,
)
from coldpage.engine.admission import EngineLimits
from coldpage.engine.messages import Delta, Failed, Finished, SamplingParams
from coldpage.engine.requests import GenerationRequest
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.steps import ScheduledItem, ServedModel, StepResult, StepState
from coldpage.types import Int32Array, LayerId
from tests.engine.faulty_manager import FaultyManager
from tests.engine.pattern_runner import (
    ENTRY_BYTES,
    ROLE,
    VOCAB,
    WINDOW,
    PatternRunner,
    expected_tokens,
)
from tests.property.setups import disk_slot_bytes

BLOCK = 4
NUM_DISK_BLOCKS = 500
MAX_STEPS = 2_000


class SpelledText:
    """Text in which token 5 reads ``[5]``; the end of each piece is held back."""

    def __init__(self, stop: tuple[str, ...], prompt: Int32Array) -> None:
        self._stop = stop
        self._held = ""

    def push(self, token_id: int) -> tuple[str, bool]:
        text = self._held + f"[{token_id}]"
        ends = [text.index(stop) for stop in self._stop if stop in text]
        if ends:
            return text[: min(ends)], True
        self._held = text[-1:]
        return text[:-1], False

    def flush(self) -> str:
        return self._held


class Recorder:
    def __init__(self) -> None:
        self.steps: list[list[ScheduledItem]] = []
        self.restored: list[tuple[str, list[int]]] = []

    def on_step(
        self, items: Sequence[ScheduledItem], outputs: Sequence[torch.Tensor | None]
    ) -> None:
        assert len(items) == len(outputs)
        self.steps.append(list(items))

    def on_restored(self, request_id: str, kv_cache: Any) -> None:
        self.restored.append((request_id, list(kv_cache.missing_blocks())))


class Rig:
    def __init__(
        self,
        directory: str,
        num_hot_blocks: int = 40,
        *,
        num_host_blocks: int = 500,  # none: the disk is the first cold level
        limits: EngineLimits | None = None,
        context_tokens: int = 10_000,
        has_sliding_window: bool = False,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        block_bytes = BLOCK * ENTRY_BYTES
        num_layers = 2 if has_sliding_window else 1
        hot_bytes = num_hot_blocks * num_layers * block_bytes
        tiers: list[CacheTierConfig] = [DeviceTierConfig(hot_bytes)]
        if num_host_blocks:
            tiers.append(HostTierConfig(num_host_blocks * block_bytes))
        tiers.append(
            DiskTierConfig(directory, NUM_DISK_BLOCKS * disk_slot_bytes(block_bytes, BLOCK))
        )
        windows = [None, WINDOW] if has_sliding_window else [None]
        layers = tuple(
            AttentionLayerConfig(LayerId(index), (BufferConfig(ROLE, block_bytes),), window)
            for index, window in enumerate(windows)
        )
        self.manager = FaultyManager(
            KVCacheManagerConfig(BLOCK, tuple(tiers), layers, model_fingerprint=b"model")
        )
        self.runner = PatternRunner(self.manager)
        model = ServedModel(
            context_tokens=context_tokens,
            vocab_size=VOCAB,
            eos_token_ids=eos,
            has_sliding_window=has_sliding_window,
            tier_names=tuple(level.name for level in self.manager.stats().levels),
            new_text=SpelledText,
        )
        self.scheduler = Scheduler(self.runner, self.manager, model, limits)
        self.recorder = Recorder()
        self.scheduler.observer = self.recorder
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.text: dict[str, str] = defaultdict(str)
        self.ends: dict[str, Finished | Failed] = {}
        self.prompts: dict[str, list[int]] = {}
        self.max_running = 0

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        num_new: int | None = 8,
        *,
        session: str | None = None,
        salt: str = "",
        **sampling: Any,
    ) -> None:
        self.prompts[request_id] = list(prompt)
        params = SamplingParams(max_tokens=num_new, **{"temperature": 0.0, **sampling})
        self.scheduler.submit(
            GenerationRequest(
                request_id,
                np.array(prompt, dtype=np.int32),
                params,
                time.monotonic(),
                session=session,
                scope=ReuseScope(salt=salt),
            )
        )

    def step(self) -> StepResult:
        result = self.scheduler.step()
        self.manager.check_integrity()
        self.max_running = max(self.max_running, self.scheduler.num_running)
        for request_id, token_id in result.tokens:
            self.tokens[request_id].append(token_id)
        for reply in result.replies:
            assert reply.request_id not in self.ends, "nothing follows the end of a request"
            if isinstance(reply, Delta):
                assert reply.text
                self.text[reply.request_id] += reply.text
            else:
                self.ends[reply.request_id] = reply
        return result

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            state = self.step().state
            if state is StepState.IDLE:
                return
            if state is StepState.BLOCKED:
                self.manager.wait_for_progress(0.01)
        raise AssertionError("requests hang")

    def run_until(self, condition: Callable[[], object]) -> None:
        """Step until something holds, with no transfer in flight between steps."""
        for _ in range(MAX_STEPS):
            if condition():
                return
            self.step()
            self.manager.finish_transfers()
        raise AssertionError("it never happened")

    def answer(
        self, request_id: str, prompt: Sequence[int], num_new: int = 8, **more: Any
    ) -> Finished:
        self.submit(request_id, prompt, num_new, **more)
        self.run()
        self.check_tokens(request_id)
        return self.finished(request_id)

    def finished(self, request_id: str) -> Finished:
        end = self.ends[request_id]
        assert isinstance(end, Finished), end
        return end

    def failed(self, request_id: str) -> Failed:
        end = self.ends[request_id]
        assert isinstance(end, Failed), end
        return end

    def check_tokens(self, *request_ids: str) -> None:
        """Greedy answers must be what the runner gives with no cache at all."""
        for request_id in request_ids or self.prompts:
            self.finished(request_id)
            got = self.tokens[request_id]
            assert got == expected_tokens(self.prompts[request_id], len(got)), request_id

    def purposes(self, request_id: str) -> Counter[str]:
        return Counter(
            one.purpose.value
            for step in self.recorder.steps
            for one in step
            if one.request_id == request_id
        )

    def close(self) -> None:
        """Every request and session lets go of what it held."""
        self.scheduler.close()
        self.manager.check_integrity()
        assert self.manager.open_caches == []
        assert self.manager.num_locked() == 0
        self.manager.close()
