"""What ``coldpage quality`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from coldpage.bench.quality.settings import EvaluationOptions
from coldpage.bench.quality.texts import COMMITTED

__all__ = ["QualityOptions"]


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """``codecs`` empty: every one there is. The newest ``num_recent_blocks`` of a context stay
    whole. ``evaluation`` is for each of ``context_tokens``; a study has so many settings that it
    asks for no needles and measures no speed.
    """

    model: str | None = None
    codecs: tuple[str, ...] = ()
    context_tokens: tuple[int, ...] = (2048,)
    text: str = COMMITTED
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    num_recent_blocks: int = 0
    is_study: bool = False
    is_verbose: bool = False
    json_path: Path | None = None
    document: Path | None = None

    def evaluation_of(self, num_tokens: int) -> EvaluationOptions:
        """For contexts of so many tokens."""
        own = replace(self.evaluation, num_tokens=num_tokens)
        return replace(own, num_needles=0, num_repeats=0) if self.is_study else own

    @property
    def command(self) -> str:
        """What a user types for the same figures."""
        defaults = QualityOptions()
        own, usual = self.evaluation, defaults.evaluation
        words = ["coldpage quality"]
        words += [] if self.model is None else [self.model]
        words += [f"--codec {codec}" for codec in self.codecs]
        tokens = ",".join(map(str, self.context_tokens))
        changed = (
            ("--recent-blocks", self.num_recent_blocks, not self.num_recent_blocks),
            ("--tokens", tokens, self.context_tokens == defaults.context_tokens),
            ("--text", self.text, self.text == defaults.text),
            ("--places", own.num_places, own.num_places == usual.num_places),
            ("--needles", own.num_needles, own.num_needles == usual.num_needles),
            ("--repeats", own.num_repeats, own.num_repeats == usual.num_repeats),
            (
                "--block-tokens",
                own.tokens_per_block,
                own.tokens_per_block == usual.tokens_per_block,
            ),
        )
        words += [f"{flag} {value}" for flag, value, is_default in changed if not is_default]
        return " ".join([*words, *(["--study"] if self.is_study else [])])
