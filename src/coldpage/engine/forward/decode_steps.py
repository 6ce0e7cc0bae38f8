"""Steps in which every sequence decodes one token: fixed shapes, fixed memory, one upload.

The batch is padded to one of few sizes (``padded_rows``), with rows that see no position and write
to no page. Row ``i`` is item ``i`` of the step, so that equal lists of items are equal work. What a
step needs goes to one buffer, where for one size everything but the changes of block tables always
lies at the same place: a graph that was captured there runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from coldpage.engine.attention.kernel_plan import plan_parts
from coldpage.engine.attention.step_plan import GroupPlan, Write
from coldpage.engine.forward.block_tables import BlockTables
from coldpage.engine.forward.decode_graphs import MAX_GRAPH_ROWS, DecodeGraphs, padded_rows
from coldpage.engine.forward.paged_model import LayerGroup, PagedModel
from coldpage.engine.forward.upload import packed_bytes, to_buffer, to_device
from coldpage.kernels.decode_plan import DecodeBatch
from coldpage.types import Int32Array, LayerGroupId

__all__ = ["DecodeRow", "DecodeSteps"]

_NO_TOKEN: Final = 0  # what padding rows compute; nobody reads it
# Room for changes of block tables beside a step's other inputs. More, as when many long sequences
# change their rows, are sent by themselves.
_MAX_CHANGES: Final = 16_384


class DecodeRow(NamedTuple):
    """One sequence's new token, at ``position``. ``slots_of`` gives the slots of its blocks."""

    token_id: int
    position: int
    slots_of: Callable[[LayerGroupId], Int32Array]


class _GroupInputs(NamedTuple):
    """Of one layer group, for each padded row."""

    write_slots: torch.Tensor
    items: torch.Tensor
    first_items: torch.Tensor
    shares: torch.Tensor


class _Changes(NamedTuple):
    """Of block tables: see TableChanges."""

    places: torch.Tensor
    slots: torch.Tensor


class _Inputs(NamedTuple):
    """What a step sends; its shapes depend on the number of padded rows alone."""

    token_ids: torch.Tensor  # [1, rows]
    positions: torch.Tensor  # [1, rows]
    num_tokens: torch.Tensor
    write_offsets: torch.Tensor
    groups: tuple[_GroupInputs, ...]


class DecodeSteps:
    """Decoding steps of up to ``max_rows`` sequences of up to ``max_tokens`` each."""

    def __init__(
        self, model: PagedModel, *, max_rows: int, max_tokens: int, use_graphs: bool
    ) -> None:
        self._model = model
        self._max_rows = padded_rows(min(max_rows, MAX_GRAPH_ROWS))
        self._block = model.tokens_per_block
        # One more: a step may be one token beyond what the model was trained for.
        max_blocks = -(-max_tokens // self._block) + 1
        self._tables = BlockTables(len(model.groups), self._max_rows, max_blocks, model.device)
        most_bytes = packed_bytes(
            (self._inputs((), [[]] * len(model.groups), self._max_rows), _no_changes(_MAX_CHANGES))
        )
        self._static = torch.empty(most_bytes, dtype=torch.uint8, device=model.device)
        self._logits: torch.Tensor | None = None  # [max_rows, vocab]
        self.graphs = DecodeGraphs(model.device, is_enabled=use_graphs)

    def takes(self, num_rows: int, last_position: int) -> bool:
        """Whether a step of this size has room here."""
        num_blocks = last_position // self._block + 1
        return num_rows <= self._max_rows and num_blocks <= self._tables.max_blocks

    def run(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        """Enqueues the step; logits [rows, vocab] on the device, valid until the next one."""
        try:
            return self._run(rows, padded_rows(len(rows)))
        except BaseException:
            self._tables.forget()
            raise

    def prepare(self, max_rows: int, progress: Callable[[int], None]) -> None:
        """Captures the graphs of all batches of up to ``max_rows``, the largest first, whose memory
        the others then share. Blocks; ``progress`` is told the size before each.
        """
        sizes = {padded_rows(n) for n in range(1, min(max_rows, self._max_rows) + 1)}
        for size in sorted(sizes, reverse=True):
            progress(size)
            self._run((), size)

    def _run(self, rows: Sequence[DecodeRow], size: int) -> torch.Tensor:
        slots = [[self._slots(row, group) for row in rows] for group in self._model.groups]
        inputs = self._send(self._inputs(rows, slots, size), slots)
        plans = [
            _plan_of(inputs, group, table[:size])
            for group, table in zip(inputs.groups, self._tables.tables, strict=True)
        ]
        logits = self.graphs.run(size, lambda: self._forward(inputs, plans, size))
        return logits[: len(rows)]

    def _forward(self, inputs: _Inputs, plans: Sequence[GroupPlan], size: int) -> torch.Tensor:
        logits = self._model.logits(inputs.token_ids, inputs.positions, None, plans)
        if self._logits is None:
            # For graphs of all sizes: each would keep memory for its own result.
            shape = (self._max_rows, logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits[:size].copy_(logits)

    def _inputs(
        self, rows: Sequence[DecodeRow], slots: Sequence[Sequence[Int32Array]], size: int
    ) -> _Inputs:
        num = len(rows)
        token_ids = np.full((1, size), _NO_TOKEN, np.int64)
        token_ids[0, :num] = [row.token_id for row in rows]
        positions = np.zeros((1, size), np.int64)
        positions[0, :num] = [row.position for row in rows]
        num_tokens = np.zeros(size, np.int32)
        num_tokens[:num] = positions[0, :num] + 1
        groups = []
        for group, of_rows in zip(self._model.groups, slots, strict=True):
            write_slots = np.full(size, -1, np.int32)
            write_slots[:num] = [
                own[row.position // self._block] for row, own in zip(rows, of_rows, strict=True)
            ]
            assert (write_slots[:num] >= 0).all(), "a step writes to a block that has no hot page"
            parts = plan_parts(group.pages, num_tokens)
            groups.append(_GroupInputs(*map(torch.from_numpy, (write_slots, *parts))))
        return _Inputs(
            torch.from_numpy(token_ids),
            torch.from_numpy(positions),
            torch.from_numpy(num_tokens),
            torch.from_numpy((positions[0] % self._block).astype(np.int32)),
            tuple(groups),
        )

    def _slots(self, row: DecodeRow, group: LayerGroup) -> Int32Array:
        return row.slots_of(group.layer_group_id)[: row.position // self._block + 1]

    def _send(self, inputs: _Inputs, slots: Sequence[Sequence[Int32Array]]) -> _Inputs:
        """The inputs on the device, where the tables are then up to date."""
        found = self._tables.changes(slots)
        changes = _Changes(torch.from_numpy(found.places), torch.from_numpy(found.slots))
        if len(found.places) > _MAX_CHANGES:
            self._tables.apply(*to_device(changes, self._model.device))
            changes = _no_changes(0)
        inputs, changes = to_buffer((inputs, changes), self._static)
        self._tables.apply(*changes)
        return inputs


def _no_changes(num: int) -> _Changes:
    return _Changes(torch.zeros(num, dtype=torch.int64), torch.zeros(num, dtype=torch.int32))


def _plan_of(inputs: _Inputs, own: _GroupInputs, table: torch.Tensor) -> GroupPlan:
    batch = DecodeBatch(table, inputs.num_tokens, own.items, own.first_items, own.shares)
    return GroupPlan(Write(own.write_slots, inputs.write_offsets, None), None, batch, ())
