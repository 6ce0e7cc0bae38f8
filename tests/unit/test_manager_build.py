"""Building a manager: what it takes, and that a failure at any point gives everything back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coldpage.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheTierConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
)
from coldpage.device.base import MemoryKind
from coldpage.device.host import HostDevice, HostMemory
from coldpage.errors import (
    ClosedError,
    ColdpageError,
    ConfigurationError,
    DeviceError,
    StorageError,
    WrongThreadError,
)
from coldpage.manager import KVCacheManager
from coldpage.testing.example_codecs import CoarseCodec
from coldpage.types import BufferRole, LayerId

_SOURCES = Path(__file__).resolve().parents[2] / "src"
_MIB = 1 << 20


def _layer(layer_id: int, num_bytes: int, window: int | None) -> AttentionLayerConfig:
    buffers = tuple(BufferConfig(BufferRole(role), num_bytes) for role in ("key", "value"))
    return AttentionLayerConfig(LayerId(layer_id), buffers, window)


# Two life cycles with pool groups of their own, so two files a disk tier.
_LAYERS = (_layer(0, 4096, None), _layer(1, 2048, 9000))


def _config(
    *cold: CacheTierConfig,
    hot_bytes: int = _MIB,
    layers: tuple[AttentionLayerConfig, ...] = _LAYERS,
    **settings: Any,
) -> KVCacheManagerConfig:
    settings.setdefault("model_fingerprint", b"model")
    return KVCacheManagerConfig(16, (DeviceTierConfig(hot_bytes), *cold), layers, **settings)


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the directory that was just listed
    return sorted(found)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Whatever a test does, its managers give back every thread and file."""
    threads, files = set(threading.enumerate()), _open_files()
    yield
    assert set(threading.enumerate()) == threads
    assert _open_files() == files


def _instance(path: Path) -> Path:
    """The directory of the one instance below a tier's path."""
    (directory,) = (path / "paged").iterdir()
    return directory


def _is_free(directory: Path) -> bool:
    """Whether another manager can have the directory."""
    KVCacheManager(_config(DiskTierConfig(str(directory), _MIB))).close()
    return True


# ---------------------------------------------------------------------- success


def test_a_manager_takes_what_it_needs_and_gives_it_back(tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), _open_files()
    path = tmp_path / "new" / "tier"
    manager = KVCacheManager(_config(HostTierConfig(_MIB), DiskTierConfig(str(path), _MIB)))
    assert len(set(threading.enumerate()) - threads) == 2, "an offload and an onboard stream"
    opened = [f for f in _open_files() if f not in files]
    names = ["instance.lock", "pool-0.slots", "pool-1.slots"]
    directory = _instance(path)
    assert opened == [str(directory / name) for name in names]
    assert sorted(os.listdir(directory)) == sorted([*names, "identity.json"])
    for private in (path, path / "paged", directory):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    for name in os.listdir(directory):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    assert json.loads((directory / "instance.lock").read_text())["pid"] == os.getpid()
    assert sum(f.stat().st_size for f in directory.iterdir() if f.suffix == ".slots") <= _MIB
    manager.close()
    manager.close()
    with pytest.raises(ClosedError, match="the manager is closed"):
        manager.poll()
    assert stat.S_IMODE((directory / "index.bin").stat().st_mode) == 0o600
    assert _is_free(path)


def test_managers_may_follow_each_other_in_a_directory_at_any_size(tmp_path: Path) -> None:
    for quota in (_MIB, 3 * _MIB, _MIB // 2):
        tier = DiskTierConfig(str(tmp_path), quota)
        with KVCacheManager(_config(tier)) as manager:
            level = manager.stats().levels[1]
            assert quota - 30_000 < level.total_bytes <= quota
        taken = sum(f.stat().st_size for f in _instance(tmp_path).glob("*.slots"))
        assert taken > quota - 30_000
        assert taken <= quota


def test_two_disk_tiers_have_a_directory_each(tmp_path: Path) -> None:
    tiers = [DiskTierConfig(str(tmp_path / name), _MIB) for name in "ab"]
    with KVCacheManager(_config(*tiers)) as manager:
        assert [level.name for level in manager.stats().levels] == ["hot", "disk", "disk2"]


def test_the_smallest_hot_level_holds_one_block_and_can_lock_it() -> None:
    """Two life cycles share a pool group of two slots: 97 % of that is one."""
    layers = (_layer(0, 100, None), _layer(1, 100, 9000))
    with KVCacheManager(_config(hot_bytes=400, layers=layers)) as manager:
        assert manager.stats().levels[0].total_slots == 2
        assert manager.max_sequence_tokens == 16
        cache = manager.create_kv_cache()
        assert cache.resume()
        assert cache.resize(16)
        cache.suspend()
        assert cache.resume()
        cache.close()


@pytest.mark.parametrize(
    "cold", [(), (HostTierConfig(_MIB), HostTierConfig(_MIB, CoarseCodec()))], ids=["", "scratch"]
)
def test_hot_pool_groups_say_where_hot_arrays_are(cold: tuple[CacheTierConfig, ...]) -> None:
    """Also for codecs of two formats, whose scratch slots come first and are part of the pools."""
    layers = (_layer(0, 100, None), _layer(1, 100, 9000), _layer(2, 60, None), _layer(3, 8, 7))
    with KVCacheManager(_config(*cold, layers=layers)) as manager:
        groups = manager.hot_pool_groups()
        assert [g.pool_group_index for g in groups] == list(range(len(groups)))
        seen = set()
        for group, stats in zip(groups, manager.stats().levels[0].pool_groups, strict=True):
            assert tuple(lc.life_cycle_id for lc in group.life_cycles) == stats.life_cycles
            assert group.num_slots == stats.total_slots + (4 if cold else 0)
            for buffer in (b for lc in group.life_cycles for b in lc.buffers):
                array = manager.hot_array(buffer.buffer_id.layer_id, buffer.buffer_id.role)
                pool = group.pools[buffer.pool_index]
                assert array.ctypes.data == pool.base_address + buffer.offset_bytes
                assert array.shape == (group.num_slots, buffer.num_bytes)
                assert array.strides == (pool.slot_bytes, 1)
                seen.add(buffer.buffer_id)
        assert len(seen) == 8
        del array
    with pytest.raises(ClosedError):
        manager.hot_pool_groups()


# ---------------------------------------------------------------------- failure

_Make = Callable[[Path], KVCacheManagerConfig]


def _below_a_file(path: Path) -> KVCacheManagerConfig:
    (path / "file").write_text("mine")
    return _config(DiskTierConfig(str(path / "file" / "tier"), _MIB))


def _a_file(path: Path) -> KVCacheManagerConfig:
    (path / "file").write_text("mine")
    return _config(DiskTierConfig(str(path / "file"), _MIB))


def _in_instance(path: Path) -> tuple[Path, KVCacheManagerConfig]:
    directory = path / "paged" / "instance-mine"
    directory.mkdir(parents=True)
    return directory, _config(DiskTierConfig(str(path), _MIB, instance_id="mine"))


def _a_directory_for_a_lock(path: Path) -> KVCacheManagerConfig:
    directory, config = _in_instance(path)
    (directory / "instance.lock").mkdir()
    return config


def _a_link_for_a_pool(path: Path) -> KVCacheManagerConfig:
    directory, config = _in_instance(path)
    (directory / "pool-1.slots").symlink_to(path / "elsewhere")
    return config


_ADVICE = "change its owner or mode, or choose another path"

# How to fail, with what, and the sentence.
_FAILURES: dict[str, tuple[_Make, type[ColdpageError], str]] = {
    "hot too small": (
        lambda path: _config(hot_bytes=12_287),
        ConfigurationError,
        "the hot tier of 12,287 bytes can not hold the pages it must (1 of 8,192 bytes, "
        "1 of 4,096 bytes): give it at least 12,288 bytes",
    ),
    "host too small": (
        lambda path: _config(HostTierConfig(12_287)),
        ConfigurationError,
        "the host tier of 12,287 bytes can not hold the pages it must (1 of 8,192 bytes, "
        "1 of 4,096 bytes): give it at least 12,288 bytes",
    ),
    "disk too small": (
        lambda path: _config(HostTierConfig(_MIB), DiskTierConfig(str(path), 20_479)),
        ConfigurationError,
        "the disk tier of 20,479 bytes can not hold the pages it must (1 of 12,288 bytes, "
        "1 of 8,192 bytes): give it at least 20,480 bytes",
    ),
    "a second host tier too small": (
        lambda path: _config(HostTierConfig(_MIB), HostTierConfig(1)),
        ConfigurationError,
        "the host2 tier of 1 bytes can not hold the pages it must (1 of 8,192 bytes, "
        "1 of 4,096 bytes): give it at least 12,288 bytes",
    ),
    "hot too small beside scratch slots": (
        lambda path: _config(
            HostTierConfig(_MIB, CoarseCodec()), HostTierConfig(_MIB), hot_bytes=61_439
        ),
        ConfigurationError,
        "the hot tier (less 49,152 bytes for changing between codecs) of 12,287 bytes can not hold "
        "the pages it must (1 of 8,192 bytes, 1 of 4,096 bytes): give it at least 12,288 bytes",
    ),
    "hot too small for a constraint": (
        lambda path: _config(
            hot_bytes=40_959,
            constraints=(BatchDesc((KVCacheDesc(50, 0),)),),
            max_util_for_resume=1.0,
        ),
        ConfigurationError,
        "the hot tier of 40,959 bytes can not hold the pages it must (4 of 8,192 bytes, "
        "4 of 4,096 bytes): give it at least 49,152 bytes",
    ),
    "a ratio for other layers": (
        lambda path: _config(initial_pool_ratio=(1.0,)),
        ConfigurationError,
        "initial_pool_ratio has 1 shares for 2 layer groups (0: layer 0 with no window; "
        "1: layer 1 with a window of 9000 tokens): give one share for each, in this order",
    ),
    "more memory than there is": (
        lambda path: _config(hot_bytes=1 << 60),
        DeviceError,
        "the host has no {why} bytes to give ({why}): make the tiers smaller",
    ),
    "more host memory than there is": (
        lambda path: _config(HostTierConfig(1 << 60)),
        DeviceError,
        "the host has no {why} bytes to give ({why}): make the tiers smaller",
    ),
    "below a file": (
        _below_a_file,
        StorageError,
        "{path}/file is a file, and a directory is needed there: choose another path, or move the "
        "file away",
    ),
    "a file": (
        _a_file,
        StorageError,
        "{path}/file is a file, and a directory is needed there: choose another path, or move the "
        "file away",
    ),
    "an id that leaves the path": (
        lambda path: _config(DiskTierConfig(str(path), _MIB, instance_id="../other")),
        ConfigurationError,
        "'../other' can not be an instance id: use 1 to 64 of the characters A-Z a-z 0-9 . _ -",
    ),
    "where nobody can write": (
        lambda path: _config(DiskTierConfig("/proc/coldpage", _MIB)),
        StorageError,
        f"/proc/coldpage/paged/instance-{{why}} can not be opened ({{why}}): {_ADVICE}",
    ),
    "a directory for a lock": (
        _a_directory_for_a_lock,
        StorageError,
        f"{{path}}/paged/instance-mine can not be opened ({{why}}): {_ADVICE}",
    ),
    "a link for a pool": (
        _a_link_for_a_pool,
        StorageError,
        "{path}/paged/instance-mine/pool-1.slots is a symbolic link: "
        "remove it or choose another path",
    ),
    "more disk than there is": (
        lambda path: _config(DiskTierConfig(str(path), 1 << 50)),
        StorageError,
        "{path}/paged/instance-{why} has no room for {why} bytes ({why}): free some space, "
        "make the disk tier smaller, or choose another path",
    ),
    "a good tier before a bad one": (
        lambda path: _config(
            DiskTierConfig(str(path / "good"), _MIB), DiskTierConfig("/proc/coldpage", _MIB)
        ),
        StorageError,
        f"/proc/coldpage/paged/instance-{{why}} can not be opened ({{why}}): {_ADVICE}",
    ),
}


@pytest.mark.parametrize(("make", "kind", "sentence"), _FAILURES.values(), ids=_FAILURES.keys())
def test_what_can_not_be_built_is_refused_in_one_sentence(
    make: _Make, kind: type[ColdpageError], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(kind) as raised:
        KVCacheManager(make(tmp_path))
    assert type(raised.value) is kind
    text = str(raised.value)
    assert "\n" not in text
    # What the operating system says differs between systems.
    pieces = sentence.replace("{path}", str(tmp_path)).split("{why}")
    position = 0
    for piece in pieces:
        assert text.find(piece, position) >= 0, (text, piece)
        position = text.find(piece, position) + len(piece)
    assert text.startswith(pieces[0])
    assert text.endswith(pieces[-1])


def test_a_failure_frees_directories_and_leaves_other_files_alone(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    bad.write_text("mine")
    tiers = [DiskTierConfig(str(path), _MIB) for path in (good, bad)]
    with pytest.raises(StorageError):
        KVCacheManager(_config(*tiers))
    assert bad.read_text() == "mine"
    assert _is_free(good)


def test_a_failure_removes_the_pools_that_it_made_and_no_others(tmp_path: Path) -> None:
    """Space that a failed start holds on to may be what the next one lacks."""
    config = _a_link_for_a_pool(tmp_path)
    directory = _instance(tmp_path)
    for is_there in (False, True):
        if is_there:
            (directory / "pool-0.slots").touch()
        with pytest.raises(StorageError, match="is a symbolic link"):
            KVCacheManager(config)
        assert (directory / "pool-0.slots").exists() == is_there
    (directory / "pool-1.slots").unlink()
    KVCacheManager(config).close()


def test_too_large_a_disk_tier_leaves_no_huge_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        KVCacheManager(_config(DiskTierConfig(str(tmp_path), 1 << 50)))
    assert sorted(os.listdir(_instance(tmp_path))) == ["identity.json", "instance.lock"]
    assert _is_free(tmp_path)


class _Scarce(HostDevice):
    """A device with so many allocations and no more."""

    def __init__(self, num_allocations: int) -> None:
        super().__init__()
        self.num_left = num_allocations

    def allocate(
        self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
    ) -> HostMemory:
        if not self.num_left:
            raise DeviceError("the device is full: make the tiers smaller")
        self.num_left -= 1
        return super().allocate(num_bytes, kind, is_growable=is_growable)


@pytest.fixture
def lent() -> Iterator[Callable[[int], _Scarce]]:
    """Makes devices that are closed after the test, as their owner would."""
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(contextlib.closing(_Scarce(count)))


def _is_freed(memory: HostMemory) -> bool:
    try:
        return memory.array is None
    except ClosedError:
        return True


@pytest.mark.parametrize("num_allocations", range(6))
def test_whichever_allocation_fails_the_others_are_freed(
    num_allocations: int, tmp_path: Path, lent: Callable[[int], _Scarce]
) -> None:
    """Two hot pools, two host pools, the staging ring: only five allocations are enough."""
    threads, files = set(threading.enumerate()), _open_files()
    device = lent(num_allocations)
    config = _config(HostTierConfig(_MIB), DiskTierConfig(str(tmp_path), _MIB))
    if num_allocations == 5:
        KVCacheManager(config, device=device).close()
    else:
        with pytest.raises(DeviceError, match="the device is full"):
            KVCacheManager(config, device=device)
        assert set(threading.enumerate()) == threads, "a lent device has no new threads either"
    assert len(device._memories) == num_allocations
    assert all(map(_is_freed, device._memories))
    assert _open_files() == files
    assert _is_free(tmp_path)
    # The device is the caller's: it still works.
    device.num_left = 1
    assert device.allocate(1, MemoryKind.DEVICE).num_bytes == 1


# ---------------------------------------------------------------------- one owner


_HOLDER = """
import sys
from coldpage.config import *
from coldpage.manager import KVCacheManager
layer = AttentionLayerConfig(0, (BufferConfig("key", 64),))
tiers = (DeviceTierConfig(1 << 16), DiskTierConfig(sys.argv[1], 1 << 16, instance_id="mine"))
config = KVCacheManagerConfig(16, tiers, (layer,), model_fingerprint=b"model")
manager = KVCacheManager(config)
print("ready", flush=True)
sys.stdin.read()
"""


def _refusal(directory: Path) -> str:
    with pytest.raises(StorageError) as raised:
        KVCacheManager(_config(DiskTierConfig(str(directory), _MIB, instance_id="mine")))
    return str(raised.value)


def test_a_directory_has_one_process_and_the_second_learns_which(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(_SOURCES)},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        directory = _instance(tmp_path)
        size = (directory / "pool-0.slots").stat().st_size
        for _ in range(2):
            started = json.loads((directory / "instance.lock").read_text())["started"]
            refusal = _refusal(tmp_path)
            assert refusal.startswith(f"{directory} is in use by process {holder.pid} (-c ")
            assert refusal.endswith(
                f"), which started at {started}: stop that process, or choose another instance id"
            )
        assert (directory / "pool-0.slots").stat().st_size == size, "its files are untouched"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert _is_free(tmp_path), "a lock does not outlive its process"


def test_a_directory_has_one_manager_in_a_process(tmp_path: Path) -> None:
    with KVCacheManager(_config(DiskTierConfig(str(tmp_path), _MIB, instance_id="mine"))):
        assert f"in use by process {os.getpid()}" in _refusal(tmp_path)
    assert _is_free(tmp_path)


def test_another_thread_is_refused() -> None:
    with KVCacheManager(_config()) as manager:
        errors: list[Exception] = []

        def touch() -> None:
            for call in (manager.poll, manager.stats, manager.create_kv_cache, manager.close):
                try:
                    call()
                except WrongThreadError as error:
                    errors.append(error)

        thread = threading.Thread(target=touch)
        thread.start()
        thread.join()
        assert len(errors) == 4
        assert {str(e) for e in errors} == {
            "a KVCacheManager belongs to the thread that made it; "
            "hand work to that thread instead of calling it from another"
        }
        manager.poll()
