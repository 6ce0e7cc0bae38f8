"""The model over the pages of a store: contexts are computed, and continued from either part."""

from __future__ import annotations

import numpy as np
import torch

from coldpage.bench.quality.hot_store import NOTHING, HotStore
from coldpage.bench.quality.metrics import VectorScores, score_vectors
from coldpage.engine.forward.hot_pages import layer_pages
from coldpage.engine.forward.runner import LogitsWanted, ModelRunner, StepItem
from coldpage.engine.model.model import KEY_ROLE, VALUE_ROLE, LoadedModel
from coldpage.types import BufferRole, HalfOpenRange, Int32Array, LayerId

__all__ = ["ContextReader"]


class ContextReader:
    """The engine's own runner on ``store``, in the model's number type. Contexts are whole blocks.

    From then on the model runs in no other way.
    """

    def __init__(self, model: LoadedModel, store: HotStore) -> None:
        self.store = store
        self._model = model
        self._runner = ModelRunner(model, store)

    def compute(self, context: Int32Array) -> None:
        """Prefill ``context`` into the pages of the original part."""
        table = self.store.table(self._num_blocks(context.size), is_whole=True)
        self._runner.forward([StepItem(table, 0, context, LogitsWanted.NONE)])

    def continue_with(
        self, num_context_tokens: int, tokens: Int32Array, restored: HalfOpenRange = NOTHING
    ) -> torch.Tensor:
        """The logits [num_tokens, vocab] behind each of ``tokens``, which follow the context, of
        which the blocks ``restored`` are read as they came back. Equal bytes give equal logits.
        """
        table = self.store.table(self._num_blocks(num_context_tokens), restored)
        item = StepItem(table, num_context_tokens, tokens, LogitsWanted.ALL)
        (logits,) = self._runner.forward([item])
        assert logits is not None
        return logits

    def answer(
        self,
        num_context_tokens: int,
        question: Int32Array,
        max_new_tokens: int,
        restored: HalfOpenRange = NOTHING,
    ) -> str:
        """The likeliest tokens one by one after the question, which follows the context: up to the
        end of the text, or of its first line.
        """
        table = self.store.table(self._num_blocks(num_context_tokens), restored)
        answer: list[int] = []
        start, tokens = num_context_tokens, question
        while len(answer) < max_new_tokens and "\n" not in self._text(answer):
            (logits,) = self._runner.forward([StepItem(table, start, tokens, LogitsWanted.LAST)])
            assert logits is not None
            token = int(logits[0].argmax())
            if token in self._model.eos_token_ids:
                break
            answer.append(token)
            start += tokens.size
            tokens = np.array([token], np.int32)
        return self._text(answer).partition("\n")[0]

    def _text(self, token_ids: list[int]) -> str:
        """Without what a template begins an answer with."""
        return str(self._model.tokenizer.decode(token_ids, skip_special_tokens=True)).lstrip()

    def compare_vectors(
        self, role: BufferRole, num_context_tokens: int, blocks: HalfOpenRange
    ) -> VectorScores:
        """The keys, or the values, of the live ones of ``blocks``, as computed and as come back."""
        pairs = [self._vectors(role, layer, num_context_tokens, blocks) for layer in self._layers]
        return score_vectors(*zip(*pairs, strict=True))

    def are_equal(self, num_context_tokens: int, blocks: HalfOpenRange) -> bool:
        """Whether the live ones of ``blocks`` came back bit for bit."""
        return all(
            torch.equal(*(t.view(torch.int32) for t in vectors))
            for role in (KEY_ROLE, VALUE_ROLE)
            for layer in self._layers
            for vectors in [self._vectors(role, layer, num_context_tokens, blocks)]
        )

    def _vectors(
        self, role: BufferRole, layer: LayerId, num_context_tokens: int, blocks: HalfOpenRange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As computed and as come back, both [num_pages, tokens, kv_heads, head_dim]. Copies."""
        group = self.store.layer_group_of(layer)
        live = self.store.live_ordinals(group, self._num_blocks(num_context_tokens))
        live = live[(live >= blocks.start) & (live < blocks.stop)]
        pages = layer_pages(self._model, self.store, layer)
        values = (pages.keys if role == KEY_ROLE else pages.values).values
        original, restored = (
            values[torch.from_numpy(place(group, live)).long()].flatten(3)
            for place in (self.store.original_slots, self.store.restored_slots)
        )
        return original, restored

    @property
    def _layers(self) -> list[LayerId]:
        return [LayerId(index) for index in range(len(self._model.layers))]

    def _num_blocks(self, num_tokens: int) -> int:
        num_blocks, rest = divmod(num_tokens, self.store.tokens_per_block)
        assert rest == 0, "a context is whole blocks"
        return num_blocks
