"""Real text to measure codecs on: committed prose and code, the interpreter's own, or any file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from coldpage.engine.model.texts import documentation_text
from coldpage.errors import ConfigurationError
from coldpage.types import Int32Array

__all__ = ["COMMITTED", "TEXT_SOURCES", "Text", "load_texts", "prose_paragraphs", "text_pieces"]

COMMITTED: Final = "committed"
_DIRECTORY: Final = Path(__file__).parent / "texts"
# Long modules of the standard library, enough for some places of several thousand tokens.
_STDLIB_MODULES: Final = ("argparse", "ast", "dataclasses", "statistics", "tarfile", "typing")


@dataclass(frozen=True, slots=True)
class Text:
    """``name`` says for people what it is."""

    name: str
    content: str


def _committed(name: str) -> Text:
    return Text(name, (_DIRECTORY / f"{name}.txt").read_text(encoding="utf-8"))


def _standard_library() -> str:
    parts = []
    for name in _STDLIB_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise ConfigurationError(
                f"this Python has no source of its module {name}: use another --text"
            )
        parts.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "\n\n".join(parts)


TEXT_SOURCES: Final[Mapping[str, Callable[[], tuple[Text, ...]]]] = {
    COMMITTED: lambda: (_committed("prose"), _committed("code")),
    "topics": lambda: (Text("topics", documentation_text()),),
    "stdlib": lambda: (Text("stdlib", _standard_library()),),
}
"""By name: this project's own words and code, the interpreter's documentation, its library."""


def load_texts(source: str) -> tuple[Text, ...]:
    """Of a name in TEXT_SOURCES, or of a file. Raises ConfigurationError where there is none."""
    if source in TEXT_SOURCES:
        return TEXT_SOURCES[source]()
    path = Path(source).expanduser()
    try:
        return (Text(path.name, path.read_text(encoding="utf-8")),)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"there is no text in {source!r} ({error}): use {', '.join(TEXT_SOURCES)} or a file "
            "in UTF-8"
        ) from error


def prose_paragraphs() -> list[str]:
    """Of the committed prose, without headings."""
    paragraphs = _committed("prose").content.split("\n\n")
    return [p.strip() for p in paragraphs if p.strip() and not p.startswith("#")]


def text_pieces(
    tokenizer: Any, text: Text, num_places: int, num_tokens: int
) -> tuple[Int32Array, ...]:
    """``num_places`` pieces of ``num_tokens`` each, spread evenly over the text, each with what the
    tokenizer begins a text with. They never overlap, and where they begin does not depend on how
    long they are.

    Raises ConfigurationError where the text is too short.
    """
    start = np.array(tokenizer("")["input_ids"], np.int32)
    ids = np.array(tokenizer(text.content, add_special_tokens=False)["input_ids"], np.int32)
    distance = ids.size // num_places
    num_own = num_tokens - start.size
    if distance < num_own:
        raise ConfigurationError(
            f"the text {text.name} has {ids.size:,} tokens and {num_places} places of "
            f"{num_own:,} are asked for: use fewer places, a shorter context or a longer text"
        )
    return tuple(
        np.concatenate([start, ids[place * distance :][:num_own]]) for place in range(num_places)
    )
