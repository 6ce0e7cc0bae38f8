"""Paged attention against transformers' own forward with the whole text at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from coldpage.engine.attention import step_plan
from coldpage.engine.forward.runner import LogitsWanted, StepItem
from tests.engine.arena import TOKENS_PER_BLOCK
from tests.engine.runner_bench import Bench, assert_close, text

NONE, LAST, ALL = LogitsWanted.NONE, LogitsWanted.LAST, LogitsWanted.ALL
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["llama", "qwen2", "gemma3", "gpt_oss"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each family of tiny model, and one with attention sinks."""
    value: str = request.param
    return value


@pytest.fixture(params=[512, 12])
def segment_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Decode segments longer than every test sequence, and so short that there are many."""
    monkeypatch.setattr(step_plan, "SEGMENT_TOKENS", request.param)
    value: int = request.param
    return value


@pytest.fixture
def bench(kind: str) -> Iterator[Bench]:
    return Bench(kind)


@pytest.mark.parametrize("chunk", [None, 1, 2, 7, 16, 33])
def test_prefill_in_any_chunks_agrees_with_transformers(bench: Bench, chunk: int | None) -> None:
    tokens = text(71)
    assert_close(bench.prefill(bench.table(71), tokens, chunk), bench.own_logits(tokens))


@pytest.mark.parametrize("tile", [1, 3, 16])
def test_window_tiles_of_any_size_agree_with_transformers(
    monkeypatch: pytest.MonkeyPatch, tile: int
) -> None:
    monkeypatch.setattr(step_plan, "MIN_TILE_TOKENS", tile)
    bench = Bench("gemma3")
    tokens = text(50)
    assert_close(bench.prefill(bench.table(50), tokens, 21), bench.own_logits(tokens))


def test_ragged_decode_batch_agrees_with_transformers(bench: Bench, segment_tokens: int) -> None:
    lengths = [3, 4, 17, 40, 61]
    texts = [text(n + 6, seed=n) for n in lengths]
    tables = [bench.table(n + 6) for n in lengths]
    for tokens, table, n in zip(texts, tables, lengths, strict=True):
        bench.prefill(table, tokens[:n], 16)
    for step in range(6):
        items = [
            StepItem(table, n + step, tokens[n + step : n + step + 1], LAST)
            for tokens, table, n in zip(texts, tables, lengths, strict=True)
        ]
        for tokens, n, logits in zip(texts, lengths, bench.runner.forward(items), strict=True):
            assert_close(logits, bench.own_logits(tokens[: n + step + 1])[-1:])


def test_a_step_mixes_decode_and_prefill_and_gives_the_rows_asked_for(
    bench: Bench, segment_tokens: int
) -> None:
    lengths = [30, 22, 41, 9]
    texts = [text(n, seed=n) for n in lengths]
    tables = [bench.table(n) for n in lengths]
    starts = [29, 10, 30, 8]
    for tokens, table, start in zip(texts, tables, starts, strict=True):
        bench.prefill(table, tokens[:start])
    wanted = [LAST, ALL, NONE, LAST]
    items = [
        StepItem(table, start, tokens[start:], logits)
        for tokens, table, start, logits in zip(texts, tables, starts, wanted, strict=True)
    ]
    first, second, third, fourth = bench.runner.forward(items)
    assert third is None
    assert_close(first, bench.own_logits(texts[0])[-1:])
    assert_close(second, bench.own_logits(texts[1])[10:])
    assert_close(fourth, bench.own_logits(texts[3])[-1:])
    # The item without logits has written its pages all the same.
    (again,) = bench.runner.forward([StepItem(tables[2], 40, texts[2][40:], LAST)])
    assert_close(again, bench.own_logits(texts[2])[-1:])


def test_a_step_without_logits_gives_none(bench: Bench) -> None:
    assert bench.runner.forward([StepItem(bench.table(5), 0, text(5), NONE)]) == [None]


def test_logits_are_the_callers_to_change(bench: Bench) -> None:
    table = bench.table(6)
    (first,) = bench.runner.forward([StepItem(table, 0, text(5), LAST)])
    assert first is not None
    kept = first.clone()
    first[0, 0] = -torch.inf
    (again,) = bench.runner.forward([StepItem(table, 0, text(5), LAST)])
    assert again is not None
    assert torch.equal(again, kept)


def holed_logits(bench: Bench, tokens: np.ndarray, num_old: int, hole: slice) -> torch.Tensor:
    """transformers' logits where tokens from ``num_old`` on do not see the positions ``hole``."""
    n = len(tokens)
    q, k = np.arange(n)[:, None], np.arange(n)[None]
    masks = []
    for window in (None, 8):
        seen = (k <= q) & (k > q - window if window else k >= 0)
        seen[num_old:, hole] = False
        mask = torch.zeros(1, 1, n, n).masked_fill_(
            torch.from_numpy(~seen), torch.finfo(torch.float32).min
        )
        masks.append(mask)
    full, sliding = masks
    by_type = {"full_attention": full, "sliding_attention": sliding}
    with torch.inference_mode():
        ids = torch.from_numpy(tokens).long()[None]
        gemma = len(bench.windows) > 1
        mask_argument = (
            by_type if gemma or "layer_types" in bench.reference.config.to_dict() else full
        )
        return bench.reference(input_ids=ids, attention_mask=mask_argument).logits[0]


@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize(("first_block", "last_block"), [(0, 1), (3, 4), (7, 9)])
def test_holes_contribute_nothing(
    bench: Bench, segment_tokens: int, num_new: int, first_block: int, last_block: int
) -> None:
    tokens = text(40 + num_new)
    table = bench.table(40 + num_new)
    bench.prefill(table, tokens[:40])
    hole = slice(first_block * TOKENS_PER_BLOCK, last_block * TOKENS_PER_BLOCK)
    for slots in table.slots:
        slots[first_block:last_block] = -1
    (logits,) = bench.runner.forward([StepItem(table, 40, tokens[40:], ALL)])
    expected = holed_logits(bench, tokens, 40, hole)[40:]
    assert_close(logits, expected)
    if first_block == 7:  # the last blocks are in every layer's window: a hole must show
        assert float((expected - bench.own_logits(tokens)[40:]).abs().max()) > 1e-3


def test_a_middle_block_is_recomputed_from_the_blocks_before_it(bench: Bench) -> None:
    tokens = text(41)
    table = bench.table(41)
    bench.prefill(table, tokens[:40], 16)
    before = [pool.copy() for pool in bench.arena.pools]
    for slots, pool in zip(table.slots, bench.arena.pools, strict=True):
        pool[slots[4:6]] = 0xFF
    start, stop = 4 * TOKENS_PER_BLOCK, 6 * TOKENS_PER_BLOCK
    assert bench.runner.forward([StepItem(table, start, tokens[start:stop], NONE)]) == [None]
    for slots, pool, old in zip(table.slots, bench.arena.pools, before, strict=True):
        np.testing.assert_allclose(
            pool[slots[:10]].view(np.float32), old[slots[:10]].view(np.float32), rtol=0, atol=1e-4
        )
    (logits,) = bench.runner.forward([StepItem(table, 40, tokens[40:], LAST)])
    assert_close(logits, bench.own_logits(tokens)[-1:])


def test_slots_and_what_else_the_pool_holds_change_no_bit(kind: str, segment_tokens: int) -> None:
    results = []
    for seed, fill in ((1, 0xFF), (2, 0x00), (3, 0x7F)):
        bench = Bench(kind, seed, fill)
        tables = [bench.table(50), bench.table(30), bench.table(45)]
        texts = [text(50), text(30, 1), text(45, 2)]
        logits = [
            bench.prefill(tables[0], texts[0][:37], 16),
            bench.prefill(tables[1], texts[1][:29]),
        ]
        items = [
            StepItem(tables[0], 37, texts[0][37:38], LAST),
            StepItem(tables[1], 29, texts[1][29:], LAST),
            StepItem(tables[2], 0, texts[2], ALL),
        ]
        logits += [part for part in bench.runner.forward(items) if part is not None]
        assert all(torch.isfinite(part).all() for part in logits)
        results.append(torch.cat(logits))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_pages_that_a_window_has_left_are_not_needed(segment_tokens: int) -> None:
    tokens = text(47)
    results = []
    for drop in (False, True):
        bench = Bench("gemma3")
        table = bench.table(47)
        window_slots = table.slots[bench.windows.index(8)]
        if drop:  # gone while its own chunk is computed: position 29 sees from 22 on
            window_slots[: 22 // TOKENS_PER_BLOCK] = -1
        logits = [bench.prefill(table, tokens[:29])]
        for start in range(29, 47):
            if drop:
                window_slots[: (start - 7) // TOKENS_PER_BLOCK] = -1
            (row,) = bench.runner.forward([StepItem(table, start, tokens[start : start + 1], LAST)])
            assert row is not None
            logits.append(row)
        results.append(torch.cat(logits))
        assert_close(results[-1], bench.own_logits(tokens))
    assert torch.equal(results[0], results[1])


def test_a_missing_page_where_a_step_writes_is_a_bug(bench: Bench) -> None:
    table = bench.table(8)
    for slots in table.slots:
        slots[1] = -1
    with pytest.raises(AssertionError, match="no hot page"):
        bench.runner.forward([StepItem(table, 0, text(8), LAST)])
