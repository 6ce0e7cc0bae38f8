"""Codecs of a model's cold tiers: what they know of it, what they are refused, and which tiers of
a manager get which."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coldpage.codecs import (
    ColdPageCodec,
    KVShape,
    NumberType,
    PoolGroupDesc,
    codec_identity,
    registry,
)
from coldpage.config import DeviceTierConfig, DiskTierConfig, HostTierConfig
from coldpage.engine.assembly import block_bytes, build_manager, with_hot_types
from coldpage.engine.model import calibration, cold_codecs
from coldpage.engine.model.calibration import calibrate, stored_or_made
from coldpage.engine.model.cold_codecs import ColdCodecs, make_cold_codecs, model_pages
from coldpage.engine.model.model import LoadedModel, describe_model
from coldpage.engine.model.random_model import SMALL, ModelGeometry, random_model
from coldpage.errors import ConfigurationError
from coldpage.testing.example_codecs import CoarseCodec
from coldpage.testing.page_codec import memory
from coldpage.types import LayerId, PageClass
from tests.engine.arena import make_tiny
from tests.engine.tiny_tokenizers import byte_level

pytestmark = pytest.mark.usefixtures("one_thread", "cache_directory")

CPU = torch.device("cpu")
GEOMETRY = ModelGeometry(2, 4, 2, 64, 64, 64, 300, 1024)
BLOCK = 16


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calibrations are kept; what numba has compiled stays where it is."""
    monkeypatch.setattr(calibration, "model_cache_directory", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model(GEOMETRY, CPU, torch.bfloat16)


def made(
    model: LoadedModel, host: str = "concat", disk: str | None = None, block: int = BLOCK
) -> ColdCodecs:
    return make_cold_codecs(model, block, host, disk, lambda line: None)


def test_pages_are_described_as_they_are(model: LoadedModel) -> None:
    for hot, number_type in (("auto", NumberType.BF16), ("f32", NumberType.F32)):
        pages = model_pages(with_hot_types(model, hot, "f16", 32), 32)
        assert list(pages) == [0, 1]
        assert pages[LayerId(1)].key == KVShape(2, 32, 64, number_type)
        assert pages[LayerId(1)].value == KVShape(2, 32, 64, NumberType.F16)
        assert pages[LayerId(1)].frequencies is pages[LayerId(1)].key_means is None
    known = stored_or_made(model, lambda line: None)
    for index, layer in model_pages(model, BLOCK, known).items():
        assert layer.frequencies is known.frequencies[index]
        assert layer.key_means is known.key_means[index]
    packed = model_pages(with_hot_types(model, "q8_0", "turbo4", BLOCK), BLOCK)
    assert packed[LayerId(0)].key is packed[LayerId(0)].value is None


def test_without_codecs_the_manager_has_its_own(model: LoadedModel, tmp_path: Path) -> None:
    for specs in (("concat", None), (" concat ", "concat,0=concat")):
        codecs = made(model, *specs)
        assert codecs.host is codecs.disk is codecs.calibration is None
        assert not codecs.is_lossy
        assert codecs.fractions() == (1.0, 1.0)
        assert codecs.describe() == ""
    with manager_of(model, codecs, tmp_path) as manager:
        assert not manager.config.separate_sink_pages
        assert [level.codec for level in manager.stats().levels[1:]] == ["concat v1", "concat v1"]


def manager_of(
    model: LoadedModel,
    codecs: ColdCodecs,
    path: Path,
    block: int = BLOCK,
    num_recent_blocks: int = 0,
) -> Any:
    room = 100 * block_bytes(model, block)
    tiers = (
        DeviceTierConfig(room),
        HostTierConfig(room, codecs.host),
        DiskTierConfig(str(path / "disk"), 4 * room, codecs.disk),
    )
    return build_manager(model, tiers, block, num_recent_blocks=num_recent_blocks)


def test_the_disk_is_as_the_host(model: LoadedModel) -> None:
    """The same object, so that pages are copied from one to the other."""
    for codecs in (made(model, "int8"), made(model, "int8", "int8")):
        assert codecs.host is codecs.disk
        assert codecs.distinct == (codecs.host,)
    codecs = made(model, "concat", "int8")
    assert codecs.host is None
    assert codecs.disk is not None and codecs.disk.codec_id == "int8"
    codecs = made(model, "int8", "concat")
    assert codecs.disk is None
    codecs = made(model, "int8", "fp8")
    assert [codec.codec_id for codec in codecs.distinct] == ["int8", "fp8"]


def test_what_loses_something_keeps_first_blocks_apart(model: LoadedModel, tmp_path: Path) -> None:
    codecs = made(model, "turbo4", "int8")
    with manager_of(model, codecs, tmp_path) as manager:
        assert manager.config.separate_sink_pages
        assert b"turbo4" in manager.provenance and b"int8" in manager.provenance
        _, host, disk = manager.stats().levels
        assert host.codec.startswith("turbo4 v1 ") and disk.codec.startswith("int8 v1 ")
        for life_cycle in manager.layout.life_cycles:
            is_sink = life_cycle.page_class is PageClass.SINK
            hot_bytes = manager.layout.page_bytes(life_cycle.life_cycle_id)
            assert codecs.host is not None
            cold_bytes = codecs.host.query_cold_page_bytes(life_cycle.life_cycle_id)
            assert cold_bytes == (hot_bytes if is_sink else hot_bytes * 34 // 128)
        sink, body = sorted(host.pool_groups, key=lambda group: group.total_slots)
        # One first block for each 64 blocks, or 1,024 tokens.
        assert body.total_slots == pytest.approx(63 * sink.total_slots, rel=0.2)
    assert codecs.fractions() == (34 / 128, 66 / 128)


def test_recent_blocks_are_kept_whole_and_have_their_share(
    model: LoadedModel, tmp_path: Path
) -> None:
    codecs = made(model, "turbo4")
    with manager_of(model, codecs, tmp_path, num_recent_blocks=4) as manager:
        layout = manager.layout
        assert layout.page_classes == (PageClass.SINK, PageClass.BODY, PageClass.RECENT)
        assert codecs.host is not None
        for life_cycle in layout.life_cycles:
            number = life_cycle.life_cycle_id
            cold_bytes = codecs.host.query_cold_page_bytes(number)
            is_body = life_cycle.page_class is PageClass.BODY
            assert (cold_bytes < layout.page_bytes(number)) == is_body
        whole, body = sorted(
            manager.stats().levels[1].pool_groups, key=lambda group: group.total_slots
        )
        # Of 64 blocks one is the first, four are recent and one is not full.
        assert body.total_slots / whole.total_slots == pytest.approx(58 / 6, rel=0.1)


def test_where_nothing_is_lost_no_blocks_are_apart(model: LoadedModel, tmp_path: Path) -> None:
    with manager_of(model, made(model, "concat"), tmp_path, num_recent_blocks=4) as manager:
        assert manager.layout.page_classes == (PageClass.BODY,)
        assert manager.provenance == b"exact"


def test_the_disk_tells_codecs_apart(model: LoadedModel, tmp_path: Path) -> None:
    """Pages of another codec, or of another calibration, lie in another instance."""
    ids = []
    for number, name in enumerate(("concat", "int4", "int4", "turbo4")):
        if number == 2:
            calibrate(model, "Something else altogether. " * 100, lambda line: None)
        with manager_of(model, made(model, "concat", name), tmp_path / str(number)) as manager:
            ids.append(manager.instance_ids)
    assert len(set(ids)) == 4


def test_the_layers_shares_stay_as_they_are(tmp_path: Path) -> None:
    """Where first blocks are apart, and layers have windows, hot memory is divided as before."""
    tiny = describe_model(make_tiny("gemma3", head_dim=64), byte_level(), "tiny", b"weights")
    room = 400 * block_bytes(tiny, BLOCK)
    slots = []
    for host in ("concat", "int8"):
        codecs = made(tiny, host)
        tiers = (DeviceTierConfig(room), HostTierConfig(room, codecs.host))
        with build_manager(tiny, tiers, BLOCK) as manager:
            slots.append([g.total_slots for g in manager.stats().levels[0].pool_groups])
    assert slots[0] == pytest.approx(slots[1], abs=1)
    assert slots[0][0] != slots[0][1]


def test_layer_groups_may_differ() -> None:
    tiny = describe_model(make_tiny("gemma3", head_dim=64), byte_level(), "tiny", b"weights")
    codecs = made(tiny, "int8,1=concat")
    assert codecs.fractions()[0] == pytest.approx((3 * 66 / 256 + 1) / 4)


def test_equal_ones_are_made_for_another_manager(model: LoadedModel) -> None:
    codecs = made(model, "int4", "concat")
    again = codecs.again()
    assert codecs.host is not None and again.host is not None
    assert again.host is not codecs.host
    assert codec_identity(again.host) == codec_identity(codecs.host)
    assert again.disk is None


@pytest.mark.parametrize("name", ["concat", "int8", "int4", "turbo4", "turbo3"])
def test_a_calibration_is_made_for_those_that_use_it(model: LoadedModel, name: str) -> None:
    lines: list[str] = []
    codecs = make_cold_codecs(model, BLOCK, "int8", name, lines.append)
    formats = cold_codecs.PACKED_FORMATS[name]
    is_wanted = formats is not None and formats.turns_back
    assert is_wanted == (codecs.calibration is not None) == bool(lines)
    assert is_wanted == ("keys less their means" in codecs.describe())
    if codecs.calibration is not None:
        assert codecs.pages[LayerId(0)].key_means is codecs.calibration.key_means[0]
        assert make_cold_codecs(model, BLOCK, "int8", name, pytest.fail).calibration is not None


def test_another_calibration_is_another_format(model: LoadedModel) -> None:
    first = made(model, "turbo4")
    calibrate(model, "Something else altogether. " * 100, lambda line: None)
    second = made(model, "turbo4")
    assert first.host is not None and second.host is not None
    assert codec_identity(first.host) != codec_identity(second.host)
    assert codec_identity(made(model, "int8").distinct[0]) == codec_identity(
        made(dataclasses.replace(model), "int8").distinct[0]
    )


def offer(monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], ColdPageCodec]) -> None:
    """Another package has a codec "theirs"."""

    class Point:
        name = "theirs"
        value = "their_package:codec"
        dist = None

        def load(self) -> Any:
            return make

    def points(group: str, name: str | None = None) -> list[Point]:
        return [Point()] if name in (None, "theirs") else []

    monkeypatch.setattr(registry, "entry_points", points)


class Theirs(CoarseCodec):
    """Of the package that ``offer`` offers."""

    codec_id = "their-package:coarse"


def test_what_it_says_at_start(model: LoadedModel) -> None:
    codecs = made(model, "turbo4", "concat")
    assert codecs.calibration is not None
    told = (
        f"keys less their means over {codecs.calibration.num_tokens:,} tokens "
        f"({codecs.calibration.name})"
    )
    host, disk = "host turbo4 (0.266 of a hot page)", "disk concat (1.000 of a hot page)"
    assert codecs.describe() == f"{host}, {disk}, {told}"
    assert codecs.describe(has_disk=False) == f"{host}, {told}"
    recent = "the newest 4 full blocks and the last one whole"
    assert codecs.describe(num_recent_blocks=4) == f"{host}, {disk}, {recent}, {told}"
    assert made(model).describe(num_recent_blocks=4) == ""


def test_it_does_not_say_that_recent_blocks_are_whole_where_they_are_not(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec of another package may know nothing of them."""
    for is_whole in (False, True):
        make = functools.partial(Theirs, keeps_recent=is_whole)
        offer(monkeypatch, lambda pages, make=make: make())  # type: ignore[misc]
        codecs = made(model, "theirs", "int8")
        what = "the newest 4 full blocks and the last one"
        said = codecs.describe(num_recent_blocks=4)
        assert (f"{what} whole" in said) == is_whole
        assert (f"{what} packed too (host)" in said) == (not is_whole)
        assert f"{what} whole" in codecs.describe(has_host=False, num_recent_blocks=4)


@pytest.mark.parametrize(
    ("types", "spec", "sentence"),
    [
        (("q8_0", "auto"), "int8", "can not pack hot pages with keys as q8_0 and values as bf16"),
        (("auto", "turbo4"), "turbo4", "packed already: use the codec concat"),
        (("auto", "auto"), "int9", "there is no codec 'int9': choose one of concat, int8"),
        (("auto", "auto"), "int8,1:fp8", "'1:fp8' is not GROUP=NAME"),
        (("auto", "auto"), "turbo4,1=int8", "this model has layer group 0 alone"),
        (("auto", "auto"), "concat,1=turbo4", "this model has layer group 0 alone"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_calibrated(
    model: LoadedModel,
    types: tuple[str, str],
    spec: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cold_codecs, "stored_or_made", pytest.fail)
    for specs in ((spec, None), ("concat", spec)):
        with pytest.raises(ConfigurationError, match=sentence):
            made(with_hot_types(model, *types, BLOCK), *specs)


def test_heads_that_a_codec_can_not_pack_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_codecs, "stored_or_made", pytest.fail)
    with pytest.raises(ConfigurationError, match="turbo3 can not pack the keys of layer 0"):
        made(random_model(SMALL, CPU, torch.float32), "turbo3")


@pytest.mark.parametrize("is_wanted", [False, True])
def test_codecs_of_other_packages_get_a_calibration_if_they_say_so(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    seen: list[Any] = []

    def make(pages: Any) -> ColdPageCodec:
        seen.append(pages)
        return Theirs()

    make.uses_calibration = is_wanted  # type: ignore[attr-defined]
    offer(monkeypatch, make)
    lines: list[str] = []
    codecs = make_cold_codecs(model, BLOCK, "theirs", "concat", lines.append)
    assert isinstance(codecs.host, Theirs)
    assert codecs.is_lossy
    assert not codecs.are_compiled
    (pages,) = seen
    assert pages[0].key == KVShape(2, BLOCK, 64, NumberType.BF16)
    assert isinstance(pages[0].key_means, np.ndarray) == is_wanted
    assert is_wanted == bool(lines) == ("keys less their means" in codecs.describe())


def test_what_is_built_in_is_compiled(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, lambda pages: Theirs())
    assert made(model, "theirs", "int8").are_compiled
    assert not made(model).are_compiled


class Curious(Theirs):
    """Looks at all that it is shown, and writes there."""

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        super().configure(pool_groups)
        for group in pool_groups:
            for pool in group.pools:
                assert pool.base_address % 4096 == 0
                slots = memory(pool.base_address, group.num_slots * pool.slot_bytes)
                slots ^= 1

    def close(self) -> None:
        raise OSError("no")


def test_a_codec_that_is_asked_for_sizes_has_pools_to_look_at(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(monkeypatch, lambda pages: Curious())
    codecs = made(model, "theirs", "concat")
    assert codecs.fractions() == (0.5, 1.0)
    assert codecs.keep_recent() == (False, True)
    assert caplog.text.count("codec their-package:coarse failed in close") == 2


def test_a_broken_offer_is_refused_before_anything_is_calibrated(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_codecs, "stored_or_made", pytest.fail)
    offer(monkeypatch, lambda pages: Theirs())
    for spec in ("theirs,1=turbo4", "theirs:1"):
        with pytest.raises(ConfigurationError, match="take"):
            made(model, spec, "turbo4")
