"""A disk tier of small slots that can be damaged, opened again and read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
)
from coldpage.device.host import HostDevice
from coldpage.manager.reopening import index_of
from coldpage.store.sidecar import SIDECAR_NAME
from coldpage.types import BufferRole, LayerGroupId, LayerId

TOKENS_PER_BLOCK = 4
BUFFER_BYTES = 256
PAYLOAD_BYTES = 2 * BUFFER_BYTES
HEADER_BYTES = 4096
SLOT_BYTES = 8192
ROLES = (BufferRole("key"), BufferRole("value"))


class SmallTier:
    """A manager over ``num_slots`` slots in ``path``, and the bytes of those and of the index."""

    def __init__(
        self, path: Path, num_slots: int, *, model: bytes = b"small", num_hot: int | None = None
    ) -> None:
        self.path = path
        self.num_slots = num_slots
        self._model = model
        self._num_hot = num_hot or num_slots
        self.open()

    def open(self) -> None:
        buffers = tuple(BufferConfig(role, BUFFER_BYTES) for role in ROLES)
        tiers = (
            DeviceTierConfig(self._num_hot * PAYLOAD_BYTES),
            DiskTierConfig(str(self.path), self.num_slots * SLOT_BYTES),
        )
        config = KVCacheManagerConfig(
            TOKENS_PER_BLOCK, tiers, (AttentionLayerConfig(LayerId(0), buffers),), 1.0, self._model
        )
        self.manager = KVCacheManager(config, device=HostDevice(num_io_threads=2))
        self._hot = [self.manager.hot_array(LayerId(0), role) for role in ROLES]

    def close(self) -> None:
        self.manager.close()
        self.manager.device.close()

    @property
    def slots_path(self) -> Path:
        (path,) = self.path.rglob("pool-0.slots")
        return path

    @property
    def index_path(self) -> Path:
        return self.slots_path.with_name(SIDECAR_NAME)

    def slots(self) -> np.ndarray:
        """What is on disk: uint8 [num_slots, SLOT_BYTES]."""
        return np.fromfile(self.slots_path, np.uint8).reshape(-1, SLOT_BYTES)

    def put(self, slots: np.ndarray) -> None:
        with open(self.slots_path, "r+b") as file:
            file.write(slots.tobytes())

    def write(self, tokens: np.ndarray, pages: np.ndarray) -> None:
        """A conversation of full blocks, whose pages [num_blocks, PAYLOAD_BYTES] go to disk when
        the tier is flushed, or room is needed.
        """
        cache = self.manager.create_kv_cache()
        assert cache.resume() and cache.resize(tokens.size)
        cache.synchronize()
        hot = cache.page_indices(LayerGroupId(0))
        for array, part in zip(self._hot, np.split(pages, 2, axis=1), strict=True):
            array[hot] = part
        cache.commit(tokens)
        cache.close()

    def flush(self) -> None:
        """Have everything on disk."""
        assert self.manager.flush(20.0) == 0

    def read(self, tokens: np.ndarray, pages: np.ndarray) -> list[int]:
        """Bring a conversation back, which must be known whole: the blocks that are missing. All
        others hold their pages.
        """
        cache = self.manager.create_kv_cache(tokens)
        assert cache.history_length == tokens.size, "known whole"
        assert cache.resume()
        cache.synchronize()
        missing = [int(block) for block in cache.missing_blocks()]
        self._check(cache, np.delete(np.arange(len(pages)), missing), pages)
        cache.close()
        return missing

    def _check(self, cache: KVCache, blocks: np.ndarray, pages: np.ndarray) -> None:
        hot = cache.page_indices(LayerGroupId(0))[blocks]
        found = np.concatenate([array[hot] for array in self._hot], axis=1)
        assert np.array_equal(found, pages[blocks]), "wrong bytes"

    def known_slots(self) -> dict[int, bytes]:
        """The slots whose pages the manager knows, and the keys of those."""
        manager = self.manager
        index = index_of(manager._storage, manager._tree, manager._storage.levels[1])
        slots, keys = index.entries["slot"].tolist(), index.entries["key"].tolist()
        return dict(zip(slots, keys, strict=True))
