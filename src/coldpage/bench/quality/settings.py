"""What is compared: codecs as they are used, and how much of what they are tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from coldpage.codecs import ColdPageCodec, ModelPages, NumberType

__all__ = ["CodecSetting", "EvaluationOptions", "with_number_type"]


@dataclass(frozen=True, slots=True)
class CodecSetting:
    """A codec, and what of a context goes through it.

    ``make`` returns a new codec for a model's pages: in f32, for what it does to the model, and in
    bf16, for its size and speed. With ``separates_sinks`` the first block is a page class of its
    own, and so are the ``num_recent_blocks`` at the end.
    """

    name: str
    make: Callable[[ModelPages], ColdPageCodec]
    separates_sinks: bool = True
    num_recent_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """At each of ``num_places`` of a text, ``num_tokens`` (whole blocks) go through the codecs and
    the next ``num_read_tokens`` are read behind them. ``num_repeats`` are samples of the speed; 0
    leaves it out.
    """

    num_tokens: int = 2048
    num_read_tokens: int = 256
    num_places: int = 3
    num_needles: int = 8
    num_repeats: int = 5
    tokens_per_block: int = 16

    @property
    def num_blocks(self) -> int:
        """Of a context."""
        return self.num_tokens // self.tokens_per_block

    def num_steps(self, num_texts: int, num_settings: int) -> int:
        """How often an evaluation tells what comes next."""
        num_contexts = self.num_places * num_texts + self.num_needles
        return num_contexts * (1 + num_settings) + (num_settings if self.num_repeats else 0)


def with_number_type(pages: ModelPages, number_type: NumberType) -> ModelPages:
    """The same vectors in other numbers. Pure."""
    return {
        layer_id: replace(
            layer,
            key=None if layer.key is None else layer.key._replace(number_type=number_type),
            value=None if layer.value is None else layer.value._replace(number_type=number_type),
        )
        for layer_id, layer in pages.items()
    }
