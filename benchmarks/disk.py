"""The disk tier's blobs, checksums included, against plain O_DIRECT I/O of the same size and
concurrency.

    python -m benchmarks disk
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from benchmarks.kv import BLOCK_BYTES
from benchmarks.rows import Row, scratch_directory, timed_ms
from coldpage.device.base import IoJob
from coldpage.device.file import BlockFile
from coldpage.device.host import HostDevice
from coldpage.pools import DiskPool, disk_slot_bytes

__all__ = ["run"]

REPETITIONS = 7
BATCH_BYTES = 256 * 2**20


def _plain_jobs(
    file: BlockFile, memory: np.ndarray, slots: np.ndarray, num_bytes: int, is_write: bool
) -> list[IoJob]:
    def job(index: int, slot: int) -> IoJob:
        buffer = memory[index * num_bytes : (index + 1) * num_bytes]
        transfer = file.writev if is_write else file.readv

        def move() -> bool:
            transfer(slot * num_bytes, [buffer])
            return True

        return IoJob(move)

    return [job(index, slot) for index, slot in enumerate(slots.tolist())]


def run(is_quick: bool) -> list[Row]:
    """Both move the same bytes through the same eight threads, slots in a random order."""
    rows: list[Row] = []
    device = HostDevice()

    def transfer(jobs: list[IoJob]) -> None:
        batch = device.io.submit(jobs)
        batch.synchronize()
        assert batch.ok.all()

    for payload in (BLOCK_BYTES,) if is_quick else (64 * 1024, BLOCK_BYTES, 2 * 2**20):
        num_slots = BATCH_BYTES // payload
        slot_bytes = disk_slot_bytes(payload)
        random = np.random.default_rng(0)
        with (
            scratch_directory() as directory,
            mmap.mmap(-1, num_slots * slot_bytes) as slab,
        ):
            memory = np.frombuffer(slab, np.uint8)
            memory[:] = random.integers(0, 256, memory.size, np.uint8)
            addresses = memory.ctypes.data + np.arange(num_slots, dtype=np.int64) * payload
            pool_file = BlockFile(Path(directory) / "pool", num_slots * slot_bytes)
            plain_file = BlockFile(Path(directory) / "plain", num_slots * slot_bytes)
            pool = DiskPool(pool_file, num_slots, payload)
            samples: dict[tuple[bool, bool], list[float]] = {}
            for _ in range(REPETITIONS + 1):
                slots = random.permutation(num_slots).astype(np.int32)
                for is_write in (True, False):
                    make_jobs = pool.write_jobs if is_write else pool.read_jobs
                    jobs = make_jobs(slots, addresses)
                    samples.setdefault((is_write, True), []).append(
                        timed_ms(lambda: transfer(jobs))
                    )
                    jobs = _plain_jobs(plain_file, memory, slots, slot_bytes, is_write)
                    samples.setdefault((is_write, False), []).append(
                        timed_ms(lambda: transfer(jobs))
                    )
            del memory, addresses
            jobs.clear()
            pool.close()
            plain_file.close()
        for is_write in (True, False):
            ours, rival = samples[is_write, True][1:], samples[is_write, False][1:]
            mib = BATCH_BYTES / 2**20
            notes = {
                "ours_mib_per_s": mib / np.median(ours) * 1e3,
                "rival_mib_per_s": mib / np.median(rival) * 1e3,
            }
            name = "disk tier writes" if is_write else "disk tier reads"
            config = f"{num_slots} blobs of {payload / 1024:.0f} KiB"
            rows.append(Row(name, config, "plain O_DIRECT", ours, rival, ">= 0.85", True, notes))
    device.close()
    return rows
