"""The kernel that merges two parts of an attention, against its reference and the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coldpage.kernels.merge_attention import merge_attention, merge_attention_reference
from tests.kernels.offline import memory_and_dot_instructions
from tests.kernels.pools import DEVICES, DTYPES

Part = tuple[torch.Tensor, torch.Tensor]
SHAPES = [(4, 1, 64), (2, 37, 128), (3, 5, 80), (1, 70, 256), (8, 0, 64)]  # heads, q, head_dim


def _part(shape: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int) -> Part:
    """As kernels give it: [q, heads, head_dim] in memory, and a log-sum-exp of any size."""
    heads, q, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(1, q, heads, head_dim, generator=generator).transpose(1, 2)
    lse = 4 * torch.randn(1, q, heads, generator=generator).transpose(1, 2)
    return out.to(device, dtype), lse.to(device)


def _assert_near(found: Part, expected: Part, dtype: torch.dtype) -> None:
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=rtol / 100)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_merge_is_the_references(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    a, b = _part(shape, dtype, device, 1), _part(shape, dtype, device, 2)
    expected = merge_attention_reference(*a, *b)
    _assert_near(merge_attention(*a, *b), expected, dtype)

    heads, q, head_dim = shape
    around = torch.full((1, heads, q + 2, head_dim + 3), 7.0, device=device, dtype=dtype)
    inside = around[:, :, 1:-1, 2:-1]
    out, lse = merge_attention(*a, *b, out=inside)
    assert out is inside
    _assert_near((out, lse), expected, dtype)
    inside.fill_(7)
    assert (around == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_that_saw_no_key_add_nothing(device: str) -> None:
    a, b = _part((2, 6, 64), torch.float32, device, 1), _part((2, 6, 64), torch.float32, device, 2)
    nan, none = float("nan"), float("-inf")
    a[0][:, :, 0], a[1][:, :, 0] = nan, none
    b[0][:, :, 1], b[1][:, :, 1] = nan, none
    for part in (a, b):
        part[0][:, :, 2], part[1][:, :, 2] = nan, none
    out, lse = merge_attention(*a, *b)
    assert torch.equal(out[:, :, 0], b[0][:, :, 0]) and torch.equal(lse[:, :, 0], b[1][:, :, 0])
    assert torch.equal(out[:, :, 1], a[0][:, :, 1]) and torch.equal(lse[:, :, 1], a[1][:, :, 1])
    assert (out[:, :, 2] == 0).all() and lse[:, :, 2].isneginf().all()
    _assert_near((out, lse), merge_attention_reference(*a, *b), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_two_halves_are_the_whole(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 3, n, 64, generator=generator).to(device) * 2 for n in (20, 90, 90)
    )

    def attend(first: int, stop: int) -> Part:
        scores = query @ key[:, :, first:stop].mT
        return scores.softmax(-1) @ value[:, :, first:stop], scores.logsumexp(-1)

    merged = merge_attention(*attend(0, 33), *attend(33, 90))
    for found, expected in zip(merged, attend(0, 90), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_result_may_replace_a_part(device: str) -> None:
    a, b = _part((2, 9, 64), torch.float16, device, 1), _part((2, 9, 64), torch.float16, device, 2)
    expected, _ = merge_attention(*a, *b)
    out, _ = merge_attention(*a, *b, out=a[0])
    assert out is a[0] and torch.equal(out, expected)


_LAUNCHES = """
from coldpage.kernels.merge_attention import merge_attention
for q in 100, 1024:
    out = torch.zeros(1, q, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
    lse = torch.zeros(1, q, 8).transpose(1, 2)
    merge_attention(out, lse, out, lse, torch.empty_like(out))
"""


def test_numbers_move_in_vectors(tmp_path: Path) -> None:
    for ops in memory_and_dot_instructions(_LAUNCHES, tmp_path):
        assert ops["ld.global.v4.b32"] == 8 and ops["st.global.v4.b32"] == 4
