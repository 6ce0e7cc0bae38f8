"""The shipped codec kit on the codecs of this package, and on codecs that are broken on purpose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.codecs import (
    CodecErrors,
    ColdPageCodec,
    KVShape,
    LayerVectors,
    LifeCycleDesc,
    NumberType,
    create_default_cold_page_codec,
)
from coldpage.device.base import Device
from coldpage.testing.codec_kit import DEVICES, CodecConformance, RigMaker
from coldpage.testing.example_codecs import (
    CoarseCodec,
    DeviceIndexCodec,
    PaddingCodec,
    PositionCodec,
    SlowCodec,
)
from coldpage.testing.hot_shapes import HotBuffer, HotGroupShape
from coldpage.testing.page_codec import HotPages, PageCodec, Strided
from coldpage.types import DeviceArray, LayerGroupId, LayerId, PageClass, PageIndexLocation
from tests.conformance.far_device import FarDevice

_Bytes = npt.NDArray[np.uint8]


class TestConcatCodec(CodecConformance):
    """The default codec, also where the host can not reach the hot level."""

    devices: Sequence[str] = (*DEVICES, "far")
    max_page_kernel_bytes = 0

    def make_device(self, name: str, seed: int) -> Device:
        return FarDevice() if name == "far" else super().make_device(name, seed)

    def make_codec(self) -> ColdPageCodec:
        return create_default_cold_page_codec(self.max_page_kernel_bytes)


class TestConcatCodecThatCopiesPages(TestConcatCodec):
    max_page_kernel_bytes = 1 << 20


class TestConcatCodecThatCopiesSmallPages(TestConcatCodec):
    """One hot pool group in each way."""

    max_page_kernel_bytes = 512


@pytest.mark.gpu
class TestConcatCodecOnCuda(TestConcatCodec):
    """All pages by copies that the driver makes."""

    devices = ("cuda",)

    def make_device(self, name: str, seed: int) -> Device:
        from coldpage.device.cuda import CudaDevice

        return CudaDevice()


@pytest.mark.gpu
class TestConcatCodecThatCopiesPagesOnCuda(TestConcatCodecOnCuda):
    max_page_kernel_bytes = 1 << 20


@pytest.mark.gpu
class TestConcatCodecThatCopiesSmallPagesOnCuda(TestConcatCodecOnCuda):
    max_page_kernel_bytes = 512


class TestPaddingCodec(CodecConformance):
    def make_codec(self) -> ColdPageCodec:
        return PaddingCodec(96)


class TestDeviceIndexCodec(CodecConformance):
    def make_codec(self) -> ColdPageCodec:
        return DeviceIndexCodec()


class TestSlowCodec(CodecConformance):
    def make_codec(self) -> ColdPageCodec:
        return SlowCodec(create_default_cold_page_codec(), 0.001)


class TestPositionCodec(CodecConformance):
    def make_codec(self) -> ColdPageCodec:
        return PositionCodec()


class TestPositionCodecOnTheDevice(CodecConformance):
    def make_codec(self) -> ColdPageCodec:
        return PositionCodec(PageIndexLocation.DEVICE)


class TestCoarseCodec(CodecConformance):
    def make_codec(self) -> ColdPageCodec:
        return CoarseCodec()

    def check_restored(self, life_cycle: LifeCycleDesc, original: _Bytes, restored: _Bytes) -> None:
        np.testing.assert_array_equal(restored, original & 0xF0)


class TestCoarseCodecWithWholeEnds(CodecConformance):
    def make_codec(self) -> ColdPageCodec:
        return CoarseCodec(keeps_sinks=True, keeps_recent=True)

    def check_restored(self, life_cycle: LifeCycleDesc, original: _Bytes, restored: _Bytes) -> None:
        mask = 0xF0 if life_cycle.page_class is PageClass.BODY else 0xFF
        np.testing.assert_array_equal(restored, original & mask)


def _documented_codec(name: str) -> Any:
    """A class that docs/CODECS.md shows, without the manager that it is given to there."""
    text = (Path(__file__).parents[2] / "docs" / "CODECS.md").read_text(encoding="utf-8")
    (example,) = [
        block.partition("```\n")[0].partition("\nlayer = ")[0]
        for block in text.split("```python\n")[1:]
        if f"class {name}(" in block.partition("```\n")[0]
    ]
    names: dict[str, Any] = {}
    exec(compile(example, "docs/CODECS.md", "exec"), names)
    return names[name]


class TestDocumentedCodec(CodecConformance):
    def make_codec(self) -> ColdPageCodec:
        codec: ColdPageCodec = _documented_codec("HalfCodec")()
        return codec

    def make_contents(self, rng: np.random.Generator, num_bytes: int) -> _Bytes:
        return rng.standard_normal(num_bytes // 4, np.float32).view(np.uint8)

    def check_restored(self, life_cycle: LifeCycleDesc, original: _Bytes, restored: _Bytes) -> None:
        floats = original.view(np.float32)
        np.testing.assert_array_equal(restored.view(np.float32), floats.astype(np.float16))

    @pytest.mark.parametrize("device", DEVICES)
    def test_it_refuses_pools_of_odd_sizes(self, device: str) -> None:
        with pytest.raises(pytest.skip.Exception, match="does not hold whole float32 values"):
            self.test_pools_of_odd_sizes(RigMaker(self, device))


_SHAPE = KVShape(2, 4, 8, NumberType.BF16)


def _bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _from_bfloat16(numbers: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (numbers.astype(np.uint32) << 16).view(np.float32)


class TestDocumentedCodecOfShapes(CodecConformance):
    """Layer group 1 has a layer that nobody describes, and one without a shape."""

    pool_groups = tuple(
        HotGroupShape.of_buffers(
            [[HotBuffer(layer, role, _SHAPE.num_bytes) for layer in (0, 1)] for role in roles],
            (group,),
        )
        for group, roles in enumerate((("key", "value"), ("value", "key")))
    )

    def make_codec(self) -> ColdPageCodec:
        described = LayerVectors(_SHAPE, _SHAPE)
        layers = {0: described, 1: described, 100: LayerVectors(_SHAPE, None)}
        pages = {LayerId(layer): vectors for layer, vectors in layers.items()}
        codec: ColdPageCodec = _documented_codec("Int8Values")(pages)
        return codec

    def make_contents(self, rng: np.random.Generator, num_bytes: int) -> _Bytes:
        numbers = rng.standard_normal(num_bytes // 2 + 1, np.float32)
        return _bfloat16(numbers).view(np.uint8)[:num_bytes]

    def check_restored(self, life_cycle: LifeCycleDesc, original: _Bytes, restored: _Bytes) -> None:
        start = 0
        for buffer in sorted(life_cycle.buffers, key=lambda it: (it.pool_index, it.offset_bytes)):
            part = slice(start, start + buffer.num_bytes)
            start = part.stop
            is_packed = buffer.buffer_id.role == "value" and buffer.buffer_id.layer_id < 100
            if is_packed and life_cycle.page_class is PageClass.BODY:
                was, now = (
                    _from_bfloat16(bytes_[part].view(np.uint16)).reshape(_SHAPE[:3])
                    for bytes_ in (original, restored)
                )
                steps = np.abs(was).max(axis=(0, 2), keepdims=True) / 127
                assert (np.abs(was - now) <= 0.51 * steps + np.abs(was) / 128).all()
            else:
                np.testing.assert_array_equal(restored[part], original[part])
        assert start == original.size

    def test_its_pages_are_smaller_and_bad_numbers_do_no_harm(self) -> None:
        kit = _NotFinite()
        maker = RigMaker(kit, "host")
        kit.test_pages_go_out_and_come_back(maker)
        rig = maker(has_sinks=False, has_recent=False)
        saved = 2 * (_SHAPE.num_bytes - _SHAPE.num_numbers - 4 * _SHAPE.tokens_per_block)
        assert rig.configured.cold_page_bytes == (512 - saved, 512)
        maker.close()


class _NotFinite(TestDocumentedCodecOfShapes):
    __test__ = False

    def make_contents(self, rng: np.random.Generator, num_bytes: int) -> _Bytes:
        numbers = rng.choice(np.array([np.nan, np.inf, -np.inf, 1, 0], "f4"), num_bytes // 2 + 1)
        return _bfloat16(numbers).view(np.uint8)[:num_bytes]

    def check_restored(self, life_cycle: LifeCycleDesc, original: _Bytes, restored: _Bytes) -> None:
        """Whatever comes back."""


# ---------------------------------------------------------------------- the kit itself


class _Plain(DeviceIndexCodec):
    """Concatenates, with host indices: right, until something below breaks it."""

    def __init__(self) -> None:
        PageCodec.__init__(self, PageIndexLocation.HOST)


class _ReadsIndicesLate(_Plain):
    """Looks at the pairs when its work runs."""

    def encode(self, life_cycle_id: Any, dst_base: Any, pairs: Any, stream: Any, _: Any) -> None:
        hot = self._hot[life_cycle_id]
        cold = Strided(dst_base, hot.page_bytes)
        if pairs.size:
            dst, src = pairs["dst"].astype(np.int64), pairs["src"].astype(np.int64)

            def work() -> None:
                cold.view(dst)[pairs["dst"]] = hot.load(pairs["src"].astype(np.int64))

            stream.launch(work, reads=hot.ranges(src), writes=cold.ranges(dst))


class _WritesOneByteTooMany(_Plain):
    """Ends each cold page one byte after its end."""

    def encode(self, *args: Any) -> None:
        super().encode(*args)
        _, base, pairs, stream, _ = args
        if pairs.size:
            size = self.query_cold_page_bytes(args[0])
            ends = Strided(base, size).view(np.array([24])).reshape(-1)
            last = (int(pairs["dst"].max()) + 1) * size
            stream.launch(lambda: ends.__setitem__(last, ends[last] ^ 1), reads=(), writes=())


class _Synchronises(_Plain):
    """Waits for the stream."""

    def encode(self, *args: Any) -> None:
        super().encode(*args)
        args[3].synchronize()


class _WaitsForAnEvent(_Plain):
    """Waits for its work in a way that the stream does not see."""

    def encode(self, *args: Any) -> None:
        super().encode(*args)
        args[3].record().synchronize()


class _DeclaresNoReads(_Plain):
    """Reads hot pages without a word."""

    def encode(self, *args: Any) -> None:
        super().encode(*args[:3], _Undeclaring(args[3], "reads"), *args[4:])


class _DeclaresNoWrites(_Plain):
    """Writes hot pages without a word."""

    def decode(self, *args: Any) -> None:
        super().decode(*args[:3], _Undeclaring(args[3], "writes"), *args[4:])


class _Undeclaring:
    """Drops ranges on the way to a stream."""

    def __init__(self, stream: Any, which: str) -> None:
        self._stream, self._which = stream, which

    def launch(self, work: Any, **accesses: Any) -> None:
        self._stream.launch(work, **(accesses | {self._which: ()}))


class _ForgetsAPool(_Plain):
    """Takes the last pool's part for zeros, where there are several."""

    def to_cold(self, hot: HotPages, pages: _Bytes, ordinals: Any) -> _Bytes:
        if len(hot.pools) > 1:
            pages[:, -hot.pools[-1].piece_bytes :] = 0
        return pages


class _KeepsItsFirstStream(_Plain):
    """Works on the stream of the first call ever after."""

    def encode(self, *args: Any) -> None:
        stream = self.__dict__.setdefault("stream", args[3])
        super().encode(*args[:3], stream, *args[4:])


class _KeepsQuiet(_Plain):
    """Takes a rejected submission for success."""

    def encode(self, *args: Any) -> None:
        try:
            super().encode(*args)
        except Exception as error:
            self.error = error


class _DecodesInTwoHalves(_Plain):
    """One submission a page: a rejected second one comes too late."""

    def decode(self, *args: Any) -> None:
        for index in range(args[2].size):
            super().decode(*args[:2], args[2][index : index + 1].copy(), *args[3:])


class _LeavesBytesUnwritten(PaddingCodec):
    """Its padding is whatever was there."""

    def to_cold(self, hot: HotPages, pages: _Bytes, ordinals: Any) -> _Bytes:
        blobs = super().to_cold(hot, pages, ordinals)
        blobs[:, -1] = np.random.default_rng().integers(256, size=len(blobs))
        return blobs


class _ClaimsToBeLossless(CoarseCodec):
    """Drops bits and says that it does not."""

    is_lossless = True


class _CountsPages(PositionCodec):
    """Takes a page's place in the call for its block's ordinal."""

    def to_cold(self, hot: HotPages, pages: _Bytes, ordinals: Any) -> _Bytes:
        return super().to_cold(hot, pages, np.arange(len(pages)))

    def to_hot(self, hot: HotPages, blobs: _Bytes, ordinals: Any) -> _Bytes:
        return super().to_hot(hot, blobs, np.arange(len(blobs)))


class _TakesOneOrdinalForAll(PositionCodec):
    """Looks at the first page's ordinal only."""

    def to_cold(self, hot: HotPages, pages: _Bytes, ordinals: Any) -> _Bytes:
        return super().to_cold(hot, pages, ordinals[:1])

    def to_hot(self, hot: HotPages, blobs: _Bytes, ordinals: Any) -> _Bytes:
        return super().to_hot(hot, blobs, ordinals[:1])


class _ChangesItsMind(_Plain):
    """Gives a size once, and then another."""

    def cold_bytes(self, hot: HotPages) -> int:
        was_asked = self.__dict__.setdefault("was_asked", set())
        is_first = hot.life_cycle.life_cycle_id not in was_asked
        was_asked.add(hot.life_cycle.life_cycle_id)
        return hot.page_bytes + is_first


class _LosesOddBytes(_Plain):
    """Handles pairs of bytes."""

    def to_cold(self, hot: HotPages, pages: _Bytes, ordinals: Any) -> _Bytes:
        pages[:, pages.shape[1] // 2 * 2 :] = 0
        return pages


class _ReadsPagesEarly(_Plain):
    """Takes hot bytes as they are during the call, before earlier work on the stream has run."""

    def encode(self, life_cycle_id: Any, dst_base: Any, pairs: Any, stream: Any, _: Any) -> None:
        hot = self._hot[life_cycle_id]
        cold = Strided(dst_base, hot.page_bytes)
        dst, src = pairs["dst"].astype(np.int64), pairs["src"].astype(np.int64)
        pages = hot.load(src)
        stream.launch(
            lambda: cold.view(dst).__setitem__(dst, pages),
            reads=hot.ranges(src),
            writes=cold.ranges(dst),
        )


class _ReadsIndicesOnTheHost(DeviceIndexCodec):
    """Takes the pairs out of device memory before they have arrived."""

    def encode(self, *args: Any) -> None:
        pairs: DeviceArray = args[2]
        if pairs.size:
            words = Strided(pairs.address, 8).view(np.array([pairs.size - 1])).view("<i4")
            dst, src = words.astype(np.int64).T
            hot = self._hot[args[0]]
            cold = Strided(args[1], hot.page_bytes)
            args[3].launch(
                lambda: cold.view(dst).__setitem__(dst, hot.load(src)),
                reads=hot.ranges(src),
                writes=cold.ranges(dst),
            )


class _ReadsTheHostsIndicesLate(DeviceIndexCodec):
    """Takes what the host has of the pairs when its work runs."""

    def encode(self, life_cycle_id: Any, dst_base: Any, pairs: Any, stream: Any, _: Any) -> None:
        hot = self._hot[life_cycle_id]
        cold = Strided(dst_base, hot.page_bytes)
        if pairs.size:
            host = pairs.host
            sources = hot.ranges(host["src"].astype(np.int64))
            targets = cold.ranges(host["dst"].astype(np.int64))

            def work() -> None:
                dst, src = host["dst"].astype(np.int64), host["src"].astype(np.int64)
                cold.view(dst)[dst] = hot.load(src)

            stream.launch(work, reads=sources, writes=targets)


class _BatchesWhatDiffers(_Plain):
    """Says that two life cycles encode alike, and they do not."""

    def to_cold(self, hot: HotPages, pages: _Bytes, ordinals: Any) -> _Bytes:
        return pages ^ np.uint8(hot.life_cycle.life_cycle_id)

    def to_hot(self, hot: HotPages, blobs: _Bytes, ordinals: Any) -> _Bytes:
        return blobs ^ np.uint8(hot.life_cycle.life_cycle_id)


class _TakesRecentForPacked(_Plain):
    """Decodes pages of recent blocks, which it leaves whole, as if it had packed them."""

    def to_hot(self, hot: HotPages, blobs: _Bytes, ordinals: Any) -> _Bytes:
        is_recent = hot.life_cycle.page_class is PageClass.RECENT
        return blobs ^ np.uint8(0x80) if is_recent else blobs


class _KnowsOtherLayerGroups(_Plain):
    """Has lost something of a layer group that there is not, once it has encoded."""

    num_calls = 0

    def encode(self, *args: Any) -> None:
        super().encode(*args)
        self.num_calls += 1

    def measured_errors(self) -> tuple[CodecErrors, ...]:
        return (CodecErrors(LayerGroupId(9), 1, 0, 0.1, 0.1, 0.1),) * self.num_calls


class _SaysNoErrors(_Plain):
    """Counts what it has lost as a number."""

    def measured_errors(self) -> Any:
        return 0.5


_BROKEN: dict[type[ColdPageCodec], str] = {
    _KnowsOtherLayerGroups: "test_measured_errors_are_of_layer_groups",
    _SaysNoErrors: "test_measured_errors_are_of_layer_groups",
    _ReadsIndicesLate: "test_a_call_does_not_wait_and_nothing_happens_early",
    _WritesOneByteTooMany: "test_pages_go_out_and_come_back",
    _Synchronises: "test_a_call_does_not_wait_and_nothing_happens_early",
    _WaitsForAnEvent: "test_a_call_does_not_wait_and_nothing_happens_early",
    _DeclaresNoReads: "test_pages_go_out_and_come_back",
    _DeclaresNoWrites: "test_pages_go_out_and_come_back",
    _ForgetsAPool: "test_pages_go_out_and_come_back",
    _KeepsItsFirstStream: "test_each_call_uses_its_own_stream_and_base",
    _KeepsQuiet: "test_a_rejected_submission_is_told_and_can_be_repeated",
    _DecodesInTwoHalves: "test_a_rejected_submission_is_told_and_can_be_repeated",
    _LeavesBytesUnwritten: "test_equal_pages_give_equal_blobs",
    _ClaimsToBeLossless: "test_pages_of_every_class_go_out_and_come_back",
    _CountsPages: "test_pages_go_out_and_come_back",
    _TakesOneOrdinalForAll: "test_life_cycles_of_a_class_share_a_call",
    _ChangesItsMind: "test_answers_are_right_and_do_not_change",
    _LosesOddBytes: "test_pools_of_odd_sizes",
    _ReadsPagesEarly: "test_calls_on_a_stream_run_in_order",
    _ReadsIndicesOnTheHost: "test_pages_go_out_and_come_back",
    _ReadsTheHostsIndicesLate: "test_a_call_does_not_wait_and_nothing_happens_early",
    _BatchesWhatDiffers: "test_life_cycles_of_a_class_encode_alike",
    _TakesRecentForPacked: "test_pages_of_every_class_go_out_and_come_back",
}
# What only the simulated device sees.
_SEEN_IN_SIMULATION = {
    _DeclaresNoReads,
    _DeclaresNoWrites,
    _ReadsIndicesOnTheHost,
    _ReadsPagesEarly,
}


def _cases() -> Iterator[Any]:
    for codec, test in _BROKEN.items():
        for device in DEVICES:
            if device == "simulated" or codec not in _SEEN_IN_SIMULATION:
                yield pytest.param(codec, test, device, id=f"{codec.__name__[1:]}-{device}")


def _run(make_codec: Any, test: str, device: str) -> None:
    class Kit(CodecConformance):
        def make_codec(self) -> ColdPageCodec:
            codec: ColdPageCodec = make_codec()
            return codec

    kit = Kit()
    maker = RigMaker(kit, device)
    try:
        getattr(kit, test)(maker)
    finally:
        maker.close()


@pytest.mark.parametrize(("codec", "test", "device"), list(_cases()))
def test_the_kit_finds_a_broken_codec(codec: type[ColdPageCodec], test: str, device: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 -- work on a device dies in many ways
        _run(codec, test, device)
    assert not isinstance(raised.value, TypeError | NameError | AttributeError), raised.value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("test", sorted(set(_BROKEN.values())))
def test_the_codec_that_they_are_made_from_passes(test: str, device: str) -> None:
    _run(_Plain, test, device)


def test_no_test_of_the_kit_is_idle() -> None:
    assert {name for name in dir(CodecConformance) if name.startswith("test_")} == set(
        _BROKEN.values()
    )


def test_a_kit_without_a_codec_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from coldpage.testing import codec_kit\n"
        "class TestMine(codec_kit.CodecConformance):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    sentence = "TestMine has no make_codec: define it, so that it returns a new codec"
    assert sentence in result.stdout.splitlines()
    assert re.search(r"^1 error in ", result.stdout, re.MULTILINE), result.stdout
