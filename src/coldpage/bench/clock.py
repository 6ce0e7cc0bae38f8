"""Work on a device that is repeated and timed, by the device's own clock where it has one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Final

import torch

from coldpage.bench.arena import is_gpu
from coldpage.device.base import Device
from coldpage.errors import DeviceError

__all__ = ["Timed", "alternated", "fastest", "place_of"]

# Of one sample on a GPU: short work is repeated, so that its start does not show.
_SAMPLE_MS: Final = 10.0
_MAX_ROUNDS: Final = 200


def place_of(device: Device) -> torch.device:
    """Where torch computes on the device."""
    return torch.device(device.name if is_gpu(device) else "cpu")


class Timed:
    """Work that is ready: it has run once, so all is compiled and chosen.

    It is ``num_units`` equal parts, of which a sample is one. On a GPU the samples are by its own
    clock, and with ``is_graph`` what the work enqueues is captured as a CUDA graph, so that the
    host plays no part.
    """

    def __init__(
        self,
        work: Callable[[], object],
        place: torch.device,
        *,
        num_units: int = 1,
        is_graph: bool = True,
    ) -> None:
        self._work: Callable[[], object] = work
        # A graph names memory without keeping it.
        self._kept = work
        self._place = place
        self._num_units = num_units
        self._num_rounds = 1
        work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
            if is_graph:
                self._work = _captured(work)
            round_ms = self.ms() * num_units
            self._num_rounds = max(1, min(_MAX_ROUNDS, round(_SAMPLE_MS / max(round_ms, 1e-3))))

    def ms(self) -> float:
        """One sample. Blocks."""
        spent_ms = self._gpu_ms() if self._place.type == "cuda" else self._cpu_ms()
        return spent_ms / (self._num_rounds * self._num_units)

    def _cpu_ms(self) -> float:
        started_s = perf_counter()
        self._work()
        return 1e3 * (perf_counter() - started_s)

    def _gpu_ms(self) -> float:
        first, last = _timing_event(), _timing_event()
        torch.cuda.synchronize(self._place)
        first.record()
        for _ in range(self._num_rounds):
            self._work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))


def alternated(num_repeats: int, *works: Timed) -> list[list[float]]:
    """Samples of each, in turn; the first of each warms up and does not count."""
    samples: list[list[float]] = [[] for _ in works]
    for repeat in range(num_repeats + 1):
        for own, work in zip(samples, works, strict=True):
            spent_ms = work.ms()
            if repeat:
                own.append(spent_ms)
    return samples


def fastest(
    ways: Mapping[str, Callable[[], object]], place: torch.device, *, num_units: int
) -> tuple[str, Timed]:
    """The quickest of some ways to do the same, of which some may be unknown to the device.

    Raises DeviceError where it knows none.
    """
    best: tuple[float, str, Timed] | None = None
    for name, work in ways.items():
        with warnings.catch_warnings():
            # torch says at length why it can not do something some way.
            warnings.simplefilter("ignore")
            try:
                timed = Timed(work, place, num_units=num_units)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                continue
        spent_ms = min(timed.ms() for _ in range(3))
        if best is None or spent_ms < best[0]:
            best = (spent_ms, name, timed)
    if best is None:
        raise DeviceError(f"none of these runs on {place}: {', '.join(ways)}")
    return best[1:]


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    cuda: Any = torch.cuda
    graph, stream = cuda.CUDAGraph(), cuda.Stream()
    # The outer block since a failed capture leaves its own stream current. Other threads of the
    # process may talk to the device meanwhile.
    with (
        cuda.stream(stream),
        cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        work()
    graph.replay()
    replay: Callable[[], object] = graph.replay
    return replay


def _timing_event() -> Any:  # torch gives its events no types
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
