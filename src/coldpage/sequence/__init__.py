"""One sequence's cache."""

from coldpage.sequence.context import (
    DiskBlob,
    DroppedBlocks,
    KVCacheStatus,
    OnMissing,
    ReusedPrefix,
    SequenceContext,
)
from coldpage.sequence.kv_cache import KVCache

__all__ = [
    "DiskBlob",
    "DroppedBlocks",
    "KVCache",
    "KVCacheStatus",
    "OnMissing",
    "ReusedPrefix",
    "SequenceContext",
]
