"""The disk tier, checksums included, against plain O_DIRECT I/O of the same size and concurrency.

python -m benchmarks disk
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.kv import BLOCK_BYTES
from benchmarks.rows import Row, scratch_directory
from coldpage.bench.disk import DiskOptions, run_disk
from coldpage.device.host import HostDevice

__all__ = ["run"]

REPETITIONS = 7
BATCH_BYTES = 256 * 2**20


def run(is_quick: bool) -> list[Row]:
    """As ``coldpage bench disk``, with the blocks of the bundled model among others."""
    blocks = (BLOCK_BYTES,) if is_quick else (64 * 1024, BLOCK_BYTES, 2 * 2**20)
    device = HostDevice()
    try:
        with scratch_directory() as directory:
            options = DiskOptions(Path(directory), BATCH_BYTES, blocks, REPETITIONS)
            return run_disk(device, options, Console(quiet=True))
    finally:
        device.close()
