"""What tests of the packed formats share: shapes, numbers like those of a model, allowances."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.formats import ColdFormat, KVShape, NumberType

LLAMA_8B: Final = KVShape(8, 16, 128, NumberType.BF16)
SMOLLM2: Final = KVShape(3, 16, 64, NumberType.BF16)


def model_like(shape: KVShape, seed: int) -> npt.NDArray[np.float32]:
    """Numbers [kv_heads, tokens, head_dim] with a few strong channels and offsets, as keys have."""
    rng = np.random.default_rng(seed)
    heads, tokens, head_dim, _ = shape
    numbers = rng.standard_normal((heads, tokens, head_dim)) * rng.lognormal(size=(heads, 1, 1))
    numbers[..., rng.integers(head_dim, size=3)] *= 8.0
    numbers += rng.standard_normal((heads, 1, head_dim))
    return numbers.astype(np.float32)


def frequencies_of(head_dim: int, base: float = 10_000.0) -> npt.NDArray[np.uint32]:
    """Rotary frequencies as formats want them: 2**-32 turns a token."""
    exponents = np.arange(head_dim // 2) * 2.0 / head_dim
    return np.round(base**-exponents / (2 * np.pi) * 2.0**32).astype(np.uint32)


def parameters_of(
    packed: npt.NDArray[np.uint8], cold_format: ColdFormat, shape: KVShape
) -> npt.NDArray[np.float16]:
    """The f16 parameters of a packed buffer, as they lie there."""
    start = cold_format.code_bytes(shape)
    raw = packed[start : start + 2 * cold_format.num_parameters(shape)]
    return raw.copy().view(np.float16)
