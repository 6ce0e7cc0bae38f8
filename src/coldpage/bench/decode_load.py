"""Attention of a decode step on the GPU, over and over: what moving pages must not slow down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from coldpage.bench.attention.decode import DTYPE, DecodeCase
from coldpage.bench.attention.layers import Heads, PagedLayers
from coldpage.device.base import Event
from coldpage.engine.attention.attention_choice import choose_attention
from coldpage.engine.attention.paged_attention import Scoring, Scratch
from coldpage.engine.attention.step_plan import ItemSpan
from coldpage.engine.forward.upload import to_device
from coldpage.engine.model.hot_types import HotTypes

__all__ = ["DecodeLoad"]

_CASE = DecodeCase(64, 8192, Heads(32, 8, 128))
_TYPES = HotTypes.plain(DTYPE)
_NUM_LAYERS = 2  # that take turns, so that none is found in the cache
_TARGET_MS = 150.0
# Rounds of moves enqueued ahead, so that the streams never run dry while the host looks away.
_MAX_ROUNDS = 3


class DecodeLoad:
    """A layer of 64 sequences of 8,192 tokens over scattered pages: 2 GiB read a step."""

    description = f"{_CASE}, bf16 pages"

    def __init__(self, device_name: str) -> None:
        self._device = place = torch.device(device_name)
        pool = torch.empty(_NUM_LAYERS * self.num_bytes, dtype=torch.uint8, device=place)
        paged = PagedLayers.make(pool, _CASE.heads, _TYPES, _CASE.num_blocks)
        num_heads, _, head_dim = _CASE.heads
        self._query = torch.randn(_CASE.batch, num_heads, head_dim, device=place, dtype=DTYPE)
        self._attention = choose_attention(place, DTYPE, head_dim, Scratch(DTYPE, place))
        tables = paged.slots.reshape(_CASE.batch, -1)
        items = [ItemSpan(row, _CASE.num_tokens - 1, 1, table) for row, table in enumerate(tables)]
        self._plan = to_device(self._attention.plan(paged.layers[0], items), place)
        self._layers = paged.layers
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.num_steps = 5
        self._run(None)
        self.num_steps = max(5, round(_TARGET_MS * self.num_steps / self._run(None)))

    @property
    def num_bytes(self) -> int:
        """Read by each step."""
        return _CASE.read_bytes(_TYPES)

    def alone_ms(self) -> float:
        """How long the steps take."""
        return self._run(None)

    def beside_ms(self, start_round: Callable[[], tuple[Event, ...]]) -> tuple[float, int]:
        """How long the steps take while rounds of moves are in flight, and how many rounds ended
        meanwhile.
        """
        self._num_rounds = 0
        return self._run(start_round), self._num_rounds

    def compare(
        self, start_round: Callable[[], tuple[Event, ...]], round_bytes: int, num_repeats: int
    ) -> tuple[list[float], list[float], list[float]]:
        """Samples: the steps alone and beside the moves, in ms, and what was moved in GB/s; the
        first of each warms up and does not count.
        """
        alone, beside, speeds = [], [], []
        for repeat in range(num_repeats + 1):
            alone_ms = self.alone_ms()
            beside_ms, num_rounds = self.beside_ms(start_round)
            if repeat:
                alone.append(alone_ms)
                beside.append(beside_ms)
                speeds.append(num_rounds * round_bytes / 1e6 / beside_ms)
        return alone, beside, speeds

    def _run(self, start_round: Callable[[], tuple[Event, ...]] | None) -> float:
        first, last = _timing_event(), _timing_event()
        torch.cuda.synchronize(self._device)
        rounds: deque[tuple[Event, ...]] = deque()
        if start_round is not None:
            rounds.append(start_round())
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            first.record(self._stream)
            for step in range(self.num_steps):
                layer = self._layers[step % _NUM_LAYERS]
                self._attention.attend_decode(layer, self._plan, self._query, Scoring(None, None))
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
