"""How long a manager takes to open a disk tier that is full of pages, with the index that a clean
end leaves and without it, when every header is read.

    python -m benchmarks reopen
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.rows import Row, scratch_directory, timed_ms
from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    ReuseScope,
)
from coldpage.device.base import MemoryKind
from coldpage.prefix import block_key, root_key
from coldpage.store import BlobName
from coldpage.store.sidecar import SIDECAR_NAME
from coldpage.types import BlockKey, BlockOrdinal, BufferRole, LayerGroupId, LayerId, PageClass

__all__ = ["run"]

TOKENS_PER_BLOCK = 16
BLOCKS_A_CONVERSATION = 50
BUFFER_BYTES = 512  # small pages: it is the number of slots that opening costs
SLOT_BYTES = 8192  # a header and a page, each a sector
NUM_SLOTS = (1_000, 10_000, 100_000)
ROUNDS = 5
BATCH_SLOTS = 1_000


def _manager(path: str, num_slots: int) -> KVCacheManager:
    buffers = tuple(BufferConfig(BufferRole(role), BUFFER_BYTES) for role in ("key", "value"))
    tiers = (DeviceTierConfig(64 * 2 * BUFFER_BYTES), DiskTierConfig(path, num_slots * SLOT_BYTES))
    layers = (AttentionLayerConfig(LayerId(0), buffers),)
    return KVCacheManager(KVCacheManagerConfig(TOKENS_PER_BLOCK, tiers, layers, 1.0, b"no model"))


def _names(manager: KVCacheManager, num_slots: int) -> list[BlobName]:
    """Conversations of some blocks each."""
    root = root_key(manager.config.model_fingerprint, ReuseScope(), manager.provenance)
    names: list[BlobName] = []
    parent = root
    for index in range(num_slots):
        ordinal = index % BLOCKS_A_CONVERSATION
        parent = parent if ordinal else root
        tokens = np.arange(TOKENS_PER_BLOCK, dtype=np.int32) + index
        key = block_key(parent, tokens)
        group, place = LayerGroupId(0), BlockOrdinal(ordinal)
        names.append(BlobName(BlockKey(key), parent, group, PageClass.BODY, place, tokens))
        parent = key
    return names


def _fill(path: str, num_slots: int) -> None:
    """Write every slot, past the manager's hot level."""
    with _manager(path, num_slots) as manager:
        file, io = manager._storage.levels[1].groups[0].disk, manager.device.io
        assert file.num_slots == num_slots
        memory = manager.device.allocate(file.payload_bytes, MemoryKind.PINNED)
        names = _names(manager, num_slots)
        for start in range(0, num_slots, BATCH_SLOTS):
            slots = np.arange(start, min(start + BATCH_SLOTS, num_slots), dtype=np.int32)
            addresses = np.full(slots.size, memory.address, np.int64)
            batch = io.submit(file.write_jobs(slots, addresses, names[start : start + BATCH_SLOTS]))
            batch.synchronize()
            assert batch.ok.all()
    _forget_index(path)


def _forget_index(path: str) -> None:
    for index in Path(path).rglob(SIDECAR_NAME):
        index.unlink()


def _open_ms(path: str, num_slots: int) -> float:
    """Opening, until the manager could serve; it leaves an index when it is closed."""
    managers: list[KVCacheManager] = []
    spent_ms = timed_ms(lambda: managers.append(_manager(path, num_slots)))
    with managers[0] as manager:
        assert manager.stats().num_committed_blocks == num_slots
    return spent_ms


def run(is_quick: bool) -> list[Row]:
    """One row for each number of slots, the two ways alternating."""
    rows = []
    for num_slots in NUM_SLOTS[:2] if is_quick else NUM_SLOTS:
        with scratch_directory() as path:
            _fill(path, num_slots)
            with_index, without = [], []
            for _ in range(2 if is_quick else ROUNDS):
                _forget_index(path)
                without.append(_open_ms(path, num_slots))
                with_index.append(_open_ms(path, num_slots))
        goal = "ours < 1000 ms" if num_slots == NUM_SLOTS[-1] else "-"
        rows.append(
            Row(
                f"open {num_slots:,} slots",
                f"{BLOCKS_A_CONVERSATION} blocks a conversation, {TOKENS_PER_BLOCK} tokens a block",
                "reading every header",
                with_index,
                without,
                goal,
            )
        )
    return rows
