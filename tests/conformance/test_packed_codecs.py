"""Every built-in codec that packs, by the shipped kit: models of real geometry, sinks, state that
is neither key nor value, layer groups that share a hot pool group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.codecs import ColdPageCodec, LifeCycleDesc, NumberType, create_codec
from coldpage.device.base import Device
from coldpage.testing.codec_kit import CodecConformance
from coldpage.testing.codec_rig import HotGroupShape
from coldpage.types import LayerGroupId
from tests.conformance.packed_models import (
    ERRORS,
    GEMMA,
    SMOL,
    Model,
    contents,
    format_of,
    numbers_of,
    relative_error,
    split_row,
)

_Bytes = npt.NDArray[np.uint8]


class PackedConformance(CodecConformance):
    """Layer group 0 has heads like SmolLM2's; 1 and 2, in one hot pool group, like Gemma 3's."""

    name: ClassVar[str]
    overrides: ClassVar[Mapping[LayerGroupId, str]] = {}
    models: ClassVar[tuple[Model, ...]] = (SMOL, GEMMA)

    @property
    def pool_groups(self) -> Sequence[HotGroupShape]:  # type: ignore[override]
        return [model.hot_group for model in self.models]

    @property
    def odd_pool_groups(self) -> Sequence[HotGroupShape]:  # type: ignore[override]
        return [self._odd_model.hot_group]

    @property
    def _odd_model(self) -> Model:
        """With state of odd sizes beside keys and values."""
        return replace(self.models[0], state_bytes=(7, 1, 13))

    def make_codec(self) -> ColdPageCodec:
        spec = ",".join([self.name, *(f"{g}={other}" for g, other in self.overrides.items())])
        pages = {k: v for model in self.models for k, v in model.pages().items()}
        return create_codec(spec, pages)

    def make_contents(self, rng: np.random.Generator, num_bytes: int) -> _Bytes:
        return contents(self.models[0].number_type, rng, num_bytes)

    def check_restored(self, life_cycle: LifeCycleDesc, original: _Bytes, restored: _Bytes) -> None:
        models = (*self.models, self._odd_model)
        model = next(m for m in models if sum(m.hot_group.pool_bytes) == original.size)
        pages = (
            split_row(row, model.hot_group, life_cycle.buffers) for row in (original, restored)
        )
        for buffer, was, now in zip(life_cycle.buffers, *pages, strict=True):
            cold_format = format_of(self.name, life_cycle, buffer, self.overrides)
            if cold_format is None:
                assert np.array_equal(was, now), f"{buffer.buffer_id} comes back with other bytes"
                continue
            error = relative_error(numbers_of(was, model.shape), numbers_of(now, model.shape))
            assert error < ERRORS[cold_format], (buffer.buffer_id, error)


class TestInt8(PackedConformance):
    name = "int8"


class TestFp8(PackedConformance):
    name = "fp8"


class TestInt4(PackedConformance):
    name = "int4"


class TestTurbo4(PackedConformance):
    name = "turbo4"


class TestTurbo3(PackedConformance):
    name = "turbo3"


class TestK8V4(PackedConformance):
    name = "k8v4"


class TestInt4Block(PackedConformance):
    name = "int4-block"


class TestTurbo4OfF32(PackedConformance):
    name = "turbo4"
    models = (Model(3, 64, number_type=NumberType.F32),)


class TestInt4OfF16(PackedConformance):
    name = "int4"
    models = (Model(3, 64, number_type=NumberType.F16),)


class TestCodecsByLayerGroup(PackedConformance):
    name = "int8"
    overrides: ClassVar = {LayerGroupId(1): "turbo4", LayerGroupId(2): "concat"}


class _OnCuda:
    devices = ("cuda",)

    def make_device(self, name: str, seed: int) -> Device:
        from coldpage.device.cuda import CudaDevice

        return CudaDevice()


@pytest.mark.gpu
class TestInt8OnCuda(_OnCuda, TestInt8):
    pass


@pytest.mark.gpu
class TestFp8OnCuda(_OnCuda, TestFp8):
    pass


@pytest.mark.gpu
class TestInt4OnCuda(_OnCuda, TestInt4):
    pass


@pytest.mark.gpu
class TestTurbo4OnCuda(_OnCuda, TestTurbo4):
    pass


@pytest.mark.gpu
class TestTurbo3OnCuda(_OnCuda, TestTurbo3):
    pass


@pytest.mark.gpu
class TestK8V4OnCuda(_OnCuda, TestK8V4):
    pass


@pytest.mark.gpu
class TestInt4BlockOnCuda(_OnCuda, TestInt4Block):
    pass


@pytest.mark.gpu
class TestTurbo4OfF32OnCuda(_OnCuda, TestTurbo4OfF32):
    pass


@pytest.mark.gpu
class TestInt4OfF16OnCuda(_OnCuda, TestInt4OfF16):
    pass


@pytest.mark.gpu
class TestCodecsByLayerGroupOnCuda(_OnCuda, TestCodecsByLayerGroup):
    pass
