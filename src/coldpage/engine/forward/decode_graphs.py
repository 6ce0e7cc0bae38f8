"""CUDA graphs of whole decoding steps, one for each padded batch size.

A step of one token a sequence is some thousand small launches, which a GPU finishes faster than a
host enqueues them. Captured once, they are one launch.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

__all__ = ["MAX_GRAPH_ROWS", "DecodeGraphs", "padded_rows"]

_LOG = logging.getLogger(__name__)

# Larger batches keep the GPU busy longer than the host needs to enqueue them.
MAX_GRAPH_ROWS: Final = 256
_SMALL_SIZES: Final = (1, 2, 4)
_SIZE_STEP: Final = 8


def padded_rows(num_rows: int) -> int:
    """The size of the batch that ``num_rows`` sequences run in: 1, 2, 4, 8, 16, 24 and so on."""
    assert 0 < num_rows <= MAX_GRAPH_ROWS
    for size in _SMALL_SIZES:
        if num_rows <= size:
            return size
    return -(-num_rows // _SIZE_STEP) * _SIZE_STEP


class DecodeGraphs:
    """Captures at the first use of a size, and replays. ``counters`` only grow: steps that were
    replayed or not, and captures that failed. After a failed capture there are no further ones, and
    sizes without a graph run as they would without this."""

    def __init__(self, device: torch.device, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled and device.type == "cuda"
        self._device = device
        self._pool: Any = None
        # One for all graphs: memory of a pool is shared only on one stream.
        self._stream: Any = None
        self._graphs: dict[int, tuple[Any, torch.Tensor]] = {}
        self.counters: Counter[str] = Counter()

    def run(self, num_rows: int, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``forward`` returns, enqueued on the current stream; a graph's result is valid until
        its next run. For one ``num_rows`` it must always do the same work on the same memory; it is
        called a few times when it is captured, which must do no harm."""
        if num_rows not in self._graphs and self._is_enabled:
            self._try_capture(num_rows, forward)
        if num_rows not in self._graphs:
            self.counters["eager_decode_steps"] += 1
            return forward()
        graph, result = self._graphs[num_rows]
        graph.replay()
        self.counters["graph_decode_steps"] += 1
        return result

    def _try_capture(self, num_rows: int, forward: Callable[[], torch.Tensor]) -> None:
        try:
            self._graphs[num_rows] = self._capture(forward)
        except RuntimeError as error:  # out of memory is one too
            self._is_enabled = False
            self.counters["graph_capture_failures"] += 1
            _LOG.warning(
                "a CUDA graph for %d sequences can not be made, and none is from here on, so "
                "decoding takes longer: %s",
                num_rows,
                " ".join(str(error).split()),
            )
        else:
            _LOG.info("decoding of up to %d sequences runs as a CUDA graph", num_rows)

    def _capture(self, forward: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        cuda: Any = torch.cuda
        if self._pool is None:
            self._pool, self._stream = cuda.graph_pool_handle(), cuda.Stream(self._device)
        current = cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = cuda.CUDAGraph()
        try:
            # The outer block also for this: a failed capture leaves its own stream current.
            with cuda.stream(self._stream):
                # The first run of a shape compiles kernels and makes constant tensors.
                forward()
                with _waits_are_errors():
                    forward()
                # Other threads register memory meanwhile, which is none of this capture's business.
                with cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    result = forward()
        finally:
            # Also of what failed: nothing may write to a page when a step is over.
            current.wait_stream(self._stream)
        return graph, result


@contextlib.contextmanager
def _waits_are_errors() -> Iterator[None]:
    """RuntimeError where the host would wait for the GPU. In a capture it is one too, but leaves
    torch's allocator in that capture for good."""
    cuda: Any = torch.cuda
    mode = cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch says, once, that it does not find every wait.
        warnings.simplefilter("ignore")
        cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(mode)
