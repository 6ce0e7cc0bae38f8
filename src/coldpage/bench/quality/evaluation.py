"""Codecs on one model and the same contexts: what each does to what is read behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from coldpage.bench.quality.hot_store import NOTHING, HotStore
from coldpage.bench.quality.metrics import (
    TokenScores,
    VectorScores,
    join_tokens,
    join_vectors,
    score_tokens,
)
from coldpage.bench.quality.needles import (
    MAX_ANSWER_TOKENS,
    MAX_QUESTION_TOKENS,
    Needle,
    make_needles,
)
from coldpage.bench.quality.passage import Passage
from coldpage.bench.quality.reader import ContextReader
from coldpage.bench.quality.settings import CodecSetting, EvaluationOptions
from coldpage.bench.quality.speed import SpeedBench, SpeedSamples
from coldpage.bench.quality.texts import Text, text_pieces
from coldpage.codecs import ModelPages
from coldpage.device.host import HostDevice
from coldpage.engine.model.model import KEY_ROLE, VALUE_ROLE, LoadedModel, manager_layers
from coldpage.errors import CodecError, ConfigurationError
from coldpage.types import HalfOpenRange, Int32Array

__all__ = ["CodecQuality", "NeedleAnswer", "evaluate"]


@dataclass(frozen=True, slots=True)
class NeedleAnswer:
    """What the model says on the cache as it was computed, and as it came back."""

    needle: Needle
    lossless: str
    own: str


@dataclass(frozen=True, slots=True, eq=False)
class CodecQuality:
    """Of one setting: the tokens behind the contexts of each text, the contexts' keys and values,
    and the needles.
    """

    setting: CodecSetting
    tokens_of: Mapping[str, TokenScores]
    keys: VectorScores
    values: VectorScores
    needles: tuple[NeedleAnswer, ...]
    speed: SpeedSamples | None

    @property
    def tokens(self) -> TokenScores:
        """Of all texts."""
        return join_tokens(list(self.tokens_of.values()))


def evaluate(
    model: LoadedModel,
    pages: ModelPages,
    settings: Sequence[CodecSetting],
    texts: Sequence[Text],
    options: EvaluationOptions,
    on_step: Callable[[str], None] = lambda line: None,
) -> list[CodecQuality]:
    """One result a setting, in order.

    ``model`` computes in float32 on the CPU, and runs over pages only from then on. ``pages`` are
    its keys and values as its hot pages hold them. ``on_step`` is told each of the steps before it
    begins. Blocks for minutes.

    Raises ConfigurationError for a text or a context that is too short or too long, and for vectors
    that a codec refuses; CodecError where a codec says that it is lossless and is not.
    """
    assert model.dtype == torch.float32, "bits are compared with the model's own"
    _check_sizes(model, settings, options)
    num_needed = options.num_tokens + options.num_read_tokens + 1
    pieces = {
        text.name: text_pieces(model.tokenizer, text, options.num_places, num_needed)
        for text in texts
    }
    needles = make_needles(
        model.tokenizer, options.num_needles, options.num_tokens, options.tokens_per_block
    )
    with _opened(model, pages, settings, options, on_step) as evaluation:
        for name, of_text in pieces.items():
            for place, piece in enumerate(of_text):
                evaluation.read(name, place, piece)
        for index, needle in enumerate(needles):
            evaluation.ask(index, needle)
        return evaluation.results()


def _check_sizes(
    model: LoadedModel, settings: Sequence[CodecSetting], options: EvaluationOptions
) -> None:
    if options.num_tokens % options.tokens_per_block:
        raise ConfigurationError(
            f"a context of {options.num_tokens:,} tokens is not whole blocks of "
            f"{options.tokens_per_block}"
        )
    behind = max(options.num_read_tokens, MAX_QUESTION_TOKENS + MAX_ANSWER_TOKENS)
    if options.num_tokens + behind > model.context_tokens:
        raise ConfigurationError(
            f"{options.num_tokens:,} tokens and {behind} behind them: the model {model.name} takes "
            f"{model.context_tokens:,} at most"
        )
    for setting in settings:
        if setting.num_recent_blocks >= options.num_blocks:
            raise ConfigurationError(
                f"{setting.name} keeps all {options.num_blocks} blocks of {options.num_tokens:,} "
                "tokens as they are: use a longer context"
            )


@contextlib.contextmanager
def _opened(
    model: LoadedModel,
    pages: ModelPages,
    settings: Sequence[CodecSetting],
    options: EvaluationOptions,
    on_step: Callable[[str], None],
) -> Iterator[_Evaluation]:
    behind = max(options.num_read_tokens, MAX_QUESTION_TOKENS + MAX_ANSWER_TOKENS)
    block = options.tokens_per_block
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(contextlib.closing(HostDevice()))
        layers = manager_layers(model, block)
        store = HotStore(device, layers, block, options.num_blocks, -(-behind // block))
        subjects = []
        for setting in settings:
            passage = Passage(
                store,
                setting.make(pages),
                separates_sinks=setting.separates_sinks,
                num_recent_blocks=setting.num_recent_blocks,
            )
            subjects.append(_Subject(setting, stack.enter_context(contextlib.closing(passage))))
        yield _Evaluation(model, pages, ContextReader(model, store), subjects, options, on_step)


class _Subject:
    """One setting, and what is known of it so far."""

    def __init__(self, setting: CodecSetting, passage: Passage) -> None:
        self.setting = setting
        self.passage = passage
        self.tokens_of: dict[str, list[TokenScores]] = {}
        self.keys: list[VectorScores] = []
        self.values: list[VectorScores] = []
        self.needles: list[NeedleAnswer] = []

    def result(self, speed: SpeedSamples | None) -> CodecQuality:
        return CodecQuality(
            self.setting,
            {name: join_tokens(scores) for name, scores in self.tokens_of.items()},
            join_vectors(self.keys),
            join_vectors(self.values),
            tuple(self.needles),
            speed,
        )


class _Evaluation:
    """One context at a time goes through every codec."""

    def __init__(
        self,
        model: LoadedModel,
        pages: ModelPages,
        reader: ContextReader,
        subjects: Sequence[_Subject],
        options: EvaluationOptions,
        on_step: Callable[[str], None],
    ) -> None:
        self._model = model
        self._pages = pages
        self._reader = reader
        self._subjects = subjects
        self._options = options
        self._on_step = on_step

    def read(self, text_name: str, place: int, piece: Int32Array) -> None:
        """``piece`` is a context, the tokens that are read behind it, and one more."""
        num_tokens = self._options.num_tokens
        behind, next_tokens = piece[num_tokens:-1], torch.from_numpy(piece[num_tokens + 1 :])
        self._on_step(f"{text_name} {place + 1}: computing {num_tokens:,} tokens")
        self._reader.compute(piece[:num_tokens])
        lossless = self._reader.continue_with(num_tokens, behind)
        for subject in self._subjects:
            self._on_step(f"{text_name} {place + 1}: {subject.setting.name}")
            blocks = self._pass(subject, num_tokens)
            own = self._reader.continue_with(num_tokens, behind, blocks)
            scores = score_tokens(lossless, own, next_tokens)
            subject.tokens_of.setdefault(text_name, []).append(scores)
            subject.keys.append(self._reader.compare_vectors(KEY_ROLE, num_tokens, blocks))
            subject.values.append(self._reader.compare_vectors(VALUE_ROLE, num_tokens, blocks))

    def ask(self, index: int, needle: Needle) -> None:
        """Greedy answers on every cache."""
        num_tokens = needle.context.size
        self._on_step(f"needle {index + 1}: computing {num_tokens:,} tokens")
        self._reader.compute(needle.context)
        lossless = self._answer(needle, NOTHING)
        for subject in self._subjects:
            self._on_step(f"needle {index + 1}: {subject.setting.name}")
            own = self._answer(needle, self._pass(subject, num_tokens))
            subject.needles.append(NeedleAnswer(needle, lossless, own))

    def results(self) -> list[CodecQuality]:
        """With the speed of each, measured now."""
        if not self._options.num_repeats:
            return [subject.result(None) for subject in self._subjects]
        results = []
        bench = SpeedBench(self._model, self._pages, self._reader.store, self._options)
        with contextlib.closing(bench):
            for subject in self._subjects:
                self._on_step(f"speed: {subject.setting.name}")
                results.append(subject.result(bench.measure(subject.setting)))
        return results

    def _pass(self, subject: _Subject, num_tokens: int) -> HalfOpenRange:
        """The context's blocks that have come back now."""
        num_blocks = num_tokens // self._options.tokens_per_block
        blocks = HalfOpenRange(0, num_blocks)
        subject.passage.run(num_blocks, blocks)
        if subject.passage.is_lossless and not self._reader.are_equal(num_tokens, blocks):
            raise CodecError(
                f"codec {subject.setting.name} says that it is lossless, and pages come back "
                "changed: a bug of the codec"
            )
        return blocks

    def _answer(self, needle: Needle, blocks: HalfOpenRange) -> str:
        return self._reader.answer(needle.context.size, needle.question, MAX_ANSWER_TOKENS, blocks)
