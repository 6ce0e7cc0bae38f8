"""Cold-page codecs: the interface, the lossless default and those that pack keys and values, by
name, and what a manager keeps of one.
"""

from coldpage.codecs.base import (
    BlockOrdinals,
    BufferDesc,
    CodecErrors,
    ColdPageCodec,
    LifeCycleDesc,
    PageIndexPairs,
    PageIndices,
    PoolDesc,
    PoolGroupDesc,
)
from coldpage.codecs.concat import create_default_cold_page_codec
from coldpage.codecs.configured import (
    ConfiguredCodec,
    close_codec,
    codec_identity,
    configure_taken,
    statistics_names,
    take_codec,
)
from coldpage.codecs.describing import describe_life_cycles
from coldpage.codecs.model_pages import LayerVectors, ModelPages
from coldpage.codecs.packed import PackedCodec
from coldpage.codecs.registry import codec_names, create_codec, uses_calibration
from coldpage.kernels.cold.formats import KVShape, NumberType

__all__ = [
    "BlockOrdinals",
    "BufferDesc",
    "CodecErrors",
    "ColdPageCodec",
    "ConfiguredCodec",
    "KVShape",
    "LayerVectors",
    "LifeCycleDesc",
    "ModelPages",
    "NumberType",
    "PackedCodec",
    "PageIndexPairs",
    "PageIndices",
    "PoolDesc",
    "PoolGroupDesc",
    "close_codec",
    "codec_identity",
    "codec_names",
    "configure_taken",
    "create_codec",
    "create_default_cold_page_codec",
    "describe_life_cycles",
    "statistics_names",
    "take_codec",
    "uses_calibration",
]
