"""Decoding steps as CUDA graphs: the same bits as without, and answers where there can be none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coldpage.engine.forward.runner import LogitsWanted, StepItem
from coldpage.engine.model.hot_types import HotTypes
from coldpage.kernels.kv_types import Q8_0, TURBO4
from tests.engine.runner_bench import Bench, text

pytestmark = pytest.mark.gpu
HALF, SINGLE = torch.bfloat16, torch.float32
BLOCK = 16
SIZES: dict[str, Any] = {"tokens_per_block": BLOCK, "head_dim": 16}


def decoded(bench: Bench, batches: list[list[int]]) -> list[torch.Tensor]:
    """Sequences of 20 to 27 tokens, decoded in the ``batches`` of them that are given."""
    texts = [text(80, seed) for seed in range(8)]
    tables = [bench.table(80) for _ in texts]
    lengths = [20 + index for index in range(8)]
    for tokens, table, n in zip(texts, tables, lengths, strict=True):
        bench.prefill(table, tokens[:n])
    results = []
    for batch in batches:
        items = [
            StepItem(tables[i], lengths[i], texts[i][lengths[i]][None], LogitsWanted.LAST)
            for i in batch
        ]
        outputs = [out for out in bench.runner.forward(items) if out is not None]
        results.append(torch.cat(outputs))
        for i in batch:
            lengths[i] += 1
    return results


BATCHES = [[0], [3, 1], [0, 1, 2], [5, 4, 2, 0, 1], *[[0, 1, 2, 3, 4, 6]] * 20, [7, 6], [1]]


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_graph_changes_no_bit(
    gpu: torch.device, kind: str, dtype: torch.dtype, is_packed: bool
) -> None:
    types = HotTypes(Q8_0, TURBO4) if is_packed else HotTypes.plain(dtype)
    sizes: dict[str, Any] = {"tokens_per_block": BLOCK, "head_dim": 64, "types": types}
    with_graphs = Bench(kind, device=gpu, dtype=dtype, **sizes)
    without = Bench(kind, 1, 0, gpu, dtype, use_graphs=False, **sizes)  # and in other slots
    ours, theirs = decoded(with_graphs, BATCHES), decoded(without, BATCHES)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert with_graphs.runner.counters == {"graph_decode_steps": len(BATCHES)}
    assert without.runner.counters == {"eager_decode_steps": len(BATCHES)}


def test_graphs_made_before_the_first_step_are_the_same(gpu: torch.device) -> None:
    prepared, lazy = (Bench("llama", device=gpu, dtype=HALF, **SIZES) for _ in range(2))
    sizes: list[int] = []
    prepared.runner.prepare(6, sizes.append)
    assert sizes == [8, 4, 2, 1]
    for one, other in zip(decoded(prepared, BATCHES), decoded(lazy, BATCHES), strict=True):
        assert torch.equal(one, other)


def test_graphs_share_their_memory(gpu: torch.device) -> None:
    """Of a tiny model even a matrix product's workspace shows that is kept for each graph."""
    bench = Bench("llama", device=gpu, dtype=HALF, max_decode_rows=256, **SIZES)
    reserved_bytes: list[int] = []
    bench.runner.prepare(256, lambda size: reserved_bytes.append(torch.cuda.memory_reserved(gpu)))
    assert len(reserved_bytes) == 35
    assert reserved_bytes[-1] - reserved_bytes[1] < 48 * 2**20


def test_batches_beyond_the_largest_graph_are_decoded_too(gpu: torch.device, kind: str) -> None:
    small, large = (Bench(kind, device=gpu, max_decode_rows=rows, **SIZES) for rows in (4, 16))
    for one, other in zip(decoded(small, BATCHES), decoded(large, BATCHES), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-4)
    assert small.runner.counters["graph_decode_steps"] == sum(len(b) <= 4 for b in BATCHES)


def test_without_memory_for_a_graph_answers_are_the_same(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, failing = (Bench("llama", device=gpu, dtype=HALF, **SIZES) for _ in range(2))
    wanted = decoded(bench, BATCHES)
    end = torch.cuda.CUDAGraph.capture_end

    def fail(graph: Any) -> None:
        end(graph)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fail)
    for one, other in zip(wanted, decoded(failing, BATCHES), strict=True):
        assert torch.equal(one, other)
    counted = failing.runner.counters
    assert counted == {"graph_capture_failures": 1, "eager_decode_steps": len(BATCHES)}


def test_a_model_that_can_not_be_captured_decodes_without(gpu: torch.device) -> None:
    """Its positions decide on the host how far it turns them."""
    bench = Bench("llama", device=gpu, **SIZES)
    rotary = bench.loaded.model.model.rotary_emb
    forward = rotary.forward

    def look(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        assert int(position_ids.max()) < 512
        return forward(x, position_ids)

    rotary.forward = look
    plain = Bench("llama", device=gpu, **SIZES)
    for one, other in zip(decoded(bench, BATCHES), decoded(plain, BATCHES), strict=True):
        assert torch.equal(one, other)
    assert bench.runner.counters["graph_capture_failures"] == 1
    # One that was made later is, so the failure left nothing behind.
    assert plain.runner.counters == {"graph_decode_steps": len(BATCHES)}
    torch.cuda.empty_cache()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU at most")
def test_a_model_on_another_gpu_than_the_current_one(gpu: torch.device) -> None:
    here, there = (Bench("llama", device=torch.device("cuda", i), **SIZES) for i in range(2))
    for one, other in zip(decoded(here, BATCHES), decoded(there, BATCHES), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-4)
    assert there.runner.counters == {"graph_decode_steps": len(BATCHES)}
