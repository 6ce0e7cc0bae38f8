"""A manager with codecs that pack: pages through host memory and disk, and after a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.codecs import LayerVectors, ModelPages, create_codec
from coldpage.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
)
from coldpage.device.simulated import SimulatedDevice
from coldpage.manager import KVCacheManager
from coldpage.types import BufferRole, LayerId
from tests.conformance.packed_models import BLOCK, ERRORS, SMOL, numbers_of, relative_error, stored

_NUM_BLOCKS, _MAX_BLOCKS = 6, 9
_PAGE_BYTES = 4 * SMOL.shape.num_bytes
_ROLES = ("key", "value")
_Floats = npt.NDArray[np.float32]


def _config(
    path: Path, host: str, disk: str, pages: ModelPages, num_recent_blocks: int = 0
) -> KVCacheManagerConfig:
    size = SMOL.shape.num_bytes
    layers = tuple(
        AttentionLayerConfig(layer, tuple(BufferConfig(BufferRole(role), size) for role in _ROLES))
        for layer in pages
    )
    host_codec = create_codec(host, pages)
    disk_codec = host_codec if disk == host else create_codec(disk, pages)
    tiers = (
        DeviceTierConfig((2 * _NUM_BLOCKS + 4) * _PAGE_BYTES),
        HostTierConfig(8 * _PAGE_BYTES, host_codec),
        DiskTierConfig(str(path), 400 * _PAGE_BYTES, disk_codec),
    )
    tokens = _NUM_BLOCKS * BLOCK
    return KVCacheManagerConfig(
        BLOCK,
        tiers,
        layers,
        model_fingerprint=b"model",
        typical_step=BatchDesc((KVCacheDesc(tokens, tokens),)),
        separate_sink_pages=True,
        num_recent_blocks=num_recent_blocks,
    )


class _Scene:
    """A manager, and what its sequences were filled with."""

    def __init__(self, config: KVCacheManagerConfig) -> None:
        self.device = SimulatedDevice(7)
        self.manager = KVCacheManager(config, device=self.device)
        self._group = self.manager.layer_group_of(LayerId(0))

    def buffers(self, slots: npt.NDArray[np.int32]) -> _Floats:
        """The numbers of hot pages, [num_buffers, num_pages, kv_heads, tokens, head_dim]."""
        return np.stack(
            [
                [numbers_of(row.copy(), SMOL.shape) for row in self._array(layer, role)[slots]]
                for layer in SMOL.pages()
                for role in _ROLES
            ]
        )

    def _array(self, layer: LayerId, role: str) -> npt.NDArray[np.uint8]:
        array = self.manager.hot_array(layer, BufferRole(role))
        assert isinstance(array, np.ndarray)
        return array

    def write(self, chat: int, num_blocks: int = _NUM_BLOCKS) -> None:
        """All blocks but those that there are already."""
        cache = self.manager.create_kv_cache(_tokens(chat, num_blocks))
        assert cache.resume() and cache.resize(num_blocks * BLOCK)
        cache.synchronize()
        first = cache.num_committed_tokens // BLOCK
        slots = cache.page_indices(self._group)[first:]
        for index, (layer, role) in enumerate((lr, r) for lr in SMOL.pages() for r in _ROLES):
            raw = stored(_original(chat)[index, first:num_blocks], SMOL.number_type)
            self._array(layer, role)[slots] = raw.reshape(slots.size, -1)
        cache.commit(_tokens(chat, num_blocks)[first * BLOCK :])
        cache.close()
        self.manager.finish_transfers()

    def read(self, chat: int, num_blocks: int = _NUM_BLOCKS) -> _Floats:
        cache = self.manager.create_kv_cache(_tokens(chat, num_blocks))
        assert len(cache.page_indices(self._group)) == num_blocks, "all blocks are found"
        assert cache.resume()
        cache.synchronize()
        found = self.buffers(cache.page_indices(self._group))
        cache.close()
        return found

    def close(self) -> None:
        self.manager.close()
        self.device.close()


def _tokens(chat: int, num_blocks: int = _NUM_BLOCKS) -> range:
    return range(1000 * chat, 1000 * chat + num_blocks * BLOCK)


def _original(chat: int) -> _Floats:
    """Numbers that bf16 holds exactly."""
    rng = np.random.default_rng(chat)
    floats = rng.standard_normal((4, _MAX_BLOCKS, *SMOL.shape[:3]), np.float32)
    return (floats.view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize(
    ("host", "disk"), [("int8", "int8"), ("turbo4", "turbo4"), ("int8", "turbo4")]
)
def test_pages_come_back_as_their_codecs_leave_them(tmp_path: Path, host: str, disk: str) -> None:
    pages: dict[LayerId, LayerVectors] = dict(SMOL.pages())
    limit = sum(max(ERRORS[it] for it in _formats(name)) for name in {host, disk})
    for is_first in (True, False):
        scene = _Scene(_config(tmp_path, host, disk, pages))
        for chat in range(6):
            if is_first:
                scene.write(chat)
        scene.manager.flush(60.0)
        for chat in (0, 3, 1, 2):
            found, wanted = scene.read(chat), _original(chat)[:, :_NUM_BLOCKS]
            assert np.array_equal(found[:, 0], wanted[:, 0]), "first blocks come back whole"
            assert 0 < relative_error(wanted[:, 1:], found[:, 1:]) < limit
        if is_first:
            moved = scene.manager.stats().moved_pages
            assert moved["hot-host"] and moved["disk-hot"]
            counted = {it.codec: it.errors[0].num_samples for it in scene.manager.stats().codecs}
            assert counted.keys() == {host, disk} and counted[host] == 1
        scene.close()


@pytest.mark.parametrize("num_recent", [0, 2])
@pytest.mark.parametrize(("host", "disk"), [("int8", "int8"), ("turbo4", "turbo3")])
def test_recent_blocks_are_bit_for_bit_what_they_were(
    tmp_path: Path, host: str, disk: str, num_recent: int
) -> None:
    """Through host memory, disk and a restart; and when a chat has gone on, only its new end."""
    for num_blocks in (_NUM_BLOCKS, _MAX_BLOCKS):  # two lives of one disk
        scene = _Scene(_config(tmp_path, host, disk, SMOL.pages(), num_recent))
        for chat in range(6):
            scene.write(chat, num_blocks)
        scene.manager.flush(60.0)
        for chat in (0, 3, 1, 2):
            found, wanted = scene.read(chat, num_blocks), _original(chat)[:, :num_blocks]
            is_exact = [
                bool(np.array_equal(found[:, block], wanted[:, block]))
                for block in range(num_blocks)
            ]
            packed = num_blocks - 1 - num_recent
            assert is_exact == [True] + [False] * packed + [True] * num_recent
        moved = scene.manager.stats().moved_pages
        assert moved["hot-host"] and moved["disk-hot"]
        scene.close()


def _formats(name: str) -> set[object]:
    from coldpage.codecs.packed import PACKED_FORMATS

    formats = PACKED_FORMATS[name]
    assert formats is not None
    return {formats.key, formats.value}
