"""Codecs for the cold tiers of a model: from names to objects that know its keys and values."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from coldpage.codecs import (
    ColdPageCodec,
    KVShape,
    LayerVectors,
    ModelPages,
    NumberType,
    PackedCodec,
    PoolDesc,
    PoolGroupDesc,
    close_codec,
    configure_taken,
    create_codec,
    describe_life_cycles,
    uses_calibration,
)
from coldpage.codecs.packed import LOSSLESS, PACKED_FORMATS
from coldpage.config import AttentionLayerConfig
from coldpage.engine.model.calibration import Calibration, stored_or_made
from coldpage.engine.model.geometry import LayerGeometry
from coldpage.engine.model.model import LoadedModel, manager_layers
from coldpage.errors import ConfigurationError
from coldpage.kernels.kv_types import KVType
from coldpage.layout import HotLayout, hot_layout
from coldpage.types import LayerId, MemAddress, PageClass, PoolGroupIndex, PoolIndex

__all__ = ["ColdCodecs", "make_cold_codecs", "model_pages"]

_T = TypeVar("_T")

_NUMBER_TYPES: Final = {number_type.value: number_type for number_type in NumberType}


def model_pages(
    model: LoadedModel, tokens_per_block: int, calibration: Calibration | None = None
) -> ModelPages:
    """What the model's hot pages hold. Without a calibration, neither frequencies nor means. Pure.

    Keys or values of a hot type that packs them have no shape.
    """
    types = model.hot_types
    return {
        LayerId(index): LayerVectors(
            _shape(types.key, layer, tokens_per_block),
            _shape(types.value, layer, tokens_per_block),
            None if calibration is None else calibration.frequencies[index],
            None if calibration is None else calibration.key_means[index],
        )
        for index, layer in enumerate(model.layers)
    }


def _shape(kv_type: KVType, layer: LayerGeometry, tokens_per_block: int) -> KVShape | None:
    number_type = _NUMBER_TYPES.get(kv_type.name)
    if number_type is None:
        return None
    return KVShape(layer.num_kv_heads, tokens_per_block, layer.head_dim, number_type)


@dataclass(frozen=True, slots=True, eq=False)
class ColdCodecs:
    """A codec for each cold tier of one manager. None: the manager's own, which loses nothing.

    ``calibration`` is None where no codec has use for it.
    """

    host: ColdPageCodec | None
    disk: ColdPageCodec | None
    calibration: Calibration | None
    specs: tuple[str, str]
    pages: ModelPages
    layers: tuple[AttentionLayerConfig, ...]

    @classmethod
    def make(
        cls,
        specs: tuple[str, str],
        calibration: Calibration | None,
        pages: ModelPages,
        layers: tuple[AttentionLayerConfig, ...],
    ) -> ColdCodecs:
        """``specs`` of the host and the disk tier. Tiers of one codec share the object."""
        packing = dict.fromkeys(spec for spec in specs if _is_packing(spec))
        made = {spec: create_codec(spec, pages) for spec in packing}
        host, disk = (made.get(spec) for spec in specs)
        return cls(host, disk, calibration, specs, pages, layers)

    def again(self) -> ColdCodecs:
        """Equal ones, for another manager."""
        return ColdCodecs.make(self.specs, self.calibration, self.pages, self.layers)

    @property
    def is_lossy(self) -> bool:
        """Whether restored pages may differ from what was computed."""
        return any(not codec.is_lossless for codec in self.distinct)

    @property
    def are_compiled(self) -> bool:
        """Whether some pack by loops that a CPU compiles: those of this package do."""
        return any(isinstance(codec, PackedCodec) for codec in self.distinct)

    @property
    def distinct(self) -> tuple[ColdPageCodec, ...]:
        """Each object once."""
        return tuple({id(c): c for c in (self.host, self.disk) if c is not None}.values())

    def fractions(self) -> tuple[float, float]:
        """How large cold pages, but for those of first blocks, are beside hot ones: of the host and
        of the disk tier."""
        layout = hot_layout(self.layers, separate_sinks=True)
        return self._of_tiers(lambda codec: _fraction(codec, layout), 1.0)

    def keep_recent(self) -> tuple[bool, bool]:
        """Whether pages of recent blocks take as much room as hot ones, of the host and of the disk
        tier: a codec may pack them like all others.
        """
        layout = hot_layout(self.layers, separate_sinks=True, num_recent_blocks=1)
        return self._of_tiers(lambda codec: _keeps_recent(codec, layout), True)

    def _of_tiers(self, find: Callable[[ColdPageCodec], _T], of_none: _T) -> tuple[_T, _T]:
        """What ``find``, which uses a codec up, finds of the host's and of the disk's."""
        fresh = self.again()
        found = {id(codec): find(codec) for codec in fresh.distinct}
        return found.get(id(fresh.host), of_none), found.get(id(fresh.disk), of_none)

    def describe(
        self, *, has_host: bool = True, has_disk: bool = True, num_recent_blocks: int = 0
    ) -> str:
        """How the cold tiers that there are hold pages, for people; empty where nothing is
        packed."""
        if not self.distinct:
            return ""
        are_there = (has_host, has_disk)
        tiers = zip(("host", "disk"), self.specs, self.fractions(), are_there, strict=True)
        parts = [
            f"{tier} {spec} ({fraction:.3f} of a hot page)"
            for tier, spec, fraction, is_there in tiers
            if is_there
        ]
        if num_recent_blocks and self.is_lossy:
            parts.append(self._describe_recent(num_recent_blocks, are_there))
        known = self.calibration
        if known is not None:
            parts.append(f"keys less their means over {known.num_tokens:,} tokens ({known.name})")
        return ", ".join(parts)

    def _describe_recent(self, num_blocks: int, are_there: tuple[bool, bool]) -> str:
        tiers = zip(("host", "disk"), self.keep_recent(), are_there, strict=True)
        packed = [tier for tier, is_kept, is_there in tiers if is_there and not is_kept]
        what = f"the newest {num_blocks} full blocks and the last one"
        return f"{what} packed too ({' and '.join(packed)})" if packed else f"{what} whole"


def _keeps_recent(codec: ColdPageCodec, layout: HotLayout) -> bool:
    """``codec`` is used up."""
    cold_page_bytes = _cold_page_bytes(codec, layout)
    recent = [lc.life_cycle_id for lc in layout.life_cycles if lc.page_class is PageClass.RECENT]
    return all(cold_page_bytes[number] >= layout.page_bytes(number) for number in recent)


def _fraction(codec: ColdPageCodec, layout: HotLayout) -> float:
    """``codec`` is used up."""
    cold_page_bytes = _cold_page_bytes(codec, layout)
    bodies = [lc.life_cycle_id for lc in layout.life_cycles if lc.page_class is PageClass.BODY]
    cold = sum(cold_page_bytes[life_cycle] for life_cycle in bodies)
    return cold / sum(layout.page_bytes(life_cycle) for life_cycle in bodies)


def _cold_page_bytes(codec: ColdPageCodec, layout: HotLayout) -> tuple[int, ...]:
    """By life cycle. ``codec`` is used up. Raises CodecError where it can not pack the pages."""
    pools = [
        [np.frombuffer(mmap.mmap(-1, size), np.uint8) for size in sizes]
        for sizes in layout.slot_bytes
    ]
    configured = configure_taken(codec, _describe_pools(layout, pools))
    close_codec(configured.codec)
    return configured.cold_page_bytes


def _describe_pools(
    layout: HotLayout, pools: list[list[npt.NDArray[np.uint8]]]
) -> list[PoolGroupDesc]:
    """Pools of one slot each, by pool group: memory that the codec may look at, as at a manager's,
    for as long as it has it.
    """
    return [
        PoolGroupDesc(
            PoolGroupIndex(index),
            1,
            tuple(
                PoolDesc(PoolIndex(pool), MemAddress(memory.ctypes.data), memory.size)
                for pool, memory in enumerate(memories)
            ),
            describe_life_cycles(layout, PoolGroupIndex(index)),
        )
        for index, memories in enumerate(pools)
    ]


def make_cold_codecs(
    model: LoadedModel,
    tokens_per_block: int,
    host: str,
    disk: str | None,
    progress: Callable[[str], None],
) -> ColdCodecs:
    """``host`` and ``disk`` are what ``create_codec`` takes; ``disk`` None is as ``host``, so that
    what moves between the two is copied as it is.

    A codec that takes means out of keys gets the stored calibration; where there is none, one is
    made now, which ``progress`` is told. The model is not switched to paged attention yet. Raises
    ConfigurationError or ModelError.
    """
    specs = (host.strip(), (host if disk is None else disk).strip())
    packing = [spec for spec in dict.fromkeys(specs) if _is_packing(spec)]
    plain_pages = model_pages(model, tokens_per_block)
    layers = tuple(manager_layers(model, tokens_per_block))
    layout = hot_layout(layers, separate_sinks=True)
    for spec in packing:
        _check(spec, plain_pages, layout, model)
    is_calibrated = [uses_calibration(spec) for spec in packing]
    calibration = stored_or_made(model, progress) if any(is_calibrated) else None
    pages = model_pages(model, tokens_per_block, calibration)
    return ColdCodecs.make(specs, calibration, pages, layers)


def _names(spec: str) -> set[str]:
    """The codecs of ``NAME,GROUP=NAME,...``."""
    return {part.rpartition("=")[2].strip() for part in spec.split(",")}


def _is_packing(spec: str) -> bool:
    return _names(spec) != {LOSSLESS}


def _check(spec: str, pages: ModelPages, layout: HotLayout, model: LoadedModel) -> None:
    """Refuses what can not work before anybody waits for a calibration."""
    if spec.partition(",")[0].strip() not in PACKED_FORMATS:
        return  # a codec of another package is made once its calibration is there
    create_codec(spec, pages).close()
    if any(layer.key is None or layer.value is None for layer in pages.values()):
        raise ConfigurationError(
            f"codec {spec} can not pack hot pages with {model.hot_types}, which are packed "
            f"already: use the codec {LOSSLESS}, or other cache types"
        )
    _cold_page_bytes(create_codec(spec, pages), layout)  # refuses layer groups that there are not
