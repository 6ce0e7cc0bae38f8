"""Conversations whose pages hold what follows from their block's key, so that every page on disk
can be checked, whoever wrote it.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
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
    ReuseScope,
)
from coldpage.device.host import HostDevice
from coldpage.manager.reopening import index_of
from coldpage.prefix import block_key, root_key
from coldpage.store import SlotIndex, slot_bytes_of
from coldpage.types import BlockKey, BlockOrdinal, BufferRole, LayerId

TOKENS_PER_BLOCK = 4
NUM_CONVERSATIONS = 12
NUM_BLOCKS = 6  # of each conversation
NUM_SHARED_BLOCKS = 2  # with the others of its family
FAMILY = 3
# A full layer and one with a window, of different sizes: two files.
BUFFER_BYTES = (4096, 2048)
WINDOW_TOKENS = 2 * TOKENS_PER_BLOCK
NUM_HOT_BLOCKS = 14
ROLES = (BufferRole("key"), BufferRole("value"))
FINGERPRINT = b"patterned"
FLUSH_BUDGET_S = 1.0


def config_of(path: Path, num_disk_blocks: int, *, write_behind: bool) -> KVCacheManagerConfig:
    """A hot level of some blocks over a disk level."""
    layers = tuple(
        AttentionLayerConfig(
            LayerId(i), tuple(BufferConfig(role, num_bytes) for role in ROLES), window
        )
        for i, (num_bytes, window) in enumerate(
            zip(BUFFER_BYTES, (None, WINDOW_TOKENS), strict=True)
        )
    )
    page_bytes = 2 * sum(BUFFER_BYTES)
    slots_bytes = page_bytes + 2 * 4096
    return KVCacheManagerConfig(
        TOKENS_PER_BLOCK,
        (
            DeviceTierConfig(NUM_HOT_BLOCKS * page_bytes),
            DiskTierConfig(str(path), num_disk_blocks * slots_bytes, write_behind=write_behind),
        ),
        layers,
        1.0,
        FINGERPRINT,
        initial_pool_ratio=tuple(float(b) for b in BUFFER_BYTES),
    )


@functools.lru_cache(maxsize=4096)
def pattern(key: BlockKey, layer: int, role: str) -> bytes:
    """What the buffer of a layer holds for a block."""
    return hashlib.shake_128(key + f"{layer} {role}".encode()).digest(BUFFER_BYTES[layer])


def conversation(number: int) -> np.ndarray:
    """The tokens of a conversation: the beginning is its family's."""
    tokens = np.arange(NUM_BLOCKS * TOKENS_PER_BLOCK, dtype=np.int32)
    shared = NUM_SHARED_BLOCKS * TOKENS_PER_BLOCK
    tokens[:shared] += 1000 * (number // FAMILY + 1)
    tokens[shared:] += 100_000 * (number + 1)
    return tokens


class Patterned:
    """A manager, and what its pages must hold. ``wrong`` and ``num_checked`` count pages."""

    def __init__(self, config: KVCacheManagerConfig) -> None:
        self.manager = KVCacheManager(config, device=HostDevice(num_io_threads=2))
        self.num_checked = 0
        self.wrong: list[str] = []
        manager = self.manager
        self.hot = {
            (layer, role): manager.hot_array(LayerId(layer), role)
            for layer in range(len(BUFFER_BYTES))
            for role in ROLES
        }
        self.tokens = [conversation(number) for number in range(NUM_CONVERSATIONS)]
        root = root_key(config.model_fingerprint, ReuseScope(), manager.provenance)
        self.keys = [self._chain(root, tokens) for tokens in self.tokens]

    @staticmethod
    def _chain(root: BlockKey, tokens: np.ndarray) -> list[BlockKey]:
        keys = [root]
        for start in range(0, tokens.size, TOKENS_PER_BLOCK):
            keys.append(block_key(keys[-1], tokens[start : start + TOKENS_PER_BLOCK]))
        return keys[1:]

    def close(self) -> None:
        """A clean end."""
        self.manager.close()
        self.manager.device.close()

    def abandon(self) -> None:
        """An end without an index, as after a crash; the process lives on."""
        self.manager._storage.close()
        self.manager._is_closed = True
        self.manager._release_everything()
        self.manager.device.close()

    def write(self, cache: KVCache, number: int, blocks: list[int]) -> None:
        """Fill the hot pages of the blocks, as far as a layer has one."""
        for layer, role in self.hot:
            slots = cache.page_indices(self.manager.layer_group_of(LayerId(layer)))
            for block in blocks:
                if slots[block] >= 0:
                    data = pattern(self.keys[number][block], layer, role)
                    self.hot[layer, role][slots[block]] = np.frombuffer(data, np.uint8)

    def check(self, cache: KVCache, number: int) -> int:
        """Compare all hot pages of the history that are not missing; returns how many."""
        num_pages, missing = 0, set(cache.missing_blocks())
        for layer in range(len(BUFFER_BYTES)):
            slots = cache.page_indices(self.manager.layer_group_of(LayerId(layer)))
            for block in range(cache.history_length // TOKENS_PER_BLOCK):
                if slots[block] < 0 or BlockOrdinal(block) in missing:
                    continue
                num_pages += 1
                for role in ROLES:
                    found = self.hot[layer, role][slots[block]].tobytes()
                    if found != pattern(self.keys[number][block], layer, role):
                        self.wrong.append(f"conversation {number} block {block} layer {layer}")
                        break
        self.num_checked += num_pages
        return num_pages

    def index(self) -> SlotIndex:
        """Every committed page with a good copy on disk."""
        manager = self.manager
        level = manager._storage.levels[1]
        return index_of(manager._storage, manager._tree, level)

    def read_all_conversations(self) -> None:
        """Bring back what is there of every conversation, at each length, through the manager."""
        for number, tokens in enumerate(self.tokens):
            for stop in range(TOKENS_PER_BLOCK, tokens.size + 1, TOKENS_PER_BLOCK):
                cache = self.manager.create_kv_cache(tokens[:stop])
                if cache.history_length == stop:
                    assert cache.resume()
                    cache.synchronize()
                    self.check(cache, number)
                cache.close()

    def read_all_slots(self) -> set[tuple[bytes, int]]:
        """Read every slot of the index, past the manager: the (key, layer group) that are good."""
        index, good = self.index(), set()
        level = self.manager._storage.levels[1]
        layer_of = {
            int(self.manager.layer_group_of(LayerId(layer))): layer
            for layer in range(len(BUFFER_BYTES))
        }
        for entry in index.entries:
            file = level.groups[int(entry["pool"])].disk
            out = np.zeros(file.payload_bytes, np.uint8)
            slots = np.array([entry["slot"]], np.int32)
            (job,) = file.read_jobs(slots, np.array([out.ctypes.data], np.int64))
            key, group = bytes(entry["key"]), int(entry["layer_group"])
            if not job.run():
                continue
            good.add((key, group))
            self.num_checked += 1
            layer = layer_of[group]
            expected = b"".join(pattern(BlockKey(key), layer, role) for role in ROLES)
            if out.tobytes() != expected:
                self.wrong.append(f"slot {slots[0]} of file {entry['pool']}")
        return good


class Talker:
    """Does at random what an engine does, one operation a ``step``."""

    def __init__(self, patterned: Patterned, rng: random.Random, on_flushed: Callable[[], None]):
        self.patterned = patterned
        self._rng = rng
        self._on_flushed = on_flushed
        self._suspended: list[tuple[KVCache, int]] = []

    def step(self) -> None:
        """One operation."""
        dice = self._rng.random()
        if dice < 0.55:
            self._talk()
        elif dice < 0.75 and self._suspended:
            self._go_on(*self._suspended.pop(self._rng.randrange(len(self._suspended))))
        elif dice < 0.85:
            self.flush()
        else:
            self.patterned.manager.wait_for_progress(0.001)
        self.patterned.manager.poll()
        while len(self._suspended) > 3:
            self._suspended.pop(0)[0].close()

    def flush(self) -> None:
        """Write everything, and say so when it is durable."""
        if self.patterned.manager.flush(FLUSH_BUDGET_S) == 0:
            self._on_flushed()

    def close_all(self) -> None:
        """Let go of every sequence."""
        while self._suspended:
            self._suspended.pop()[0].close()

    def _talk(self) -> None:
        number = self._rng.randrange(NUM_CONVERSATIONS)
        stop = self._rng.randint(1, NUM_BLOCKS) * TOKENS_PER_BLOCK
        cache = self.patterned.manager.create_kv_cache(self.patterned.tokens[number][:stop])
        if self._wake(cache, number) and cache.resize(stop):
            cache.synchronize()
            first = cache.num_committed_tokens // TOKENS_PER_BLOCK
            blocks = list(range(first, stop // TOKENS_PER_BLOCK))
            self.patterned.write(cache, number, blocks)
            if self._rng.random() < 0.3:
                assert cache.resize(stop, stop)  # written, and committed later
            else:
                self._commit(cache, number, stop)
        self._leave(cache, number)

    def _go_on(self, cache: KVCache, number: int) -> None:
        """Back to a suspended one: check it, and commit what has waited."""
        if self._wake(cache, number):
            self._commit(cache, number, cache.history_length)
        self._leave(cache, number)

    def _wake(self, cache: KVCache, number: int) -> bool:
        if not cache.resume():
            return False
        cache.synchronize()
        missing = cache.missing_blocks()
        self.patterned.write(cache, number, [int(block) for block in missing])
        cache.fill_missing(missing)
        self.patterned.check(cache, number)
        return True

    def _commit(self, cache: KVCache, number: int, stop: int) -> None:
        cache.commit(self.patterned.tokens[number][cache.num_committed_tokens : stop])

    def _leave(self, cache: KVCache, number: int) -> None:
        if cache.status.value == "active":
            cache.suspend()
        self._suspended.append((cache, number))


def slot_bytes(patterned: Patterned) -> list[int]:
    """What a slot takes in each file."""
    level = patterned.manager._storage.levels[1]
    return [slot_bytes_of(group.disk.identity) for group in level.groups]
