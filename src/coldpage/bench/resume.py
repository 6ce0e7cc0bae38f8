"""``coldpage bench resume``: a session that lies in host memory, until its first step may launch;
against the link's speed, and against computing its tokens again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import Progress, TaskID

from coldpage.bench.arena import Arena, is_gpu
from coldpage.bench.kv import (
    LLAMA_8B,
    SMOLLM2_135M,
    TOKENS_PER_BLOCK,
    Geometry,
    evict_all,
    make_manager,
    write_cache,
)
from coldpage.bench.rows import Row, median, quiet_progress, size_name, table_of, timed_ms
from coldpage.codecs import ColdPageCodec, create_default_cold_page_codec
from coldpage.config import HostTierConfig
from coldpage.device.base import Device, Stream
from coldpage.errors import ConfigurationError, DeviceError
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCache

if TYPE_CHECKING:
    from coldpage.bench.prefill import Prefill

__all__ = ["ResumeOptions", "run_resume"]

# What the limit copies at most; for more bytes its time is scaled.
_MAX_LIMIT_BYTES: Final = 1 << 30
_SPARE_BLOCKS: Final = 2
_MAX_PREFILLS: Final = 3
_IDLE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """What to measure; None is what suits the device. The prompt that is computed instead is cut
    into steps of ``step_tokens``: the larger, the faster.
    """

    num_tokens: int | None = None
    geometry: Geometry | None = None
    num_repeats: int = 5
    step_tokens: int | None = None
    has_prefill: bool = True


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Milliseconds from the call of ``resume`` on."""

    total_ms: float  # until the first step may launch: waits on its stream included
    planning_ms: float  # until the first copy was enqueued
    enqueue_ms: float  # inside the codec, summed
    call_ms: float  # until ``resume`` returned

    @property
    def copy_ms(self) -> float:
        """From the first copy on."""
        return self.total_ms - self.planning_ms


class _Watch:
    """When the codec's ``decode`` is called, and how long it takes."""

    def __init__(self, codec: ColdPageCodec) -> None:
        self.first_s: float | None = None
        self.spent_s = 0.0
        codec.decode = self._watched(codec.decode)  # type: ignore[method-assign]

    def _watched(self, decode: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(decode)
        def watched(*arguments: Any) -> None:
            started_s = perf_counter()
            if self.first_s is None:
                self.first_s = started_s
            decode(*arguments)
            self.spent_s += perf_counter() - started_s

        return watched

    def reset(self) -> None:
        """Forget what was."""
        self.first_s, self.spent_s = None, 0.0


def run_resume(device: Device, options: ResumeOptions, console: Console) -> list[Row]:
    """Measure, print the table, and return every row.

    Raises DeviceError where the device has not the memory, or a resumed session is another one.
    """
    geometry = options.geometry or (LLAMA_8B if is_gpu(device) else SMOLLM2_135M)
    num_tokens = options.num_tokens or (32_768 if is_gpu(device) else 2_048)
    num_blocks = -(-num_tokens // TOKENS_PER_BLOCK)
    if num_tokens % TOKENS_PER_BLOCK:
        raise ConfigurationError(f"{num_tokens} tokens: use a multiple of {TOKENS_PER_BLOCK}")
    num_bytes = num_blocks * geometry.block_bytes
    codec = create_default_cold_page_codec(device.max_page_kernel_bytes)
    watch = _Watch(codec)
    host = HostTierConfig((num_blocks + 2 * _SPARE_BLOCKS) * geometry.block_bytes)
    with quiet_progress(console) as progress:
        task = progress.add_task("preparing memory", total=2 + options.num_repeats)
        arena = Arena(device, min(num_bytes, _MAX_LIMIT_BYTES))
        num_hot = num_blocks + _SPARE_BLOCKS
        with make_manager(geometry, num_hot, host, device=device, codec=codec) as manager:
            session = _Session(manager, watch, device.create_stream("compute"), num_blocks)
            if options.has_prefill:
                progress.update(task, description="computing the tokens", advance=1)
                session.compute(_prefill(device, geometry, manager, options), options.num_repeats)
            else:
                session.write()
            resumed, limit_ms = _resumes(session, arena, num_bytes, options, (progress, task))
            session.close()
    rows = _rows(geometry, num_bytes, resumed, limit_ms, session.prefill_ms)
    table = table_of(f"a session of {num_tokens:,} tokens from host memory, {device.name}", rows)
    table.caption = _parts(resumed, limit_ms, num_bytes)
    console.print(table)
    return rows


def _prefill(
    device: Device, geometry: Geometry, manager: KVCacheManager, options: ResumeOptions
) -> Prefill:
    try:
        from coldpage.bench.prefill import Prefill
    except ImportError as error:
        raise ConfigurationError(
            f"computing the tokens needs torch and transformers ({error}): use --no-prefill"
        ) from error
    step_tokens = options.step_tokens or (8192 if is_gpu(device) else 1024)
    return Prefill(device, geometry, manager, step_tokens)


class _Session:
    """One sequence of a manager, and what is known of it."""

    def __init__(
        self, manager: KVCacheManager, watch: _Watch, stream: Stream, num_blocks: int
    ) -> None:
        self._manager = manager
        self._watch = watch
        self._stream = stream
        self._num_blocks = num_blocks
        self._cache: KVCache | None = None
        self._prefill: Prefill | None = None
        self._logits: Any = None
        self.prefill_ms: list[float] = []

    def write(self) -> None:
        """Have pages, whatever is in them."""
        self._cache = write_cache(self._manager, self._num_blocks, 1)

    def compute(self, prefill: Prefill, num_repeats: int) -> None:
        """Have pages that a model has written, and time that."""
        self._prefill = prefill
        num_tokens = self._num_blocks * TOKENS_PER_BLOCK
        for repeat in range(min(num_repeats, _MAX_PREFILLS) + 1):
            self.close()
            spent_ms = timed_ms(lambda r=repeat: self._compute(num_tokens, r))  # type: ignore[misc]
            if repeat:  # the first warms up
                self.prefill_ms.append(spent_ms)
        assert self._cache is not None
        self._logits = prefill.next_logits(self._cache)
        self._cache.suspend()

    def _compute(self, num_tokens: int, seed: int) -> None:
        assert self._prefill is not None
        self._cache = self._prefill.compute(num_tokens, seed)

    def resume(self) -> _Resumed:
        """Send it to host memory, then bring it back; it is suspended again afterwards."""
        kv_cache, stream, watch = self._cache, self._stream, self._watch
        assert kv_cache is not None
        evict_all(self._manager)
        stream.synchronize()
        before = self._manager.stats().moved_pages.get("host-hot", 0)
        watch.reset()
        started_s = perf_counter()
        assert kv_cache.resume(stream)
        returned_s = perf_counter()
        while not kv_cache.is_ready():
            self._manager.wait_for_progress(_IDLE_S)
        stream.record().synchronize()
        ended_s = perf_counter()
        num_moved = self._manager.stats().moved_pages.get("host-hot", 0) - before
        if num_moved != self._num_blocks or watch.first_s is None:
            raise DeviceError(f"of {self._num_blocks} pages {num_moved} came from host memory")
        self._check(kv_cache)
        kv_cache.suspend()
        return _Resumed(
            1e3 * (ended_s - started_s),
            1e3 * (watch.first_s - started_s),
            1e3 * watch.spent_s,
            1e3 * (returned_s - started_s),
        )

    def _check(self, kv_cache: KVCache) -> None:
        """The next token is what it was."""
        if self._prefill is None:
            return
        logits = self._prefill.next_logits(kv_cache, self._stream)
        if not bool((logits == self._logits).all()):
            raise DeviceError("the resumed session gives other logits than before it left")

    def close(self) -> None:
        """Drop the pages."""
        if self._cache is not None:
            self._cache.plan_drop()
            self._cache.close()
            self._cache = None


def _resumes(
    session: _Session,
    arena: Arena,
    num_bytes: int,
    options: ResumeOptions,
    progress: tuple[Progress, TaskID],
) -> tuple[list[_Resumed], list[float]]:
    """Resumes and, in turn, the limit: the bytes over the speed of one contiguous copy."""
    bar, task = progress
    bar.update(task, description="resuming", advance=1)
    scale = num_bytes / arena.num_bytes
    resumed, limit_ms = [], []
    for repeat in range(options.num_repeats + 1):
        one = session.resume()
        copied_ms = arena.timed_ms(lambda: arena.copy_plainly("up", arena.num_bytes))
        if repeat:  # the first warms up
            resumed.append(one)
            limit_ms.append(scale * copied_ms)
            bar.advance(task)
    return resumed, limit_ms


def _rows(
    geometry: Geometry,
    num_bytes: int,
    resumed: list[_Resumed],
    limit_ms: list[float],
    prefill_ms: list[float],
) -> list[Row]:
    num_pages = num_bytes // geometry.block_bytes
    num_tokens = num_pages * TOKENS_PER_BLOCK
    config = f"{geometry.name}: {size_name(num_bytes)} in {num_pages:,} pages"
    total_ms = [one.total_ms for one in resumed]
    notes = {
        "num_tokens": float(num_tokens),
        "num_bytes": float(num_bytes),
        "gb_per_s": round(num_bytes / 1e6 / median(total_ms), 3),
        "limit_gb_per_s": round(num_bytes / 1e6 / median(limit_ms), 3),
        "planning_ms": round(median([one.planning_ms for one in resumed]), 3),
        "enqueue_ms": round(median([one.enqueue_ms for one in resumed]), 3),
        "call_ms": round(median([one.call_ms for one in resumed]), 3),
        "copy_ms": round(median([one.copy_ms for one in resumed]), 3),
    }
    name, limit = "resume, until the first step may launch", "bytes / speed of one copy"
    rows = [Row(name, config, limit, total_ms, limit_ms, "<= 1.1", False, notes)]
    if prefill_ms:
        notes = {"prefill_tokens_per_s": round(1e3 * num_tokens / median(prefill_ms), 1)}
        rival = "prefill of the same tokens"
        rows.append(Row(name, config, rival, total_ms, prefill_ms, ">= 12", notes=notes))
    return rows


def _parts(resumed: list[_Resumed], limit_ms: list[float], num_bytes: int) -> str:
    planning, enqueue, call, copy = (
        median([getattr(one, part) for one in resumed])
        for part in ("planning_ms", "enqueue_ms", "call_ms", "copy_ms")
    )
    speed = num_bytes / 1e6 / median(limit_ms)
    return (
        f"of that {planning:.2f} ms until the first copy is enqueued and {copy:.2f} ms from then "
        f"on; the codec enqueues for {enqueue:.2f} ms, and resume() returns after {call:.2f} ms; "
        f"one copy: {speed:.1f} GB/s"
    )
