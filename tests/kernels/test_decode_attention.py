"""Decode attention over pages against its definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from coldpage.kernels.decode_attention import (
    decode_attention,
    decode_attention_reference,
    decode_programs,
)
from coldpage.kernels.decode_plan import (
    AttentionOptions,
    DecodeBatch,
    DecodePrograms,
    DecodeResult,
    plan_decode,
)
from coldpage.kernels.kv_types import BF16, F16, F32, Q8_0, TURBO4, KVPages, KVType, page_views
from coldpage.kernels.packing import pack
from coldpage.kernels.rotation import rotate
from tests.kernels.pools import DEVICES, Shape, huge_pages

# Largest relative error of the output, and absolute of the log-sum-exp, by what is multiplied. The
# interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {F32: 2e-5, F16: 5e-3, BF16: 5e-3, Q8_0: 5e-3, TURBO4: 5e-3}
# Programs to plan for on the CPU, whose interpreter runs one after another.
CPU_PROGRAMS = DecodePrograms(8, 2)
CPU, CUDA = DEVICES

PLAIN = AttentionOptions(0.1)


@dataclass(frozen=True)
class Case:
    """Of a batch; what is not said is plain."""

    key_type: KVType = BF16
    value_type: KVType = BF16
    head_dim: int = 128
    tokens_per_block: int = 16
    kv_heads: int = 2
    group: int = 2
    lengths: tuple[int, ...] = (1, 16, 37, 90)
    options: AttentionOptions = PLAIN
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.key_type is F32 else torch.bfloat16


class Problem:
    """Pages at random places of a pool that holds NaN or noise elsewhere, also behind the newest
    token, and a batch on them."""

    def __init__(self, case: Case, device: str, *, cuts: int | None = None) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        batch, block = len(case.lengths), case.tokens_per_block
        num_blocks = [-(-n // block) for n in case.lengths]
        self.max_blocks = max(num_blocks) + 1
        num_slots = sum(num_blocks) + 3
        order = torch.randperm(num_slots, generator=self.generator)[: sum(num_blocks)]
        self.tables = torch.full((batch, self.max_blocks), -1, dtype=torch.int32)
        for row, slots in enumerate(order.split(num_blocks)):
            self.tables[row, : len(slots)] = slots.int()
        self.keys, self.values = (
            self._pages(kv_type, num_slots, device, is_value=is_value)
            for kv_type, is_value in ((case.key_type, False), (case.value_type, True))
        )
        query = self.normal(batch, case.kv_heads * case.group, case.head_dim)
        self.query = rotate(query, case.key_type).to(case.dtype).to(device)
        self.cuts = cuts

    def normal(self, *shape: int) -> torch.Tensor:
        """Numbers that differ from call to call, and are the same in each test."""
        return torch.randn(*shape, generator=self.generator)

    def _pages(self, kv_type: KVType, num_slots: int, device: str, *, is_value: bool) -> KVPages:
        case = self.case
        vectors = case.kv_heads * case.tokens_per_block
        num_bytes = vectors * kv_type.vector_bytes(case.head_dim)
        pool = torch.full((num_slots, 2 * num_bytes + 32), 0xFF, dtype=torch.uint8, device=device)
        pages = page_views(
            pool[:, 32 : 32 + num_bytes],
            kv_type,
            case.tokens_per_block,
            case.kv_heads,
            case.head_dim,
            is_value=is_value,
        )
        position = torch.arange(self.max_blocks * case.tokens_per_block)
        rows, positions = (position < torch.tensor(case.lengths)[:, None]).nonzero(as_tuple=True)
        slots = self.tables[rows, positions // case.tokens_per_block].long().to(device)
        offsets = (positions % case.tokens_per_block).to(device)
        values, scales = pack(self.normal(len(rows), case.kv_heads, case.head_dim), kv_type)
        pages.values[slots, offsets] = values.view(-1, *pages.values.shape[2:]).to(device)
        if scales is not None and pages.scales is not None:
            pages.scales[slots, offsets] = scales.to(device)
        return pages

    def batch(self) -> DecodeBatch:
        case, device, sides = self.case, self.query.device, (self.keys, self.values)
        lengths = np.array(case.lengths, np.int32)
        items, first_items, shares = plan_decode(
            lengths,
            tokens_per_block=case.tokens_per_block,
            num_kv_heads=case.kv_heads,
            programs=CPU_PROGRAMS if device.type == "cpu" else decode_programs(*sides),
            window=case.options.window,
            num_sink_tokens=case.options.num_sink_tokens,
        )
        if self.cuts is not None:  # equal parts, whatever the plan would be
            rows = [
                (row, first, min(first + self.cuts, -(-n // case.tokens_per_block)), 0)
                for row, n in enumerate(case.lengths)
                for first in range(0, -(-n // case.tokens_per_block), self.cuts)
            ]
            items = np.array([*rows, (-1, 0, 9, 0)], np.int32)
            first_items = np.searchsorted(items[:-1, 0], np.arange(len(lengths) + 1))
            # Of two items each, and one that has none.
            shares = np.append(np.arange(0, len(rows), 2), (len(rows), len(rows))).astype(np.int32)
        arrays = (lengths, items, first_items.astype(np.int32), shares)
        return DecodeBatch(
            self.tables.to(device), *(torch.from_numpy(array).to(device) for array in arrays)
        )

    def run(self, run: Callable[..., DecodeResult], **wanted: Any) -> DecodeResult:
        return run(self.query, self.keys, self.values, self.batch(), self.case.options, **wanted)

    def check(self, **wanted: Any) -> DecodeResult:
        """Against the reference, each row for itself."""
        wanted = {"want_lse": True, **wanted}
        result = self.run(decode_attention, **wanted)
        expected = self.run(decode_attention_reference, **wanted)
        limit = max(TOLERANCE[self.case.key_type], TOLERANCE[self.case.value_type])
        assert result.out.dtype == self.query.dtype and not result.out.isnan().any()
        assert result.lse is not None and expected.lse is not None
        error = (result.out.double() - expected.out).flatten(1).norm(dim=1)
        length = expected.out.flatten(1).norm(dim=1)
        assert (error <= limit * length).all(), (error / length).tolist()
        is_finite = expected.lse.isfinite()
        assert torch.equal(result.lse.isfinite(), is_finite)
        assert not result.lse.isnan().any()
        difference = (result.lse.double() - expected.lse)[is_finite].abs()
        assert (difference <= limit).all(), difference.max().item()
        if result.mass is not None and expected.mass is not None:
            assert torch.equal(result.mass == 0, expected.mass == 0)
            torch.testing.assert_close(
                result.mass.double(), expected.mass, rtol=10 * limit, atol=limit
            )
        return result


TYPES = [
    (BF16, BF16),
    (F16, F16),
    (F32, F32),
    (F16, BF16),
    (Q8_0, Q8_0),
    (TURBO4, TURBO4),
    (Q8_0, TURBO4),
    (TURBO4, BF16),
]
SHAPES = [(32, 16), (64, 16), (128, 16), (256, 16), (128, 32)]
# Of the product of both, what the interpreter has time for: each pair of types, and of packed ones
# each number of parts, which is what kernels differ in.
SOME = [
    (BF16, BF16, 64, 16),
    (F16, F16, 128, 32),
    (F32, F32, 256, 16),
    (F16, BF16, 128, 16),
    (Q8_0, Q8_0, 32, 16),
    (Q8_0, Q8_0, 64, 16),
    (Q8_0, Q8_0, 128, 32),
    (Q8_0, Q8_0, 256, 16),
    (TURBO4, TURBO4, 64, 16),
    (TURBO4, TURBO4, 128, 32),
    (TURBO4, TURBO4, 256, 16),
    (Q8_0, TURBO4, 128, 16),
    (TURBO4, BF16, 64, 16),
]
ALL = [
    (*types, *shape)
    for types in TYPES
    for shape in SHAPES
    if all(kv_type.supports(shape[0]) for kv_type in types)
]


@pytest.mark.parametrize(
    ("device", "key_type", "value_type", "head_dim", "block"),
    [pytest.param(*CPU.values, *some, marks=CPU.marks) for some in SOME]
    + [pytest.param(*CUDA.values, *each, marks=CUDA.marks) for each in ALL],
    ids=lambda value: getattr(value, "name", None),
)
def test_types_and_shapes(
    device: str, key_type: KVType, value_type: KVType, head_dim: int, block: int
) -> None:
    options = AttentionOptions(head_dim**-0.5)
    Problem(Case(key_type, value_type, head_dim, block, options=options), device, cuts=3).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 3), (2, 8), (1, 9), (1, 17)])
def test_groups_of_heads(device: str, kv_heads: int, group: int) -> None:
    case = Case(head_dim=64, kv_heads=kv_heads, group=group, lengths=(1, 70))
    Problem(case, device).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [16, 80, 96])
def test_other_head_sizes_of_plain_types(device: str, head_dim: int) -> None:
    Problem(Case(F32, F32, head_dim, kv_heads=1), device).check()


OPTIONS = {
    "window": AttentionOptions(0.1, window=20),
    "window-of-one": AttentionOptions(0.1, window=1),
    "window-of-blocks": AttentionOptions(0.1, window=32),
    "sinks": AttentionOptions(0.1, window=24, num_sink_tokens=4),
    "many-sinks": AttentionOptions(0.1, window=17, num_sink_tokens=33),
    "softcap": AttentionOptions(0.5, softcap=3.0),
    "all": AttentionOptions(0.3, window=40, num_sink_tokens=3, softcap=5.0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", [(F32, F32), (TURBO4, Q8_0)], ids=["plain", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_windows_sinks_and_soft_caps(device: str, types: tuple[KVType, KVType], name: str) -> None:
    lengths = (1, 20, 130, 75, 33)
    case = Case(*types, 64, kv_heads=1, lengths=lengths, options=OPTIONS[name])
    Problem(case, device).check(want_mass=True)
    # Items of what no window shows, too, which no plan has.
    Problem(replace(case, lengths=(70, 130)), device, cuts=2).check(want_mass=True)


@pytest.mark.parametrize("device", DEVICES)
def test_sink_logits_take_weight(device: str) -> None:
    problem = Problem(Case(F32, F32, 64, group=4, lengths=(5, 0, 90)), device)
    logits = torch.linspace(-4.0, 6.0, 8).to(device)
    logits[3] = -math.inf
    with_sinks = problem.check(sink_logits=logits)
    without = problem.check()
    assert with_sinks.out[0].norm() < 0.9 * without.out[0].norm()
    torch.testing.assert_close(with_sinks.out[:, 3], without.out[:, 3])


def _only(block: int) -> Callable[[int], list[int]]:
    return lambda num_blocks: [b for b in range(num_blocks) if b != block]


HOLES: dict[str, Callable[[int], list[int]]] = {
    "front": lambda n: [0, 1],
    "middle": lambda n: [n // 2],
    "last": lambda n: [n - 1],
    "split-boundaries": lambda n: [3, 4, 7, 8],
    "a-whole-item": lambda n: [4, 5, 6, 7],
    "every-other": lambda n: list(range(0, n, 2)),
    "all-but-one": _only(5),
    "everywhere": lambda n: list(range(n)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "types", [(F32, F32), (BF16, BF16), (Q8_0, Q8_0), (TURBO4, TURBO4)], ids=lambda t: t[0].name
)
@pytest.mark.parametrize("name", HOLES)
def test_holes_have_no_weight_at_all(device: str, types: tuple[KVType, KVType], name: str) -> None:
    problem = Problem(Case(*types, 64, kv_heads=1, lengths=(163, 40)), device, cuts=4)
    for block in HOLES[name](problem.max_blocks - 1):
        problem.tables[0, block] = -1
    result = problem.check(want_mass=True)
    assert result.lse is not None and result.mass is not None
    assert (result.mass[0].cpu()[problem.tables[0] < 0] == 0).all()
    if name == "everywhere":
        assert (result.out[0] == 0).all() and (result.lse[0] == -math.inf).all()
        assert (result.mass[0] == 0).all()
    else:
        torch.testing.assert_close(
            result.mass.sum(1), torch.full((2,), 2.0, device=device), rtol=0.01, atol=0.0
        )


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_query_give_nothing(device: str) -> None:
    result = Problem(Case(lengths=(0, 40, 0, 0)), device).check(want_mass=True)
    assert (result.out[[0, 2, 3]] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_how_work_is_cut_does_not_change_the_result(device: str) -> None:
    case = Case(F32, F32, 64, kv_heads=1, lengths=(280, 3))
    outs = []
    for cuts in (1, 5, 30):
        problem = Problem(case, device, cuts=cuts)
        # The last of more items than are merged at a time has the largest scores.
        problem.keys.values[problem.tables[0, 17].long(), :8] *= 4.0
        outs.append(problem.run(decode_attention).out)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_type", [BF16, Q8_0, TURBO4], ids=lambda t: t.name)
def test_pages_may_be_further_apart_than_32_bits_count(device: str, kv_type: KVType) -> None:
    problem = Problem(Case(kv_type, kv_type, 64, kv_heads=1, lengths=(48,)), device)
    problem.tables[0, :3] = torch.tensor([2, -(2**31), 0])
    shape = Shape(64, 16, 1, 48)
    for is_value in (False, True):
        pages = huge_pages(kv_type, shape, device, is_value=is_value)
        for slot in (0, 2):
            values, scales = pack(problem.normal(16, 1, 64), kv_type)
            pages.values[slot] = values.view(pages.values.shape[1:]).to(device)
            if scales is not None and pages.scales is not None:
                pages.scales[slot] = scales.to(device)
        if is_value:
            problem.values = pages
        else:
            problem.keys = pages
    problem.check()


@pytest.mark.parametrize("device", DEVICES)
def test_equal_calls_give_equal_bits(device: str) -> None:
    problem = Problem(Case(Q8_0, TURBO4, kv_heads=1, lengths=(100, 77)), device, cuts=2)
    first, second = (problem.run(decode_attention).out for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_and_tables_may_be_views(device: str) -> None:
    problem = Problem(Case(F32, F32, 64, group=4), device)
    expected = problem.run(decode_attention).out
    wide = torch.randn(4, 24, 64).to(device)
    wide[:, 8:16] = problem.query
    problem.query = wide[:, 8:16]
    tables = torch.full((4, problem.max_blocks + 5), 9, dtype=torch.int32)
    tables[:, : problem.max_blocks] = problem.tables
    problem.tables = tables
    batch = problem.batch()
    batch = batch._replace(tables=batch.tables[:, : problem.max_blocks])
    out = decode_attention(
        problem.query, problem.keys, problem.values, batch, problem.case.options, want_mass=True
    ).out
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "types", [(BF16, BF16), (F16, F16), (Q8_0, Q8_0), (TURBO4, TURBO4)], ids=lambda t: t[0].name
)
@pytest.mark.parametrize(
    ("head_dim", "block", "kv_heads", "group"),
    [
        (128, 16, 8, 4),
        (64, 16, 3, 3),
        (256, 16, 2, 8),
        (128, 32, 8, 4),
    ],
)
def test_long_ragged_batches(
    types: tuple[KVType, KVType], head_dim: int, block: int, kv_heads: int, group: int
) -> None:
    lengths = tuple(int(n) for n in np.random.default_rng(3).integers(1, 20_001, 12))
    scale = AttentionOptions(head_dim**-0.5)
    case = Case(*types, head_dim, block, kv_heads, group, (1, 20_000, *lengths), scale)
    Problem(case, "cuda").check()
    windowed = replace(case, options=replace(scale, window=4096, num_sink_tokens=4))
    Problem(windowed, "cuda").check()


@pytest.mark.gpu
def test_a_graph_can_hold_it() -> None:
    problem = Problem(Case(lengths=(100, 2000)), "cuda")
    batch = problem.batch()

    def attend() -> torch.Tensor:
        return decode_attention(
            problem.query, problem.keys, problem.values, batch, problem.case.options
        ).out

    expected = attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    graph.replay()
    assert torch.equal(out, expected)
    batch.num_tokens.fill_(17)
    graph.replay()
    assert torch.equal(out, attend())
