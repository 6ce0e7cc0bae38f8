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
    is_value: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        side = "value" if self.is_value else "key"
        return f"{'-'.join(map(str, self.shape))}-{self.kv_type.name}-{side}-{dtype}"


# Pages of no power of two of tokens too. Each type meets each shape, and each dtype in turn.
PACKED = itertools.product([*SHAPES, Shape(64, 24, 2, 50)], [Q8_0, TURBO4], [False, True])
PLAIN = itertools.product(PLAIN_SHAPES, [F32, BF16], [False])
CASES = [
    Case(shape, kv_type, dtype, is_value)
    for (shape, kv_type, is_value), dtype in zip(
        [*PACKED, *PLAIN], itertools.cycle(DTYPES), strict=False
    )
]
# What a model's own type becomes: itself.
CASES += [Case(SHAPES[1], *same) for same in ((BF16, torch.bfloat16), (F16, torch.float16))]
CASES += [
    Case(SHAPES[1], kv_type, torch.bfloat16, is_value)
    for kv_type, is_value in itertools.product((Q8_0, TURBO4), (False, True))
]


def _full_pages(case: Case, device: str, num_slots: int) -> KVPages:
    head_dim, block, heads, _ = case.shape
    _, pages = canary_pool(case.kv_type, case.shape, device, num_slots, is_value=case.is_value)
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(num_slots, block, heads, head_dim, generator=generator)
    x *= 10 ** torch.randn(num_slots, 1, heads, 1, generator=generator)
    if device == "cpu":
        x = x.bfloat16().float()  # needs no rounding: the interpreter cuts bits off instead
    packed, scales = pack(x, case.kv_type)
    pages.values.copy_(packed.unflatten(-1, pages.values.shape[3:]))
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
@pytest.mark.parametrize("is_value", [False, True], ids=["key", "value"])
@pytest.mark.parametrize("kv_type", [Q8_0, TURBO4, F16], ids=lambda t: t.name)
def test_the_tiles_of_many_pages_are_the_references(
    device: str, kv_type: KVType, is_value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(Shape(128, 16, 3, 100), kv_type, torch.float16, is_value)
    if device == "cpu":  # the interpreter takes seconds for what makes tiles large
        monkeypatch.setattr("coldpage.kernels.gather_pages._LARGE_FROM", 1)
    else:
        case = case._replace(shape=Shape(128, 16, 3, 16 * 1000))
    gathered, expected = _gathered(case, device, num_slots=1001 if device == "cuda" else 9)
    assert torch.equal(gathered, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_value", [False, True], ids=["key", "value"])
def test_pages_may_be_further_apart_than_32_bits_count(device: str, is_value: bool) -> None:
    shape = Shape(128, 16, 1, 32)
    pages = huge_pages(Q8_0, shape, device, is_value=is_value)
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
        for is_value in False, True:
            out = torch.empty(8, num_blocks * 16, 128, dtype=torch.bfloat16)
            slots = torch.zeros(num_blocks, dtype=torch.int32)
            gather_pages(pages(kv_type, is_value), slots, out)
"""


def test_numbers_move_in_vectors(tmp_path: Path) -> None:
    found = memory_and_dot_instructions(_LAUNCHES, tmp_path)
    # 8192 numbers by 128 threads: bytes stored are the same for all, bytes loaded are not. Plain
    # values lie as plain keys do.
    for ops, num_loads in zip(found, (2, 2, 4, 4, 8), strict=True):
        assert ops["ld.global.v4.b32"] == num_loads
        stores = {op: n for op, n in ops.items() if op.startswith("st.")}
        assert stores == {"st.global.v4.b32": 8}
