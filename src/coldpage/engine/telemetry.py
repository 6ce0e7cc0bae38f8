"""The engine's numbers as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from coldpage.engine.messages import CodecErrorStats, CodecFailureStats, Stats, TierStats
from coldpage.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from coldpage.manager import KVCacheManager

__all__ = ["engine_stats", "tier_stats"]

# There from the start: a rate needs a sample before the first loss, and an alert one without any.
_LOSSES: Final = (
    "dropped_pages",
    "lost_held_pages",
    "preemptions",
    "read_misses",
    "recomputed_blocks",
    "write_errors",
)


def tier_stats(manager: KVCacheManager) -> tuple[TierStats, ...]:
    """The levels now. A block takes a page in every layer group, so blocks are counted in those."""
    pages_of_block = len(manager.layout.layer_groups)
    return tuple(
        TierStats(
            name=level.name,
            total_bytes=level.total_bytes,
            used_bytes=level.used_bytes,
            total_blocks=level.total_slots // pages_of_block,
            used_blocks=-(-level.used_slots // pages_of_block),
            capacity_tokens=level.capacity_tokens,
            quarantined_blocks=-(-level.quarantined_slots // pages_of_block),
            dropped_pages=level.dropped_pages,
            state=level.state,
        )
        for level in manager.stats().levels
    )


def engine_stats(manager: KVCacheManager, scheduler: Scheduler) -> Stats:
    """Everything that is reported about once a second."""
    stats = manager.stats()
    return Stats(
        tiers=tier_stats(manager),
        moves=dict(stats.moved_pages),
        moved_bytes=dict(stats.moved_bytes),
        hits_tokens=dict(scheduler.hits_tokens),
        counters={
            **dict.fromkeys(_LOSSES, 0),
            **stats.totals,
            **scheduler.counters,
            **scheduler.runner_counters,
        },
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        sessions=scheduler.num_sessions,
        codec_errors=tuple(
            CodecErrorStats(
                codec=codec.codec,
                layer_group=errors.layer_group_id,
                checked_pages=errors.num_samples,
                not_finite_pages=errors.num_not_finite,
                mean_error=errors.mean_error,
                max_error=errors.max_error,
                last_error=errors.last_error,
            )
            for codec in stats.codecs
            for errors in codec.errors
        ),
        codec_failures=tuple(
            CodecFailureStats(codec, call, count)
            for (codec, call), count in sorted(stats.codec_failures.items())
        ),
    )
