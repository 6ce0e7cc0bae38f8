"""coldpage: a tiered KV cache for LLM inference, in GPU memory, host memory and on SSD."""

from coldpage.codecs import ColdPageCodec, create_default_cold_page_codec
from coldpage.config import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
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
    StorageError,
    SubmissionError,
    UsageError,
    WrongThreadError,
)
from coldpage.manager import KVCacheManager
from coldpage.sequence import KVCache
from coldpage.types import PAGE_INDEX_PAIR, PageIndexLocation

__all__ = [
    "PAGE_INDEX_PAIR",
    "AttentionLayerConfig",
    "BufferConfig",
    "ClosedError",
    "CodecConsumedError",
    "CodecError",
    "ColdPageCodec",
    "ColdpageError",
    "ConfigurationError",
    "DeviceError",
    "DeviceTierConfig",
    "DiskTierConfig",
    "HostTierConfig",
    "KVCache",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "ModelError",
    "OutOfPagesError",
    "PageIndexLocation",
    "ReuseScope",
    "StorageError",
    "SubmissionError",
    "UsageError",
    "WrongThreadError",
    "create_default_cold_page_codec",
]
