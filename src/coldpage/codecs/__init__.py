"""Cold-page codecs: the interface, and the lossless default."""

from coldpage.codecs.base import (
    BufferDesc,
    ColdPageCodec,
    LifeCycleDesc,
    PoolDesc,
    PoolGroupDesc,
)
from coldpage.codecs.concat import create_default_cold_page_codec

__all__ = [
    "BufferDesc",
    "ColdPageCodec",
    "LifeCycleDesc",
    "PoolDesc",
    "PoolGroupDesc",
    "create_default_cold_page_codec",
]
