"""``coldpage bench manager``: what the manager costs the thread that owns it. Work is enqueued and
not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from rich.console import Console

from coldpage.bench.arena import is_gpu
from coldpage.bench.kv import (
    LLAMA_8B,
    TOKENS_PER_BLOCK,
    Geometry,
    evict_all,
    make_manager,
    tokens_of,
    write_cache,
)
from coldpage.bench.rows import Row, median, quiet_progress, table_of
from coldpage.config import HostTierConfig
from coldpage.device.base import Device
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCache
from coldpage.types import LayerId

__all__ = ["ManagerOptions", "decode_row", "run_manager", "suspend_resume_rows"]

# So that the cost is the manager's, where the copies take the same processor.
_TINY: Final = Geometry("tiny", 32, 16)
_LIMIT_US_A_PAGE: Final = 5_000 / 2_048
_LIMIT_US_A_STEP: Final = 20.0
_DECODE_STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """What to measure. ``geometry`` None: an 8B model's on a GPU, tiny pages elsewhere."""

    num_pages: int = 2048
    num_sequences: int = 64
    context_tokens: int = 2048
    num_repeats: int = 7
    geometry: Geometry | None = None


def run_manager(device: Device, options: ManagerOptions, console: Console) -> list[Row]:
    """Measure, print the table, and return every row. Raises DeviceError where the device has not
    the memory.
    """
    geometry = options.geometry or (LLAMA_8B if is_gpu(device) else _TINY)
    with quiet_progress(console) as progress:
        task = progress.add_task("suspend and resume", total=2)
        limit = _LIMIT_US_A_PAGE
        rows = suspend_resume_rows(device, geometry, options.num_pages, options.num_repeats, limit)
        progress.update(task, description="decode steps", advance=1)
        rows.append(decode_row(device, geometry, options))
    table = table_of(f"time of the manager's thread, {device.name}", rows)
    table.caption = "a ratio over 1 is below the limit"
    console.print(table)
    return rows


class _Clock:
    """Sums what parts of a repetition take: by the clock, and by the thread's own time."""

    def __init__(self) -> None:
        self.wall_ms = self.thread_ms = 0.0

    def run(self, work: Callable[[], object]) -> None:
        wall, thread = perf_counter(), time.thread_time()
        work()
        self.thread_ms += 1e3 * (time.thread_time() - thread)
        self.wall_ms += 1e3 * (perf_counter() - wall)


def suspend_resume_rows(
    device: Device | None,
    geometry: Geometry,
    num_pages: int,
    num_repeats: int,
    limit_us_a_page: float,
) -> list[Row]:
    """A session that stays hot, one that comes back from the host level, and a new one that goes
    there first.
    """
    host = HostTierConfig(2 * (num_pages + 1) * geometry.block_bytes)
    limit_ms = [num_pages * limit_us_a_page / 1e3]
    limit = f"{limit_us_a_page:.3g} µs a page"
    config = f"{num_pages:,} pages of {geometry.block_bytes:,} bytes"
    rows = []
    with make_manager(geometry, num_pages + 1, host, device=device) as manager:
        for name, measure in (
            ("suspend + resume, all hot", _stay_hot),
            ("resume from host + suspend", _come_back),
            ("suspend when new + resume from host", _go_and_come_back),
        ):
            measure(manager, num_pages, _Clock(), num_repeats)
            clocks = [_Clock() for _ in range(num_repeats)]
            for repeat, clock in enumerate(clocks):
                measure(manager, num_pages, clock, repeat)
            samples = [clock.wall_ms for clock in clocks]
            notes = {
                "us_a_page": round(1e3 * median(samples) / num_pages, 3),
                "thread_ms": round(median([clock.thread_ms for clock in clocks]), 3),
            }
            rows.append(Row(name, config, limit, samples, limit_ms, ">= 1", notes=notes))
    return rows


def _resume(kv_cache: KVCache) -> None:
    assert kv_cache.resume()


def _written(manager: KVCacheManager, num_pages: int, seed: int) -> KVCache:
    """Active, all hot, and nothing in flight."""
    kv_cache = write_cache(manager, num_pages, seed)
    manager.finish_transfers()
    assert kv_cache.resume()
    kv_cache.synchronize()
    return kv_cache


def _forget(kv_cache: KVCache) -> None:
    kv_cache.plan_drop()
    kv_cache.close()


def _stay_hot(manager: KVCacheManager, num_pages: int, clock: _Clock, seed: int) -> None:
    kv_cache = _written(manager, num_pages, seed)
    kv_cache.suspend()
    manager.finish_transfers()
    assert kv_cache.resume()
    clock.run(kv_cache.suspend)
    clock.run(lambda: _resume(kv_cache))
    kv_cache.synchronize()
    _forget(kv_cache)


def _come_back(manager: KVCacheManager, num_pages: int, clock: _Clock, seed: int) -> None:
    kv_cache = write_cache(manager, num_pages, seed)
    evict_all(manager)
    clock.run(lambda: _resume(kv_cache))
    kv_cache.synchronize()
    clock.run(kv_cache.suspend)
    _forget(kv_cache)


def _go_and_come_back(manager: KVCacheManager, num_pages: int, clock: _Clock, seed: int) -> None:
    kv_cache = manager.create_kv_cache()
    assert kv_cache.resume() and kv_cache.resize(num_pages * TOKENS_PER_BLOCK)
    kv_cache.synchronize()
    kv_cache.commit(tokens_of(num_pages * TOKENS_PER_BLOCK, seed))
    clock.run(kv_cache.suspend)
    evict_all(manager)
    clock.run(lambda: _resume(kv_cache))
    kv_cache.synchronize()
    _forget(kv_cache)


def decode_row(device: Device | None, geometry: Geometry, options: ManagerOptions) -> Row:
    """What an engine asks of the manager in each decode step, for all sequences together."""
    num_tokens = options.context_tokens + (options.num_repeats + 1) * _DECODE_STEPS
    num_blocks = options.num_sequences * (-(-num_tokens // TOKENS_PER_BLOCK) + 1)
    samples = []
    # Of pages only the numbers matter here, and there are many.
    geometry = Geometry(geometry.name, geometry.num_layers, min(geometry.buffer_bytes, 64))
    with make_manager(geometry, num_blocks + 1, device=device) as manager:
        stream = None if device is None else device.create_stream("compute")
        caches = [manager.create_kv_cache() for _ in range(options.num_sequences)]
        for index, kv_cache in enumerate(caches):
            assert kv_cache.resume(stream) and kv_cache.resize(options.context_tokens)
            kv_cache.synchronize()
            kv_cache.commit(tokens_of(options.context_tokens, index))
        group = manager.layer_group_of(LayerId(0))

        def step() -> None:
            manager.poll()
            for kv_cache in caches:
                stop = kv_cache.history_length + 1
                if kv_cache.capacity < stop:
                    assert kv_cache.resize(-(-stop // TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK)
                assert kv_cache.is_ready()
                assert kv_cache.page_indices(group).size * TOKENS_PER_BLOCK >= stop
                kv_cache.commit([stop])

        for repeat in range(options.num_repeats + 1):
            clock = _Clock()
            for _ in range(_DECODE_STEPS):
                clock.run(step)
            if repeat:
                samples.append(clock.wall_ms / _DECODE_STEPS)
        for kv_cache in caches:
            kv_cache.close()
    config = f"{options.num_sequences} sequences of {options.context_tokens:,} tokens"
    limit = [options.num_sequences * _LIMIT_US_A_STEP / 1e3]
    us = 1e3 * median(samples) / options.num_sequences
    notes = {"us_a_sequence": round(us, 2)}
    limit_name = f"{_LIMIT_US_A_STEP:.0f} µs a sequence"
    return Row(
        f"decode step: {us:.1f} µs a sequence",
        config,
        limit_name,
        samples,
        limit,
        ">= 1",
        notes=notes,
    )
