"""What a codec does to a model's next tokens, and to its keys and values, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "TokenScores",
    "VectorScores",
    "join_tokens",
    "join_vectors",
    "score_tokens",
    "score_vectors",
]

# Log-probabilities of so many positions in f64 at a time: 64 MB for 256,000 words.
_ROWS = 32

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Of each position, all [num_positions]: the divergence KL(lossless || own) of the next token's
    distribution in nats, whether the likeliest token is the same, and minus the log-probability of
    the text's own next token under both.
    """

    kl: _Floats
    is_same_top: npt.NDArray[np.bool_]
    lossless_nll: _Floats
    own_nll: _Floats

    @property
    def kl_mean(self) -> float:
        """In nats."""
        return float(self.kl.mean())

    @property
    def kl_p99(self) -> float:
        """The 99th percentile of the positions, in nats."""
        return float(np.percentile(self.kl, 99))

    @property
    def top1(self) -> float:
        """The part of the positions whose likeliest token is the same."""
        return float(self.is_same_top.mean())

    @property
    def lossless_perplexity(self) -> float:
        """Of the text, on the cache as it was computed."""
        return math.exp(float(self.lossless_nll.mean()))

    @property
    def own_perplexity(self) -> float:
        """Of the text, on the cache that came back."""
        return math.exp(float(self.own_nll.mean()))


def score_tokens(
    lossless: torch.Tensor, own: torch.Tensor, next_tokens: torch.Tensor
) -> TokenScores:
    """Of logits [num_positions, vocab] and the tokens that follow them [num_positions]. Pure; all
    arithmetic in f64.
    """
    whole = (lossless, own, next_tokens)
    rows = zip(*(torch.split(tensor, _ROWS) for tensor in whole), strict=True)
    return join_tokens([_score_rows(*some) for some in rows])


def _score_rows(
    lossless: torch.Tensor, own: torch.Tensor, next_tokens: torch.Tensor
) -> TokenScores:
    log_p = torch.log_softmax(lossless.double(), -1)
    log_q = torch.log_softmax(own.double(), -1)
    difference = log_p - log_q
    # A token that neither gives a chance, such as one a model masks, makes no difference.
    difference.masked_fill_(log_p == -torch.inf, 0.0)
    own_nll, lossless_nll = (
        -t.gather(1, next_tokens[:, None].long())[:, 0] for t in (log_q, log_p)
    )
    return TokenScores(
        (log_p.exp() * difference).sum(-1).numpy(),
        (lossless.argmax(-1) == own.argmax(-1)).numpy(),
        lossless_nll.numpy(),
        own_nll.numpy(),
    )


def join_tokens(parts: Sequence[TokenScores]) -> TokenScores:
    """Of all positions."""
    return TokenScores(
        np.concatenate([part.kl for part in parts]),
        np.concatenate([part.is_same_top for part in parts]),
        np.concatenate([part.lossless_nll for part in parts]),
        np.concatenate([part.own_nll for part in parts]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class VectorScores:
    """Sums over the vectors of keys, or of values, by layer, all [num_layers]."""

    num_vectors: _Floats
    cosine_sum: _Floats
    squared_error: _Floats
    squared_length: _Floats

    @property
    def cosine(self) -> float:
        """The mean over all vectors."""
        return float(self.cosine_sum.sum() / self.num_vectors.sum())

    @property
    def worst_cosine(self) -> float:
        """The mean over the vectors of the layer where it is least."""
        return float((self.cosine_sum / self.num_vectors).min())

    @property
    def relative_error(self) -> float:
        """The length of the difference over the length of all vectors."""
        return math.sqrt(float(self.squared_error.sum() / self.squared_length.sum()))


def score_vectors(original: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> VectorScores:
    """Of one tensor a layer, [..., head_dim] each. Pure; all arithmetic in f64.

    The cosine with a vector of zeros is 0, and of two such vectors 1.
    """
    rows = [_vector_sums(a.double(), b.double()) for a, b in zip(original, own, strict=True)]
    return VectorScores(*(np.array(column, np.float64) for column in zip(*rows, strict=True)))


def _vector_sums(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float, float]:
    length_a, length_b = a.norm(dim=-1), b.norm(dim=-1)
    product = length_a * length_b
    cosine = torch.where(product > 0, (a * b).sum(-1) / product, 0.0)
    cosine = torch.where((length_a == 0) & (length_b == 0), 1.0, cosine)
    # A difference that is no number must show in the mean.
    cosine = torch.where(product.isnan(), torch.nan, cosine)
    return (
        float(cosine.numel()),
        float(cosine.sum()),
        float((a - b).square().sum()),
        float(a.square().sum()),
    )


def join_vectors(parts: Sequence[VectorScores]) -> VectorScores:
    """Of all vectors; the layers are the same."""
    return VectorScores(
        sum((part.num_vectors for part in parts), np.zeros(1)),
        sum((part.cosine_sum for part in parts), np.zeros(1)),
        sum((part.squared_error for part in parts), np.zeros(1)),
        sum((part.squared_length for part in parts), np.zeros(1)),
    )
