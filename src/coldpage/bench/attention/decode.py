"""Attention of one new token a sequence over pages, beside the library's over contiguous memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coldpage.bench.attention.layers import (
    TOKENS_PER_BLOCK,
    Heads,
    PagedLayers,
    num_in_turn,
    read_pages,
    type_names,
)
from coldpage.bench.clock import Timed, alternated, fastest
from coldpage.bench.rows import Row, median
from coldpage.engine.attention.attention_choice import choose_attention
from coldpage.engine.attention.paged_attention import Scoring, Scratch
from coldpage.engine.attention.step_plan import ItemSpan
from coldpage.engine.forward.upload import to_device
from coldpage.engine.model.hot_types import HotTypes
from coldpage.errors import DeviceError

__all__ = ["DTYPE", "DecodeCase", "check_close", "decode_rows"]

DTYPE: Final = torch.bfloat16
# Of the largest number of a result. Pages read in another order would be off by all of it.
_TOLERANCE: Final = 0.05


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One line: ``batch`` sequences of ``num_tokens`` each."""

    batch: int
    num_tokens: int
    heads: Heads

    def __str__(self) -> str:
        return f"{self.batch} x {self.num_tokens:,} tokens, {self.heads}"

    @property
    def num_blocks(self) -> int:
        """Of all sequences."""
        return self.batch * (self.num_tokens // TOKENS_PER_BLOCK)

    def read_bytes(self, types: HotTypes) -> int:
        """K and V of one layer, as they are stored."""
        return self.batch * self.num_tokens * self.heads.vector_bytes(types)


def decode_rows(
    pool: torch.Tensor, case: DecodeCase, types: HotTypes, num_repeats: int
) -> list[Row]:
    """Measure. Raises ConfigurationError where ``pool`` is too small, DeviceError where both do not
    agree."""
    paged = PagedLayers.make(pool, case.heads, types, case.num_blocks)
    place = pool.device
    query = torch.randn(
        case.batch, case.heads.num_heads, case.heads.head_dim, device=place, dtype=DTYPE
    )
    attention = choose_attention(place, DTYPE, case.heads.head_dim, Scratch(DTYPE, place))
    tables = paged.slots.reshape(case.batch, -1)
    items = [ItemSpan(row, case.num_tokens - 1, 1, table) for row, table in enumerate(tables)]
    plan = to_device(attention.plan(paged.layers[0], items), place)
    scoring = Scoring(None, None)

    def attend() -> torch.Tensor:
        outs = [attention.attend_decode(layer, plan, query, scoring) for layer in paged.layers]
        return outs[0]

    rival = _Contiguous(case, paged, query)
    check_close(attend(), rival.result(), f"attention of {case} in {type_names(types)}")
    ours = Timed(attend, place, num_units=len(paged.layers))
    way, sdpa = fastest(rival.ways(), place, num_units=rival.num_layers)
    ours_ms, rival_ms = alternated(num_repeats, ours, sdpa)
    num_bytes = case.read_bytes(types)
    notes = {
        "batch": float(case.batch),
        "num_tokens": float(case.num_tokens),
        "us": round(1e3 * median(ours_ms), 2),
        "gb_per_s": round(num_bytes / 1e6 / median(ours_ms), 1),
        "rival_us": round(1e3 * median(rival_ms), 2),
        "rival_gb_per_s": round(rival.read_bytes / 1e6 / median(rival_ms), 1),
    }
    config = f"{case}, {type_names(types)}"
    rival_name = f"contiguous bf16, {way}"
    return [Row("decode", config, rival_name, ours_ms, rival_ms, notes=notes)]


def check_close(ours: torch.Tensor, rival: torch.Tensor, what: str) -> None:
    """Raises DeviceError where results of one thing differ by more than rounding."""
    # In this form a NaN is no agreement.
    error = float((ours.float() - rival.float()).abs().max())
    bound = _TOLERANCE * float(rival.float().abs().max())
    if not error <= bound:
        raise DeviceError(f"{what} is off by {error:.2g} from the library's, more than {bound:.2g}")


class _Contiguous:
    """K and V of every sequence in a row, in bfloat16; the first layer has what the pages have."""

    def __init__(self, case: DecodeCase, paged: PagedLayers, query: torch.Tensor) -> None:
        num_heads, kv_heads, head_dim = case.heads
        layer_bytes = 2 * case.batch * case.num_tokens * kv_heads * head_dim * DTYPE.itemsize
        self.read_bytes = layer_bytes
        self.num_layers = num_in_turn(layer_bytes, query.device)
        shape = (self.num_layers, 2, case.batch, kv_heads, case.num_tokens, head_dim)
        self._memory = torch.empty(shape, dtype=DTYPE, device=query.device)
        for layer in self._memory[1:]:
            layer.normal_()
        slots = torch.from_numpy(paged.slots.reshape(case.batch, -1)).to(query.device)
        first = paged.layers[0]
        for pages, own in zip((first.keys, first.values), self._memory[0], strict=True):
            for table, sequence in zip(slots, own, strict=True):
                read_pages(pages, table, sequence)
        self._query = query
        self._rows = query.view(case.batch, kv_heads, num_heads // kv_heads, head_dim)

    def result(self) -> torch.Tensor:
        """Of the first layer, [batch, heads, head_dim]."""
        key, value = self._memory[0]
        return F.scaled_dot_product_attention(self._rows, key, value).reshape(self._query.shape)

    def ways(self) -> dict[str, Any]:
        """To do it: the query heads of one KV head as rows of one matrix, or as heads."""
        ways = {"SDPA of rows": self._by_rows, "SDPA with enable_gqa": self._by_heads}
        if self._query.is_cuda:
            for name, backend in (
                ("flash", SDPBackend.FLASH_ATTENTION),
                ("cuDNN", SDPBackend.CUDNN_ATTENTION),
            ):
                ways[f"{name} SDPA of rows"] = _forced(self._by_rows, backend)
                ways[f"{name} SDPA with enable_gqa"] = _forced(self._by_heads, backend)
        return ways

    def _by_rows(self) -> None:
        for key, value in self._memory:
            F.scaled_dot_product_attention(self._rows, key, value)

    def _by_heads(self) -> None:
        query = self._query[:, :, None]
        for key, value in self._memory:
            F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def _forced(work: Any, backend: SDPBackend) -> Any:
    def forced() -> None:
        with sdpa_kernel(backend):
            work()

    return forced
