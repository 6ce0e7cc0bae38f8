"""What goes into a step and what comes out of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from coldpage.engine.forward.runner import StepItem
from coldpage.engine.messages import Delta, Failed, Finished
from coldpage.engine.planning import ItemPurpose
from coldpage.engine.requests import LiveRequest, TextStream
from coldpage.types import BlockOrdinal, HalfOpenRange, Int32Array

if TYPE_CHECKING:
    from coldpage.sequence import KVCache

__all__ = [
    "PlannedItem",
    "ScheduledItem",
    "ServedModel",
    "StepObserver",
    "StepResult",
    "StepRunner",
    "StepState",
]


class StepRunner(Protocol):
    """What a scheduler needs of a model runner. ``counters`` only grow, and are reported."""

    @property
    def counters(self) -> Mapping[str, int]:
        """How steps were run, by name."""
        ...

    def forward(self, items: Sequence[StepItem]) -> list[torch.Tensor | None]:
        """Write the items' pages; f32 logits [rows, vocab] for each item that wants them."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a scheduler needs to know of the model. ``tier_names`` go from the hot level to the
    coldest.
    """

    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    has_sliding_window: bool
    tier_names: tuple[str, ...]
    new_text: Callable[[tuple[str, ...], Int32Array], TextStream]  # from stop strings, prompt


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """One item of a step, and whose it is."""

    request_id: str
    purpose: ItemPurpose
    item: StepItem


class StepObserver(Protocol):
    """Sees every step; what it is given may be read until the call returns, tensors as long as it
    likes.
    """

    def on_step(
        self, items: Sequence[ScheduledItem], outputs: Sequence[torch.Tensor | None]
    ) -> None:
        """The items were computed and nothing of them is committed yet."""
        ...

    def on_restored(self, request_id: str, kv_cache: KVCache) -> None:
        """A resumed cache's pages are hot and ready; its ``missing_blocks()`` are blank."""
        ...


class StepState(enum.Enum):
    """What to do before the next step."""

    WORKED = "worked"  # step again at once
    BLOCKED = "blocked"  # wait for the manager's progress: requests are there, none can be computed
    IDLE = "idle"  # no requests


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. ``tokens`` are the sampled (request id, token id), end tokens included."""

    state: StepState
    num_batched_tokens: int
    tokens: tuple[tuple[str, int], ...]
    replies: tuple[Delta | Finished | Failed, ...]


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """Positions of one request that the step will compute, and the lost blocks they fill."""

    live: LiveRequest
    purpose: ItemPurpose
    positions: HalfOpenRange
    ordinals: tuple[BlockOrdinal, ...] = ()
