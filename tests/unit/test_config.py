"""Configuration refuses what can not work, in one line that says what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from coldpage.config import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
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
    settings = {"tokens_per_block": 16, "cache_tiers": (_HOT,), "layers": (_layer(),)} | settings
    return KVCacheManagerConfig(**settings)


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
    "two hot tiers": (
        lambda: _config(cache_tiers=(_HOT, _HOT)),
        "only the first tier can be a DeviceTierConfig: use HostTierConfig or DiskTierConfig",
    ),
    "no directory": (
        lambda: DiskTierConfig("", 1 << 20),
        "the disk tier has no usable path (''): name a directory",
    ),
    "a path that no file system has": (
        lambda: DiskTierConfig("/tmp/a\0b", 1 << 20),
        r"the disk tier has no usable path ('/tmp/a\x00b'): name a directory",
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


def test_what_works_is_taken() -> None:
    tiers = (_HOT, _HOST, HostTierConfig(1), DiskTierConfig("/a", 1), DiskTierConfig("/b", 1))
    config = _config(
        tokens_per_block=1,
        cache_tiers=tiers,
        layers=(_layer(0, sliding_window_tokens=1, num_sink_tokens=9), _layer(7)),
        max_util_for_resume=1.0,
    )
    assert [t.tier for t in config.cache_tiers] == [
        CacheTier.GPU,
        CacheTier.HOST,
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


def test_configuration_is_frozen_and_does_not_print_the_model() -> None:
    config = _config(model_fingerprint=b"secret")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tokens_per_block = 3  # type: ignore[misc]
    assert "secret" not in repr(config)
