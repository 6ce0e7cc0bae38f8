"""Configuration refuses what can not work, in one line that says what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coldpage.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    ReuseScope,
)
from coldpage.errors import ColdpageError, ConfigurationError
from coldpage.types import BufferRole, CacheTier, LayerId

_KEY, _VALUE = BufferRole("key"), BufferRole("value")
_HOT = DeviceTierConfig(1 << 20)
_HOST = HostTierConfig(1 << 20)


def _layer(layer_id: int = 0, **settings: Any) -> AttentionLayerConfig:
    settings.setdefault("buffers", (BufferConfig(_KEY, 64), BufferConfig(_VALUE, 64)))
    return AttentionLayerConfig(LayerId(layer_id), **settings)


def _config(**settings: Any) -> KVCacheManagerConfig:
    defaults: dict[str, Any] = {
        "tokens_per_block": 16,
        "cache_tiers": (_HOT,),
        "layers": (_layer(),),
        "model_fingerprint": b"model",
    }
    return KVCacheManagerConfig(**defaults | settings)


class _Codec:
    """What a configuration knows of a codec."""

    codec_id = "secret-codec"
    version = 1
    parameters = ""
    is_lossless = True


_TWO_KEYS = (BufferConfig(_KEY, 64), BufferConfig(_KEY, 32))

# What is wrong, and the sentence that must name it and the way out.
_BAD: dict[str, tuple[Callable[[], object], str]] = {
    "empty buffer": (
        lambda: BufferConfig(_KEY, 0),
        "buffer 'key' needs a positive size, not 0 bytes",
    ),
    "negative buffer": (
        lambda: BufferConfig(_VALUE, -8),
        "buffer 'value' needs a positive size, not -8 bytes",
    ),
    "no buffers": (
        lambda: _layer(3, buffers=()),
        "layer 3 has no buffers: give it a key and a value buffer",
    ),
    "one role twice": (
        lambda: _layer(3, buffers=_TWO_KEYS),
        "layer 3 names a buffer role twice (key, key): use each role once",
    ),
    "no window": (
        lambda: _layer(3, sliding_window_tokens=0),
        "layer 3 has a sliding window of 0 tokens: give it at least one, or None for no window",
    ),
    "negative sinks": (
        lambda: _layer(3, num_sink_tokens=-1),
        "layer 3 has -1 sink tokens: use 0 for none",
    ),
    "negative recent blocks": (
        lambda: _config(num_recent_blocks=-1),
        "num_recent_blocks is -1: give a number of blocks, 0 for none",
    ),
    "no tokens in a block": (
        lambda: _config(tokens_per_block=0),
        "tokens_per_block is 0: use at least 1, usually 16",
    ),
    "no layers": (lambda: _config(layers=()), "a manager needs at least one layer"),
    "one layer twice": (
        lambda: _config(layers=(_layer(4), _layer(5), _layer(4))),
        "layer_id 4 is used twice: give each layer an id of its own",
    ),
    "zero utilisation": (
        lambda: _config(max_util_for_resume=0.0),
        "max_util_for_resume is 0.0: it must lie in (0, 1]",
    ),
    "too much utilisation": (
        lambda: _config(max_util_for_resume=1.01),
        "max_util_for_resume is 1.01: it must lie in (0, 1]",
    ),
    "utilisation that is no number": (
        lambda: _config(max_util_for_resume=float("nan")),
        "max_util_for_resume is nan: it must lie in (0, 1]",
    ),
    "no tiers": (
        lambda: _config(cache_tiers=()),
        "the first cache tier must be a DeviceTierConfig: the level that attention reads",
    ),
    "no hot tier": (
        lambda: _config(cache_tiers=(_HOST,)),
        "the first cache tier must be a DeviceTierConfig: the level that attention reads",
    ),
    "nine tiers": (
        lambda: _config(cache_tiers=(_HOT, *[_HOST] * 8)),
        "9 cache tiers: use at most 8",
    ),
    "a tier without bytes": (
        lambda: _config(cache_tiers=(_HOT, HostTierConfig(0))),
        "the host tier has no bytes: give it a positive quota",
    ),
    "a hot tier with a codec": (
        lambda: _config(cache_tiers=(DeviceTierConfig(1, _Codec()), _HOST)),
        "the first cache tier, which attention reads, can not have a codec: give it to a later one",
    ),
    "no directory": (
        lambda: DiskTierConfig("", 1 << 20),
        "the disk tier has no usable path (''): name a directory",
    ),
    "a path that no file system has": (
        lambda: DiskTierConfig("/tmp/a\0b", 1 << 20),
        r"the disk tier has no usable path ('/tmp/a\x00b'): name a directory",
    ),
    "a history longer than the capacity": (
        lambda: KVCacheDesc(capacity=8, history_length=9),
        "a sequence with a capacity of 8 and a history of 9 tokens can not be: "
        "use 0 <= history_length <= capacity, and a capacity of at least 1",
    ),
    "a negative history": (
        lambda: KVCacheDesc(capacity=8, history_length=-1),
        "a sequence with a capacity of 8 and a history of -1 tokens can not be: "
        "use 0 <= history_length <= capacity, and a capacity of at least 1",
    ),
    "a sequence without capacity": (
        lambda: KVCacheDesc(capacity=0, history_length=0),
        "a sequence with a capacity of 0 and a history of 0 tokens can not be: "
        "use 0 <= history_length <= capacity, and a capacity of at least 1",
    ),
    "an empty batch": (lambda: BatchDesc(()), "a batch needs at least one sequence"),
    "a system prompt longer than a sequence": (
        lambda: BatchDesc((KVCacheDesc(9, 0), KVCacheDesc(8, 8)), system_prompt_length=9),
        "a system prompt of 9 tokens does not fit every sequence of the batch: "
        "make it shorter or the capacities larger",
    ),
    "a negative system prompt": (
        lambda: BatchDesc((KVCacheDesc(8, 8),), system_prompt_length=-1),
        "a system prompt of -1 tokens can not be: use 0 for none",
    ),
    "a negative watermark": (
        lambda: _config(free_watermark=-0.1),
        "free_watermark is -0.1: it must lie in [0, 1), 0 for none",
    ),
    "a watermark of everything": (
        lambda: _config(free_watermark=1.0),
        "free_watermark is 1.0: it must lie in [0, 1), 0 for none",
    ),
    "no shares": (
        lambda: _config(initial_pool_ratio=()),
        "initial_pool_ratio is (): give a positive share for each layer group",
    ),
    "a share of nothing": (
        lambda: _config(initial_pool_ratio=(1.0, 0.0)),
        "initial_pool_ratio is (1.0, 0.0): give a positive share for each layer group",
    ),
    "an endless share": (
        lambda: _config(initial_pool_ratio=(1.0, float("inf"))),
        "initial_pool_ratio is (1.0, inf): give a positive share for each layer group",
    ),
    "a share that is no number": (
        lambda: _config(initial_pool_ratio=(float("nan"),)),
        "initial_pool_ratio is (nan,): give a positive share for each layer group",
    ),
    "a disk without a model": (
        lambda: _config(cache_tiers=(_HOT, DiskTierConfig("/a", 1)), model_fingerprint=b""),
        "a disk tier needs a model_fingerprint, or another model would find this one's pages "
        "there: give bytes that name the model and its weights, such as a SHA-256 over them",
    ),
    "a model named by text": (
        lambda: _config(model_fingerprint="abc"),
        "model_fingerprint is a str: give bytes that name the model and its weights, such as a "
        "SHA-256 over them",
    ),
    "a scope that is no text": (lambda: ReuseScope(salt=b"x"), "salt is b'x': give a str"),  # type: ignore[arg-type]
    "an adapter that is no text": (lambda: ReuseScope(7), "adapter is 7: give a str"),  # type: ignore[arg-type]
    "an admission that is no DiskAdmission": (
        lambda: DiskTierConfig("/a", 1, admission="second-use"),  # type: ignore[arg-type]
        "admission is 'second-use': give a DiskAdmission, such as DiskAdmission.ALWAYS",
    ),
    "a quota for a path": (
        lambda: DiskTierConfig(1 << 20, "/a"),  # type: ignore[arg-type]
        "the disk tier has no usable path (1048576): name a directory",
    ),
    "shares that are none": (
        lambda: _config(initial_pool_ratio=("1", True)),
        "initial_pool_ratio is ('1', True): give a positive share for each layer group",
    ),
    "one share": (
        lambda: _config(initial_pool_ratio=0.5),
        "initial_pool_ratio is 0.5: give a positive share for each layer group",
    ),
    "one directory for two tiers": (
        lambda: _config(cache_tiers=(_HOT, *[DiskTierConfig("/tmp/x", 1 << 20)] * 2)),
        "two disk tiers use the directory /tmp/x: give each its own",
    ),
}


@pytest.mark.parametrize(("make", "sentence"), _BAD.values(), ids=_BAD.keys())
def test_what_can_not_work_is_refused_in_one_sentence(
    make: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make()
    assert str(raised.value) == sentence
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, ColdpageError)


# Settings that count something, and how each is named in a sentence.
_WHOLE: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "hot quota": (DeviceTierConfig, "quota_bytes", "bytes"),
    "host quota": (HostTierConfig, "quota_bytes", "bytes"),
    "disk quota": (lambda value: DiskTierConfig("/a", value), "quota_bytes", "bytes"),
    "buffer": (lambda value: BufferConfig(_KEY, value), "num_bytes of buffer 'key'", "bytes"),
    "window": (
        lambda value: _layer(3, sliding_window_tokens=value),
        "sliding_window_tokens of layer 3",
        "tokens",
    ),
    "sinks": (
        lambda value: _layer(3, num_sink_tokens=value),
        "num_sink_tokens of layer 3",
        "tokens",
    ),
    "block": (lambda value: _config(tokens_per_block=value), "tokens_per_block", "tokens"),
    "recent": (lambda value: _config(num_recent_blocks=value), "num_recent_blocks", "blocks"),
    "capacity": (lambda value: KVCacheDesc(value, 0), "capacity", "tokens"),
    "history": (lambda value: KVCacheDesc(9, value), "history_length", "tokens"),
    "system prompt": (
        lambda value: BatchDesc((KVCacheDesc(9, 0),), value),
        "system_prompt_length",
        "tokens",
    ),
}
# Settings that measure something.
_MEASURES: dict[str, Callable[[Any], object]] = {
    "read_deadline_s": lambda value: DiskTierConfig("/a", 1, read_deadline_s=value),
    "time_to_live_s": lambda value: DiskTierConfig("/a", 1, time_to_live_s=value),
    "max_util_for_resume": lambda value: _config(max_util_for_resume=value),
    "free_watermark": lambda value: _config(free_watermark=value),
}


@pytest.mark.parametrize("value", ["1GiB", 1.0, True, b"1", (1,), np.float64(1.0), np.True_])
@pytest.mark.parametrize(("make", "name", "unit"), _WHOLE.values(), ids=_WHOLE.keys())
def test_what_counts_is_a_whole_number(
    make: Callable[[Any], object], name: str, unit: str, value: object
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make(value)
    assert str(raised.value) == f"{name} is {value!r}: give a whole number of {unit}"
    make(np.int64(1))


@pytest.mark.parametrize("value", ["0.5", True, b"1", np.True_])
@pytest.mark.parametrize(("name", "make"), _MEASURES.items(), ids=_MEASURES.keys())
def test_what_measures_is_a_number(name: str, make: Callable[[Any], object], value: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make(value)
    assert str(raised.value) == f"{name} is {value!r}: give a number"
    make(np.float32(0.5))


def test_a_layer_is_named_by_a_number() -> None:
    with pytest.raises(ConfigurationError, match=r"^layer_id is '3': give a whole number$"):
        _layer("3")  # type: ignore[arg-type]


def test_what_works_is_taken() -> None:
    tiers = (_HOT, _HOST, _HOT, HostTierConfig(1), DiskTierConfig("/a", 1), DiskTierConfig("/b", 1))
    config = _config(
        tokens_per_block=1,
        cache_tiers=tiers,
        layers=(_layer(0, sliding_window_tokens=1, num_sink_tokens=9), _layer(7)),
        max_util_for_resume=1.0,
        initial_pool_ratio=(3, 0.5),
        typical_step=BatchDesc((KVCacheDesc(16, 16),), system_prompt_length=16),
        constraints=(BatchDesc((KVCacheDesc(1, 0), KVCacheDesc(9, 3))),),
        separate_sink_pages=True,
        free_watermark=0.5,
        num_recent_blocks=4,
    )
    assert [t.tier for t in config.cache_tiers] == [
        CacheTier.GPU,
        CacheTier.HOST,
        CacheTier.GPU,
        CacheTier.HOST,
        CacheTier.DISK,
        CacheTier.DISK,
    ]


def test_defaults() -> None:
    config = _config()
    assert config.max_util_for_resume == 0.97
    assert config.layers[0].sliding_window_tokens is None
    assert config.layers[0].num_sink_tokens == 0
    assert ReuseScope() == ReuseScope(adapter="", salt="")
    assert (config.initial_pool_ratio, config.typical_step, config.constraints) == (None, None, ())
    assert not config.separate_sink_pages
    assert config.free_watermark == 0.0
    assert config.num_recent_blocks == 0
    assert DeviceTierConfig(1).codec is None
    assert HostTierConfig(1).codec is None
    assert DiskTierConfig("/a", 1).codec is None


def test_configuration_is_frozen_and_does_not_print_the_model() -> None:
    config = _config(model_fingerprint=b"secret")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tokens_per_block = 3  # type: ignore[misc]
    assert "secret" not in repr(config)


def test_a_tier_is_known_by_its_numbers_whatever_its_codec_is() -> None:
    codec = _Codec()
    with_codec = (
        DeviceTierConfig(5, codec),
        HostTierConfig(5, codec),
        DiskTierConfig("/a", 5, codec=codec),
    )
    without = (DeviceTierConfig(5), HostTierConfig(5), DiskTierConfig("/a", 5))
    assert all(tier.codec is codec for tier in with_codec)
    assert with_codec == without
    assert hash(with_codec) == hash(without)
    assert repr(with_codec) == repr(without)
