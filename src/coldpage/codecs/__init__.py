"""Cold-page codecs: the interface, and the lossless default."""

from coldpage.codecs.base import (
    BufferDesc,
    ColdPageCodec,
    LifeCycleDesc,
    PoolDesc,
    PoolGroupDesc,
)
from coldpage.codecs.concat import create_default_cold_page_codec
from coldpage.codecs.configured import ConfiguredCodec, take_codec

__all__ = [
    "BufferDesc",
    "ColdPageCodec",
    "ConfiguredCodec",
    "LifeCycleDesc",
    "PoolDesc",
    "PoolGroupDesc",
    "create_default_cold_page_codec",
    "take_codec",
]
