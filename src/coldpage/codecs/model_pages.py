"""What a codec for keys and values has to know of a model: the vectors that its hot pages hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coldpage.errors import ConfigurationError
from coldpage.kernels.cold.formats import KVShape
from coldpage.types import LayerId

__all__ = ["LayerVectors", "ModelPages"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerVectors:
    """Keys and values of one layer. A shape is None where hot pages hold no plain numbers, such as
    a hot type of 4 bits.

    Keys with rotary embedding have ``frequencies``, uint32 [head_dim / 2]: by how much of a full
    turn, in units of 1 / 2**32, each plane turns from one token to the next. ``key_means``, float32
    [kv_heads, head_dim], are what keys are on average, turned back by the frequencies where there
    are some.

    Raises ConfigurationError for arrays of another form.
    """

    key: KVShape | None
    value: KVShape | None
    frequencies: npt.NDArray[np.uint32] | None = None
    key_means: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.key is None:
            return
        heads, _, head_dim, _ = self.key
        _check("frequencies", self.frequencies, np.dtype(np.uint32), (head_dim // 2,))
        _check("key_means", self.key_means, np.dtype(np.float32), (heads, head_dim))


def _check(
    name: str,
    array: npt.NDArray[np.generic] | None,
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
) -> None:
    if array is not None and (array.dtype != dtype or array.shape != shape):
        raise ConfigurationError(
            f"{name} of a layer are {array.dtype} {list(array.shape)}: "
            f"these keys need {dtype} {list(shape)}"
        )


ModelPages = Mapping[LayerId, LayerVectors]
"""By layer. Buffers of a layer that is not here are copied as they are."""
