"""The codecs of one manager: taken, told apart, shared between tiers, and closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coldpage.codecs import CodecErrors, ColdPageCodec, create_default_cold_page_codec
from coldpage.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManagerConfig,
)
from coldpage.device.base import Stream
from coldpage.device.host import HostDevice, HostMemory
from coldpage.errors import CodecConsumedError, CodecError, ConfigurationError
from coldpage.manager import KVCacheManager
from coldpage.manager.tier_codecs import TierCodecs
from coldpage.migration import NUM_SCRATCH_SLOTS
from coldpage.migration.codec_calls import INDEX_RING_BYTES
from coldpage.prefix import EXACT_PROVENANCE
from coldpage.testing.example_codecs import CoarseCodec, DeviceIndexCodec, PaddingCodec
from coldpage.types import BufferRole, LayerGroupId, LayerId
from tests.unit.answering_codec import AnsweringCodec

_PAGE_BYTES = 256
_LAYER = AttentionLayerConfig(
    LayerId(0), tuple(BufferConfig(BufferRole(role), 128) for role in ("key", "value"))
)
_HOT = DeviceTierConfig(12 * _PAGE_BYTES)


def _host(codec: Any = None, num_pages: int = 20) -> HostTierConfig:
    return HostTierConfig(num_pages * _PAGE_BYTES, codec)


def _config(*cold: CacheTierConfig) -> KVCacheManagerConfig:
    return KVCacheManagerConfig(4, (_HOT, *cold), (_LAYER,), model_fingerprint=b"model")


class _Noted(AnsweringCodec):
    """Notes its end in a list that others share, and what it encodes and decodes in its own."""

    def __init__(self, name: str, ends: list[str], *, fails: bool = False, **answers: Any) -> None:
        super().__init__(**answers)
        self.codec_id = name
        self._ends = ends
        self._fails = fails

    def encode(self, *args: Any) -> None:
        self.calls.append("encode")
        super().encode(*args)

    def decode(self, *args: Any) -> None:
        self.calls.append("decode")
        super().decode(*args)

    def close(self) -> None:
        self._ends.append(self.codec_id)
        if self._fails:
            raise RuntimeError(f"{self.codec_id} would not close")


# ---------------------------------------------------------------------- preparing


class _Preparing(_Noted):
    """Wants to be ready before its first page, and says what it has lost."""

    error: BaseException | None = None

    def prepare(self, stream: Stream) -> None:
        stream.synchronize()
        self.calls.append("prepare")
        if self.error is not None:
            raise self.error

    def measured_errors(self) -> tuple[CodecErrors, ...]:
        return (CodecErrors(LayerGroupId(0), len(self._ends), 0, 0.0, 0.0, 0.0),)


class _Vague(AnsweringCodec):
    """Says what ``said`` is of what it has lost, or raises it."""

    said: Any = None

    def measured_errors(self) -> Any:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (RuntimeError("no"), r"codec odd failed in measured_errors: RuntimeError('no')"),
        (None, "codec odd says None of what it has lost: return a tuple of CodecErrors"),
        ((0.5,), "codec odd says (0.5,) of what it has lost: return a tuple of CodecErrors"),
    ],
)
def test_what_a_codec_can_not_say_is_logged_once_and_ends_nothing(
    said: Any, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    vague, clear = _Vague(), _Preparing("clear", [])
    vague.said = said
    with KVCacheManager(_config(_host(vague), _host(clear))) as manager:
        for _ in range(2):
            assert [it.codec for it in manager.stats().codecs] == ["clear"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(sentence)
    assert line.endswith("(logged once: it is left out of statistics)")


def test_codecs_in_use_prepare_once_when_they_are_configured() -> None:
    codecs = [_Preparing(name, []) for name in "abc"]
    config = _config(_host(codecs[1]), _host(codecs[2]), _host(codecs[1]))
    with KVCacheManager(config, codec=codecs[0]) as manager:
        for codec, count in zip(codecs, (0, 1, 1), strict=True):
            assert codec.calls.count("prepare") == count
            assert codec.calls.index("configure") == 0
        assert codecs[1].calls[-1] == "prepare"
        manager.stats()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ImportError("no numba"), r"^codec a v1 failed in prepare: ImportError\('no numba'\)$"),
        (SystemExit(3), r"^codec a v1 failed in prepare: SystemExit\(3\)$"),
        (CodecError("use another one"), "^use another one$"),
    ],
)
def test_a_codec_that_can_not_prepare_stops_the_manager(
    error: BaseException, sentence: str
) -> None:
    ends: list[str] = []
    codec = _Preparing("a", ends)
    codec.error = error
    with pytest.raises(CodecError, match=sentence):
        KVCacheManager(_config(_host()), codec=codec)
    assert ends == ["a"]


def test_what_codecs_have_lost_has_their_names() -> None:
    first, second, third = (_Preparing(name, ["x"] * i) for i, name in enumerate("aab"))
    second.parameters = "finer"
    config = _config(_host(first), _host(second), _host(third), _host(CoarseCodec()))
    with KVCacheManager(config) as manager:
        found = [(it.codec, it.errors[0].num_samples) for it in manager.stats().codecs]
    assert found == [("a v1", 0), ("a v1 finer", 1), ("b", 2)]


# ---------------------------------------------------------------------- taking


def _take(*cold: HostTierConfig, codec: ColdPageCodec | None = None) -> TierCodecs:
    return TierCodecs((_HOT, *cold), codec)


def test_every_codec_given_is_taken_once_and_closed_in_reverse_order() -> None:
    ends: list[str] = []
    a, b, c = (_Noted(name, ends) for name in "abc")
    codecs = _take(_host(b), _host(), _host(c), _host(b), _host(a), codec=a)
    assert all(codec.is_consumed for codec in (a, b, c))
    assert ends == []
    codecs.close()
    assert ends == ["c", "b", "a"]


@pytest.mark.parametrize("place", range(4))
def test_one_that_another_manager_has_is_left_to_it_and_the_rest_are_consumed(place: int) -> None:
    ends: list[str] = []
    given = [_Noted(name, ends) for name in "abcd"]
    given[place].is_consumed = True
    with pytest.raises(CodecConsumedError, match="belongs to another manager already"):
        _take(*map(_host, given[1:]), codec=given[0])
    assert all(codec.is_consumed for codec in given)
    assert ends == [name for name in "dcba" if name != "abcd"[place]]


@pytest.mark.parametrize("no_codec", ["int4", AnsweringCodec, 0])
def test_a_tier_codec_that_is_none_is_refused_in_a_sentence(no_codec: Any) -> None:
    ends: list[str] = []
    before, after = _Noted("before", ends), _Noted("after", ends)
    with pytest.raises(ConfigurationError) as raised:
        KVCacheManager(_config(_host(no_codec), _host(after)), codec=before)
    assert str(raised.value) == (
        f"{no_codec!r} is no codec: pass an instance of a subclass of ColdPageCodec, "
        "or None for the default"
    )
    assert before.is_consumed
    assert after.is_consumed
    assert ends == ["after", "before"]


def test_a_default_codec_is_made_only_where_a_tier_needs_one() -> None:
    with KVCacheManager(_config(_host(CoarseCodec()), _host(CoarseCodec()))) as manager:
        levels = manager.stats().levels
        assert [level.codec for level in levels] == ["", *["coarse v1 nibbles"] * 2]
        assert levels[0].total_slots == 12
    with KVCacheManager(_config(_host(CoarseCodec()), _host())) as manager:
        assert [lv.codec for lv in manager.stats().levels] == ["", "coarse v1 nibbles", "concat v1"]


@pytest.mark.parametrize("max_page_kernel_bytes", [0, _PAGE_BYTES])
def test_a_default_codec_suits_the_device(max_page_kernel_bytes: int) -> None:
    """Its indices go to device memory where the device copies such pages itself."""
    sizes: list[int] = []

    class NotingDevice(HostDevice):
        def allocate(self, num_bytes: int, *args: Any, **options: Any) -> HostMemory:
            sizes.append(num_bytes)
            return super().allocate(num_bytes, *args, **options)

    device = NotingDevice()
    device.max_page_kernel_bytes = max_page_kernel_bytes
    KVCacheManager(_config(_host()), device=device).close()
    assert (INDEX_RING_BYTES in sizes) == (max_page_kernel_bytes > 0)
    device.close()


# ---------------------------------------------------------------------- ending


@pytest.mark.parametrize("failing", ["a", "b", "c", "abc"])
def test_a_codec_that_will_not_close_keeps_none_open(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[str] = []
    a, b, c = (_Noted(name, ends, fails=name in failing) for name in "abc")
    codecs = _take(_host(b), _host(c), _host(), codec=a)
    codecs.close()
    assert ends == ["c", "b", "a"]
    assert [record.getMessage() for record in caplog.records] == [
        f"codec {name} failed in close, and may hold on to what it has: "
        f"RuntimeError('{name} would not close')"
        for name in failing[::-1]
    ]


def test_a_codec_that_will_not_close_keeps_no_thread_of_its_manager(tmp_path: Path) -> None:
    ends: list[str] = []
    a, b = _Noted("a", ends), _Noted("b", ends, fails=True)
    threads = set(threading.enumerate())
    disk = DiskTierConfig(str(tmp_path), 1 << 20, a)
    manager = KVCacheManager(_config(disk, _host(b)))
    manager.close()
    assert ends == ["b", "a"]
    assert set(threading.enumerate()) == threads
    manager.close()
    assert ends == ["b", "a"], "closed once"
    KVCacheManager(_config(DiskTierConfig(str(tmp_path), 1 << 20))).close()


def test_why_codecs_were_refused_is_not_hidden_by_one_that_will_not_close() -> None:
    ends: list[str] = []
    stubborn, other = _Noted("stubborn", ends, fails=True), _Noted("other", ends)
    with pytest.raises(ConfigurationError, match="'int4' is no codec"):
        _take(_host(stubborn), _host("int4"), codec=other)
    assert ends == ["stubborn", "other"]


# ---------------------------------------------------------------------- formats


class _Nameless(AnsweringCodec):
    """As one whose author left the name out: the base class only declares it."""

    @property
    def codec_id(self) -> str:  # type: ignore[override]
        raise AttributeError("codec_id")


def _with_a_list_of_parameters() -> AnsweringCodec:
    codec = AnsweringCodec()
    codec.parameters = ["group", 32]  # type: ignore[assignment]
    return codec


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_Nameless, "codec _Nameless has the codec_id None: give it a name"),
        (_with_a_list_of_parameters, "codec odd has the parameters ['group', 32]: write"),
    ],
)
@pytest.mark.parametrize("num_cold", [0, 1, 2])
def test_a_codec_without_a_proper_name_is_refused_and_closed(
    make: type[AnsweringCodec], sentence: str, num_cold: int
) -> None:
    codec, cold = make(), [_host(CoarseCodec()), _host()][2 - num_cold :]
    with pytest.raises(CodecError) as raised:
        KVCacheManager(_config(*cold), codec=codec)
    assert str(raised.value).startswith(sentence)
    assert codec.num_closed == 1


def _num_hot_slots(*cold: CacheTierConfig, codec: ColdPageCodec | None = None) -> int:
    with KVCacheManager(_config(*cold), codec=codec) as manager:
        total = manager.stats().levels[0].total_slots
        # Codecs and kernels see the scratch slots too, which come first.
        (group,) = manager.hot_pool_groups()
        assert group.num_slots in (total, total + NUM_SCRATCH_SLOTS)
        assert group.num_slots == 12
        return total


def test_only_two_formats_need_scratch_slots() -> None:
    twice = CoarseCodec()
    assert _num_hot_slots(_host(twice), _host(twice)) == 12
    assert _num_hot_slots(_host(CoarseCodec()), _host(CoarseCodec())) == 12
    assert _num_hot_slots(_host(PaddingCodec(4)), _host(PaddingCodec(4))) == 12
    assert _num_hot_slots(_host(create_default_cold_page_codec()), _host()) == 12
    assert _num_hot_slots(_host(CoarseCodec()), _host()) == 12 - NUM_SCRATCH_SLOTS
    # Equal in name, and not in what sets them apart.
    assert _num_hot_slots(_host(PaddingCodec(4)), _host(PaddingCodec(8))) == 12 - NUM_SCRATCH_SLOTS


def test_a_codec_that_no_tier_uses_is_checked_and_takes_no_room() -> None:
    ends: list[str] = []
    spare, own = _Noted("spare", ends), PaddingCodec(4)
    with KVCacheManager(_config(_host(own)), codec=spare) as manager:
        assert manager.stats().levels[0].total_slots == 12
        assert [level.codec for level in manager.stats().levels] == ["", "padding v1 alignment=4"]
        # It loses something, and no page passes through it.
        assert not spare.is_lossless
        assert manager.provenance == EXACT_PROVENANCE
    assert spare.calls.count("configure") == 1
    assert ends == ["spare"]
    broken = AnsweringCodec(query_cold_page_bytes={0: 0})
    with pytest.raises(CodecError, match="cold page of 0 bytes"):
        KVCacheManager(_config(_host(PaddingCodec(4))), codec=broken)


def test_a_manager_without_cold_tiers_asks_its_codec_all_the_same() -> None:
    codec = AnsweringCodec()
    with KVCacheManager(_config(), codec=codec) as manager:
        assert codec.calls[0] == "configure"
        assert {call.split()[0] for call in codec.calls[1:]} == {
            "query_cold_page_bytes",
            "query_page_index_location",
            "get_batching_layer_group_id",
        }
        assert list(manager.hot_pool_groups()) == codec.described
    assert codec.num_closed == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PaddingCodec(4), CoarseCodec()),
        (CoarseCodec(), PaddingCodec(4)),
        (CoarseCodec(), CoarseCodec(keeps_sinks=True)),
        (PaddingCodec(4), DeviceIndexCodec()),
    ],
    ids=lambda codec: codec.codec_id,
)
def test_provenance_names_each_format_that_loses_something(
    first: ColdPageCodec, second: ColdPageCodec
) -> None:
    lossy = [c for c in (first, second) if not c.is_lossless]
    with KVCacheManager(_config(_host(first), _host(second))) as manager:
        provenance = manager.provenance
    names = sorted(f"{c.codec_id}/{c.version}/{c.parameters}".encode() for c in lossy)
    told = b"".join(len(name).to_bytes(8, "little") + name for name in names)
    assert provenance == (told if lossy else EXACT_PROVENANCE)


# ---------------------------------------------------------------------- raw copies


def _press_down(manager: KVCacheManager, num_blocks: Sequence[int]) -> dict[str, int]:
    """Sequences, one after the other, that push each other down; returns pages moved by path."""
    for number, length in enumerate(num_blocks):
        cache = manager.create_kv_cache()
        assert cache.resume()
        assert cache.resize(4 * length)
        cache.commit(range(1000 * number, 1000 * number + 4 * length))
        cache.suspend()
        manager.poll()
        manager.finish_transfers()
    manager.check_integrity()
    return dict(manager.stats().moved_pages)


def test_two_objects_of_one_format_share_raw_copies() -> None:
    ends: list[str] = []
    first, second = _Noted("same", ends), _Noted("same", ends)
    config = _config(_host(first, num_pages=10), _host(second, num_pages=60))
    with KVCacheManager(config) as manager:
        moved = _press_down(manager, [8] * 5)
        assert moved["host-host2"] > 0
        assert manager.stats().totals.get("transcoded_pages", 0) == 0
    assert "encode" in first.calls
    assert not {"encode", "decode"} & set(second.calls), "one object does the work of both"
    assert ends == ["same", "same"]


def test_two_formats_do_not() -> None:
    ends: list[str] = []
    first, second = _Noted("one", ends), _Noted("other", ends)
    config = _config(_host(first, num_pages=10), _host(second, num_pages=60))
    with KVCacheManager(config) as manager:
        moved = _press_down(manager, [6] * 6)
        assert manager.stats().totals["transcoded_pages"] == moved["host-host2"] > 0
    assert "decode" in first.calls
    assert "encode" in second.calls


def test_a_format_of_two_sizes_is_refused_whichever_tier_has_it(tmp_path: Path) -> None:
    ends: list[str] = []
    sizes = ({0: 256}, {0: 300}, {0: 256})
    codecs = [_Noted("same", ends, query_cold_page_bytes=size) for size in sizes]
    disk = DiskTierConfig(str(tmp_path), 1 << 20, codecs[1])
    with pytest.raises(CodecError) as raised:
        KVCacheManager(_config(_host(codecs[0]), disk, _host(codecs[2])))
    assert str(raised.value) == (
        "two codecs are both called same v1 and differ in the size of their cold pages: "
        "say in `parameters` what sets them apart"
    )
    assert ends == ["same"] * 3
    assert all(codec.is_consumed for codec in codecs)
