"""Several conversations of real text that take turns: the load of the demonstration and of
verification.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from coldpage.engine.assembly import served_model
from coldpage.engine.messages import Failed, Finished, SamplingParams, Usage
from coldpage.engine.model.texts import documentation_tokens
from coldpage.engine.requests import GenerationRequest
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.steps import ServedModel, StepState
from coldpage.errors import ModelError
from coldpage.types import Int32Array

if TYPE_CHECKING:
    from coldpage.engine.model.model import LoadedModel
    from coldpage.manager import KVCacheManager

__all__ = [
    "ANSWER_TOKENS",
    "TURN_TOKENS",
    "Conversation",
    "Turn",
    "make_conversations",
    "play",
    "serve_tokens",
]

TURN_TOKENS: Final = 32  # what the user adds in each later turn
ANSWER_TOKENS: Final = 16
_PROGRESS_TIMEOUT_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn. ``prompt`` is the whole conversation up to it."""

    request_id: str
    prompt: Int32Array
    answer: Int32Array
    usage: Usage


@dataclass(slots=True)
class Conversation:
    """A conversation: what the user will say in each turn, and what has been said.

    ``session`` None: its cache is found by content alone.
    """

    name: str
    session: str | None
    user_tokens: list[Int32Array]
    turns: list[Turn] = field(default_factory=list)

    def next_prompt(self) -> Int32Array:
        """Everything said so far and the user's next words."""
        said = [part for turn in self.turns[-1:] for part in (turn.prompt, turn.answer)]
        return np.concatenate([*said, self.user_tokens[len(self.turns)]])

    def request_id(self, round_index: int) -> str:
        """The name of one turn's request."""
        return f"{self.name} turn {round_index + 1}"


def make_conversations(
    tokenizer: Any, num_conversations: int, first_tokens: int, num_rounds: int
) -> list[Conversation]:
    """Conversations whose first blocks differ; every other one has a session name."""
    num_later = TURN_TOKENS * (num_rounds - 1)
    pieces = documentation_tokens(tokenizer, [first_tokens + num_later] * num_conversations)
    conversations = []
    for index, piece in enumerate(pieces):
        cuts = [first_tokens + TURN_TOKENS * i for i in range(num_rounds - 1)]
        session = f"session {index}" if index % 2 == 0 else None
        name = f"conversation {index + 1}"
        conversations.append(Conversation(name, session, np.split(piece, cuts)))
    return conversations


class _NoText:
    """A text stream for callers that want tokens only."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """See TextStream."""
        return "", False

    def flush(self) -> str:
        """See TextStream."""
        return ""


def serve_tokens(model: LoadedModel, manager: KVCacheManager) -> ServedModel:
    """What a scheduler needs to know of ``model`` when nobody reads text."""
    return served_model(model, manager, lambda stop, prompt: _NoText())


def play(
    scheduler: Scheduler,
    manager: KVCacheManager,
    conversations: list[Conversation],
    on_turn: Callable[[], None],
) -> None:
    """Submit the next turn of every conversation at once and run until all have been answered
    greedily.

    Raises ModelError when one of them fails.
    """
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    open_turns: dict[str, tuple[Conversation, Int32Array]] = {}
    answers: dict[str, list[int]] = {}
    for conversation in conversations:
        request_id = conversation.request_id(len(conversation.turns))
        prompt = conversation.next_prompt()
        open_turns[request_id] = conversation, prompt
        answers[request_id] = []
        scheduler.submit(
            GenerationRequest(request_id, prompt, sampling, time.monotonic(), conversation.session)
        )
    while open_turns:
        result = scheduler.step()
        for request_id, token_id in result.tokens:
            answers[request_id].append(token_id)
        for reply in result.replies:
            if isinstance(reply, Failed):
                raise ModelError(f"{reply.request_id} failed: {reply.sentence}")
            if isinstance(reply, Finished):
                conversation, prompt = open_turns.pop(reply.request_id)
                answer = np.array(answers[reply.request_id], np.int32)
                conversation.turns.append(Turn(reply.request_id, prompt, answer, reply.usage))
                on_turn()
        if result.state is StepState.BLOCKED:
            manager.wait_for_progress(_PROGRESS_TIMEOUT_S)
