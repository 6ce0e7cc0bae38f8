"""The kernel that unpacks scattered pages, against its reference."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from coldpage.kernels.gather_pages import gather_pages, gather_pages_reference
from coldpage.kernels.kv_types import BF16, F16, F32, Q8_0, TURBO4, KVPages, KVType
from coldpage.kernels.packing import pack
from tests.kernels.offline import memory_and_dot_instructions
from tests.kernels.pools import (
    DEVICES,
    DTYPES,
    PLAIN_SHAPES,
    SHAPES,
    Shape,
    canary_pool,
    huge_pages,
)


class Case(NamedTuple):
    shape: Shape
    kv_type: KVType
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{'-'.join(map(str, self.shape))}-{self.kv_type.name}-{dtype}"


# Each type meets each shape, and each dtype in turn.
CASES = [
    Case(shape, kv_type, dtype)
    for (shape, kv_type), dtype in zip(
        [*itertools.product(SHAPES, [Q8_0, TURBO4]), *itertools.product(PLAIN_SHAPES, [F32, BF16])],
        itertools.cycle(DTYPES),
        strict=False,
    )
]
# What a model's own type becomes: itself.
CASES += [Case(SHAPES[1], *same) for same in ((BF16, torch.bfloat16), (F16, torch.float16))]
CASES += [Case(SHAPES[1], packed, torch.bfloat16) for packed in (Q8_0, TURBO4)]


def _full_pages(case: Case, device: str, num_slots: int) -> KVPages:
    head_dim, block, heads, _ = case.shape
    _, pages = canary_pool(case.kv_type, case.shape, device, num_slots)
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(num_slots, block, heads, head_dim, generator=generator)
    x *= 10 ** torch.randn(num_slots, 1, heads, 1, generator=generator)
    if device == "cpu":
        x = x.bfloat16().float()  # needs no rounding: the interpreter cuts bits off instead
    packed, scales = pack(x, case.kv_type)
    pages.values.copy_(packed)
    if pages.scales is not None and scales is not None:
        pages.scales.copy_(scales)
    return pages


def _gathered(case: Case, device: str, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel and the reference made, with the borders of a larger tensor around."""
    pages = _full_pages(case, device, num_slots)
    num_blocks = -(-case.shape.num_tokens // case.shape.tokens_per_block)
    generator = torch.Generator().manual_seed(num_blocks)
    slots = torch.randperm(num_slots, generator=generator)[:num_blocks].to(device, torch.int32)
    num_rows = num_blocks * case.shape.tokens_per_block
    made = []
    for gather in (gather_pages, gather_pages_reference):
        around = torch.full(
            (case.shape.kv_heads, num_rows + 5, case.shape.head_dim + 16), 7.0, device=device
        ).to(case.dtype)
        gather(pages, slots, around[:, 3 : num_rows + 3, : case.shape.head_dim])
        made.append(around)
    return made[0], made[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_the_references(device: str, case: Case) -> None:
    gathered, expected = _gathered(case, device, num_slots=9)
    if device == "cpu" and case.dtype == torch.bfloat16 and case.kv_type in (Q8_0, TURBO4):
        # The interpreter cuts bits off where a GPU rounds.
        torch.testing.assert_close(gathered, expected, rtol=2**-7, atol=0)
        return
    assert torch.equal(gathered, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_type", [Q8_0, TURBO4, F16], ids=lambda t: t.name)
def test_the_tiles_of_many_pages_are_the_references(
    device: str, kv_type: KVType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(Shape(128, 16, 3, 100), kv_type, torch.float16)
    if device == "cpu":  # the interpreter takes seconds for what makes tiles large
        monkeypatch.setattr("coldpage.kernels.gather_pages._LARGE_FROM", 1)
    else:
        case = case._replace(shape=Shape(128, 16, 3, 16 * 1000))
    gathered, expected = _gathered(case, device, num_slots=1001 if device == "cuda" else 9)
    assert torch.equal(gathered, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_may_be_further_apart_than_32_bits_count(device: str) -> None:
    shape = Shape(128, 16, 1, 32)
    pages = huge_pages(Q8_0, shape, device)
    assert pages.scales is not None
    for slot in (0, 2):
        pages.values[slot], pages.scales[slot] = slot + 3, 0.5
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    out = torch.zeros(1, 32, 128, device=device)
    gather_pages(pages, slots, out)
    assert (out[0, :16] == 2.5).all() and (out[0, 16:] == 1.5).all()


_LAUNCHES = """
from coldpage.kernels.gather_pages import gather_pages
for num_blocks in 1024, 1025:
    for kv_type in TURBO4, Q8_0, BF16:
        out = torch.empty(8, num_blocks * 16, 128, dtype=torch.bfloat16)
        gather_pages(pages(kv_type), torch.zeros(num_blocks, dtype=torch.int32), out)
"""


def test_numbers_move_in_vectors(tmp_path: Path) -> None:
    turbo4, q8_0, bf16 = memory_and_dot_instructions(_LAUNCHES, tmp_path)
    # 8192 numbers by 128 threads: bytes stored are the same for all, bytes loaded are not.
    for ops, num_loads in ((turbo4, 2), (q8_0, 4), (bf16, 8)):
        assert ops["ld.global.v4.b32"] == num_loads
        stores = {op: n for op, n in ops.items() if op.startswith("st.")}
        assert stores == {"st.global.v4.b32": 8}
