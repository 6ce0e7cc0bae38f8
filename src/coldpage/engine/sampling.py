"""From logits to tokens: greedy, temperature, top-k and top-p, in f32, on the CPU.

A sampled row depends on its own logits and its own generator only, so a seed gives the same tokens
whatever else runs in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from coldpage.engine.messages import SamplingParams
from coldpage.types import Int64Array

__all__ = ["SampledTokens", "SamplingRow", "new_generator", "row_probabilities", "sample"]

_SEED_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row is sampled. ``generator`` is None exactly for greedy rows."""

    params: SamplingParams
    generator: torch.Generator | None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token a row. Where ``is_valid`` is False the row had no finite maximum and its token
    means nothing.
    """

    token_ids: Int64Array  # [num_rows]
    is_valid: npt.NDArray[np.bool_]  # [num_rows]


def new_generator(params: SamplingParams) -> torch.Generator | None:
    """A generator for one request (None when it is greedy), seeded from the request or from the
    system.
    """
    if params.temperature == 0:
        return None
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed & _SEED_MASK)
    return generator


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
    """Choose one token a row from ``logits`` (f32 [num_rows, vocab]); advances the rows'
    generators.
    """
    assert logits.dtype == torch.float32
    assert logits.shape[0] == len(rows)
    # max carries a NaN through, so one pass finds the greedy tokens and the broken rows.
    maxima, greedy_ids = logits.max(dim=-1)
    is_valid = torch.isfinite(maxima)
    token_ids = greedy_ids.numpy().copy()
    valid = is_valid.numpy()
    for index, row in enumerate(rows):
        if row.generator is None or not valid[index]:
            continue
        probabilities = row_probabilities(logits[index], row.params)
        choice = torch.multinomial(probabilities, num_samples=1, generator=row.generator)
        token_ids[index] = int(choice)
    return SampledTokens(token_ids=token_ids, is_valid=valid)


def row_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution [vocab] that one row with ``temperature`` > 0 is drawn from.

    Temperature first, then the ``top_k`` best, then the smallest set of those that holds ``top_p``.
    """
    # The maximum is taken out first, so that a tiny temperature gives 0 and -inf and never inf -
    # inf.
    scaled = (logits - logits.max()) / params.temperature
    vocab = scaled.shape[0]
    num_kept = min(params.top_k, vocab) if params.top_k > 0 else vocab
    if num_kept == vocab and params.top_p >= 1.0:
        return torch.softmax(scaled, dim=-1)
    best, ids = torch.sort(scaled, descending=True, stable=True)
    best = best[:num_kept]
    probabilities = torch.softmax(best, dim=-1)
    if params.top_p < 1.0:
        before = torch.cumsum(probabilities, dim=-1) - probabilities
        keep = before < params.top_p
        keep[0] = True
        probabilities = torch.where(keep, probabilities, 0.0)
        probabilities = probabilities / probabilities.sum()
    result = torch.zeros_like(scaled)
    result[ids[:num_kept]] = probabilities
    return result
