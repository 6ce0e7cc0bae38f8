"""Steps that only decode, on padded batches in fixed memory, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from coldpage.engine.forward import decode_steps
from coldpage.engine.forward.paged_model import PagedModel
from coldpage.engine.forward.runner import LogitsWanted, StepItem
from tests.engine.arena import Table
from tests.engine.kernel_rig import use_kernels
from tests.engine.runner_bench import Bench, assert_close, text

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 16
LENGTHS = [18, 5, 31]  # the last one is about to begin a block


@pytest.fixture
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A runner that decodes up to four sequences together in fixed memory."""
    use_kernels(monkeypatch)
    kind = getattr(request, "param", "llama")
    return Bench(kind, tokens_per_block=BLOCK, head_dim=16, max_decode_rows=4)


@pytest.fixture
def tables(bench: Bench) -> list[Table]:
    """Sequences of LENGTHS tokens, each made by ``text`` with its length for a seed."""
    made = [bench.table(n + 3) for n in LENGTHS]
    for table, n in zip(made, LENGTHS, strict=True):
        bench.prefill(table, text(n + 3, n)[:n])
    return made


def items(tables: list[Table], which: list[int], step: int = 0) -> list[StepItem]:
    return [
        StepItem(
            tables[i],
            LENGTHS[i] + step,
            text(LENGTHS[i] + 3, LENGTHS[i])[LENGTHS[i] + step :][:1],
            LogitsWanted.LAST,
        )
        for i in which
    ]


def rows(bench: Bench, step: list[StepItem]) -> torch.Tensor:
    return torch.cat([out for out in bench.runner.forward(step) if out is not None])


def own(bench: Bench, which: list[int], step: int = 0) -> torch.Tensor:
    texts = [text(LENGTHS[i] + 3, LENGTHS[i])[: LENGTHS[i] + step + 1] for i in which]
    return torch.cat([bench.own_logits(tokens)[-1:] for tokens in texts])


def test_padding_adds_nothing_and_equal_steps_are_equal_bit_for_bit(
    bench: Bench, tables: list[Table]
) -> None:
    first = rows(bench, items(tables, [0, 1, 2]))
    assert_close(first, own(bench, [0, 1, 2]))
    assert_close(rows(bench, items(tables, [2])), own(bench, [2]))  # row 0 is another sequence
    assert torch.equal(rows(bench, items(tables, [0, 1, 2])), first)
    swapped = rows(bench, items(tables, [1, 0]))
    assert_close(swapped, own(bench, [1, 0]))
    assert bench.runner.counters == {"eager_decode_steps": 4}


@pytest.mark.parametrize("bench", ["gemma3"], indirect=True)
def test_steps_follow_each_other_over_the_end_of_a_block(
    bench: Bench, tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_steps, "_MAX_CHANGES", 1)  # the rest goes by itself
    for step in range(3):
        assert_close(rows(bench, items(tables, [0, 2], step)), own(bench, [0, 2], step))


def test_after_a_step_that_failed_the_next_one_is_right(
    bench: Bench, tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no GPU any more")

    with monkeypatch.context() as patch:
        patch.setattr(decode_steps.BlockTables, "apply", fail)
        with pytest.raises(RuntimeError, match="no GPU"):
            bench.runner.forward(items(tables, [1, 2]))
    assert_close(rows(bench, items(tables, [1, 2])), own(bench, [1, 2]))


def test_more_sequences_or_longer_ones_than_there_is_room_for_run_without(
    bench: Bench, tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = bench.runner._decode
    assert steps is not None
    assert steps.takes(4, 511) and not steps.takes(5, 0)
    assert not steps.takes(1, 512 + BLOCK)
    monkeypatch.setattr(steps, "takes", lambda num_rows, last: False)
    assert_close(rows(bench, items(tables, [0, 1, 2])), own(bench, [0, 1, 2]))
    assert bench.runner.counters == {}


def test_items_that_want_no_logits_get_none(bench: Bench, tables: list[Table]) -> None:
    step = items(tables, [0, 1, 2])
    step[1] = StepItem(step[1].kv_cache, step[1].start, step[1].token_ids, LogitsWanted.NONE)
    first, second, third = bench.runner.forward(step)
    assert second is None and first is not None and third is not None
    assert_close(torch.cat([first, third]), own(bench, [0, 2]))
    assert_close(rows(bench, items(tables, [1], 1)), own(bench, [1], 1))  # its page was written


def test_preparing_runs_every_size_and_writes_to_no_page(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, seen = [], []
    logits = PagedModel.logits

    def watch(self: PagedModel, token_ids: torch.Tensor, *more: object) -> torch.Tensor:
        seen.append(token_ids.shape[1])
        return logits(self, token_ids, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedModel, "logits", watch)
    before = [pool.copy() for pool in bench.arena.pools]
    bench.runner.prepare(3, sizes.append)
    assert sizes == seen == [4, 2, 1]
    for pool, old in zip(bench.arena.pools, before, strict=True):
        assert (pool == old).all()


def test_a_missing_page_where_a_step_writes_is_a_bug(bench: Bench, tables: list[Table]) -> None:
    tables[0].slots[0][1] = -1
    with pytest.raises(AssertionError, match="no hot page"):
        bench.runner.forward(items(tables, [0]))
    tables[1].slots[0] = tables[1].slots[0][:0]
    with pytest.raises(IndexError):
        bench.runner.forward(items(tables, [1]))
