"""New keys and values into pages, and pages into rows, beside a copy on the device that reads and
writes as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from coldpage.bench.attention.decode import DTYPE
from coldpage.bench.attention.layers import (
    TOKENS_PER_BLOCK,
    Heads,
    PagedLayers,
    read_pages,
    type_names,
)
from coldpage.bench.clock import Timed, alternated
from coldpage.bench.rows import Row, median
from coldpage.engine.attention.attention_choice import choose_attention
from coldpage.engine.attention.paged_attention import Scratch
from coldpage.engine.attention.step_plan import ItemSpan
from coldpage.engine.forward.upload import to_device
from coldpage.engine.model.hot_types import HotTypes

__all__ = ["gather_rows", "write_rows"]


def gather_rows(
    pool: torch.Tensor, num_tokens: int, heads: Heads, types: HotTypes, num_repeats: int
) -> list[Row]:
    """K and V of one sequence into contiguous rows of bfloat16, unpacked. Raises ConfigurationError
    where ``pool`` is too small."""
    place = pool.device
    paged = PagedLayers.make(pool, heads, types, num_tokens // TOKENS_PER_BLOCK)
    slots = torch.from_numpy(paged.slots).to(place)
    shape = (2, heads.num_kv_heads, num_tokens, heads.head_dim)
    out = torch.empty(shape, dtype=DTYPE, device=place)

    def gather() -> None:
        for layer in paged.layers:
            read_pages(layer.keys, slots, out[0])
            read_pages(layer.values, slots, out[1])

    num_bytes = num_tokens * heads.vector_bytes(types) + out.numel() * DTYPE.itemsize
    config = f"{num_tokens:,} tokens, {heads}, {type_names(types)}"
    return [_row("gather", config, gather, num_bytes, paged, num_repeats)]


def write_rows(
    pool: torch.Tensor,
    batches: tuple[int, int],
    heads: Heads,
    types: HotTypes,
    num_repeats: int,
) -> list[Row]:
    """K and V of so many tokens from bfloat16 into pages: of one token each of ``batches[0]``
    sequences, and of ``batches[1]`` tokens of one sequence. Raises as ``gather_rows``."""
    num_sequences, num_tokens = batches
    decode = [(row, 7, 1) for row in range(num_sequences)]
    rows = []
    for name, spans in (("write, decoding", decode), ("write, prefill", [(0, 0, num_tokens)])):
        blocks_each = -(-spans[0][2] // TOKENS_PER_BLOCK)
        paged = PagedLayers.make(pool, heads, types, blocks_each * len(spans))
        tables = paged.slots.reshape(len(spans), -1)
        items = [ItemSpan(*span, table) for span, table in zip(spans, tables, strict=True)]
        total = sum(item.num_tokens for item in items)
        num_bytes = total * (
            heads.vector_bytes(types) + 2 * heads.num_kv_heads * heads.head_dim * DTYPE.itemsize
        )
        config = f"{total:,} tokens, {heads}, {type_names(types)}"
        work = _write(paged, items, heads, pool.device)
        rows.append(_row(name, config, work, num_bytes, paged, num_repeats))
    return rows


def _write(
    paged: PagedLayers, items: list[ItemSpan], heads: Heads, place: torch.device
) -> Callable[[], None]:
    total = sum(item.num_tokens for item in items)
    attention = choose_attention(place, DTYPE, heads.head_dim, Scratch(DTYPE, place))
    write = to_device(attention.plan(paged.layers[0], items), place).write
    # As a model makes them: the heads of a token are neighbours.
    shape = (2, 1, total, heads.num_kv_heads, heads.head_dim)
    key, value = torch.randn(shape, dtype=DTYPE, device=place).transpose(2, 3)

    def run() -> None:
        for layer in paged.layers:
            attention.write(layer, write, key, value)

    return run


def _row(
    name: str,
    config: str,
    work: Callable[[], object],
    num_bytes: int,
    paged: PagedLayers,
    num_repeats: int,
) -> Row:
    """``num_bytes`` are read and written together, by a layer; the copy reads half and writes half
    of it."""
    place = paged.layers[0].keys.values.device
    num_layers = len(paged.layers)
    source = torch.ones(num_layers, num_bytes // 2, dtype=torch.uint8, device=place)
    target = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=place)

    def copy() -> None:
        for part in source:
            target.copy_(part)

    ours = Timed(work, place, num_units=num_layers)
    rival = Timed(copy, place, num_units=num_layers)
    ours_ms, rival_ms = alternated(num_repeats, ours, rival)
    notes = {
        "us": round(1e3 * median(ours_ms), 2),
        "gb_per_s": round(num_bytes / 1e6 / median(ours_ms), 1),
        "rival_us": round(1e3 * median(rival_ms), 2),
        "rival_gb_per_s": round(num_bytes / 1e6 / median(rival_ms), 1),
    }
    rival_name = "a device copy of as many bytes"
    return Row(name, config, rival_name, ours_ms, rival_ms, notes=notes)
