"""coldpage: a tiered KV cache for LLM inference, in GPU memory, host memory and on SSD."""

from coldpage.codecs import ColdPageCodec, create_default_cold_page_codec
from coldpage.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    ReuseScope,
)
from coldpage.errors import (
    ClosedError,
    CodecConsumedError,
    CodecError,
    ColdpageError,
    ConfigurationError,
    DeviceError,
    ModelError,
    OutOfPagesError,
    SnapshotError,
    StorageError,
    SubmissionError,
    UsageError,
    WrongThreadError,
)
from coldpage.manager import CacheObserver, KVCacheManager
from coldpage.sequence import KVCache, OnMissing
from coldpage.types import PAGE_INDEX_PAIR, DeviceArray, HalfOpenRange, PageClass, PageIndexLocation

__all__ = [
    "PAGE_INDEX_PAIR",
    "AttentionLayerConfig",
    "BatchDesc",
    "BufferConfig",
    "CacheObserver",
    "ClosedError",
    "CodecConsumedError",
    "CodecError",
    "ColdPageCodec",
    "ColdpageError",
    "ConfigurationError",
    "DeviceArray",
    "DeviceError",
    "DeviceTierConfig",
    "DiskTierConfig",
    "HalfOpenRange",
    "HostTierConfig",
    "KVCache",
    "KVCacheDesc",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "ModelError",
    "OnMissing",
    "OutOfPagesError",
    "PageClass",
    "PageIndexLocation",
    "ReuseScope",
    "SnapshotError",
    "StorageError",
    "SubmissionError",
    "UsageError",
    "WrongThreadError",
    "create_default_cold_page_codec",
]
