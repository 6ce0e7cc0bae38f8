"""Cold pages of the codecs that pack: their bytes by the plain reference, what is copied, what is
refused, and what sets two codecs apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.codecs import (
    ColdPageCodec,
    KVShape,
    LayerVectors,
    LifeCycleDesc,
    ModelPages,
    NumberType,
    PoolDesc,
    create_codec,
)
from coldpage.codecs.packed import PACKED_FORMATS, PackedCodec, VectorFormats
from coldpage.codecs.packed_page import PackedPage
from coldpage.device.host import HostDevice
from coldpage.device.simulated import SimulatedDevice
from coldpage.errors import CodecError, ConfigurationError, UsageError
from coldpage.kernels.cold.formats import ColdFormat
from coldpage.kernels.cold.reference import pack_buffer, unpack_buffer
from coldpage.testing.codec_rig import CodecRig
from coldpage.testing.hot_shapes import HotBuffer, HotGroupShape
from coldpage.types import (
    LayerGroupId,
    LayerId,
    LifeCycleId,
    MemAddress,
    PageClass,
    PageIndexLocation,
    PoolIndex,
)
from tests.conformance import packed_models
from tests.conformance.packed_models import (
    BLOCK,
    ERRORS,
    LLAMA,
    SMOL,
    Model,
    contents,
    numbers_of,
    relative_error,
    split_row,
)

_Bytes = npt.NDArray[np.uint8]
_MakeRig = Callable[..., CodecRig]

PACKING = [name for name, formats in PACKED_FORMATS.items() if formats is not None]
GEMMA = replace(packed_models.GEMMA, layer_groups=(0, 1))
STATEFUL = replace(SMOL, state_bytes=(33, 5))


@pytest.fixture(params=["host", "simulated"])
def make_rig(request: pytest.FixtureRequest) -> Iterator[_MakeRig]:
    """On the simulated device work sees only what it declares."""
    rigs: list[CodecRig] = []

    def make(
        codec: str | ColdPageCodec,
        model: Model,
        *,
        has_sinks: bool = False,
        shape: HotGroupShape | None = None,
        **has: bool,
    ) -> CodecRig:
        shapes = [model.hot_group if shape is None else shape]
        if isinstance(codec, str):
            codec = create_codec(codec, model.pages(**has))

        def gaussian(rng: np.random.Generator, num_bytes: int) -> _Bytes:
            return contents(model.number_type, rng, num_bytes)

        device = SimulatedDevice(2) if request.param == "simulated" else HostDevice()
        rigs.append(CodecRig(codec, device, shapes, gaussian, has_sinks=has_sinks))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def _blob(rig: CodecRig, life_cycle: int, ordinal: int) -> tuple[_Bytes, _Bytes]:
    """A hot page [page_bytes] and its cold one."""
    number = LifeCycleId(life_cycle)
    area = rig.new_area(number)
    rig.encode(number, area, [3], [5], np.array([ordinal], np.int32))
    rig.finish()
    return rig.load(number, [5])[0], area.pages[3].copy()


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("model", [SMOL, LLAMA, replace(SMOL, number_type=NumberType.F32), GEMMA])
@pytest.mark.parametrize("name", PACKING)
def test_pages_are_as_the_reference_reads_and_writes_them(
    make_rig: _MakeRig, name: str, model: Model
) -> None:
    rig, formats, shape = make_rig(name, model), PACKED_FORMATS[name], model.shape
    assert formats is not None
    for life_cycle in rig.life_cycles:
        _check_blob(rig, life_cycle, model)
    sizes = model.num_layers * sum(it.buffer_bytes(shape) for it in (formats.key, formats.value))
    num_copied = sum(model.state_bytes)
    assert rig.configured.cold_page_bytes[0] == sizes + -(-num_copied // 16) * 16


def _check_blob(rig: CodecRig, life_cycle: LifeCycleDesc, model: Model) -> None:
    ordinal, start = 70_001, 0
    row, blob = _blob(rig, life_cycle.life_cycle_id, ordinal)
    formats, pages = PACKED_FORMATS[rig.configured.codec.codec_id], model.pages()
    assert formats is not None
    for buffer, raw in zip(
        life_cycle.buffers, split_row(row, model.hot_group, life_cycle.buffers), strict=True
    ):
        role = buffer.buffer_id.role
        if role not in ("key", "value"):
            continue
        layer, cold_format = pages[buffer.buffer_id.layer_id], formats.value
        options: dict[str, Any] = {}
        if role == "key":
            cold_format = formats.key
            if formats.turns_back:
                options = {
                    "frequencies": layer.frequencies,
                    "means": layer.key_means,
                    "block_ordinal": ordinal,
                }
        numbers = numbers_of(raw, model.shape)
        packed = blob[start : start + cold_format.buffer_bytes(model.shape)]
        start += packed.size
        found = unpack_buffer(packed, cold_format, model.shape, **options)
        assert relative_error(numbers, found) < ERRORS[cold_format]
        wanted = pack_buffer(numbers, cold_format, model.shape, **options)
        assert np.mean(packed == wanted) > 0.99, "ties and last bits differ, if anything"
        used = cold_format.code_bytes(model.shape) + 2 * cold_format.num_parameters(model.shape)
        assert not packed[used:].any()
    copied = row[model.hot_group.pool_bytes[0] :]
    assert np.array_equal(blob[start : start + copied.size], copied)


def _turned(x: npt.NDArray[np.float64], frequencies: Any, ordinal: int) -> _Bytes:
    """Keys f32 [kv_heads, tokens, head_dim] of a block at their positions, as bytes."""
    positions = ordinal * BLOCK + np.arange(BLOCK, dtype=np.float64)
    angles = 2 * np.pi * ((positions[:, None] * frequencies.astype(np.float64)) / 2.0**32 % 1)
    low, high = np.split(x, 2, axis=-1)
    turned = [
        low * np.cos(angles) - high * np.sin(angles),
        high * np.cos(angles) + low * np.sin(angles),
    ]
    return np.concatenate(turned, axis=-1).astype(np.float32).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("name", ["int8", "int4", "turbo4", "turbo3"])
def test_keys_are_turned_back_from_where_their_block_is(make_rig: _MakeRig, name: str) -> None:
    """The same keys at other positions: one packed form, where they are turned back."""
    model = replace(SMOL, number_type=NumberType.F32)
    rig, formats = make_rig(name, model), PACKED_FORMATS[name]
    assert formats is not None
    frequencies = model.pages()[LayerId(0)].frequencies
    x = np.random.default_rng(0).standard_normal(model.shape[:3])
    area, ordinals = rig.new_area(LifeCycleId(0)), (0, 1, 12_345)
    pages = np.repeat(rig.load(LifeCycleId(0), [0]), 3, axis=0)
    for page, ordinal in zip(pages, ordinals, strict=True):
        page[: model.shape.num_bytes] = _turned(x, frequencies, ordinal)
    rig.store(LifeCycleId(0), [0, 1, 2], pages)
    rig.encode(LifeCycleId(0), area, [0, 1, 2], [0, 1, 2], np.array(ordinals, np.int32))
    rig.finish()
    keys = area.pages[:3, : formats.key.code_bytes(model.shape)]
    for key in keys[1:]:
        assert (np.mean(key == keys[0]) > 0.98) == formats.turns_back


def test_sinks_and_other_roles_come_back_whole(make_rig: _MakeRig) -> None:
    rig = make_rig("turbo3", STATEFUL, has_sinks=True)
    sink, body = rig.life_cycles
    assert (sink.page_class, body.page_class) == (PageClass.SINK, PageClass.BODY)
    row, blob = _blob(rig, sink.life_cycle_id, 0)
    assert np.array_equal(row, blob), "a sink is its pools, one after another"
    row, blob = _blob(rig, body.life_cycle_id, 9)
    state = row[STATEFUL.hot_group.pool_bytes[0] :]
    at = blob.size - 48
    assert np.array_equal(blob[at : at + 38], state)
    assert np.array_equal(blob[at + 38 :], state[:10]), "filled up to a multiple of 16"


def test_layers_that_nobody_describes_are_copied(make_rig: _MakeRig) -> None:
    for pages in ({}, {LayerId(77): SMOL.pages()[LayerId(0)]}):
        rig = make_rig(create_codec("int8", pages), SMOL)
        row, blob = _blob(rig, 0, 4)
        assert np.array_equal(row, blob)


def test_a_described_layer_is_packed_and_its_neighbour_is_not(make_rig: _MakeRig) -> None:
    pages = SMOL.pages()
    rig = make_rig(create_codec("int8", {LayerId(1): pages[LayerId(1)]}), SMOL)
    row, blob = _blob(rig, 0, 4)
    packed = 2 * ColdFormat.INT8.buffer_bytes(SMOL.shape)
    assert blob.size == packed + 2 * SMOL.shape.num_bytes
    assert np.array_equal(blob[packed:], row[: 2 * SMOL.shape.num_bytes])


@pytest.mark.parametrize("bases", [(1 << 20, 1 << 30), (1 << 30, 1 << 20)])
def test_where_pools_lie_changes_no_cold_page(bases: tuple[int, int]) -> None:
    """A blob on disk is read by a later process, whose pools have other addresses."""
    buffers = [[HotBuffer(0, "a", 7), HotBuffer(1, "b", 9)], [HotBuffer(0, "c", 5)]]
    shape = HotGroupShape.of_buffers(buffers, (0,))
    life_cycle = LifeCycleDesc(
        LifeCycleId(0), LayerGroupId(0), PageClass.BODY, shape.describe_buffers(0)
    )
    pools = tuple(
        PoolDesc(PoolIndex(index), MemAddress(base), size)
        for index, (base, size) in enumerate(zip(bases, shape.pool_bytes, strict=True))
    )
    parts = PackedPage(life_cycle, pools, lambda _: None).parts_to_hot(MemAddress(0))
    assert parts.dst_base.tolist() == list(bases)
    assert parts.src_base.tolist() == [0, 16]


# ---------------------------------------------------------------------- classes and calls


def test_layer_groups_that_are_packed_alike_share_calls(make_rig: _MakeRig) -> None:
    rig = make_rig("int8", GEMMA, has_sinks=True)
    assert rig.configured.representative.tolist() == [0, 1, 0, 1]
    rig = make_rig("turbo4", GEMMA, has_sinks=True)
    assert rig.configured.representative.tolist() == [0, 1, 0, 3], "their keys turn differently"
    rig = make_rig("turbo4", replace(GEMMA, bases=(1e4,)), has_means=False)
    assert rig.configured.representative.tolist() == [0, 0]
    rig = make_rig("int8,1=fp8", GEMMA, has_sinks=True)
    assert rig.configured.representative.tolist() == [0, 1, 0, 3]


def test_indices_lie_in_device_memory(make_rig: _MakeRig) -> None:
    rig = make_rig("turbo4", STATEFUL, has_sinks=True)
    assert set(rig.configured.locations) == {PageIndexLocation.DEVICE}


def test_a_codec_that_is_not_configured_says_so() -> None:
    with pytest.raises(UsageError, match="does not know life cycle 4"):
        create_codec("int8", {}).query_cold_page_bytes(LifeCycleId(4))


def test_layer_groups_have_codecs_of_their_own(make_rig: _MakeRig) -> None:
    model = replace(SMOL, layer_groups=(0, 1, 2))
    rig = make_rig("int8,1=turbo4,2=concat", model)
    shape, layers = model.shape, model.num_layers
    assert rig.configured.cold_page_bytes == (
        2 * layers * ColdFormat.INT8.buffer_bytes(shape),
        2 * layers * ColdFormat.TURBO4.buffer_bytes(shape),
        2 * layers * shape.num_bytes,
    )


# ---------------------------------------------------------------------- identity


def _identity(spec: str, pages: ModelPages) -> tuple[str, int, str]:
    codec = create_codec(spec, pages)
    return codec.codec_id, codec.version, codec.parameters


def _changed(pages: ModelPages, **changes: Any) -> ModelPages:
    """With changes to the last layer."""
    last = max(pages)
    return {**pages, last: replace(pages[last], **changes)}


@pytest.mark.parametrize("name", PACKING)
def test_what_changes_bytes_changes_the_identity(name: str) -> None:
    pages, formats = SMOL.pages(), PACKED_FORMATS[name]
    assert formats is not None
    layer = pages[max(pages)]
    assert layer.frequencies is not None and layer.key_means is not None
    shape, last = SMOL.shape, layer.frequencies.copy()
    last[-1] += 1
    means = layer.key_means.copy()
    means[-1, -1] += 0.5
    changes = [
        _changed(pages, value=shape._replace(num_kv_heads=4)),
        _changed(pages, value=shape._replace(tokens_per_block=32)),
        _changed(pages, value=shape._replace(head_dim=128)),
        _changed(pages, value=shape._replace(number_type=NumberType.F16)),
        _changed(pages, value=None, key=shape),
        {layer_id: pages[layer_id] for layer_id in list(pages)[:1]},
        {LayerId(layer_id + 1): layer for layer_id, layer in pages.items()},
    ]
    calibrated = [
        _changed(pages, frequencies=last),
        _changed(pages, frequencies=None),
        _changed(pages, key_means=means),
        _changed(pages, key_means=None),
    ]
    was = _identity(name, pages)
    assert was == _identity(name, dict(reversed(SMOL.pages().items())))
    found = [_identity(name, changed) for changed in changes]
    assert len({was, *found}) == 1 + len(changes)
    found = [_identity(name, changed) for changed in calibrated]
    assert len({was, *found}) == (1 + len(calibrated) if formats.turns_back else 1)


def test_formats_and_layer_groups_are_part_of_the_identity() -> None:
    pages = SMOL.pages()
    specs = ["int8", "fp8", "int8,0=fp8", "int8,1=fp8", "int8,0=fp8,1=fp8", "concat,1=fp8"]
    assert len({_identity(spec, pages) for spec in specs}) == len(specs)
    same = ["int8,1=fp8,0=turbo4", " int8 , 0=turbo4,1=fp8", "int8,2=int8,0 = turbo4,1=fp8"]
    assert len({_identity(spec, pages) for spec in same}) == 1


def test_numbers_of_another_version_are_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    was = _identity("turbo4", SMOL.pages())
    monkeypatch.setattr("coldpage.codecs.packed.NUMBERS_VERSION", 99)
    assert _identity("turbo4", SMOL.pages()) != was


def test_a_name_with_other_formats_is_another_format() -> None:
    pages, other = SMOL.pages(), VectorFormats(ColdFormat.INT8, ColdFormat.FP8)
    changed = PackedCodec("int8", pages, formats={"int8": other})
    assert changed.parameters != create_codec("int8", pages).parameters


@pytest.mark.parametrize("name", PACKING)
def test_positions_are_asked_for_where_keys_are_turned_back(name: str) -> None:
    formats = PACKED_FORMATS[name]
    assert formats is not None
    assert create_codec(name, SMOL.pages()).needs_positions == formats.turns_back
    assert not create_codec(name, SMOL.pages(has_frequencies=False)).needs_positions
    assert not create_codec(name, {}).needs_positions
    mixed = create_codec(f"{name},1=turbo4", SMOL.pages())
    assert mixed.needs_positions


# ---------------------------------------------------------------------- refusals


def _layer(shape: KVShape, **others: Any) -> ModelPages:
    return {LayerId(0): LayerVectors(shape, shape, **others)}


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("int8", KVShape(1, BLOCK, 60, NumberType.BF16), "heads of 60 numbers are no multiple of"),
        ("turbo4", KVShape(1, BLOCK, 96, NumberType.BF16), "heads have 96 numbers and not 64"),
        ("k8v4", KVShape(1, BLOCK, 96, NumberType.BF16), "the values of layer 0"),
        ("int4", KVShape(1, 96, 64, NumberType.BF16), "blocks of 96 tokens are no multiple of 64"),
    ],
)
def test_vectors_that_do_not_fit_are_refused_at_once(name: str, shape: KVShape, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^codec {name} can not pack .*{why}.*concat"):
        create_codec(name, _layer(shape))


def test_vectors_that_do_not_fit_are_refused_in_their_layer_group(make_rig: _MakeRig) -> None:
    odd = Model(1, 96)
    make_rig(create_codec("int8,1=turbo4", odd.pages()), replace(odd, layer_groups=(0, 1)))
    with pytest.raises(CodecError, match="can not pack the keys of layer 0: heads have 96"):
        make_rig("int8,0=turbo4", odd)


def test_vectors_that_are_packed_already_are_refused(make_rig: _MakeRig) -> None:
    shape = SMOL.shape
    for key, value, role in ((None, shape, "keys"), (shape, None, "values")):
        codec = create_codec("int8", {LayerId(1): LayerVectors(key, value)})
        with pytest.raises(CodecError, match=f"the {role} of layer 1: .*already; use concat"):
            make_rig(codec, SMOL)


def test_pages_of_another_size_are_refused(make_rig: _MakeRig) -> None:
    codec = create_codec("int8", SMOL.pages())
    with pytest.raises(CodecError, match="have 12288 bytes of them and not 6144"):
        make_rig(codec, replace(SMOL, number_type=NumberType.F32))


def test_pages_at_odd_addresses_are_refused(make_rig: _MakeRig) -> None:
    size = SMOL.shape.num_bytes
    for buffers in (
        [HotBuffer(0, "flag", 8), HotBuffer(0, "key", size), HotBuffer(0, "x", 8)],
        [HotBuffer(0, "key", size), HotBuffer(0, "flag", 8)],
    ):
        shape = HotGroupShape.of_buffers([buffers], (0,))

        with pytest.raises(CodecError, match="addresses that are no multiples of 16"):
            make_rig(create_codec("int8", SMOL.pages()), SMOL, shape=shape)


def test_a_layer_group_that_is_not_there_is_refused(make_rig: _MakeRig) -> None:
    with pytest.raises(CodecError, match="group 5, and this model has layer group 0 alone: leave"):
        make_rig("int8,5=fp8", SMOL)
    with pytest.raises(CodecError, match="group 2, and this model has layer groups 0 to 1 alone"):
        make_rig("int8,2=fp8", GEMMA)


def test_constants_of_another_form_are_refused() -> None:
    shape = SMOL.shape
    with pytest.raises(ConfigurationError, match=r"frequencies .* need uint32 \[32\]"):
        LayerVectors(shape, shape, np.zeros(64, np.uint32))
    with pytest.raises(ConfigurationError, match=r"key_means .* need float32 \[3, 64\]"):
        LayerVectors(shape, shape, None, np.zeros((3, 64), np.float64))  # type: ignore[arg-type]


def test_without_numba_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigurationError, match=r"pip install numba.*'\.\[codecs\]'"):
        create_codec("turbo4", SMOL.pages())
    create_codec("concat", SMOL.pages())
