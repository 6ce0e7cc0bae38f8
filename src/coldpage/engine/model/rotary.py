"""By how much each layer turns its keys with their position, measured and not guessed.

The candidates are the frequencies that the model keeps in buffers. A sequence of one token attends
to nothing but itself, so at another position it has the same hidden states, and a layer's key there
is its key at position 0, turned. The candidate that turns the one into the other is the layer's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from coldpage.engine.model.layer_keys import LayerKeys, layer_keys
from coldpage.engine.model.model import LoadedModel

__all__ = ["Frequencies", "measure_frequencies", "turn_back"]

# uint32 [head_dim / 2]: 1 / 2**32 of a full turn a position, of the plane of the numbers i and
# i + head_dim / 2.
Frequencies = npt.NDArray[np.uint32]

_LOG = logging.getLogger(__name__)

_TURN: Final = 1 << 32
# Any token will do whose key is not zero.
_TOKEN: Final = 5
_NEAR, _MIDDLE = 1, 61
# What a turned key may be off by, as a part of its length, beside what the angle is: rounding of
# sine, cosine and products to the number type. A wrong candidate is off by more than 0.3.
_TOLERANCES: Final = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Models compute the angle in float32: it is off by so much for each position.
_ANGLE_ERROR: Final = 2.0**-23


def measure_frequencies(model: LoadedModel) -> tuple[Frequencies | None, ...]:
    """By layer; None: its keys are not turned, or in another way than full rotary embedding of
    halves, which is logged once. Blocks for some passes of one token. The model must not be
    switched to paged attention yet.
    """
    candidates = _candidates(model.model)
    num_layers = len(model.layers)

    def keys_at(position: int) -> list[LayerKeys]:
        token = torch.tensor([min(_TOKEN, model.model.config.get_text_config().vocab_size - 1)])
        return layer_keys(model.model, num_layers, token, torch.tensor([position]))

    far = model.context_tokens - 1
    turned = {p: keys_at(p) for p in sorted({_NEAR, _MIDDLE, far // 2, far}) if 0 < p <= far}
    # Last, so that a model whose frequencies depend on the length has those of a short text again.
    first = keys_at(0)
    tolerance = _TOLERANCES[model.dtype]
    found: list[Frequencies | None] = []
    unknown: list[int] = []
    for index, start in enumerate(first):
        pairs = {position: layers[index] for position, layers in turned.items()}
        matches = _matching(candidates, start, pairs, tolerance)
        found.append(matches)
        if matches is None and not _is_still(start, pairs, tolerance):
            unknown.append(index)
    if unknown:
        _LOG.info(
            "%s: the keys of layers %s are turned with their position in a way that is not known "
            "here: codecs take them as they are",
            model.name,
            ", ".join(map(str, unknown)),
        )
    return tuple(found)


def turn_back(
    keys: npt.NDArray[np.float32], frequencies: Frequencies, first_position: int
) -> npt.NDArray[np.float32]:
    """Keys [..., tokens, head_dim] of consecutive positions, as they were at position 0. Pure."""
    half = frequencies.size
    positions = np.arange(first_position, first_position + keys.shape[-2], dtype=np.uint32)
    # The product is cut to 32 bits: whole turns are none.
    angles = (positions[:, None] * frequencies).astype(np.float64) * (2 * math.pi / _TURN)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = keys[..., :half], keys[..., half:]
    return np.concatenate([low * cosine + high * sine, high * cosine - low * sine], axis=-1)


def _candidates(model: Any) -> list[Frequencies]:
    """The different frequencies in the model's buffers, before a pass may change them."""
    found: dict[bytes, Frequencies] = {}
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.ndim == 1:
            radians = buffer.detach().to("cpu", torch.float64).numpy()
            turns = np.rint(radians * (_TURN / (2 * math.pi))) % _TURN
            frequencies = turns.astype(np.uint64).astype(np.uint32)
            found.setdefault(frequencies.tobytes(), frequencies)
    return list(found.values())


def _matching(
    candidates: Sequence[Frequencies],
    start: LayerKeys,
    turned: dict[int, LayerKeys],
    tolerance: float,
) -> Frequencies | None:
    head_dim = start.keys.shape[-1]
    for frequencies in candidates:
        if 2 * frequencies.size != head_dim:
            continue

        def restored(keys: torch.Tensor, position: int, f: Frequencies = frequencies) -> Any:
            return turn_back(_numbers(keys), f, position)

        if _agree(start, turned, tolerance, restored):
            return frequencies
    return None


def _is_still(start: LayerKeys, turned: dict[int, LayerKeys], tolerance: float) -> bool:
    return _agree(start, turned, tolerance, lambda keys, position: _numbers(keys))


def _agree(
    start: LayerKeys,
    turned: dict[int, LayerKeys],
    tolerance: float,
    restored: Callable[[torch.Tensor, int], npt.NDArray[np.float32]],
) -> bool:
    """Whether each key, restored, is the one at position 0; values never depend on the position,
    or the hidden states do. Written so that NaN disagrees."""
    expected, scale = _numbers(start.keys), float(np.linalg.norm(_numbers(start.keys)))
    return scale > 0 and all(
        _distance(restored(seen.keys, position), expected)
        <= scale * (tolerance + position * _ANGLE_ERROR)
        and _distance(_numbers(seen.values), _numbers(start.values))
        <= tolerance * float(np.linalg.norm(_numbers(start.values)))
        for position, seen in turned.items()
    )


def _distance(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(one - other))


def _numbers(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    numbers: npt.NDArray[np.float32] = tensor.float().cpu().numpy()
    return numbers
