"""One forward pass of the model over the new tokens of many sequences, whose history lies in
pages."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from coldpage.engine.attention import (
    CURRENT_CACHE,
    PagedCache,
    PagedLayer,
    register_attention,
)
from coldpage.engine.attention_choice import choose_attention
from coldpage.engine.geometry import cache_argument
from coldpage.engine.hot_pages import PageSource, layer_pages
from coldpage.engine.model import LoadedModel
from coldpage.engine.paged_attention import PagedAttention, Scratch
from coldpage.engine.step_plan import GroupPlan, ItemSpan
from coldpage.engine.upload import to_device
from coldpage.types import Int32Array, LayerGroupId, LayerId

__all__ = [
    "LogitsWanted",
    "ModelRunner",
    "PageTable",
    "StepItem",
]


class PageTable(Protocol):
    """What a step reads of a sequence's cache."""

    def page_indices(self, layer_group_id: LayerGroupId) -> Int32Array:
        """The hot slot of each block, -1 where there is none. [num_blocks]"""
        ...


class LogitsWanted(enum.Enum):
    """Which of an item's positions get logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class StepItem:
    """New tokens of one sequence, at positions ``start`` and on. They attend to each block up to
    themselves that has a hot page; an item may be a middle block that is computed again."""

    kv_cache: PageTable
    start: int
    token_ids: Int32Array
    logits: LogitsWanted


class ModelRunner:
    """Runs steps. It switches ``model`` to paged attention, after which only a runner can run that
    model object."""

    def __init__(self, model: LoadedModel, manager: PageSource) -> None:
        self._model: Any = model.model
        self._device = model.model.device
        self._dtype = model.dtype
        self._tokens_per_block = manager.tokens_per_block
        scratch = Scratch(model.dtype, self._device)
        attention_of: dict[int, PagedAttention] = {}  # by head size
        layers = []
        self._layers_of: dict[LayerGroupId, list[PagedLayer]] = {}
        for index, geometry in enumerate(model.layers):
            layer_id = LayerId(index)
            head_dim = geometry.head_dim
            if head_dim not in attention_of:
                attention_of[head_dim] = choose_attention(
                    self._device, model.dtype, head_dim, scratch
                )
            layer = PagedLayer(layer_pages(model, manager, layer_id), attention_of[head_dim])
            layers.append(layer)
            self._layers_of.setdefault(manager.layer_group_of(layer_id), []).append(layer)
        self._cache = PagedCache(layers)
        self._cache_argument = cache_argument(self._model)
        self._model.set_attn_implementation(register_attention())

    def forward(self, items: Sequence[StepItem]) -> list[torch.Tensor | None]:
        """Writes the new tokens' K and V into their pages; returns f32 logits [rows, vocab] per
        item, in host memory.

        Blocks until done, also when it raises: nothing reads or writes a page afterwards. The
        caller holds every page named, hot and quiescent, and no two items write to one page. A
        result depends on the list of items and their own pages only, bit for bit. The tensors are
        the caller's.
        """
        assert items and all(len(item.token_ids) for item in items)
        token_ids = np.concatenate([item.token_ids for item in items])
        positions = np.concatenate([np.arange(i.start, i.start + len(i.token_ids)) for i in items])
        kept_rows = _logit_rows(items)
        try:
            ids, places, kept, plans = to_device(
                (
                    torch.from_numpy(token_ids.astype(np.int64))[None],
                    torch.from_numpy(positions.astype(np.int64))[None],
                    torch.from_numpy(np.concatenate(kept_rows)),
                    self._plans(items),
                ),
                self._device,
            )
            logits = self._run(ids, places, kept, plans)
        finally:
            self._wait()
        parts = torch.split(logits, [len(rows) for rows in kept_rows])
        return [part if len(part) else None for part in parts]

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kept_rows: torch.Tensor,
        plans: list[GroupPlan],
    ) -> torch.Tensor:
        """The logits [rows, vocab] of the packed row [1, total]."""
        for plan, layers in zip(plans, self._layers_of.values(), strict=True):
            for layer in layers:
                layer.plan = plan
        token = CURRENT_CACHE.set(self._cache)
        try:
            with torch.inference_mode():
                logits = self._model(
                    input_ids=token_ids,
                    position_ids=positions,
                    logits_to_keep=kept_rows,
                    use_cache=True,
                    **{self._cache_argument: self._cache},
                ).logits[0]
        finally:
            CURRENT_CACHE.reset(token)
            for layer in self._cache.paged_layers:
                layer.plan = None
        # A copy made out here is an ordinary tensor, which the caller may change.
        result: torch.Tensor = logits.to("cpu", torch.float32, copy=True)
        return result

    def _wait(self) -> None:
        """Block until the device has done what was enqueued: pages may move once a step is over.

        A step whose logits are all there may still be writing pages that no logit depends on.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _plans(self, items: Sequence[StepItem]) -> list[GroupPlan]:
        """One for each layer group, in host memory."""
        rows = np.cumsum([0, *(len(item.token_ids) for item in items)])
        plans = []
        for group_id, layers in self._layers_of.items():
            spans = [
                ItemSpan(
                    int(row), item.start, len(item.token_ids), item.kv_cache.page_indices(group_id)
                )
                for row, item in zip(rows, items, strict=False)
            ]
            first = layers[0]
            window = first.pages.window
            assert all(layer.pages.window == window for layer in layers), (
                "a layer group mixes sliding windows"
            )
            reads_back = first.pages.reads_back(self._dtype)
            plans.append(
                first.attention.plan(spans, self._tokens_per_block, window, reads_back=reads_back)
            )
        return plans


def _logit_rows(items: Sequence[StepItem]) -> list[npt.NDArray[np.int64]]:
    kept = []
    first = 0
    for item in items:
        stop = first + len(item.token_ids)
        begin = {LogitsWanted.NONE: stop, LogitsWanted.LAST: stop - 1, LogitsWanted.ALL: first}[
            item.logits
        ]
        kept.append(np.arange(begin, stop))
        first = stop
    return kept
