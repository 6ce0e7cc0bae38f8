"""What a codec is asked once it is taken, and how each broken answer is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from coldpage.codecs import (
    ConfiguredCodec,
    LifeCycleDesc,
    PoolDesc,
    PoolGroupDesc,
    close_codec,
    configure_taken,
    create_default_cold_page_codec,
    take_codec,
)
from coldpage.errors import CodecConsumedError, CodecError, ConfigurationError, UsageError
from coldpage.testing.example_codecs import CoarseCodec
from coldpage.types import (
    LayerGroupId,
    LifeCycleId,
    MemAddress,
    PageClass,
    PageIndexLocation,
    PoolGroupIndex,
    PoolIndex,
)
from tests.unit.answering_codec import AnsweringCodec

_HOST, _DEVICE = PageIndexLocation.HOST, PageIndexLocation.DEVICE


def _group(index: int, pool_bytes: Sequence[int], *life_cycles: int) -> PoolGroupDesc:
    """A hot pool group; layer groups have a sink (even) and a body life cycle (odd)."""
    pools = [
        PoolDesc(PoolIndex(i), MemAddress(4096 * (i + 1)), size)
        for i, size in enumerate(pool_bytes)
    ]
    classes = PageClass.SINK, PageClass.BODY
    described = [
        LifeCycleDesc(LifeCycleId(lc), LayerGroupId(lc // 2), classes[lc % 2], ())
        for lc in life_cycles
    ]
    return PoolGroupDesc(PoolGroupIndex(index), 8, tuple(pools), tuple(described))


# Life cycles 0, 1, 4 and 5 share a hot pool group; 2 and 3 have another.
_GROUPS = (_group(0, (96, 32), 0, 1, 4, 5), _group(1, (128,), 2, 3))


def _sizes(answers: dict[int, Any]) -> dict[str, Any]:
    return {"query_cold_page_bytes": answers}


def _batching(answers: dict[int, Any]) -> dict[str, Any]:
    return {"get_batching_layer_group_id": answers}


def _places(answers: dict[int, Any]) -> dict[str, Any]:
    return {"query_page_index_location": answers}


# ---------------------------------------------------------------------- good answers


def test_the_default_codec_has_good_answers() -> None:
    codec = create_default_cold_page_codec()
    configured = ConfiguredCodec(codec, _GROUPS)
    assert configured.codec is codec
    assert configured.cold_page_bytes == (128,) * 6
    assert configured.representative.tolist() == [0, 0, 2, 2, 0, 0]
    assert configured.representative.dtype == np.int16
    assert configured.locations == (_HOST,) * 6
    assert not configured.any_device_indices
    assert configured.max_cold_page_bytes == 128
    with pytest.raises(ValueError, match="read-only"):
        configured.representative[0] = 1


def test_it_is_configured_once_and_before_it_is_asked_anything() -> None:
    codec = AnsweringCodec()
    ConfiguredCodec(codec, _GROUPS)
    assert codec.calls[0] == "configure"
    assert codec.calls.count("configure") == 1
    assert codec.described == list(_GROUPS)
    assert len(set(codec.calls)) == len(codec.calls) == 1 + 3 * 6, "each answer is asked for once"
    assert codec.num_closed == 0


def test_answers_may_differ_between_life_cycles_that_are_no_class() -> None:
    answers = _sizes({0: 50, 3: 50}) | _batching({i: i for i in range(6)}) | _places({2: _DEVICE})
    configured = ConfiguredCodec(AnsweringCodec(**answers), _GROUPS)
    assert configured.cold_page_bytes == (50, 128, 128, 50, 128, 128)
    assert configured.representative.tolist() == [0, 1, 2, 3, 4, 5]
    assert configured.locations == (_HOST, _HOST, _DEVICE, _HOST, _HOST, _HOST)
    assert configured.any_device_indices
    assert configured.max_cold_page_bytes == 128


def test_numpy_integers_are_integers() -> None:
    answers = _sizes({0: np.int64(128)}) | _batching({5: np.int16(0)})
    configured = ConfiguredCodec(AnsweringCodec(**answers), _GROUPS)
    assert [type(size) for size in configured.cold_page_bytes] == [int] * 6
    assert configured.representative.tolist() == [0, 0, 2, 2, 0, 0]


def test_page_classes_of_one_hot_pool_group_may_have_two_cold_sizes() -> None:
    configured = ConfiguredCodec(CoarseCodec(keeps_sinks=True), _GROUPS)
    assert configured.cold_page_bytes == (128, 64, 128, 64, 128, 64)
    assert configured.representative.tolist() == [0, 1, 2, 3, 0, 1]


def test_a_codec_without_parameters_has_a_short_name() -> None:
    configured = ConfiguredCodec(create_default_cold_page_codec(), _GROUPS)
    assert configured.name == "concat v1"
    assert configured.identity == "concat/1/"


def test_a_name_says_everything_that_changes_bytes() -> None:
    codec = AnsweringCodec()
    codec.codec_id, codec.version, codec.parameters = "int4", 2, "group=64"
    configured = ConfiguredCodec(codec, _GROUPS)
    assert configured.name == "int4 v2 group=64"
    assert configured.identity == "int4/2/group=64"


# ---------------------------------------------------------------------- broken answers

_BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "size of zero": (
        _sizes({1: 0}),
        "codec odd has a cold page of 0 bytes for life cycle 1: "
        "return its fixed, positive size from query_cold_page_bytes",
    ),
    "negative size": (
        _sizes({0: -128}),
        "codec odd has a cold page of -128 bytes for life cycle 0: "
        "return its fixed, positive size from query_cold_page_bytes",
    ),
    "size with a fraction": (
        _sizes({2: 128.0}),
        "codec odd has a cold page of 128.0 bytes for life cycle 2: "
        "return a whole number from query_cold_page_bytes",
    ),
    "size that is a truth": (
        _sizes({2: True}),
        "codec odd has a cold page of True bytes for life cycle 2: "
        "return a whole number from query_cold_page_bytes",
    ),
    "no size": (
        _sizes({5: None}),
        "codec odd has a cold page of None bytes for life cycle 5: "
        "return a whole number from query_cold_page_bytes",
    ),
    "no location": (
        _places({2: None}),
        "codec odd wants the page indices of life cycle 2 at None: "
        "return a PageIndexLocation from query_page_index_location",
    ),
    "location by its name": (
        _places({2: "host"}),
        "codec odd wants the page indices of life cycle 2 at 'host': "
        "return a PageIndexLocation from query_page_index_location",
    ),
    "no representative": (
        _batching({2: None}),
        "codec odd batches life cycle 2 as None, which is no life cycle: "
        "return one from get_batching_layer_group_id, or the argument to batch nothing",
    ),
    "negative representative": (
        _batching({0: -1}),
        "codec odd batches life cycle 0 as -1, which says that it failed: "
        "return the smallest life cycle of the class from get_batching_layer_group_id",
    ),
    "unknown representative": (
        _batching({2: 6}),
        "codec odd batches life cycle 2 as 6, which configure has not named: "
        "return one of the 6 life cycles from get_batching_layer_group_id",
    ),
    "representative above its member": (
        _batching({0: 1, 1: 1, 4: 1, 5: 1}),
        "codec odd batches life cycle 0 as 1, which is greater: "
        "return the smallest life cycle of the class from get_batching_layer_group_id",
    ),
    "representative of something else": (
        _batching({1: 0, 5: 1}),
        "codec odd batches life cycle 5 as 1, and that one as 0: "
        "return the same life cycle for the whole class from get_batching_layer_group_id",
    ),
    "two hot pool groups": (
        _batching({2: 0, 3: 0}),
        "codec odd batches life cycle 2 as 0, which lies in another hot pool group: "
        "batch only life cycles that configure describes in one group",
    ),
    "two cold pool groups": (
        _sizes({4: 64}),
        "codec odd batches life cycle 4 as 0, whose cold pages have 128 bytes and not 64, "
        "so that they lie in another cold pool group: batch only life cycles of one size",
    ),
    "two index locations": (
        _places({4: _DEVICE}),
        "codec odd batches life cycle 4 as 0, whose page indices it wants in host and not in "
        "device memory: batch only life cycles with one index location",
    ),
}


@pytest.mark.parametrize(("answers", "sentence"), _BROKEN.values(), ids=_BROKEN.keys())
def test_a_broken_answer_is_refused_in_one_sentence(answers: dict[str, Any], sentence: str) -> None:
    codec = AnsweringCodec(**answers)
    with pytest.raises(CodecError) as raised:
        ConfiguredCodec(codec, _GROUPS)
    assert str(raised.value) == sentence
    assert isinstance(raised.value, ConfigurationError)
    assert codec.num_closed == 0, "that is its owner's part"


_UNNAMED: dict[str, tuple[dict[str, Any], str]] = {
    "empty id": (
        {"codec_id": ""},
        "codec AnsweringCodec has the codec_id '': "
        "give it a name, in one or more characters other than '/'",
    ),
    "id that is no string": (
        {"codec_id": 7},
        "codec AnsweringCodec has the codec_id 7: "
        "give it a name, in one or more characters other than '/'",
    ),
    "id with a slash": (
        {"codec_id": "int4/1"},
        "codec AnsweringCodec has the codec_id 'int4/1': "
        "give it a name, in one or more characters other than '/'",
    ),
    "version that is no number": (
        {"version": "1"},
        "codec odd has the version '1': count the versions of its format in whole numbers",
    ),
    "parameters that are no string": (
        {"parameters": None},
        "codec odd has the parameters None: "
        "write what changes its bytes as a string, empty for nothing",
    ),
    "parameters that no header has room for": (
        {"parameters": "ä" * 510},
        "codec odd has a codec_id, version and parameters of 1,026 bytes together, "
        "of which a disk tier can keep 1,024: put a hash of the parameters there",
    ),
    "id that no header has room for": (
        {"codec_id": "x" * 1022},
        f"codec {'x' * 64} has a codec_id, version and parameters of 1,025 bytes together, "
        "of which a disk tier can keep 1,024: put a hash of the parameters there",
    ),
    "parameters that can not be written": (
        {"parameters": "\ud800"},
        "codec 'odd' has a codec_id or parameters that are no Unicode text: "
        "use characters that UTF-8 can write",
    ),
}


@pytest.mark.parametrize(("attributes", "sentence"), _UNNAMED.values(), ids=_UNNAMED.keys())
def test_a_format_without_a_name_is_refused(attributes: dict[str, Any], sentence: str) -> None:
    codec = AnsweringCodec()
    for name, value in attributes.items():
        setattr(codec, name, value)
    with pytest.raises(CodecError) as raised:
        ConfiguredCodec(codec, _GROUPS)
    assert str(raised.value) == sentence
    assert codec.calls == [], "it is not asked anything"


def test_a_format_that_just_fits_a_header_is_taken() -> None:
    codec = AnsweringCodec()
    codec.parameters = "ä" * 509
    assert len(ConfiguredCodec(codec, _GROUPS).identity.encode()) == 1024


def test_a_codec_that_forgot_its_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AnsweringCodec, "codec_id")
    with pytest.raises(CodecError, match=r"^codec AnsweringCodec has the codec_id None: "):
        ConfiguredCodec(AnsweringCodec(), _GROUPS)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("configure", "configure"),
        ("query_cold_page_bytes", "query_cold_page_bytes of life cycle 0"),
        ("query_page_index_location", "query_page_index_location of life cycle 0"),
        ("get_batching_layer_group_id", "get_batching_layer_group_id of life cycle 0"),
    ],
)
def test_a_bug_in_a_codec_is_told_with_its_place_and_cause(method: str, where: str) -> None:
    bug = ZeroDivisionError("no")
    with pytest.raises(CodecError) as raised:
        ConfiguredCodec(AnsweringCodec(**{method: bug}), _GROUPS)
    assert str(raised.value) == f"codec odd failed in {where}: ZeroDivisionError('no')"
    assert raised.value.__cause__ is bug
    refusal = CodecError("pools of 96 bytes can not be packed: use whole groups")
    with pytest.raises(CodecError) as raised:
        ConfiguredCodec(AnsweringCodec(**{method: refusal}), _GROUPS)
    assert raised.value is refusal


def test_a_description_with_gaps_is_the_callers_bug() -> None:
    for groups in (
        [],
        [_group(1, (8,), 0)],
        [_group(0, (8,), 0, 2)],
        [_group(0, (8,), 0), _group(1, (8,), 0)],
    ):
        codec = AnsweringCodec()
        with pytest.raises(AssertionError):
            ConfiguredCodec(codec, groups)
        assert codec.calls == []


# ---------------------------------------------------------------------- consumption


def test_a_codec_is_taken_once() -> None:
    codec = AnsweringCodec()
    assert take_codec(codec) is codec
    assert codec.is_consumed
    with pytest.raises(CodecConsumedError) as raised:
        take_codec(codec)
    assert str(raised.value) == (
        "codec odd belongs to another manager already: make a new one for each manager"
    )
    assert isinstance(raised.value, UsageError)
    assert codec.calls == []


class _Unclosable(AnsweringCodec):
    def close(self) -> None:
        super().close()
        raise OSError("a file is gone")


def test_what_goes_wrong_with_closing_is_logged_and_hides_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    codec = _Unclosable()
    close_codec(codec)
    refusing = _Unclosable(**_sizes({2: 0}))
    with pytest.raises(CodecError, match="cold page of 0 bytes"):
        configure_taken(refusing, _GROUPS)
    assert (codec.num_closed, refusing.num_closed) == (1, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "codec odd failed in close, and may hold on to what it has: OSError('a file is gone')"
    ] * 2


def test_a_codec_that_refuses_is_consumed_and_closed() -> None:
    codec = AnsweringCodec(**_sizes({2: 0}))
    with pytest.raises(CodecError):
        configure_taken(codec, _GROUPS)
    assert codec.is_consumed
    assert codec.num_closed == 1
    codec = AnsweringCodec()
    assert configure_taken(codec, _GROUPS).codec is codec
    assert codec.is_consumed
    assert codec.num_closed == 0
    with pytest.raises(CodecConsumedError):
        configure_taken(codec, _GROUPS)
    assert codec.num_closed == 0, "another has it"


def test_without_a_codec_there_is_a_default_one() -> None:
    first, second = take_codec(None), take_codec(None)
    assert (first.codec_id, first.is_consumed) == ("concat", True)
    assert first is not second


@pytest.mark.parametrize(
    ("max_page_kernel_bytes", "locations"),
    [
        (0, (_HOST,) * 6),
        (95, (_HOST,) * 6),
        (96, (_DEVICE, _DEVICE, _HOST, _HOST, _DEVICE, _DEVICE)),
        (1 << 20, (_DEVICE,) * 6),
    ],
)
def test_the_default_codec_lets_the_device_copy_small_pages(
    max_page_kernel_bytes: int, locations: tuple[PageIndexLocation, ...]
) -> None:
    configured = ConfiguredCodec(take_codec(None, max_page_kernel_bytes), _GROUPS)
    assert configured.locations == locations
    other = ConfiguredCodec(create_default_cold_page_codec(), _GROUPS)
    assert configured.identity == other.identity
    assert configured.cold_page_bytes == other.cold_page_bytes


@pytest.mark.parametrize("thing", ["concat", AnsweringCodec, 0])
def test_what_is_no_codec_is_refused(thing: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        take_codec(thing)
    assert str(raised.value) == (
        f"{thing!r} is no codec: pass an instance of a subclass of ColdPageCodec, "
        "or None for the default"
    )
