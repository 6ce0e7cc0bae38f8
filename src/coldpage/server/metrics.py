"""What ``/metrics`` shows: the engine's last statistics and the latencies seen by HTTP clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coldpage.engine.messages import (
    CodecErrorStats,
    CodecFailureStats,
    EngineReady,
    Stats,
    TierStats,
)

__all__ = ["EngineCollector", "ServerMetrics"]

_FIRST_TOKEN_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0),
)
_TOKEN_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_STATES: Final = ("ok", "read_only", "off")
_RESTORE_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class ServerMetrics:
    """A registry of its own, and what the HTTP process itself observes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first_token = Histogram(
            "coldpage_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self._token = Histogram(
            "coldpage_time_per_output_token_seconds",
            "Mean time between the tokens of an answer, after the first.",
            buckets=_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self._restore = Histogram(
            "coldpage_restore_seconds",
            "Time a request waited for its cached pages to become hot.",
            buckets=_RESTORE_BUCKETS_S,
            registry=self.registry,
        )
        self._answers = Counter(
            "coldpage_answers_total",
            "Generating requests by outcome.",
            ("outcome",),
            registry=self.registry,
        )

        self._unread_fields = Counter(
            "coldpage_requests_with_unread_fields_total",
            "Generating requests with fields that this server does not know; the log names each.",
            registry=self.registry,
        )

    def count_answer(self, outcome: str) -> None:
        """``stop``, ``length``, ``failed``, ``cancelled`` or ``refused``."""
        self._answers.labels(outcome).inc()

    def count_unread_fields(self) -> None:
        """Once a request that has any."""
        self._unread_fields.inc()

    def observe_first_token(self, seconds: float) -> None:
        """Once a request."""
        self._first_token.observe(seconds)

    def observe_tokens(self, mean_seconds: float) -> None:
        """Once a request of at least two tokens."""
        self._token.observe(mean_seconds)

    def observe_restore(self, seconds: float) -> None:
        """Once a request that reused cached tokens."""
        self._restore.observe(seconds)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"coldpage_{name}", text, value=value)


def _labelled_counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"coldpage_{name}", text, labels=(label,))
    for key, value in sorted(values.items()):
        family.add_metric((key,), value)
    return family


def _codec_errors(found: Sequence[CodecErrorStats]) -> Iterator[Metric]:
    """Nothing while no codec checks what it loses."""
    if not found:
        return
    labels = ("codec", "layer_group")
    columns: tuple[
        tuple[CounterMetricFamily | GaugeMetricFamily, Callable[[CodecErrorStats], float]], ...
    ] = (
        (
            CounterMetricFamily(
                "coldpage_codec_checked_pages",
                "Pages that were decoded again right after a lossy codec had encoded them.",
                labels=labels,
            ),
            lambda errors: errors.checked_pages,
        ),
        (
            CounterMetricFamily(
                "coldpage_codec_not_finite_pages",
                "Checked pages with numbers that are not finite.",
                labels=labels,
            ),
            lambda errors: errors.not_finite_pages,
        ),
        (_error_gauge("mean", "Mean"), lambda errors: errors.mean_error),
        (_error_gauge("max", "Largest"), lambda errors: errors.max_error),
        (_error_gauge("last", "Last"), lambda errors: errors.last_error),
    )
    for family, value_of in columns:
        for errors in found:
            family.add_metric((errors.codec, str(errors.layer_group)), value_of(errors))
        yield family


def _error_gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(
        f"coldpage_codec_relative_error_{name}",
        f"{text} error of the checked pages, relative to their length.",
        labels=("codec", "layer_group"),
    )


def _codec_failures(found: Sequence[CodecFailureStats]) -> Metric:
    family = CounterMetricFamily(
        "coldpage_codec_failures",
        "Calls of a codec that raised; its pages are recomputed.",
        labels=("codec", "call"),
    )
    for failures in found:
        family.add_metric((failures.codec, failures.call), failures.num_failures)
    return family


class EngineCollector(Collector):
    """Turns the engine's last report into metrics, when asked."""

    def __init__(
        self,
        ready: Callable[[], EngineReady | None],
        stats: Callable[[], Stats | None],
        num_open_requests: Callable[[], int],
    ) -> None:
        self._ready = ready
        self._stats = stats
        self._num_open_requests = num_open_requests

    def collect(self) -> Iterator[Metric]:
        """The families of the latest snapshot; only ``up`` and ``open`` before there is one."""
        ready, stats = self._ready(), self._stats()
        yield _gauge("engine_up", "1 while the engine serves requests.", float(ready is not None))
        yield _gauge(
            "open_requests", "Requests handed to the engine, unanswered.", self._num_open_requests()
        )
        if ready is not None:
            yield _gauge(
                "context_tokens", "Longest sequence the model takes.", ready.context_tokens
            )
            yield from self._tiers(stats.tiers if stats is not None else ready.tiers)
        if stats is not None:
            yield from self._engine(stats)
            yield from _codec_errors(stats.codec_errors)
            yield _codec_failures(stats.codec_failures)

    def _tiers(self, tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
        columns: tuple[tuple[str, str, Callable[[TierStats], int]], ...] = (
            ("tier_capacity_bytes", "Size of a tier.", lambda tier: tier.total_bytes),
            ("tier_used_bytes", "Bytes of a tier that hold pages.", lambda tier: tier.used_bytes),
            ("tier_capacity_blocks", "Blocks a tier can hold.", lambda tier: tier.total_blocks),
            ("tier_used_blocks", "Blocks a tier holds.", lambda tier: tier.used_blocks),
            (
                "tier_quarantined_blocks",
                "Blocks' worth of slots that failed and are not used again.",
                lambda tier: tier.quarantined_blocks,
            ),
            ("tier_capacity_tokens", "Tokens a tier can hold.", lambda tier: tier.capacity_tokens),
        )
        for name, text, value_of in columns:
            family = GaugeMetricFamily(f"coldpage_{name}", text, labels=("tier",))
            for tier in tiers:
                family.add_metric((tier.name,), value_of(tier))
            yield family
        healthy = GaugeMetricFamily(
            "coldpage_tier_state",
            "1 for the state a tier is in: a disk that fails is read_only or off for a while.",
            labels=("tier", "state"),
        )
        for tier in tiers:
            for state in _STATES:
                healthy.add_metric((tier.name, state), float(tier.state == state))
        yield healthy
        yield _labelled_counter(
            "tier_dropped_pages",
            "Pages lost for good while a tier had their only copy.",
            "tier",
            {tier.name: tier.dropped_pages for tier in tiers},
        )

    def _engine(self, stats: Stats) -> Iterator[Metric]:
        yield _gauge("running_requests", "Requests in the running batch.", stats.running)
        yield _gauge("waiting_requests", "Requests that wait for room.", stats.waiting)
        yield _gauge("sessions", "Idle named conversations that are kept.", stats.sessions)
        yield _labelled_counter("moved_pages", "Pages moved between tiers.", "path", stats.moves)
        yield _labelled_counter(
            "moved_bytes", "Bytes moved between tiers.", "path", stats.moved_bytes
        )
        yield _labelled_counter(
            "reused_tokens", "Prompt tokens found in a tier.", "tier", stats.hits_tokens
        )
        for name, value in sorted(stats.counters.items()):
            text = f"The engine's count of {name.replace('_', ' ')}."
            yield CounterMetricFamily(f"coldpage_{name}", text, value=value)
