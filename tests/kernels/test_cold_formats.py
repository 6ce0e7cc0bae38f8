"""The packed formats: their sizes, where each bit lies, and that the reference is right."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import numpy as np
import pytest

from coldpage.kernels.cold.formats import FORMATS, ColdFormat, KVShape, NumberType
from coldpage.kernels.cold.numbers import MAGNITUDES, THRESHOLDS, hadamard, phase_steps, signs
from coldpage.kernels.cold.reference import pack_buffer, unpack_buffer
from coldpage.kernels.rotation import rotation
from coldpage.kernels.rotation import signs as hot_signs
from tests.kernels.cold_pages import (
    LLAMA_8B,
    SMOLLM2,
    frequencies_of,
    model_like,
    parameters_of,
)
from tests.kernels.turbo_groups import F16_ROUNDING, check_norms

INT8, FP8 = ColdFormat.INT8, ColdFormat.FP8
INT4_TOKEN, INT4_CHANNEL = ColdFormat.INT4_TOKEN, ColdFormat.INT4_CHANNEL
TURBO4, TURBO3 = ColdFormat.TURBO4, ColdFormat.TURBO3
INT4_BLOCK = ColdFormat.INT4_BLOCK
SMALL = KVShape(1, 1, 8, NumberType.F32)

# Of the numbers' root mean square, on numbers like a model's: about a fifth above what they cost.
WORST_ERROR = {
    INT8: 0.022,
    FP8: 0.03,
    INT4_TOKEN: 0.17,
    INT4_CHANNEL: 0.095,
    TURBO4: 0.105,
    TURBO3: 0.2,
    INT4_BLOCK: 0.75,
}


def relative_error(cold_format, shape, numbers, **keys):
    packed = pack_buffer(numbers, cold_format, shape, **keys)
    back = unpack_buffer(packed, cold_format, shape, **keys)
    return float(np.sqrt(np.square(back - numbers).mean() / np.square(numbers).mean()))


@pytest.mark.parametrize("cold_format", FORMATS.values())
@pytest.mark.parametrize("shape", [LLAMA_8B, SMOLLM2, KVShape(2, 32, 256, NumberType.F32)])
def test_numbers_come_back_nearly(cold_format, shape):
    numbers = model_like(shape, seed=1)
    keys = {
        "frequencies": frequencies_of(shape.head_dim),
        "means": numbers.mean(axis=1),
        "block_ordinal": 5,
    }
    assert relative_error(cold_format, shape, numbers) < WORST_ERROR[cold_format]
    assert relative_error(cold_format, shape, numbers, **keys) < WORST_ERROR[cold_format]


@pytest.mark.parametrize(
    ("cold_format", "num_bytes"),
    [
        (INT8, 16640),
        (FP8, 16640),
        (INT4_TOKEN, 9216),
        (INT4_CHANNEL, 12288),
        (TURBO4, 8448),
        (TURBO3, 6400),
        (INT4_BLOCK, 8208),
    ],
)
def test_a_buffer_of_an_8b_model_takes_so_many_bytes(cold_format, num_bytes):
    assert LLAMA_8B.num_bytes == 32768
    assert cold_format.buffer_bytes(LLAMA_8B) == num_bytes
    assert pack_buffer(model_like(LLAMA_8B, 0), cold_format, LLAMA_8B).shape == (num_bytes,)


def test_int8_by_hand():
    numbers = np.array([[[12.7, -12.7, 0.1, 0.06, -0.26, 0.0, 6.0, 1.0]]], np.float32)
    packed = pack_buffer(numbers, INT8, SMALL)
    scale = parameters_of(packed, INT8, SMALL)
    assert scale == np.float16(0.10004)  # f16 has 0.09998 below 0.1
    assert packed[:8].view(np.int8).tolist() == [127, -127, 1, 1, -3, 0, 60, 10]
    assert not packed[10:].any()


def test_fp8_by_hand():
    numbers = np.array([[[448.0, -448.0, 17.0, 19.0, 2.0**-9, 2.0**-10, -0.02, 1.0]]], np.float32)
    packed = pack_buffer(numbers, FP8, SMALL)
    assert parameters_of(packed, FP8, SMALL) == 1
    # 17 and 19 lie between 16, 18 and 20: both go to the even one. So does 2**-10, half a step.
    assert packed[:8].tolist() == [0x7E, 0xFE, 0x58, 0x5A, 0x01, 0x00, 0x8A, 0x38]


def test_fp8_codes_are_torchs():
    torch = pytest.importorskip("torch")
    shape = KVShape(1, 64, 64, NumberType.F32)
    numbers = np.random.default_rng(0).standard_normal((1, 64, 64)).astype(np.float32)
    numbers *= np.float32(2.0) ** np.arange(-32, 32, dtype=np.float32)[:, None] / 2.0**20
    numbers[0, :, 0] = 448.0  # so that the scale is 1
    packed = pack_buffer(numbers, FP8, shape)
    expected = torch.from_numpy(numbers).clamp(-448, 448).to(torch.float8_e4m3fn)
    found = packed[:4096].reshape(64, 64)[:54]  # rows without larger numbers
    assert np.array_equal(found, expected.view(torch.uint8).numpy()[0, :54])


def test_int4_by_hand():
    numbers = np.array([[[-3.0, 12.0, 0.0, 0.4, 0.6, 1.0, 2.0, 5.0]]], np.float32)
    packed = pack_buffer(numbers, INT4_TOKEN, SMALL)
    assert parameters_of(packed, INT4_TOKEN, SMALL).tolist() == [1.0, -3.0]
    # Codes 0 15 3 3 4 4 5 8: number i beside number i + 4.
    assert packed[:4].tolist() == [0x40, 0x4F, 0x53, 0x83]


def test_int4_channel_takes_its_scale_along_the_tokens():
    shape = KVShape(1, 128, 8, NumberType.F32)
    numbers = np.zeros((1, 128, 8), np.float32)
    numbers[0, :64, 3] = np.arange(64) % 16 * 2.0 + 1.0
    numbers[0, 64:, 3] = np.arange(64) % 16 * 0.5 - 4.0
    packed = pack_buffer(numbers, INT4_CHANNEL, shape)
    parameters = parameters_of(packed, INT4_CHANNEL, shape).reshape(2, 8, 2)
    assert parameters[:, 3].tolist() == [[2.0, 1.0], [0.5, -4.0]]
    codes = packed[: 128 * 4].reshape(128, 4)
    assert codes[:, 3].tolist() == [i % 16 for i in range(128)]
    assert np.array_equal(unpack_buffer(packed, INT4_CHANNEL, shape), numbers)


@pytest.mark.parametrize("cold_format", [TURBO4, TURBO3])
def test_a_rotated_code_is_a_magnitude_below_a_sign(cold_format):
    """The numbers are made by rotating codebook numbers back, so their codes are known."""
    group, num_magnitudes = 128, len(MAGNITUDES[cold_format])
    shape = KVShape(1, 1, 256, NumberType.F32)
    # Such as normally distributed numbers get: then their rms is near the codebook's 1.
    normal = np.random.default_rng(3).standard_normal(256)
    codes = np.searchsorted(THRESHOLDS[cold_format], np.abs(normal)) + num_magnitudes * (normal < 0)
    magnitudes = np.array(MAGNITUDES[cold_format])[codes % num_magnitudes]
    values = np.where(codes < num_magnitudes, magnitudes, -magnitudes).reshape(2, group)
    numbers = (values @ hadamard(group) * signs(group)).reshape(1, 1, 256).astype(np.float32)
    packed = pack_buffer(numbers, cold_format, shape)
    # The hot numbers are sqrt(group) times as long: the matrix was not normalised.
    norm = parameters_of(packed, cold_format, shape).astype(np.float64)
    assert norm == pytest.approx(math.sqrt(group) * np.ones(2), rel=1e-3)
    found = np.empty(256, np.int64)
    if cold_format is TURBO4:
        found[:128], found[128:] = packed[:128] & 15, packed[:128] >> 4
    else:
        for i in range(256):
            low = packed[i % 64] >> (2 * (i // 64)) & 3
            found[i] = low | (packed[64 + i % 32] >> (i // 32) & 1) << 2
    assert np.array_equal(found, codes)


def test_int4_block_by_hand():
    numbers = np.array([[[7.0, -7.0, 0.0, 0.4, 0.6, 1.0, -2.0, 5.0]]], np.float32)
    packed = pack_buffer(numbers, INT4_BLOCK, SMALL)
    assert packed[4:8].copy().view(np.float32) == 1.0
    assert packed[:4].tolist() == [0x9F, 0x91, 0x68, 0xD8]


@pytest.mark.parametrize("cold_format", [TURBO4, TURBO3])
def test_magnitudes_are_where_lloyds_iteration_ends(cold_format):
    """Each is the mean of the half normal distribution between the thresholds beside it."""
    levels = np.linspace(0.2, 2.5, len(MAGNITUDES[cold_format])).tolist()
    for _ in range(1_000):
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        levels = [_mean_between(a, b) for a, b in pairwise(edges)]
    assert levels == pytest.approx(list(MAGNITUDES[cold_format]), abs=1e-6)


def _mean_between(low: float, high: float) -> float:
    density = math.exp(-low * low / 2) - (0.0 if high == math.inf else math.exp(-high * high / 2))
    mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
    return density / math.sqrt(2 * math.pi) / mass


@pytest.mark.parametrize("group", [64, 128])
def test_the_rotation_is_that_of_hot_pages(group):
    assert np.array_equal(signs(group), hot_signs(group).numpy())
    torch = pytest.importorskip("torch")
    hot = rotation(group, torch.device("cpu"), torch.float32).numpy()
    assert np.array_equal(signs(group)[:, None] * hadamard(group), hot)


@pytest.mark.parametrize("shape", [LLAMA_8B, SMOLLM2, KVShape(1, 16, 256, NumberType.F32)])
def test_turbo4_keeps_lengths_and_turbo3_products(shape):
    numbers = model_like(shape, 4)
    keys = {
        "frequencies": frequencies_of(shape.head_dim),
        "means": numbers.mean(axis=1),
        "block_ordinal": 9,
    }
    for cold_format, what in itertools.product((TURBO4, TURBO3), ({}, keys)):
        packed = pack_buffer(numbers, cold_format, shape, **what)
        check_norms(packed, numbers, cold_format, shape, what, slack=1e-6)


# Groups without end would lose 0.0095 with turbo4, what its codebook loses, and 0.0358 with turbo3:
# D / (1 - D) of what its codebook loses. With codes taken once turbo3 would lose 0.0337 and 0.0347.
@pytest.mark.parametrize(
    ("cold_format", "group", "square", "slope"),
    [
        (TURBO3, 64, 0.0319, 1.0),
        (TURBO3, 128, 0.0336, 1.0),
        # Of equal length: shorter along what they were, by half of the square that is lost.
        (TURBO4, 64, 0.00888, 1 - 0.00444),
        (TURBO4, 128, 0.00918, 1 - 0.00459),
    ],
)
def test_what_normal_numbers_lose(cold_format, group, square, slope):
    """Of their square; and what becomes of their products with others, by regression."""
    rng = np.random.default_rng(8)
    shape = KVShape(1, 8_000, group, NumberType.F32)
    numbers, noise = rng.standard_normal((2, 1, 8_000, group)).astype(np.float32)
    back = unpack_buffer(pack_buffer(numbers, cold_format, shape), cold_format, shape)
    lost = np.square(back - numbers).sum(-1) / np.square(numbers).sum(-1)
    assert lost.mean() == pytest.approx(square, rel=0.01)
    others = numbers + noise
    was, now = (numbers * others).sum(-1), (back * others).sum(-1)
    assert (was * now).sum() / np.square(was).sum() == pytest.approx(slope, abs=0.001)


def test_turbo3_by_hand():
    """Two numbers of size 7 and 62 of size 1: their root mean square is 1.581."""
    group = 64
    sizes = np.ones(group)
    sizes[[0, 3]] = 7, -7
    numbers = (sizes @ hadamard(group) * signs(group) / group).reshape(1, 1, group)
    shape = KVShape(1, 1, group, NumberType.F32)
    packed = pack_buffer(numbers.astype(np.float32), TURBO3, shape)
    # In units of 1.581 they are 4.427 and 0.632, next to 2.152 and 0.756. The best scale for these
    # is (14 * 2.152 + 62 * 0.756) / (2 * 2.152**2 + 62 * 0.756**2) = 1.723, so that the unit of the
    # second codes is 1.581 + 3 * (1.723 - 1.581) = 2.006. In it 1 is 0.499, next to 0.245.
    assert packed[:16].tolist() == [3, 0, 0, 3, *[0] * 12]
    assert packed[16:24].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    norm = (2 * 49 + 62) / (14 * 2.151946 + 62 * 0.245094)
    # The rotation makes what it takes eight times as large.
    assert parameters_of(packed, TURBO3, shape) == pytest.approx(norm / 8, rel=F16_ROUNDING)


def test_turbo3_has_the_low_bits_of_all_vectors_before_the_high_ones():
    """Buffers of one vector each, put together."""
    shape = KVShape(3, 2, 64, NumberType.F32)
    numbers = model_like(shape, 9)
    one = shape._replace(num_kv_heads=1, tokens_per_block=1)
    parts = [pack_buffer(numbers[h, t].reshape(1, 1, 64), TURBO3, one) for h, t in np.ndindex(3, 2)]
    expected = np.concatenate(
        [packed[a:b] for a, b in ((0, 16), (16, 24), (24, 26)) for packed in parts]
    )
    packed = pack_buffer(numbers, TURBO3, shape)
    assert np.array_equal(packed[: expected.size], expected)
    assert not packed[expected.size :].any()
    back = [unpack_buffer(part, TURBO3, one).reshape(64) for part in parts]
    assert np.array_equal(unpack_buffer(packed, TURBO3, shape).reshape(6, 64), back)


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_a_key_turned_back_is_packed_as_the_key_before_rotation(cold_format):
    """The same key at any position gives the same codes, but for ties; that is the whole point."""
    shape = KVShape(2, 16, 64, NumberType.F32)
    frequencies = frequencies_of(64)
    keys = model_like(shape, 5)
    position = (37 * 16 + np.arange(16))[:, None]
    angle = position * (frequencies * 2 * np.pi / 2.0**32)
    low, high = np.split(keys.astype(np.float64), 2, -1)
    rotated = np.concatenate(
        [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], -1
    ).astype(np.float32)
    plain = pack_buffer(keys, cold_format, shape)
    turned = {"frequencies": frequencies, "block_ordinal": 37}
    packed = pack_buffer(rotated, cold_format, shape, **turned)
    assert (packed != plain).mean() < 0.002
    back = unpack_buffer(packed, cold_format, shape, **turned)
    expected = unpack_buffer(plain, cold_format, shape)
    assert np.linalg.norm(back, axis=-1) == pytest.approx(np.linalg.norm(expected, axis=-1), 1e-2)


def test_phases_are_cut_to_32_bits():
    frequencies = np.array([0xFFFFFFFF, 0x40000000, 3], np.uint32)
    steps = phase_steps(frequencies, 2**20, 16)
    assert steps[1].tolist() == [(2**24 + 1) * int(f) % 2**32 for f in frequencies]


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_numbers_that_are_none_harm_no_other_vector(cold_format):
    numbers = model_like(SMOLLM2, 6)
    broken = numbers.copy()
    broken[1, 3, 5], broken[1, 3, 40] = np.nan, -np.inf
    packed = pack_buffer(broken, cold_format, SMOLLM2)
    again = unpack_buffer(packed, cold_format, SMOLLM2)
    assert np.isfinite(again).all()
    expected = unpack_buffer(pack_buffer(numbers, cold_format, SMOLLM2), cold_format, SMOLLM2)
    is_same = (again == expected).all(axis=-1)
    if cold_format is INT4_CHANNEL:
        assert is_same.mean(dtype=float) >= 2 / 3
        assert (again == expected)[..., [i for i in range(64) if i not in (5, 40)]].all()
    elif cold_format is not INT4_BLOCK:
        is_same[1, 3] = True
        assert is_same.all()


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_zeros_come_back_as_zeros(cold_format):
    packed = pack_buffer(np.zeros((3, 16, 64), np.float32), cold_format, SMOLLM2)
    assert not unpack_buffer(packed, cold_format, SMOLLM2).any()


@pytest.mark.parametrize("cold_format", [INT8, FP8, INT4_TOKEN, INT4_CHANNEL])
def test_parameters_are_rounded_so_that_no_number_is_cut_off(cold_format):
    rng = np.random.default_rng(7)
    for exponent in (-9, -5, 0, 5, 12):
        numbers = rng.standard_normal((3, 16, 64)).astype(np.float32) * np.float32(2.0**exponent)
        packed = pack_buffer(numbers, cold_format, SMOLLM2)
        back = unpack_buffer(packed, cold_format, SMOLLM2)
        parameters = parameters_of(packed, cold_format, SMOLLM2).astype(np.float32)
        steps = parameters if cold_format in (INT8, FP8) else parameters[::2]
        widest = 16.0 if cold_format is FP8 else 0.5  # e4m3 has steps of 32 at 448
        assert np.abs(back - numbers).max() <= widest * steps.max() * (1 + 1e-5)


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_huge_numbers_give_the_largest_there_are(cold_format):
    numbers = np.full((3, 16, 64), 1e18, np.float32)
    numbers[..., 1::2] *= -1
    packed = pack_buffer(numbers, cold_format, SMOLLM2)
    assert np.isfinite(unpack_buffer(packed, cold_format, SMOLLM2)).all()


def test_what_does_not_fit_is_refused_in_a_sentence():
    odd = KVShape(1, 16, 80, NumberType.BF16)
    assert "80" in (TURBO4.refusal(odd) or "")
    assert INT8.refusal(odd) is None
    assert "100" in (INT8.refusal(KVShape(1, 16, 100, NumberType.BF16)) or "")
    assert "96" in (INT4_CHANNEL.refusal(KVShape(1, 96, 64, NumberType.BF16)) or "")
