"""The kernel that writes new keys and values, against its reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from coldpage.kernels.kv_types import BF16, F16, F32, Q8_0, TURBO4, KVPages, KVType
from coldpage.kernels.packing import unpack
from coldpage.kernels.write_pages import write_pages, write_pages_reference
from tests.kernels.offline import compiled_kernels
from tests.kernels.pools import (
    BEFORE_BYTES,
    BEHIND_BYTES,
    CANARY,
    DEVICES,
    DTYPES,
    PLAIN_SHAPES,
    SHAPES,
    Shape,
    canary_pool,
    huge_pages,
)

Types = tuple[KVType, KVType]
PACKED: list[Types] = [
    (Q8_0, TURBO4),
    (TURBO4, Q8_0),
    (TURBO4, TURBO4),
    (Q8_0, Q8_0),
    (F16, TURBO4),
]
PLAIN: list[Types] = [(F32, BF16), (F16, F16), (BF16, F32), (BF16, BF16)]


class Case(NamedTuple):
    shape: Shape
    types: Types
    dtype: torch.dtype

    def __str__(self) -> str:
        names = "-".join(t.name for t in self.types)
        return f"{'-'.join(map(str, self.shape))}-{names}-{str(self.dtype).removeprefix('torch.')}"


# Each type meets each shape, and each dtype in turn.
CASES = [
    Case(shape, types, dtype)
    for (shape, types), dtype in zip(
        [*itertools.product(SHAPES, PACKED), *itertools.product(PLAIN_SHAPES, PLAIN)],
        itertools.cycle(DTYPES),
        strict=False,
    )
]


class Written(NamedTuple):
    """Both pools and their views, after a write."""

    pools: tuple[torch.Tensor, ...]
    pages: tuple[KVPages, ...]


def _write(write: Callable[..., None], case: Case, inputs: list[torch.Tensor]) -> Written:
    num_slots = case.shape.num_tokens // case.shape.tokens_per_block + 3
    device = inputs[0].device.type
    made = [
        canary_pool(kv_type, case.shape, device, num_slots, is_value=is_value)
        for kv_type, is_value in zip(case.types, (False, True), strict=True)
    ]
    written = Written(*zip(*made, strict=True))
    write(*written.pages, *inputs)
    return written


def _inputs(case: Case, device: str) -> list[torch.Tensor]:
    """K, V, slots and offsets: scattered places, every fifth token without one."""
    generator = torch.Generator().manual_seed(case.shape.num_tokens)
    head_dim, block, heads, n = case.shape
    # As a fused projection gives them: K and V are parts of one row.
    fused = torch.randn(n, 3 * heads, head_dim, generator=generator)
    fused *= 10 ** torch.randn(3 * heads, 1, generator=generator)
    fused[n // 2 : n // 2 + 1] = 0
    if device == "cpu" and BF16 in case.types:
        fused = fused.bfloat16()  # what needs no rounding: the interpreter cuts bits off instead
    fused = fused.to(device, case.dtype)
    places = torch.randperm((n // block + 3) * block, generator=generator)[:n].to(torch.int32)
    slots = places // block
    slots[4::5] = -1
    offsets = places % block
    return [fused[:, :heads], fused[:, -heads:], slots.to(device), offsets.to(device)]


def _assert_turbo4_near(pages: KVPages, expected: KVPages) -> None:
    """Equal, but for numbers within rounding of two of the codebook's, and of norms: those of
    parts with another number differ by what it adds to their length."""
    assert pages.scales is not None and expected.scales is not None
    assert (pages.values != expected.values).sum() <= pages.values.numel() / 1000
    is_same = (pages.values == expected.values).all(-1)
    ulps = pages.scales.view(torch.int16).int() - expected.scales.view(torch.int16).int()
    assert (ulps.abs()[is_same] <= 1).all()
    ratios = pages.scales.float() / torch.where(is_same, 1.0, expected.scales.float())
    assert ((ratios[~is_same] - 1).abs() <= 0.02).all()
    ones = torch.ones_like(pages.scales)
    numbers, others = (
        unpack(side.values.flatten(-2), ones, TURBO4, torch.float32) for side in (pages, expected)
    )
    assert ((numbers - others).abs() <= 0.67).all()  # the widest step of the codebook


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages_are_the_references(device: str, case: Case) -> None:
    inputs = _inputs(case, device)
    written = _write(write_pages, case, inputs)
    expected = _write(write_pages_reference, case, inputs)
    for pool, pages, expected_pool, expected_pages in zip(*written, *expected, strict=True):
        if pages.kv_type != TURBO4:
            assert torch.equal(pool, expected_pool)
            continue
        _assert_turbo4_near(pages, expected_pages)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", [(TURBO4, Q8_0), (Q8_0, F16)], ids=lambda t: t[0].name)
def test_only_places_of_tokens_with_a_slot_change(device: str, types: Types) -> None:
    case = Case(Shape(64, 16, 2, 40), types, torch.float16)
    inputs = _inputs(case, device)
    slots, offsets = inputs[2], inputs[3]
    written = _write(write_pages, case, inputs)
    is_written = torch.zeros(written.pages[0].values.shape[:2], dtype=torch.bool, device=device)
    has_slot = slots >= 0
    is_written[slots[has_slot].long(), offsets[has_slot].long()] = True
    for pool, pages in zip(*written, strict=True):
        assert (pool[:, :BEFORE_BYTES] == CANARY).all()
        assert (pool[:, -BEHIND_BYTES:] == CANARY).all()
        for view in (pages.values, pages.scales):
            if view is not None:
                held = view[~is_written].contiguous().view(torch.uint8)
                assert held.numel() > 0 and (held == CANARY).all()
                changed = view[is_written].contiguous().view(torch.uint8) != CANARY
                assert changed.flatten(1).any(1).all()

    nowhere = torch.full_like(slots, -1)
    untouched = _write(write_pages, case, [*inputs[:2], nowhere, offsets])
    assert all((pool == CANARY).all() for pool in untouched.pools)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", [(TURBO4, Q8_0), (BF16, TURBO4)], ids=lambda t: t[0].name)
def test_the_tiles_of_prompts_are_the_references(
    device: str, types: Types, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(Shape(128, 16, 2, 150), types, torch.bfloat16)
    if device == "cpu":  # the interpreter takes seconds for what makes tiles large
        monkeypatch.setattr("coldpage.kernels.write_pages._LARGE_FROM", 1)
    else:
        case = case._replace(shape=Shape(128, 16, 8, 4100))
    inputs = _inputs(case, device)
    written = _write(write_pages, case, inputs)
    expected = _write(write_pages_reference, case, inputs)
    for pool, pages, expected_pool, expected_pages in zip(*written, *expected, strict=True):
        if pages.kv_type == TURBO4:
            _assert_turbo4_near(pages, expected_pages)
        else:
            assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_may_be_further_apart_than_32_bits_count(device: str) -> None:
    case = Case(Shape(128, 16, 1, 3), (Q8_0, TURBO4), torch.float32)
    key, value, _, offsets = _inputs(case, device)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    sides = list(zip(case.types, (False, True), strict=True))
    far = [huge_pages(t, case.shape, device, is_value=is_value) for t, is_value in sides]
    near = [canary_pool(t, case.shape, device, 3, is_value=is_value)[1] for t, is_value in sides]
    for pages in (far, near):
        write_pages(*pages, key, value, slots, offsets)
    place = slots.long(), offsets.long()
    for side, expected in zip(far, near, strict=True):
        assert side.scales is not None and expected.scales is not None
        assert torch.equal(side.values[place], expected.values[place])
        assert torch.equal(side.scales[place], expected.scales[place])


_LAUNCHES = """
from coldpage.kernels import write_pages
write_pages._dot_dtype = lambda x: x.dtype  # as on a GPU
for kv_type, *counts in (TURBO4, 1, 17, 64), (Q8_0, 64, 63), (BF16, 4096, 4097):
    for num_tokens in counts:
        fused = torch.zeros(num_tokens, 24, 128, dtype=torch.bfloat16)
        place = torch.zeros(num_tokens, dtype=torch.int32)
        sides = pages(kv_type), pages(kv_type, is_value=True)
        write_pages.write_pages(*sides, fused[:, :8], fused[:, 16:], place, place)
"""


def test_numbers_move_in_vectors_and_are_rotated_by_tensor_cores(tmp_path: Path) -> None:
    kernels = compiled_kernels(_LAUNCHES, tmp_path)
    found = [kernel.memory_and_dot_instructions for kernel in kernels]
    assert len(found) == 3  # none is compiled for a number of tokens
    for ops in found:
        assert ops["ld.global.v4.b32"] >= 2
        # No other loads but of slots and offsets.
        assert set(ops) & {"ld.global.b16", "ld.global.b8", "ld.global.v2.b32"} == set()
        assert ops["st.global.v4.b32"] + ops["st.global.v2.b32"] >= 1
        assert ops["st.global.b32"] == 0
    # Of packed values no byte's neighbour is a thread's own, but the next threads'.
    assert [ops["st.global.b8"] for ops in found] == [8, 16, 0]
    tokens = [kernel.threads_of_byte_stores[-1][1] for kernel in kernels[:2]]
    assert tokens == [16, 32]
    is_rotated = [any("mma" in op for op in ops) for ops in found]
    assert is_rotated == [True, False, False]
