"""How an answer is put into JSON: one shape for chats, one for completions."""

from __future__ import annotations

import time
from typing import Protocol

from pydantic import BaseModel

from coldpage.engine.messages import Usage
from coldpage.server.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    ChunkDelta,
    Completion,
    CompletionChoice,
    PromptTokensDetails,
    TokensByTier,
    UsageReport,
)

__all__ = ["AnswerShape", "ChatShape", "CompletionShape", "usage_report"]


def usage_report(usage: Usage) -> UsageReport:
    """Token counts as OpenAI names them, and the reused ones by tier."""
    tokens = usage.cached_tokens_by_tier
    by_tier = TokensByTier(
        hot=tokens.get("hot", 0), host=tokens.get("host", 0), disk=tokens.get("disk", 0)
    )
    return UsageReport(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(tokens.values()), cached_tokens_by_tier=by_tier
        ),
    )


class AnswerShape(Protocol):
    """Makes the bodies of one answer. Fields that are not set are left out of the JSON."""

    def first(self) -> BaseModel | None:
        """The chunk before any text, if there is one."""

    def text(self, text: str) -> BaseModel:
        """A chunk of text."""

    def last(self, finish_reason: str) -> BaseModel:
        """The chunk after all text."""

    def usage(self, usage: Usage) -> BaseModel:
        """The chunk of token counts, which has no choice."""

    def whole(self, text: str, finish_reason: str, usage: Usage) -> BaseModel:
        """The answer that is not streamed."""


class ChatShape:
    """``chat.completion`` and its chunks; with ``include_usage`` all but one have it null."""

    def __init__(self, answer_id: str, model: str, *, include_usage: bool) -> None:
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage

    def _chunk(self, delta: ChunkDelta, finish_reason: str | None) -> ChatChunk:
        choice = ChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=finish_reason)
        return self._event([choice], None)

    def _event(self, choices: list[ChunkChoice], usage: UsageReport | None) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if self._include_usage:
            chunk.usage = usage
        return chunk

    def first(self) -> BaseModel | None:
        """Names the role."""
        return self._chunk(ChunkDelta(role="assistant", content=""), None)

    def text(self, text: str) -> BaseModel:
        """A chunk of text."""
        return self._chunk(ChunkDelta(content=text), None)

    def last(self, finish_reason: str) -> BaseModel:
        """An empty delta with the reason."""
        return self._chunk(ChunkDelta(), finish_reason)

    def usage(self, usage: Usage) -> BaseModel:
        """The chunk of token counts."""
        return self._event([], usage_report(usage))

    def whole(self, text: str, finish_reason: str, usage: Usage) -> BaseModel:
        """The answer that is not streamed."""
        message = AssistantMessage(role="assistant", content=text, refusal=None)
        choice = ChatChoice(index=0, message=message, logprobs=None, finish_reason=finish_reason)
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=usage_report(usage),
        )


class CompletionShape:
    """``text_completion``, whole or in chunks."""

    def __init__(self, answer_id: str, model: str, *, include_usage: bool) -> None:
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage

    def _chunk(self, text: str, finish_reason: str | None) -> Completion:
        choice = CompletionChoice(index=0, text=text, logprobs=None, finish_reason=finish_reason)
        return self._event([choice], None)

    def _event(self, choices: list[CompletionChoice], usage: UsageReport | None) -> Completion:
        event = Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if self._include_usage:
            event.usage = usage
        return event

    def first(self) -> BaseModel | None:
        """Nothing: there is no role to name."""
        return None

    def text(self, text: str) -> BaseModel:
        """A chunk of text."""
        return self._chunk(text, None)

    def last(self, finish_reason: str) -> BaseModel:
        """An empty text with the reason."""
        return self._chunk("", finish_reason)

    def usage(self, usage: Usage) -> BaseModel:
        """The chunk of token counts."""
        return self._event([], usage_report(usage))

    def whole(self, text: str, finish_reason: str, usage: Usage) -> BaseModel:
        """The answer that is not streamed."""
        answer = self._chunk(text, finish_reason)
        answer.usage = usage_report(usage)
        return answer
