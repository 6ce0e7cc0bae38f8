"""Facts early in a long context that are asked for at its end, where nothing else says them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from coldpage.bench.quality.texts import prose_paragraphs
from coldpage.errors import ConfigurationError
from coldpage.types import Int32Array

__all__ = ["MAX_ANSWER_TOKENS", "MAX_NEEDLES", "MAX_QUESTION_TOKENS", "Needle", "make_needles"]

MAX_ANSWER_TOKENS: Final = 24
# What follows the context: the rest of its last block, the question, and what a template adds.
MAX_QUESTION_TOKENS: Final = 128

_CODE: Final = ("The access code of {} is {}.", "What is the access code of {}?")
_NUMBER: Final = ("The secret number of {} is {}.", "What is the secret number of {}?")
_FACTS: Final = (
    (_CODE, "the harbour office", "48213"),
    (_NUMBER, "Anna Lindholm", "70956"),
    (_CODE, "the old library", "90574"),
    (_NUMBER, "Peter Okafor", "25831"),
    (_CODE, "the north gate", "31862"),
    (_NUMBER, "Maria Castillo", "64097"),
    (_CODE, "the music school", "76409"),
    (_NUMBER, "John Whitfield", "18342"),
)
MAX_NEEDLES: Final = len(_FACTS)
# Where in the context the facts lie: the first is followed by nine times as much other text.
_FIRST_DEPTH: Final = 0.1
_LAST_DEPTH: Final = 0.45


@dataclass(frozen=True, slots=True, eq=False)
class Needle:
    """A context of whole blocks that holds the fact, the question behind it, and the answer."""

    context: Int32Array
    question: Int32Array
    answer: str

    def is_in(self, text: str) -> bool:
        """Whether ``text`` gives the answer."""
        return self.answer in text


def make_needles(
    tokenizer: Any, num_needles: int, num_tokens: int, tokens_per_block: int
) -> tuple[Needle, ...]:
    """Contexts of up to ``num_tokens`` of the committed prose, each from another place on and with
    its fact at another depth. Models with a chat template are asked in it.

    Raises ConfigurationError for a context with no room.
    """
    paragraphs = prose_paragraphs()
    sizes = [len(_ids(tokenizer, text + "\n\n")) for text in paragraphs]
    needles = []
    for index, ((fact, question), who, number) in enumerate(_FACTS[:num_needles]):
        depth = _FIRST_DEPTH + (_LAST_DEPTH - _FIRST_DEPTH) * index / max(1, num_needles - 1)
        first = index * len(paragraphs) // MAX_NEEDLES
        order = [*range(first, len(paragraphs)), *range(first)]
        haystack = _haystack([(paragraphs[i], sizes[i]) for i in order], num_tokens)
        if not haystack:
            raise _no_room(num_tokens, tokens_per_block)
        at = int(depth * len(haystack))
        said = fact.format(who, number)
        body = "\n\n".join([*haystack[:at], said[0].upper() + said[1:], *haystack[at:]])
        needles.append(
            _needle(tokenizer, body, question.format(who), number, num_tokens, tokens_per_block)
        )
    return tuple(needles)


def _haystack(paragraphs: Sequence[tuple[str, int]], num_tokens: int) -> list[str]:
    """Paragraphs until there is no room; what does not fit is left out."""
    chosen = []
    room = num_tokens - MAX_QUESTION_TOKENS
    for text, size in paragraphs:
        if size <= room:
            chosen.append(text)
            room -= size
    return chosen


def _needle(
    tokenizer: Any, body: str, question: str, answer: str, num_tokens: int, tokens_per_block: int
) -> Needle:
    has_template = bool(tokenizer.chat_template)
    if has_template:
        message = {"role": "user", "content": f"{body}\n\n{question}"}
        text: str = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
    else:
        text = f"{body}\n\nQuestion: {question}\nAnswer:"
    ids = _ids(tokenizer, text, has_start=not has_template)
    # Up to the question the text is the same, but its last token may be cut in another way.
    before = _ids(tokenizer, text[: text.rindex(question)], has_start=not has_template)
    num_context = (len(before) - 1) // tokens_per_block * tokens_per_block
    assert np.array_equal(ids[:num_context], before[:num_context])
    if not 0 < num_context <= num_tokens or len(ids) - num_context > MAX_QUESTION_TOKENS:
        raise _no_room(num_tokens, tokens_per_block)
    return Needle(ids[:num_context], ids[num_context:], answer)


def _no_room(num_tokens: int, tokens_per_block: int) -> ConfigurationError:
    return ConfigurationError(
        f"a context of {num_tokens:,} tokens in blocks of {tokens_per_block} has no room for a "
        "fact among other text and its question: use a longer one, or no needles"
    )


def _ids(tokenizer: Any, text: str, *, has_start: bool = False) -> Int32Array:
    return np.array(tokenizer(text, add_special_tokens=has_start)["input_ids"], np.int32)
