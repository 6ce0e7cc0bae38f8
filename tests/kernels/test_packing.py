"""Stored numbers: how near they are to what was stored, and the rotation that makes them so."""

from __future__ import annotations

import pytest
import torch

from coldpage.kernels import packing
from coldpage.kernels.kv_types import BF16, F16, F32, Q8_0, TURBO4, KVType
from coldpage.kernels.packing import pack, unpack
from coldpage.kernels.rotation import (
    CODEBOOK,
    THRESHOLDS,
    codebook,
    rotate,
    rotate_back,
    rotation,
    signs,
)
from tests.kernels.pools import DEVICES, DTYPES


def _vectors(head_dim: int, num_strong: int = 0, device: str = "cpu") -> torch.Tensor:
    x = torch.randn(300, 2, head_dim, generator=torch.Generator().manual_seed(head_dim))
    x[..., 3 : 3 + num_strong] *= 10
    return x.to(device)


def _cosine(x: torch.Tensor, kv_type: KVType = TURBO4) -> float:
    values, scales = pack(x, kv_type)
    restored = rotate_back(unpack(values, scales, kv_type, torch.float32), kv_type)
    return torch.nn.functional.cosine_similarity(restored, x.float(), dim=-1).mean().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_turbo4_keeps_the_direction_of_vectors(
    device: str, head_dim: int, dtype: torch.dtype
) -> None:
    assert _cosine(_vectors(head_dim, device=device).to(dtype)) >= 0.995
    assert _cosine(_vectors(head_dim, num_strong=4, device=device).to(dtype)) >= 0.993


def test_a_codebook_of_another_scale_or_no_rotation_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(packing, "codebook", lambda device: torch.tensor(CODEBOOK) * 0.61)
        patch.setattr(packing, "THRESHOLDS", tuple(t * 0.61 for t in THRESHOLDS))
        assert _cosine(_vectors(128)) < 0.99
    monkeypatch.setattr(packing, "rotation", lambda group, device, dtype: torch.eye(group))
    x = _vectors(128, num_strong=4)
    values, scales = pack(x, TURBO4)
    restored = unpack(values, scales, TURBO4, torch.float32)  # in the space it was packed in
    assert torch.nn.functional.cosine_similarity(restored, x, dim=-1).mean() < 0.99


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_turbo4_keeps_the_length_of_every_group(device: str, head_dim: int) -> None:
    x = _vectors(head_dim, num_strong=1, device=device)
    x *= torch.logspace(-2, 2, 300, device=device)[:, None, None]
    x[0] = 0
    values, scales = pack(x, TURBO4)
    group = min(head_dim, 128)
    length = unpack(values, scales, TURBO4, torch.float32).reshape(-1, group).norm(dim=-1)
    torch.testing.assert_close(length, x.reshape(-1, group).norm(dim=-1), rtol=2**-11, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_nearest_entry_of_the_codebook_is_taken(device: str) -> None:
    x = _vectors(128, device=device)
    values, scales = pack(x, TURBO4)
    assert scales is not None
    length = rotate(x, TURBO4).norm(dim=-1)
    numbers = rotate(x, TURBO4) * (128**0.5 / length)[..., None]
    distance = (numbers[..., None] - codebook(x.device)).abs()
    chosen = torch.cat([values & 15, values >> 4], -1).long()
    of_chosen = distance.gather(-1, chosen[..., None])[..., 0]
    torch.testing.assert_close(of_chosen, distance.amin(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [32, 128, 96])
def test_q8_0_is_within_half_a_step_of_every_number(device: str, head_dim: int) -> None:
    x = _vectors(head_dim, device=device)
    x *= torch.logspace(-9, 5, 300, device=device)[:, None, None]
    x[0] = 0
    values, scales = pack(x, Q8_0)
    assert scales is not None and scales.isfinite().all() and values.min() >= -127
    error = (unpack(values, scales, Q8_0, torch.float32) - x).abs().reshape(-1, 32)
    step = scales.float().reshape(-1, 1)
    assert (error <= step * (0.5 + 1e-4)).all()
    # The scale is no larger than it must be, so a step is 1/127 of the largest number.
    largest = x.abs().reshape(-1, 32).amax(-1, keepdim=True)
    assert (step <= (largest / 127 * (1 + 2**-10)).clamp(min=2**-24) + 2**-24).all()


def test_a_number_halfway_goes_to_the_even_one() -> None:
    x = torch.zeros(32)
    x[:6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    values, scales = pack(x, Q8_0)
    assert scales is not None and scales.tolist() == [1.0]
    assert values[:6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("kv_type", [F32, F16, BF16], ids=lambda t: t.name)
def test_plain_types_are_conversions(kv_type: KVType) -> None:
    x = _vectors(80)
    values, scales = pack(x, kv_type)
    assert scales is None and torch.equal(values, x.to(kv_type.value_dtype))
    assert torch.equal(unpack(values, scales, kv_type, torch.float32), values.float())
    assert rotate(x, kv_type) is x and rotate_back(x, kv_type) is x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_rotation_is_undone_and_keeps_dot_products(
    device: str, head_dim: int, dtype: torch.dtype
) -> None:
    x = _vectors(head_dim, device=device).to(dtype)
    rotated = rotate(x.transpose(0, 1), TURBO4)
    assert rotated.dtype == dtype and rotated.shape == (2, 300, head_dim)
    tolerance = {"rtol": 0.0, "atol": 32 * torch.finfo(dtype).eps}
    torch.testing.assert_close(rotate_back(rotated, TURBO4).transpose(0, 1), x, **tolerance)
    y = rotate(x.float(), TURBO4)
    products = (y[1:] * y[:-1]).sum(-1)
    torch.testing.assert_close(
        products, (x.float()[1:] * x.float()[:-1]).sum(-1), atol=1e-3, rtol=0
    )
    assert not torch.allclose(y, x.float(), atol=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rotation_of_large_f16_numbers_does_not_overflow(device: str) -> None:
    x = torch.full((1, 128), 5000.0, dtype=torch.float16) * signs(128).half()
    x = x.to(device)
    assert rotate(x, TURBO4).isfinite().all()


def test_the_rotation_is_part_of_the_format() -> None:
    """Pages of another run or version are read with the same signs."""
    assert signs(128).tolist()[:12] == [-1, -1, -1, 1, -1, 1, -1, -1, -1, -1, -1, -1]
    matrix = rotation(128, torch.device("cpu"), torch.float32)
    assert torch.equal(matrix @ matrix.T, 128 * torch.eye(128))
    assert torch.equal(matrix[:, 0], signs(128))
