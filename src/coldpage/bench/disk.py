"""``coldpage bench disk``: pages from the hot level to disk and back, by way of the page-locked
ring, against plain file I/O of the same blocks on the same threads.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from coldpage.bench.arena import is_gpu, prepared
from coldpage.bench.kv import TOKENS_PER_BLOCK, Geometry, evict_all, make_manager, write_cache
from coldpage.bench.rows import Row, median, quiet_progress, size_name, timed_ms
from coldpage.config import DiskTierConfig
from coldpage.device.base import Device, IoJob, Memory, MemoryKind
from coldpage.device.file import BlockFile
from coldpage.errors import ConfigurationError, StorageError
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCache
from coldpage.store import BlobName, FileIdentity, SlotFile, slot_bytes_of
from coldpage.types import (
    BlockKey,
    BlockOrdinal,
    ByteRange,
    Int32Array,
    LayerGroupId,
    MemAddress,
    PageClass,
)

__all__ = ["BLOCKS", "DiskOptions", "run_disk"]

_KIB: Final = 1024
_MIB: Final = 1024 * 1024
BLOCKS: Final = (64 * _KIB, 256 * _KIB, _MIB, 2 * _MIB)
_GPU_BYTES: Final = 512 * _MIB
_HOST_BYTES: Final = 128 * _MIB
_GOAL: Final = ">= 0.9"
# Pages pass from hot memory through the manager and the ring; blobs lie in page-locked memory.
_NAMES: Final = {
    "page writes": "plain writes",
    "page reads": "plain reads",
    "blob writes": "plain writes",
    "blob reads": "plain reads",
}
# A slot has a header before its page; and a few slots more than pages.
_HEADER_BYTES: Final = 2 * 4096
_SPARE_SLOTS: Final = 8


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What to measure. ``num_bytes`` is what moves at a time; None: what suits the device."""

    directory: Path
    num_bytes: int | None = None
    block_bytes: tuple[int, ...] = BLOCKS
    num_repeats: int = 5


def run_disk(device: Device, options: DiskOptions, console: Console) -> list[Row]:
    """Measure, print the table, and return every row; leaves no file behind.

    Raises ConfigurationError for blocks that can not be, StorageError where the directory has not
    the room, DeviceError where the device has not the memory.
    """
    num_bytes = options.num_bytes or (_GPU_BYTES if is_gpu(device) else _HOST_BYTES)
    for size in options.block_bytes:
        if size % 4096 or size > num_bytes:
            raise ConfigurationError(
                f"blocks of {size_name(size)} can not be read past the page cache, or are more "
                f"than the {size_name(num_bytes)} that move: use multiples of 4 KiB up to that"
            )
    rows = []
    with quiet_progress(console) as progress:
        task = progress.add_task("", total=len(options.block_bytes))
        with prepared(device):
            memory = device.allocate(num_bytes, MemoryKind.PINNED)
        for size in options.block_bytes:
            progress.update(task, description=f"blocks of {size_name(size)}")
            with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as directory:
                rows += _measure(device, memory, Path(directory), size, options.num_repeats)
            progress.advance(task)
        memory.free()
    console.print(_table(device, rows))
    return rows


class _Files:
    """The blocks of page-locked memory to a plain file and back, and to a file of the disk tier,
    where each has a header and a checksum.
    """

    def __init__(self, device: Device, memory: Memory, directory: Path, block_bytes: int) -> None:
        self._io = device.io
        self._array = memory.array
        self._block_bytes = block_bytes
        self.num_blocks = memory.num_bytes // block_bytes
        starts = np.arange(self.num_blocks, dtype=np.int64) * block_bytes
        self._addresses = memory.address + starts
        identity = FileIdentity(bytes(32), "bench", block_bytes, TOKENS_PER_BLOCK)
        with contextlib.ExitStack() as files:
            plain_bytes = self.num_blocks * block_bytes
            self.plain = BlockFile(directory / "plain", plain_bytes)
            files.callback(self.plain.close)
            blobs_bytes = self.num_blocks * slot_bytes_of(identity)
            blobs = BlockFile(directory / "blobs", blobs_bytes)
            files.callback(blobs.close)
            self._files = files.pop_all()
        self._blobs = SlotFile(blobs, self.num_blocks, identity)
        tokens = np.zeros(TOKENS_PER_BLOCK, np.int32)
        self._names = [
            BlobName(
                BlockKey(index.to_bytes(32, "little")),
                BlockKey(bytes(32)),
                LayerGroupId(0),
                PageClass.BODY,
                BlockOrdinal(index),
                tokens,
            )
            for index in range(self.num_blocks)
        ]

    def write_blobs(self, slots: Int32Array) -> None:
        """Every block, to these slots."""
        self._run(self._blobs.write_jobs(slots, self._addresses, self._names))

    def read_blobs(self, slots: Int32Array) -> None:
        """Every block, from these slots."""
        self._run(self._blobs.read_jobs(slots, self._addresses))

    def write(self, slots: Int32Array) -> None:
        """Every block, to these places of the plain file."""
        self._run(self._plain_jobs(slots, self.plain.writev, is_read=False))

    def read(self, slots: Int32Array) -> None:
        """Every block, from these places of the plain file."""
        self._run(self._plain_jobs(slots, self.plain.readv, is_read=True))

    def _plain_jobs(
        self,
        slots: Int32Array,
        transfer: Callable[[int, list[npt.NDArray[np.uint8]]], None],
        *,
        is_read: bool,
    ) -> list[IoJob]:
        size, addresses = self._block_bytes, self._addresses.tolist()

        def job(index: int, slot: int) -> IoJob:
            buffer = self._array[index * size : (index + 1) * size]

            def move() -> bool:
                transfer(slot * size, [buffer])
                return True

            ranges = (ByteRange(MemAddress(addresses[index]), size),)
            return IoJob(move, writes=ranges) if is_read else IoJob(move, reads=ranges)

        return [job(index, slot) for index, slot in enumerate(slots.tolist())]

    def _run(self, jobs: list[IoJob]) -> None:
        batch = self._io.submit(jobs)
        batch.synchronize()
        if not batch.ok.all():
            raise StorageError(f"of {len(jobs)} blocks {int((~batch.ok).sum())} were not moved")

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _measure(
    device: Device, memory: Memory, directory: Path, block_bytes: int, num_repeats: int
) -> list[Row]:
    geometry = Geometry("pages", 1, block_bytes // 2)
    random = np.random.default_rng(0)
    samples: dict[str, list[float]] = {}
    with contextlib.closing(_Files(device, memory, directory, block_bytes)) as files:
        num_pages = files.num_blocks
        quota_bytes = (num_pages + _SPARE_SLOTS) * (block_bytes + _HEADER_BYTES)
        disk = DiskTierConfig(str(directory), quota_bytes)
        with make_manager(geometry, num_pages + 1, disk, device=device) as manager:
            for repeat in range(num_repeats + 1):
                slots = random.permutation(num_pages).astype(np.int32)
                kv_cache = write_cache(manager, num_pages, repeat)
                spent = {
                    "page writes": timed_ms(functools.partial(evict_all, manager)),
                    "plain writes": timed_ms(functools.partial(files.write, slots)),
                    "blob writes": timed_ms(functools.partial(files.write_blobs, slots)),
                    "page reads": timed_ms(functools.partial(_resume, kv_cache)),
                    "plain reads": timed_ms(functools.partial(files.read, slots)),
                    "blob reads": timed_ms(functools.partial(files.read_blobs, slots)),
                }
                _check_moved(manager, num_pages * (repeat + 1))
                kv_cache.plan_drop()
                kv_cache.close()
                manager.finish_transfers()
                if repeat:  # the first warms up
                    for what, spent_ms in spent.items():
                        samples.setdefault(what, []).append(spent_ms)
        rival = "plain O_DIRECT" if files.plain.is_direct else "plain I/O, page cache"
        return _rows(samples, rival, num_pages, block_bytes)


def _resume(kv_cache: KVCache) -> None:
    assert kv_cache.resume()
    kv_cache.synchronize()


def _check_moved(manager: KVCacheManager, num_pages: int) -> None:
    moved = manager.stats().moved_pages
    if (moved.get("hot-disk"), moved.get("disk-hot")) != (num_pages, num_pages):
        raise StorageError(f"of {num_pages} pages to disk and back these moved: {dict(moved)}")


def _rows(
    samples: dict[str, list[float]], rival: str, num_blocks: int, block_bytes: int
) -> list[Row]:
    config = f"{num_blocks:,} blocks of {size_name(block_bytes)}"
    mb = num_blocks * block_bytes / 1e6
    rows = []
    for name, of_plain in _NAMES.items():
        ours, theirs = samples[name], samples[of_plain]
        notes = {
            "block_bytes": float(block_bytes),
            "mb_per_s": round(1e3 * mb / median(ours), 2),
            "rival_mb_per_s": round(1e3 * mb / median(theirs), 2),
        }
        rows.append(Row(name, config, rival, ours, theirs, _GOAL, notes=notes))
    return rows


def _table(device: Device, rows: Sequence[Row]) -> Table:
    table = Table(title=f"pages between hot memory and disk, {device.name}: MB/s", show_edge=False)
    for column in ("what", "blocks"):
        table.add_column(column)
    for column in ("ours", "plain", "ratio", "goal"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = (f"{row.notes[key]:,.0f}" for key in ("mb_per_s", "rival_mb_per_s"))
        table.add_row(row.name, row.config, *speeds, f"{row.ratio:.2f}", row.goal)
    rivals = ", ".join(sorted({row.rival for row in rows}))
    table.caption = (
        f"beside: {rivals}, the same blocks on the same threads; pages pass through the manager "
        "and page-locked memory, blobs are pages that lie there already"
    )
    return table
