"""Attention of a decode step on the GPU, over and over: what moving pages must not slow down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from coldpage.device.base import Event

__all__ = ["DecodeLoad"]

_NUM_SEQUENCES, _NUM_TOKENS = 64, 8192
_NUM_KV_HEADS, _QUERIES_PER_HEAD, _HEAD_DIM = 8, 4, 128
_TARGET_MS = 150.0
# Rounds of moves enqueued ahead, so that the streams never run dry while the host looks away.
_MAX_ROUNDS = 3


class DecodeLoad:
    """64 sequences of 8,192 tokens, 8 KV heads of 128, bfloat16: 2 GiB read a step. The queries of
    one KV head are rows of one matrix, so that K and V are read once.
    """

    description = f"{_NUM_SEQUENCES} x {_NUM_TOKENS:,} tokens, {_NUM_KV_HEADS} KV heads"

    def __init__(self, device_name: str) -> None:
        def tensor(num_tokens: int) -> torch.Tensor:
            shape = (_NUM_SEQUENCES, _NUM_KV_HEADS, num_tokens, _HEAD_DIM)
            return torch.empty(shape, dtype=torch.bfloat16, device=device_name).normal_()

        self._query = tensor(_QUERIES_PER_HEAD)
        self._key, self._value = tensor(_NUM_TOKENS), tensor(_NUM_TOKENS)
        self._device = torch.device(device_name)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.num_steps = 5
        self._run(None)
        self.num_steps = max(5, round(_TARGET_MS * self.num_steps / self._run(None)))

    @property
    def num_bytes(self) -> int:
        """Read by each step."""
        return 2 * self._key.numel() * self._key.element_size()

    def alone_ms(self) -> float:
        """How long the steps take."""
        return self._run(None)

    def beside_ms(self, start_round: Callable[[], tuple[Event, ...]]) -> tuple[float, int]:
        """How long the steps take while rounds of moves are in flight, and how many rounds ended
        meanwhile.
        """
        self._num_rounds = 0
        return self._run(start_round), self._num_rounds

    def _run(self, start_round: Callable[[], tuple[Event, ...]] | None) -> float:
        first, last = _timing_event(), _timing_event()
        torch.cuda.synchronize(self._device)
        rounds: deque[tuple[Event, ...]] = deque()
        if start_round is not None:
            rounds.append(start_round())
        with torch.cuda.stream(self._stream):
            first.record(self._stream)
            for _ in range(self.num_steps):
                F.scaled_dot_product_attention(self._query, self._key, self._value)
            last.record(self._stream)
        while start_round is not None and not last.query():
            while len(rounds) < _MAX_ROUNDS:
                rounds.append(start_round())
            if all(event.is_done() for event in rounds[0]):
                rounds.popleft()
                self._num_rounds += 1
        last.synchronize()
        for events in rounds:
            for event in events:
                event.synchronize()
        return float(first.elapsed_time(last))


def _timing_event() -> Any:  # torch gives its events no types
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
