"""Real text that every Python has: the interpreter's own documentation topics."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from typing import Any

import numpy as np

from coldpage.errors import ModelError
from coldpage.types import Int32Array

__all__ = ["documentation_text", "documentation_tokens"]


def documentation_text() -> str:
    """All topics, one after another, in the order of their names."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def documentation_tokens(tokenizer: Any, lengths: Sequence[int]) -> list[Int32Array]:
    """Consecutive pieces of the text with these numbers of tokens. Raises ModelError when the text
    is too short for them.
    """
    text = documentation_text()
    # A token of English text is rarely shorter than two characters: no need to tokenize all of it.
    ids = np.array(tokenizer(text[: 8 * sum(lengths)])["input_ids"], np.int32)
    if ids.size < sum(lengths):
        raise ModelError(
            f"the documentation has {ids.size:,} tokens and {sum(lengths):,} are asked for: "
            "use fewer or shorter conversations"
        )
    return np.split(ids, np.cumsum(lengths))[:-1]
