"""When a graph is made and used, without a GPU: what it captures is a matter of the GPU tests."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from coldpage.engine.decode_graphs import MAX_GRAPH_ROWS, DecodeGraphs, padded_rows

GPU = torch.device("cuda", 0)  # named only


def test_batches_are_padded_to_few_sizes() -> None:
    sizes = [padded_rows(n) for n in range(1, MAX_GRAPH_ROWS + 1)]
    assert sorted(set(sizes))[:7] == [1, 2, 4, 8, 16, 24, 32]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert sizes[-1] == MAX_GRAPH_ROWS
    assert all(padded_rows(size) == size for size in sizes)


class FakeGraph:
    """Replays by calling."""

    def __init__(self, forward: Any) -> None:
        self.result = forward()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


def test_a_size_is_captured_once_and_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeGraph] = []

    def capture(self: DecodeGraphs, forward: Any) -> tuple[FakeGraph, torch.Tensor]:
        made.append(FakeGraph(forward))
        return made[-1], made[-1].result

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    graphs = DecodeGraphs(GPU, is_enabled=True)
    results = [graphs.run(size, lambda: torch.zeros(1)) for size in (4, 8, 4, 4)]
    assert [graph.num_replays for graph in made] == [3, 1]
    assert results[0] is results[2] is made[0].result
    assert graphs.counters == {"graph_decode_steps": 4}


def test_without_memory_for_a_graph_steps_run_without_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(self: DecodeGraphs, forward: Any) -> Any:
        raise torch.OutOfMemoryError("no memory\nat all")

    graphs = DecodeGraphs(GPU, is_enabled=True)
    kept = FakeGraph(lambda: torch.ones(1))
    graphs._graphs[1] = (kept, kept.result)
    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    with caplog.at_level(logging.WARNING):
        for size in (8, 8, 4, 1):
            graphs.run(size, lambda: torch.zeros(1))
    (record,) = caplog.records
    assert "8 sequences" in record.getMessage()
    assert "no memory at all" in record.getMessage()
    assert kept.num_replays == 1  # what was made stays in use
    assert graphs.counters == {
        "graph_capture_failures": 1,
        "eager_decode_steps": 3,
        "graph_decode_steps": 1,
    }


@pytest.mark.parametrize(("device", "is_enabled"), [("cpu", True), ("cuda", False)])
def test_without_a_gpu_or_the_wish_nothing_is_captured(
    device: str, is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *args: pytest.fail("captured"))
    graphs = DecodeGraphs(torch.device(device), is_enabled=is_enabled)
    assert graphs.run(2, lambda: torch.ones(3)).sum() == 3
    assert graphs.counters == {"eager_decode_steps": 1}
