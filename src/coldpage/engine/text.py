"""From messages and texts to token ids, and from the tokens of an answer back to text as they
come."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from coldpage.engine.messages import ChatMessage
from coldpage.engine.model.model import LoadedModel
from coldpage.errors import ModelError
from coldpage.types import Int32Array

__all__ = [
    "IncrementalText",
    "encode_chat",
    "encode_text",
    "render_chat",
    "tokenizer_fingerprint",
]

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
# Tokens after which text that is still no complete character is given out as it is. A character has
# at most four byte tokens, but tokens may straddle characters.
_MAX_PENDING_TOKENS: Final = 16
# Tokens of the prompt that are decoded with the first ones of the answer: a tokenizer that drops
# the space at the start of a text must see that this is not the start.
_PROMPT_TAIL_TOKENS: Final = 4


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the vocabulary and of the special tokens: with equal ones, equal ids mean equal
    text.
    """
    said = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_tokens)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def render_chat(model: LoadedModel, messages: Sequence[ChatMessage]) -> str:
    """The text that the model's chat template makes of ``messages``, up to where the answer begins.
    Raises ModelError where there is no template or it refuses the messages."""
    tokenizer: Any = model.tokenizer
    if not tokenizer.chat_template:
        raise ModelError(
            f"the model {model.name} has no chat template, "
            "so it takes plain text only (/v1/completions)"
        )
    turns = [{"role": m.role, "content": m.content} for m in messages]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the chat template of {model.name} refuses these messages: {error}"
        ) from error
    return text


def encode_chat(model: LoadedModel, messages: Sequence[ChatMessage]) -> Int32Array:
    """The token ids of ``render_chat``. Raises ModelError as it does."""
    # The template has written the special tokens itself.
    return _encode(model.tokenizer, render_chat(model, messages), add_special_tokens=False)


def encode_text(model: LoadedModel, text: str) -> Int32Array:
    """The token ids of a plain prompt, with what the tokenizer puts before a text (a start token,
    often)."""
    return _encode(model.tokenizer, text, add_special_tokens=True)


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool
) -> Int32Array:
    # verbose=False: prompts over the context are refused by the engine, in a sentence of its own.
    ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int32)


class IncrementalText:
    """The text of one answer while its tokens arrive.

    What is given out is never taken back: it holds no part of a character that is not complete, and
    no beginning of a stop string. The work per token does not grow with the answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """``prompt_tail``: the last tokens of the prompt, so that the answer's first word keeps its
        space."""
        self._tokenizer: Any = tokenizer
        self._stop = tuple(s for s in stop if s)
        # Decoded together: the tokens of the last complete piece (it is context only), then the
        # pending ones.
        self._window = [int(token) for token in prompt_tail][-_PROMPT_TAIL_TOKENS:]
        self._num_context = len(self._window)
        self._num_given = len(self._decode())  # characters of the window's text that are given out
        self._held = ""
        self._hit_stop = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that ``token_id`` makes certain, and whether a stop string has ended the answer.

        At a stop the text ends before it; what comes after is dropped, as are later tokens.
        """
        if self._hit_stop:
            return "", True
        self._window.append(int(token_id))
        text = self._decode()
        complete = text.rstrip(_REPLACEMENT)
        if len(complete) == len(text):
            self._window = self._window[self._num_context :]
            new = text[self._num_given :]
            self._num_context, self._num_given = len(self._window), len(self._decode())
        elif len(self._window) - self._num_context >= _MAX_PENDING_TOKENS:
            new = text[self._num_given :]
            self._window, self._num_context, self._num_given = [], 0, 0
        else:
            new = complete[self._num_given :]
            self._num_given = max(self._num_given, len(complete))
        return self._release(new), self._hit_stop

    def flush(self) -> str:
        """The rest, at the end of the answer: nothing more is held back."""
        if self._hit_stop:
            return ""
        text = self._release(self._decode()[self._num_given :])
        rest, self._held, self._window, self._num_given = self._held, "", [], 0
        return text + rest

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(
            self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _release(self, new: str) -> str:
        self._held += new
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            text, self._held, self._hit_stop = self._held[: min(found)], "", True
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        split = len(self._held) - keep
        text, self._held = self._held[:split], self._held[split:]
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are a beginning of ``stop``."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
