"""Cold-page codecs: the interface, the lossless default, and what a manager keeps of one."""

from coldpage.codecs.base import (
    BlockOrdinals,
    BufferDesc,
    ColdPageCodec,
    LifeCycleDesc,
    PageIndexPairs,
    PageIndices,
    PoolDesc,
    PoolGroupDesc,
)
from coldpage.codecs.concat import create_default_cold_page_codec
from coldpage.codecs.configured import ConfiguredCodec, codec_identity, take_codec

__all__ = [
    "BlockOrdinals",
    "BufferDesc",
    "ColdPageCodec",
    "ConfiguredCodec",
    "LifeCycleDesc",
    "PageIndexPairs",
    "PageIndices",
    "PoolDesc",
    "PoolGroupDesc",
    "codec_identity",
    "create_default_cold_page_codec",
    "take_codec",
]
