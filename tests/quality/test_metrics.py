"""Metrics on distributions and vectors whose figures are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from coldpage.bench.quality.metrics import (
    TokenScores,
    join_tokens,
    join_vectors,
    score_tokens,
    score_vectors,
)


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    """Of these probabilities, and of no scale in particular."""
    return torch.tensor(rows).log() + 3.0


def test_divergence_agreement_and_perplexity_of_two_words() -> None:
    lossless, own = logits((0.5, 0.5), (0.75, 0.25)), logits((0.25, 0.75), (0.75, 0.25))
    scores = score_tokens(lossless, own, torch.tensor([1, 0]))
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert scores.kl == pytest.approx([expected, 0.0], abs=1e-7)
    assert scores.kl_mean == pytest.approx(expected / 2, rel=1e-6)
    # Of two likeliest tokens the first counts.
    assert scores.is_same_top.tolist() == [False, True]
    assert scores.top1 == 0.5
    assert scores.lossless_perplexity == pytest.approx(1 / math.sqrt(0.5 * 0.75), rel=1e-6)
    assert scores.own_perplexity == pytest.approx(1 / math.sqrt(0.75 * 0.75), rel=1e-6)


def test_divergence_is_of_what_is_lost_and_not_the_other_way() -> None:
    certain, unsure = logits((0.9, 0.1)), logits((0.5, 0.5))
    scores = score_tokens(certain, unsure, torch.tensor([0]))
    assert scores.kl_mean == pytest.approx(
        0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel=1e-5
    )


def test_equal_logits_differ_by_exactly_nothing() -> None:
    # More rows than are looked at together.
    lossless = 9 * torch.randn(75, 331, generator=torch.Generator().manual_seed(0))
    scores = score_tokens(lossless, lossless.clone(), torch.zeros(75, dtype=torch.int32))
    assert scores.kl.shape == (75,) and (scores.kl == 0.0).all()
    assert scores.top1 == 1.0 and scores.lossless_perplexity == scores.own_perplexity


def test_a_masked_token_makes_no_difference_and_a_broken_one_shows() -> None:
    masked = torch.tensor([[0.0, 0.0, -math.inf]])
    assert score_tokens(masked, masked, torch.tensor([0])).kl_mean == 0.0
    broken = torch.tensor([[0.0, math.nan, -math.inf]])
    assert math.isnan(score_tokens(masked, broken, torch.tensor([0])).kl_mean)


def test_the_99th_percentile_is_of_all_positions() -> None:
    kl = np.arange(101, dtype=np.float64)
    zeros, yes = np.zeros(101), np.ones(101, np.bool_)
    first = TokenScores(kl[:40], yes[:40], zeros[:40], zeros[:40])
    rest = TokenScores(kl[40:], yes[40:], zeros[40:], zeros[40:])
    assert join_tokens([rest, first]).kl_p99 == 99.0


def test_cosines_and_errors_by_layer() -> None:
    one = [torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]])]
    other = [torch.tensor([[[1.0, 1.0], [0.0, 1.0]]]), torch.tensor([[[3.0, 4.0]]])]
    scores = score_vectors(one, other)
    of_first = (math.sqrt(0.5) + 1) / 2
    assert scores.worst_cosine == pytest.approx(of_first)
    assert scores.cosine == pytest.approx((2 * of_first + 1) / 3)
    assert scores.relative_error == pytest.approx(math.sqrt((1 + 1) / (1 + 4 + 25)))


def test_joined_layers_are_those_of_all_places() -> None:
    parts = [
        score_vectors([torch.ones(1, 2)], [torch.tensor([[1.0, 1.0]])]),
        score_vectors([torch.ones(3, 2)], [torch.tensor([[1.0, -1.0]] * 3)]),
    ]
    joined = join_vectors(parts)
    assert joined.cosine == pytest.approx(0.25)
    assert joined.relative_error == pytest.approx(math.sqrt(12 / 8))


def test_zeros_are_like_zeros_alone_and_what_is_no_number_shows() -> None:
    zeros, ones = torch.zeros(1, 4), torch.ones(1, 4)
    assert score_vectors([zeros], [zeros]).cosine == 1.0
    assert score_vectors([ones], [zeros]).cosine == 0.0
    broken = torch.tensor([[1.0, math.nan, 1.0, 1.0]])
    assert math.isnan(score_vectors([ones], [broken]).cosine)
    assert math.isnan(score_vectors([ones], [broken]).relative_error)
