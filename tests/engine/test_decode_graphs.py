"""When a graph is made and used, without a GPU: what it captures is a matter of the GPU tests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coldpage.engine.forward import decode_graphs
from coldpage.engine.forward.decode_graphs import MAX_GRAPH_ROWS, DecodeGraphs, padded_rows

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


class FakeStream:
    """Says what it waited for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """What a capture asks of torch.cuda. ``log`` has the state of each call of ``forward``."""

    CUDAGraph = SimpleNamespace
    Stream = FakeStream

    def __init__(self) -> None:
        self.current = FakeStream()
        self.captures: list[tuple[object, object]] = []
        self.sync_mode: str | int = 0
        self.is_capturing = False
        self.log: list[tuple[bool, bool, str | int]] = []

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def get_sync_debug_mode(self) -> str | int:
        return self.sync_mode

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self.sync_mode = mode

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        previous, self.current = self.current, stream
        yield
        self.current = previous

    @contextlib.contextmanager
    def graph(
        self, graph: object, *, pool: object, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        self.captures.append((pool, stream))
        self.is_capturing = True
        yield
        self.is_capturing = False

    def forward(self) -> torch.Tensor:
        is_aside = isinstance(self.current, FakeStream) and bool(self.current.waited_for)
        self.log.append((is_aside, self.is_capturing, self.sync_mode))
        return torch.zeros(1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(decode_graphs, "torch", SimpleNamespace(cuda=made))
    return made


def test_graphs_of_all_sizes_share_a_stream_and_so_their_memory(cuda: FakeCuda) -> None:
    graphs = DecodeGraphs(GPU, is_enabled=True)
    for size in (8, 4):
        graphs._try_capture(size, cuda.forward)
    first, second = cuda.captures
    assert first == second


def test_waits_show_before_a_capture_begins(cuda: FakeCuda) -> None:
    DecodeGraphs(GPU, is_enabled=True)._try_capture(8, cuda.forward)
    assert cuda.log == [(True, False, 0), (True, False, "error"), (True, True, 0)]


def test_what_a_failed_capture_enqueued_is_waited_for(cuda: FakeCuda) -> None:
    def forward() -> torch.Tensor:
        if cuda.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return cuda.forward()

    main = cuda.current
    graphs = DecodeGraphs(GPU, is_enabled=True)
    graphs._try_capture(8, forward)
    assert graphs.counters == {"graph_capture_failures": 1}
    assert main.waited_for == [graphs._stream]
    assert cuda.captures == [] and cuda.sync_mode == 0
