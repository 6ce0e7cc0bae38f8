"""The names that users of the library rely on, pinned: a change here is a breaking change."""

from __future__ import annotations

import subprocess
import sys

import coldpage
from coldpage import errors

PUBLIC_NAMES = {
    "HOT_LEVEL",
    "NO_SLOT",
    "PAGE_INDEX_PAIR",
    "AttentionLayerConfig",
    "BatchDesc",
    "BlockStored",
    "BufferConfig",
    "BufferDesc",
    "ByteRange",
    "CacheLevel",
    "CacheObserver",
    "ColdPageCodec",
    "DeviceArray",
    "DeviceTierConfig",
    "DiskAdmission",
    "DiskTierConfig",
    "DroppedBlocks",
    "HalfOpenRange",
    "HostTierConfig",
    "KVCache",
    "KVCacheDesc",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "KVCacheStatus",
    "KVShape",
    "LayerVectors",
    "LifeCycleDesc",
    "ManagerStats",
    "ModelPages",
    "NumberType",
    "OnMissing",
    "PageClass",
    "PageIndexLocation",
    "PageName",
    "PagesDropped",
    "PagesMoved",
    "PoolDesc",
    "PoolGroupDesc",
    "Priority",
    "ReuseScope",
    "codec_names",
    "create_codec",
    "create_default_cold_page_codec",
}
EXCEPTIONS = {
    "ClosedError",
    "CodecConsumedError",
    "CodecError",
    "ColdpageError",
    "ConfigurationError",
    "DeviceError",
    "ModelError",
    "OutOfPagesError",
    "SnapshotError",
    "StorageError",
    "SubmissionError",
    "UsageError",
    "WrongThreadError",
}


def test_the_package_exports_exactly_these_names() -> None:
    assert set(coldpage.__all__) - {"__version__"} == PUBLIC_NAMES | EXCEPTIONS


def test_every_exported_name_exists() -> None:
    assert [name for name in coldpage.__all__ if not hasattr(coldpage, name)] == []


def test_every_exception_is_exported_and_in_the_tree() -> None:
    assert set(errors.__all__) == EXCEPTIONS
    assert all(issubclass(getattr(coldpage, name), coldpage.ColdpageError) for name in EXCEPTIONS)


def test_importing_the_library_loads_nothing_heavy() -> None:
    code = (
        "import sys, coldpage\n"
        "heavy = {'torch', 'transformers', 'triton', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'import coldpage loads {sorted(heavy)}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
