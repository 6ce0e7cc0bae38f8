"""Suspend plus resume: microseconds a page of the owner's thread, with and without pages moving.

python -m benchmarks manager_cost
"""

from __future__ import annotations

import time

from benchmarks.kv import NUM_LAYERS, TOKENS_PER_BLOCK, evict_all, make_manager, write_cache
from benchmarks.rows import Row, timed_ms
from coldpage import HostTierConfig

__all__ = ["run"]

TINY_BUFFER_BYTES = 16  # so that the cost is the manager's, not the copy's
LIMIT_US = 5.0
REPETITIONS = 7


def run(is_quick: bool) -> list[Row]:
    """The limit of 5 us a page stands as the rival."""
    rows: list[Row] = []
    for num_pages in (1_000, 10_000) if is_quick else (1_000, 10_000, 100_000):
        page_bytes = NUM_LAYERS * 2 * TINY_BUFFER_BYTES
        host = HostTierConfig(3 * num_pages * page_bytes)
        limit_ms = [num_pages * LIMIT_US / 1e3]
        with make_manager(num_pages + 1, host, buffer_bytes=TINY_BUFFER_BYTES) as manager:
            kv_cache = write_cache(manager, num_pages, 1)
            assert kv_cache.resume()
            kv_cache.synchronize()

            def stay_hot() -> None:
                kv_cache.suspend()
                assert kv_cache.resume()
                kv_cache.synchronize()

            samples = [timed_ms(stay_hot) for _ in range(REPETITIONS)]
            config = f"{num_pages:,} pages of {TOKENS_PER_BLOCK} tokens"
            rows.append(
                Row("suspend + resume, all hot", config, "5 us a page", samples, limit_ms, ">= 1")
            )
            kv_cache.suspend()
            samples = []
            for _ in range(REPETITIONS):
                evict_all(manager)
                started = time.thread_time()
                assert kv_cache.resume()
                kv_cache.synchronize()
                kv_cache.suspend()
                samples.append(1e3 * (time.thread_time() - started))
            rows.append(
                Row(
                    "resume from host + suspend, CPU",
                    config,
                    "5 us a page",
                    samples,
                    limit_ms,
                    ">= 1",
                )
            )
    return rows
