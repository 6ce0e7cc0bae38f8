"""One forward pass of the model over the new tokens of many sequences, whose history lies in
pages."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from coldpage.engine.attention.attention_choice import follows_tables
from coldpage.engine.attention.step_plan import GroupPlan, ItemSpan
from coldpage.engine.forward.decode_graphs import MAX_GRAPH_ROWS
from coldpage.engine.forward.hot_pages import PageSource
from coldpage.engine.forward.paged_model import PagedModel
from coldpage.engine.forward.upload import to_device
from coldpage.engine.model.model import LoadedModel
from coldpage.types import Int32Array, LayerGroupId

if TYPE_CHECKING:
    from coldpage.engine.forward.decode_steps import DecodeSteps

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

    def __init__(
        self,
        model: LoadedModel,
        manager: PageSource,
        *,
        max_decode_rows: int = MAX_GRAPH_ROWS,
        use_graphs: bool = True,
    ) -> None:
        """On a GPU, steps in which up to ``max_decode_rows`` sequences decode one token each run as
        CUDA graphs, unless ``use_graphs`` is False: their results are the same bit for bit. Memory
        is kept for that many block tables, and for MAX_GRAPH_ROWS at most."""
        self._model = PagedModel(model, manager)
        self._device = self._model.device
        self._decode: DecodeSteps | None = None
        if follows_tables(self._device):
            # Only here: a machine without a GPU may have no Triton.
            from coldpage.engine.forward.decode_steps import DecodeSteps

            self._decode = DecodeSteps(
                self._model,
                max_rows=max_decode_rows,
                max_tokens=model.context_tokens,
                use_graphs=use_graphs,
            )

    @property
    def counters(self) -> Counter[str]:
        """Of decoding steps as CUDA graphs, see DecodeGraphs; empty where there are none."""
        return Counter() if self._decode is None else self._decode.graphs.counters

    def prepare(self, max_decode_rows: int, progress: Callable[[int], None]) -> None:
        """Makes ready what the first steps would wait for. Blocks; ``progress`` is told each batch
        size in turn."""
        if self._decode is not None:
            try:
                self._decode.prepare(max_decode_rows, progress)
            finally:
                self._wait()

    def forward(self, items: Sequence[StepItem]) -> list[torch.Tensor | None]:
        """Writes the new tokens' K and V into their pages; returns f32 logits [rows, vocab] per
        item, in host memory.

        Blocks until done, also when it raises: nothing reads or writes a page afterwards. The
        caller holds every page named, hot and quiescent, and no two items write to one page. A
        result depends on the list of items and their own pages only, bit for bit. The tensors are
        the caller's.
        """
        assert items and all(len(item.token_ids) for item in items)
        try:
            logits = self._decoded(items)
            if logits is None:
                logits = self._packed(items)
            # A copy made out here is an ordinary tensor, which the caller may change.
            on_host = torch.empty(
                logits.shape, dtype=torch.float32, pin_memory=self._device.type == "cuda"
            )
            on_host.copy_(logits, non_blocking=True)
        finally:
            self._wait()
        return _parts(on_host, items)

    def _decoded(self, items: Sequence[StepItem]) -> torch.Tensor | None:
        """Logits [num_items, vocab] of a step in which all decode; None where that is not this."""
        if self._decode is None or any(len(item.token_ids) > 1 for item in items):
            return None
        if not self._decode.takes(len(items), max(item.start for item in items)):
            return None
        from coldpage.engine.forward.decode_steps import DecodeRow

        rows = [
            DecodeRow(int(item.token_ids[0]), item.start, item.kv_cache.page_indices)
            for item in items
        ]
        logits = self._decode.run(rows)
        if all(item.logits is not LogitsWanted.NONE for item in items):
            return logits
        kept = [i for i, item in enumerate(items) if item.logits is not LogitsWanted.NONE]
        return logits[kept]

    def _packed(self, items: Sequence[StepItem]) -> torch.Tensor:
        """Logits [rows, vocab] of any step."""
        token_ids = np.concatenate([item.token_ids for item in items])
        positions = np.concatenate([np.arange(i.start, i.start + len(i.token_ids)) for i in items])
        inputs = to_device(
            (
                torch.from_numpy(token_ids.astype(np.int64))[None],
                torch.from_numpy(positions.astype(np.int64))[None],
                torch.from_numpy(np.concatenate(_logit_rows(items))),
                self._plans(items),
            ),
            self._device,
        )
        return self._model.logits(*inputs)

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
        for group in self._model.groups:
            spans = [
                ItemSpan(
                    int(row),
                    item.start,
                    len(item.token_ids),
                    item.kv_cache.page_indices(group.layer_group_id),
                )
                for row, item in zip(rows, items, strict=False)
            ]
            plans.append(group.attention.plan(group.pages, spans))
        return plans


def _parts(logits: torch.Tensor, items: Sequence[StepItem]) -> list[torch.Tensor | None]:
    parts = torch.split(logits, [len(rows) for rows in _logit_rows(items)])
    return [part if len(part) else None for part in parts]


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
