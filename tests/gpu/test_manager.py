"""A manager whose hot level is on a GPU: pages leave it and come back with their bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from coldpage import KVCache, KVCacheManager
from coldpage.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManagerConfig,
)
from coldpage.device.base import Device, DeviceBytes, MemoryKind, Stream
from coldpage.testing.memory_access import allocate_ready
from coldpage.types import BufferRole, CacheLevel, LayerGroupId, LayerId
from tests.gpu.page_rig import PATHS

pytestmark = pytest.mark.gpu

_PER_BLOCK = 4
_NUM_LAYERS = 3
_ROLES = BufferRole("key"), BufferRole("value")
_GROUP = LayerGroupId(0)
_HOT_BLOCKS = 8
_COLD = (("host",), ("host", "disk"), ("disk",), ("gpu",), ("gpu", "host", "disk"))
_DEADLINE_S = 30.0

_Bytes = npt.NDArray[np.uint8]


def _config(cold: Sequence[CacheTierConfig], buffer_bytes: int) -> KVCacheManagerConfig:
    buffers = tuple(BufferConfig(role, buffer_bytes) for role in _ROLES)
    layers = tuple(AttentionLayerConfig(LayerId(i), buffers) for i in range(_NUM_LAYERS))
    hot = DeviceTierConfig(_HOT_BLOCKS * _page_bytes(buffer_bytes))
    return KVCacheManagerConfig(
        _PER_BLOCK,
        (hot, *cold),
        layers,
        max_util_for_resume=1.0,
        model_fingerprint=b"gpu",
    )


def _page_bytes(buffer_bytes: int) -> int:
    return _NUM_LAYERS * len(_ROLES) * buffer_bytes


def _content(name: int, block: int, buffer_bytes: int) -> _Bytes:
    """What a block of a sequence holds, [num_buffers, buffer_bytes]."""
    rng = np.random.default_rng((name, block))
    return rng.integers(0, 256, (_NUM_LAYERS * len(_ROLES), buffer_bytes), np.uint8)


def _tokens(name: int, start: int, stop: int) -> list[int]:
    return [1000 * name + position for position in range(start, stop)]


class _Copier:
    """Reads and writes hot pages by copies on a stream."""

    def __init__(self, manager: KVCacheManager, device: Device, buffer_bytes: int) -> None:
        self.stream = device.create_stream("compute")
        self._size = buffer_bytes
        num_bytes = _HOT_BLOCKS * _page_bytes(buffer_bytes)
        self._room = allocate_ready(device, num_bytes, MemoryKind.PINNED)
        self._buffers: list[DeviceBytes] = []
        for layer in range(_NUM_LAYERS):
            for role in _ROLES:
                found = manager.hot_array(LayerId(layer), role)
                assert isinstance(found, DeviceBytes)
                self._buffers.append(found)

    def write(self, slots: Sequence[int], pages: Sequence[_Bytes]) -> None:
        """Pages [num_buffers, buffer_bytes] to hot slots, on the stream."""
        for index, (slot, page) in enumerate(zip(slots, pages, strict=True)):
            rooms = self._rooms(index)
            self._room.array[self._span(index)] = page.reshape(-1)
            self.stream.copy(self._places(slot), rooms, np.full(rooms.size, self._size))
        self.stream.synchronize()

    def read(self, slots: Sequence[int]) -> list[_Bytes]:
        """The pages in hot slots, each [num_buffers, buffer_bytes]."""
        for index, slot in enumerate(slots):
            rooms = self._rooms(index)
            self.stream.copy(rooms, self._places(slot), np.full(rooms.size, self._size))
        self.stream.synchronize()
        array = self._room.array
        return [array[self._span(i)].reshape(-1, self._size).copy() for i in range(len(slots))]

    def _span(self, index: int) -> slice:
        size = len(self._buffers) * self._size
        return slice(index * size, (index + 1) * size)

    def _rooms(self, index: int) -> npt.NDArray[np.int64]:
        first = self._room.address + self._span(index).start
        return first + self._size * np.arange(len(self._buffers))

    def _places(self, slot: int) -> npt.NDArray[np.int64]:
        return np.array([b.address + slot * b.stride_bytes for b in self._buffers], np.int64)

    def close(self) -> None:
        self._room.free()


def _until(manager: KVCacheManager, attempt: Any) -> None:
    """Until it is true; what is in motion may take the room meanwhile."""
    deadline = time.monotonic() + _DEADLINE_S
    while not attempt():
        assert time.monotonic() < deadline, "there is never room"
        manager.wait_for_progress(0.01)
        manager.poll()


def _slots(kv_cache: KVCache, start: int, stop: int) -> list[int]:
    slots: list[int] = kv_cache.page_indices(_GROUP)[start:stop].tolist()
    assert min(slots, default=0) >= 0, "a block has no hot page"
    return slots


def _extend(manager: KVCacheManager, kv_cache: KVCache, num_tokens: int) -> None:
    _until(manager, lambda: kv_cache.resize(kv_cache.history_length + num_tokens))
    kv_cache.synchronize()


class _Story:
    """Some sequences, more of them than the hot level holds, that take turns."""

    def __init__(self, manager: KVCacheManager, copier: _Copier, buffer_bytes: int) -> None:
        self._manager = manager
        self._copier = copier
        self._size = buffer_bytes
        self.caches = {name: manager.create_kv_cache() for name in range(1, 5)}

    def turn(self, name: int, num_new_blocks: int) -> None:
        """Resume it, check every page, add blocks, and suspend it."""
        kv_cache, stream = self.caches[name], self._copier.stream
        _until(self._manager, lambda: kv_cache.resume(stream))
        kv_cache.synchronize()
        assert kv_cache.missing_blocks() == []
        old = kv_cache.num_blocks
        found = self._copier.read(_slots(kv_cache, 0, old))
        for block, page in enumerate(found):
            expected = _content(name, block, self._size)
            assert np.array_equal(page, expected), f"sequence {name}, block {block}"
        if num_new_blocks:
            start = kv_cache.history_length
            _extend(self._manager, kv_cache, num_new_blocks * _PER_BLOCK)
            new = range(old, old + num_new_blocks)
            pages = [_content(name, block, self._size) for block in new]
            self._copier.write(_slots(kv_cache, new.start, new.stop), pages)
            kv_cache.commit(_tokens(name, start, start + num_new_blocks * _PER_BLOCK))
        kv_cache.suspend()

    def run(self) -> None:
        """A few rounds, in one order and the other."""
        for name in self.caches:
            self.turn(name, 4)
        for new_blocks in (1, 0, 2):
            for name in reversed(self.caches):
                self.turn(name, new_blocks)
        for name in self.caches:
            self.turn(name, 0)


def _tiers(names: Sequence[str], buffer_bytes: int, path: Path) -> Iterator[CacheTierConfig]:
    """With room for all in the last, and for a part in the others."""
    page = _page_bytes(buffer_bytes)
    for name in names:
        if name == "disk":
            yield DiskTierConfig(str(path), 64 * (page + 8192))
        else:
            quota = (40 if name == names[-1] else 9) * page
            yield HostTierConfig(quota) if name == "host" else DeviceTierConfig(quota)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cold", _COLD, ids="-".join)
@pytest.mark.parametrize("buffer_bytes", [1024, 4099, 33_000])
def test_sessions_take_turns(
    tmp_path: Path, path: str, cold: tuple[str, ...], buffer_bytes: int
) -> None:
    from coldpage.device.cuda import CudaDevice

    device = CudaDevice(max_page_kernel_bytes=PATHS[path])
    config = _config(tuple(_tiers(cold, buffer_bytes, tmp_path)), buffer_bytes)
    with KVCacheManager(config, device=device) as manager:
        copier = _Copier(manager, device, buffer_bytes)
        story = _Story(manager, copier, buffer_bytes)
        story.run()
        moved = manager.stats().moved_pages
        for tier in cold:
            for end in (f"-{tier}", f"{tier}-"):
                assert any(end in name and count for name, count in moved.items()), moved
        for kv_cache in story.caches.values():
            kv_cache.close()
        manager.check_integrity()
        copier.close()
    device.close()


def test_levels_grow_and_shrink_in_place(tmp_path: Path) -> None:
    """Both in memory, at addresses that stay, past the blocks that device memory is made of."""
    from coldpage.device.cuda import CudaDevice

    device, buffer_bytes = CudaDevice(), 300_000
    tiers = tuple(_tiers(("host", "disk"), buffer_bytes, tmp_path))
    page = _page_bytes(buffer_bytes)
    with KVCacheManager(_config(tiers, buffer_bytes), device=device) as manager:
        copier = _Copier(manager, device, buffer_bytes)
        story = _Story(manager, copier, buffer_bytes)
        address = manager.hot_array(LayerId(0), _ROLES[0])
        assert isinstance(address, DeviceBytes)
        story.run()
        for level, num_pages in ((0, 30), (1, 40), (0, 8), (1, 3), (0, 12), (1, 20)):
            manager.resize(CacheLevel(level), num_pages * page)
            now = manager.hot_array(LayerId(0), _ROLES[0])
            assert isinstance(now, DeviceBytes)
            assert now.address == address.address
            for name in story.caches:
                story.turn(name, 0)
            manager.check_integrity()
        copier.close()
    device.close()


def test_a_session_is_found_on_disk_by_the_next_manager(tmp_path: Path) -> None:
    from coldpage.device.cuda import CudaDevice

    buffer_bytes = 4096
    tiers = tuple(_tiers(("host", "disk"), buffer_bytes, tmp_path))
    tokens = _tokens(1, 0, 5 * _PER_BLOCK)
    for is_first in (True, False):
        device: Device = CudaDevice()
        with KVCacheManager(_config(tiers, buffer_bytes), device=device) as manager:
            copier = _Copier(manager, device, buffer_bytes)
            story = _Story(manager, copier, buffer_bytes)
            if not is_first:
                story.caches[1] = manager.create_kv_cache(tokens)
                assert story.caches[1].num_committed_tokens == len(tokens)
            story.turn(1, 5 if is_first else 1)
            for kv_cache in story.caches.values():
                kv_cache.close()
            assert manager.flush(_DEADLINE_S) == 0
            copier.close()
        device.close()


@pytest.mark.parametrize("buffer_bytes", [2048, 256 * 1024])
def test_torch_works_on_the_pages(buffer_bytes: int) -> None:
    """On a stream of torch's, with tensors of the hot level's own memory; the host waits for
    nothing between writing and suspending.
    """
    import torch

    from coldpage.device.cuda import CudaDevice

    device = CudaDevice()
    tiers = tuple(_tiers(("host",), buffer_bytes, Path()))
    with KVCacheManager(_config(tiers, buffer_bytes), device=device) as manager:
        torch_stream = torch.cuda.Stream()
        stream: Stream = device.wrap_stream(torch_stream.cuda_stream, "torch")
        tensors = [
            torch.as_tensor(manager.hot_array(LayerId(layer), role), device="cuda")
            for layer in range(_NUM_LAYERS)
            for role in _ROLES
        ]
        first = manager.hot_array(LayerId(0), _ROLES[0])
        assert tensors[0].data_ptr() == first.address, "no copy"
        caches = [manager.create_kv_cache() for _ in range(4)]
        marks: list[list[int]] = []
        with torch.cuda.stream(torch_stream):
            for name, kv_cache in enumerate(caches):
                _until(manager, lambda cache=kv_cache: cache.resume(stream))
                _extend(manager, kv_cache, 6 * _PER_BLOCK)
                slots = torch.tensor(_slots(kv_cache, 0, 6), device="cuda")
                for number, tensor in enumerate(tensors):
                    torch.cuda._sleep(1_000_000)
                    tensor[slots] = (slots % 7 + 8 * number + 50 * name).to(torch.uint8)[:, None]
                kv_cache.commit(_tokens(name, 0, 6 * _PER_BLOCK))
                marks.append([slot % 7 for slot in _slots(kv_cache, 0, 6)])
                kv_cache.suspend()
            for name, kv_cache in enumerate(caches):
                _until(manager, lambda cache=kv_cache: cache.resume(stream))
                kv_cache.synchronize()
                slots = torch.tensor(_slots(kv_cache, 0, 6), device="cuda")
                for number, tensor in enumerate(tensors):
                    values = [mark + 8 * number + 50 * name for mark in marks[name]]
                    expected = torch.tensor(values, device="cuda")[:, None]
                    assert bool((tensor[slots] == expected).all()), (name, number)
                kv_cache.close()
        assert manager.stats().moved_pages["host-hot"] > 0
    device.close()
