from __future__ import annotations

import pytest
import torch

from coldpage.engine.messages import SamplingParams
from coldpage.engine.sampling import SamplingRow, new_generator, row_probabilities, sample


def row(**params: float) -> SamplingRow:
    sampling = SamplingParams(**params)
    return SamplingRow(sampling, new_generator(sampling))


def random_logits(num_rows: int, vocab: int = 50, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_rows_take_the_first_maximum() -> None:
    logits = random_logits(3)
    logits[1, 7] = logits[1, 31] = 99.0
    result = sample(logits, [row(temperature=0)] * 3)
    assert result.token_ids.tolist() == [int(logits[0].argmax()), 7, int(logits[2].argmax())]
    assert result.is_valid.all()


def test_seeded_tokens_do_not_depend_on_the_neighbours() -> None:
    logits = random_logits(4)

    def draws(neighbours: int) -> list[int]:
        mine = row(temperature=1.3, seed=42)
        others = [row(temperature=0.7, seed=n) for n in range(neighbours)]
        rows = torch.cat([logits[1 : 1 + neighbours], logits[:1]])
        return [int(sample(rows, [*others, mine]).token_ids[-1]) for _ in range(20)]

    assert draws(0) == draws(3)
    assert len(set(draws(0))) > 3  # it does sample


def test_seeds_differ_and_no_seed_is_not_a_fixed_seed() -> None:
    logits = torch.zeros(1, 10_000)

    def first(**params: float) -> int:
        return int(sample(logits, [row(temperature=1.0, **params)]).token_ids[0])

    assert first(seed=1) == first(seed=1)
    assert first(seed=1) != first(seed=2)
    assert first(seed=-1) == first(seed=(1 << 64) - 1)
    assert len({first() for _ in range(5)}) > 1


def test_temperature_is_softmax_of_the_scaled_logits() -> None:
    logits = random_logits(1)[0]
    got = row_probabilities(logits, SamplingParams(temperature=0.5))
    torch.testing.assert_close(got, torch.softmax(logits.double() / 0.5, -1).float())


@pytest.mark.parametrize("temperature", [1e-30, 1e-8])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(1)
    assert int(sample(logits, [row(temperature=temperature)]).token_ids[0]) == int(logits.argmax())


def test_top_k_keeps_the_k_best_even_among_ties() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    got = row_probabilities(logits, SamplingParams(temperature=1.0, top_k=2))
    torch.testing.assert_close(got, torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0]))
    everything = row_probabilities(logits, SamplingParams(temperature=1.0, top_k=99))
    torch.testing.assert_close(everything, torch.softmax(logits, -1))


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])

    def kept(top_p: float, top_k: int = 0) -> list[float]:
        params = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k)
        return row_probabilities(probabilities.log(), params).tolist()

    assert kept(0.5) == pytest.approx([0, 1, 0, 0])
    assert kept(0.51) == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert kept(1e-9) == pytest.approx([0, 1, 0, 0])
    assert kept(0.8) == pytest.approx([0, 5 / 9, 1.5 / 9, 2.5 / 9])
    # top_p looks at what top_k left: 0.5 of [0.5, 0.25] is two thirds.
    assert kept(0.6, top_k=2) == pytest.approx([0, 1, 0, 0])


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    rows = [row(temperature=1.0, seed=5)]
    counts = torch.zeros(3)
    for _ in range(3000):
        counts[int(sample(logits, rows).token_ids[0])] += 1
    torch.testing.assert_close(counts / 3000, logits.exp()[0], atol=0.03, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_is_reported_and_its_neighbours_are_not(bad: float) -> None:
    logits = random_logits(3)
    logits[1] = bad
    result = sample(logits, [row(temperature=0), row(temperature=1.0), row(temperature=1.0)])
    assert result.is_valid.tolist() == [True, False, True]
