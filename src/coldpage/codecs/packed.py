"""Codecs that pack keys and values: each built-in name is a format for keys and one for values.

Buffers of other roles, pages of the classes SINK and RECENT, and layers that nobody describes are
copied as they are. Cold pages are the same on every device, up to the last bit of a rounded number.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coldpage.codecs.base import (
    BlockOrdinals,
    BufferDesc,
    CodecErrors,
    ColdPageCodec,
    LifeCycleDesc,
    PageIndices,
    PoolDesc,
    PoolGroupDesc,
)
from coldpage.codecs.guard import CHECK_INTERVAL_PAGES, CodecGuard
from coldpage.codecs.model_pages import LayerVectors, ModelPages
from coldpage.codecs.packed_calls import (
    Direction,
    PackedCall,
    PageChecks,
    PreparedPages,
    prepare_page,
)
from coldpage.codecs.packed_page import BufferCoding, PackedPage
from coldpage.device.base import Stream
from coldpage.errors import CodecError, ConfigurationError, UsageError
from coldpage.kernels.cold.formats import ALIGNMENT_BYTES, ColdFormat, KVShape
from coldpage.kernels.cold.numbers import NUMBERS_VERSION
from coldpage.types import (
    BufferRole,
    DeviceArray,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    MemAddress,
    PageClass,
    PageIndexLocation,
)

__all__ = ["LOSSLESS", "PACKED_FORMATS", "PackedCodec", "VectorFormats"]

_KEY: Final = BufferRole("key")
_VALUE: Final = BufferRole("value")
LOSSLESS: Final = "concat"
"""The name under which nothing is packed."""


@dataclass(frozen=True, slots=True)
class VectorFormats:
    """How keys and values are packed. Where ``turns_back``, keys lose their position, if the layer
    has frequencies, and their mean, if it is known.
    """

    key: ColdFormat
    value: ColdFormat
    turns_back: bool = False


PACKED_FORMATS: Final[Mapping[str, VectorFormats | None]] = {
    LOSSLESS: None,
    "int8": VectorFormats(ColdFormat.INT8, ColdFormat.INT8),
    "fp8": VectorFormats(ColdFormat.FP8, ColdFormat.FP8),
    "int4": VectorFormats(ColdFormat.INT4_CHANNEL, ColdFormat.INT4_TOKEN, turns_back=True),
    "turbo4": VectorFormats(ColdFormat.TURBO4, ColdFormat.TURBO4, turns_back=True),
    "turbo3": VectorFormats(ColdFormat.TURBO3, ColdFormat.TURBO3, turns_back=True),
    "k8v4": VectorFormats(ColdFormat.INT8, ColdFormat.TURBO4),
    "int4-block": VectorFormats(ColdFormat.INT4_BLOCK, ColdFormat.INT4_BLOCK),
}
"""By name of the codec; None: copied."""


class PackedCodec(ColdPageCodec):
    """Packs keys and values as ``name`` says, and those of some layer groups in another way.

    Raises ConfigurationError where numba, which packs on the host, is not installed, and when the
    vectors of ``pages`` can not be packed so.
    """

    def __init__(
        self,
        name: str,
        pages: ModelPages,
        overrides: Mapping[LayerGroupId, str] | None = None,
        *,
        formats: Mapping[str, VectorFormats | None] = PACKED_FORMATS,
        check_interval_pages: int = CHECK_INTERVAL_PAGES,
    ) -> None:
        """``overrides`` has names by layer group; all names are keys of ``formats``. One page of
        every ``check_interval_pages`` that are encoded is decoded again; of 0, none.
        """
        others = {} if overrides is None else dict(overrides)
        self._formats = formats[name]
        self._overrides = {group: formats[other] for group, other in others.items()}
        different = {group: other for group, other in others.items() if other != name}
        self.codec_id = ",".join(
            [name, *(f"{group}={other}" for group, other in sorted(different.items()))]
        )
        self._model = dict(pages)
        _require_numba(self.codec_id)
        names = (name, *(other for _, other in sorted(different.items())))
        in_use = [it for it in map(formats.get, names) if it is not None]
        self._turns_back = any(it.turns_back for it in in_use)
        if not different and self._formats is not None:
            self._check_model(self._formats)
        self.parameters = self._describe_parameters(in_use)
        self.needs_positions = self._turns_back and any(
            layer.key is not None and layer.frequencies is not None
            for layer in self._model.values()
        )
        self._pages: dict[LifeCycleId, PackedPage] = {}
        self._representative: dict[LifeCycleId, LifeCycleId] = {}
        self._prepared = PreparedPages()
        self._guard = CodecGuard(self.codec_id, check_interval_pages)
        self._layer_group_of: dict[LifeCycleId, LayerGroupId] = {}

    # ------------------------------------------------------------------ the format

    def _describe_parameters(self, in_use: Sequence[VectorFormats]) -> str:
        """What changes the bytes besides the names of the formats."""
        digest = hashlib.sha256()
        for it in in_use:
            digest.update(f"{it.key.value} {it.value.value}\n".encode())
        types: set[str] = set()
        blocks: set[int] = set()
        for layer_id, layer in sorted(self._model.items()):
            for role, shape in ((_KEY, layer.key), (_VALUE, layer.value)):
                if shape is None:
                    continue
                heads, tokens, head_dim, number_type = shape
                types.add(number_type.value)
                blocks.add(tokens)
                line = f"{layer_id} {role} {heads} {tokens} {head_dim} {number_type.value}\n"
                digest.update(line.encode())
            if layer.key is not None and self._turns_back:
                for name, array in (
                    ("frequencies", layer.frequencies),
                    ("means", layer.key_means),
                ):
                    if array is not None:
                        little = array.astype(array.dtype.newbyteorder("<"))
                        digest.update(f"{name}\n".encode() + little.tobytes())
        words = (*sorted(types), *(f"block {tokens}" for tokens in sorted(blocks)))
        return ", ".join((*words, f"numbers {NUMBERS_VERSION}", digest.hexdigest()[:16]))

    def _check_model(self, formats: VectorFormats) -> None:
        for layer_id, layer in self._model.items():
            for role in (_KEY, _VALUE):
                shape = _shape_of(layer, role)
                refusal = None if shape is None else _format_of(formats, role).refusal(shape)
                if refusal is not None:
                    raise ConfigurationError(self._refused(layer_id, role, refusal))

    def _refused(self, layer_id: LayerId, role: BufferRole, why: str) -> str:
        return (
            f"codec {self.codec_id} can not pack the {role}s of layer {layer_id}: {why}; "
            f"use {LOSSLESS} or another codec"
        )

    # ------------------------------------------------------------------ the contract

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        """Lay out the cold pages of each life cycle."""
        described = {lc.layer_group_id for group in pool_groups for lc in group.life_cycles}
        unknown = sorted(self._overrides.keys() - described)
        if unknown:
            known = f"groups 0 to {max(described)}" if len(described) > 1 else "group 0"
            raise CodecError(
                f"codec {self.codec_id} is told how to pack layer group {unknown[0]}, and this "
                f"model has layer {known} alone: leave the other out"
            )
        for group in pool_groups:
            alike: dict[tuple[object, ...], LifeCycleId] = {}
            for life_cycle in sorted(group.life_cycles, key=lambda lc: lc.life_cycle_id):
                number, page = life_cycle.life_cycle_id, self._lay_out(life_cycle, group.pools)
                first = alike.setdefault(page.fingerprint, number)
                self._representative[number] = first
                self._pages[number] = self._pages.get(first, page)
                self._layer_group_of[number] = life_cycle.layer_group_id
                if first == number and not page.is_all_copied:
                    formats = frozenset(buffers.cold_format for buffers in page.buffers)
                    self._guard.watch(life_cycle.layer_group_id, formats)

    def _lay_out(self, life_cycle: LifeCycleDesc, pools: Sequence[PoolDesc]) -> PackedPage:
        def coding_of(buffer: BufferDesc) -> BufferCoding | None:
            pool = next(pool for pool in pools if pool.pool_index == buffer.pool_index)
            return self._coding_of(life_cycle, buffer, pool)

        return PackedPage(life_cycle, pools, coding_of)

    def _coding_of(
        self, life_cycle: LifeCycleDesc, buffer: BufferDesc, pool: PoolDesc
    ) -> BufferCoding | None:
        layer_id, role = buffer.buffer_id.layer_id, buffer.buffer_id.role
        formats = self._overrides.get(life_cycle.layer_group_id, self._formats)
        layer = self._model.get(layer_id)
        if (
            formats is None
            or layer is None
            or role not in (_KEY, _VALUE)
            or life_cycle.page_class is not PageClass.BODY
        ):
            return None
        shape, cold_format = _shape_of(layer, role), _format_of(formats, role)
        why = _why_not(cold_format, shape, buffer, pool)
        if why is not None:
            raise CodecError(self._refused(layer_id, role, why))
        assert shape is not None
        if role == _VALUE or not formats.turns_back:
            return BufferCoding(cold_format, shape)
        return BufferCoding(cold_format, shape, layer.frequencies, layer.key_means)

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        """Of packed vectors and copied buffers."""
        return self._page(life_cycle_id).cold_page_bytes

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        """The first whose pages are laid out, and packed, alike."""
        self._page(life_cycle_id)
        return self._representative[life_cycle_id]

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        """In device memory, always."""
        return PageIndexLocation.DEVICE

    def prepare(self, stream: Stream) -> None:
        """Compile for the host, or make the GPU's tables."""
        for page in self._distinct_pages():
            prepare_page(page, stream, self._prepared)

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """One submission."""
        self._submit(
            life_cycle_id, Direction.TO_COLD, dst_base, page_indices, stream, block_ordinals
        )

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """One submission."""
        self._submit(
            life_cycle_id, Direction.TO_HOT, src_base, page_indices, stream, block_ordinals
        )

    def _submit(
        self,
        life_cycle_id: LifeCycleId,
        direction: Direction,
        cold_base: MemAddress,
        pairs: PageIndices,
        stream: Stream,
        ordinals: BlockOrdinals | None,
    ) -> None:
        page = self._page(life_cycle_id)
        assert isinstance(pairs, DeviceArray), "indices lie in device memory"
        assert ordinals is None or isinstance(ordinals, DeviceArray), "and so do ordinals"
        if pairs.size:
            checks = self._take_checks(page, life_cycle_id, direction, pairs.size)
            call = PackedCall(page, direction, cold_base, pairs, ordinals, checks, self._prepared)
            call.submit(stream)

    def _take_checks(
        self, page: PackedPage, life_cycle_id: LifeCycleId, direction: Direction, num_pages: int
    ) -> PageChecks | None:
        if page.is_all_copied or direction is not Direction.TO_COLD:
            return None
        self._count_checks()
        pages = self._guard.take(num_pages)
        return (
            PageChecks(pages, self._layer_group_of[life_cycle_id], self._guard) if pages else None
        )

    def _count_checks(self) -> None:
        self._prepared.report_to(self._guard)
        self._guard.count()

    def measured_errors(self) -> tuple[CodecErrors, ...]:
        """Of the layer groups that are packed. A page counts for the one that its batching class is
        named after.
        """
        self._count_checks()
        return self._guard.errors()

    def close(self) -> None:
        """Let go of tables and checks."""
        self._prepared.close()

    def _distinct_pages(self) -> list[PackedPage]:
        return list({id(page): page for page in self._pages.values()}.values())

    def _page(self, life_cycle_id: LifeCycleId) -> PackedPage:
        try:
            return self._pages[life_cycle_id]
        except KeyError:
            raise UsageError(
                f"codec {self.codec_id} does not know life cycle {life_cycle_id}: "
                "configure it with its pool group first"
            ) from None


def _shape_of(layer: LayerVectors, role: BufferRole) -> KVShape | None:
    return layer.key if role == _KEY else layer.value


def _format_of(formats: VectorFormats, role: BufferRole) -> ColdFormat:
    return formats.key if role == _KEY else formats.value


def _why_not(
    cold_format: ColdFormat, shape: KVShape | None, buffer: BufferDesc, pool: PoolDesc
) -> str | None:
    """Why a buffer of a hot page can not be packed; None where it can."""
    if shape is None:
        return "hot pages store them packed already"
    if shape.num_bytes != buffer.num_bytes:
        return f"hot pages have {buffer.num_bytes} bytes of them and not {shape.num_bytes}"
    places = (pool.base_address + buffer.offset_bytes, pool.slot_bytes)
    if any(place % ALIGNMENT_BYTES for place in places):
        return f"hot pages have them at addresses that are no multiples of {ALIGNMENT_BYTES}"
    return cold_format.refusal(shape)


def _require_numba(codec_id: str) -> None:
    try:
        is_installed = importlib.util.find_spec("numba") is not None
    except ImportError:  # a finder may refuse to look
        is_installed = False
    if not is_installed:
        raise ConfigurationError(
            f"codec {codec_id} needs numba, which is not installed: run `pip install numba`, or "
            "`pip install '.[codecs]'` in a clone of coldpage"
        )
