"""Calls of a manager: what they refuse, in one sentence and changing nothing, and what a close
leaves on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpage import (
    DeviceTierConfig,
    DiskTierConfig,
    HostTierConfig,
    KVCacheManager,
    OnMissing,
    Priority,
    ReuseScope,
)
from coldpage.config import AttentionLayerConfig, BufferConfig, KVCacheManagerConfig
from coldpage.errors import ConfigurationError, UsageError
from coldpage.store.sidecar import SIDECAR_NAME
from coldpage.types import CacheLevel, LayerId

_BLOCK, _PAGE_BYTES = 4, 4096
_LAYER = AttentionLayerConfig(LayerId(0), (BufferConfig("key", _PAGE_BYTES),))  # type: ignore[arg-type]
_TIERS = (DeviceTierConfig(8 * _PAGE_BYTES), HostTierConfig(8 * _PAGE_BYTES))
_CONFIG = KVCacheManagerConfig(_BLOCK, _TIERS, (_LAYER,), 1.0, b"model")
_TOKENS = list(range(5 * _BLOCK))


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    with KVCacheManager(_CONFIG) as made:
        yield made


def _with_disk(path: str | Path, **settings: Any) -> KVCacheManagerConfig:
    disk = DiskTierConfig(str(path), 64 * 3 * _PAGE_BYTES, **settings)
    return replace(_CONFIG, cache_tiers=(*_TIERS, disk))


def _write(manager: KVCacheManager) -> None:
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(len(_TOKENS))
    cache.synchronize()
    cache.commit(_TOKENS)
    cache.close()


def _num_found(config: KVCacheManagerConfig) -> int:
    with KVCacheManager(config) as manager:
        return manager.create_kv_cache(_TOKENS).history_length


# ---------------------------------------------------------------------- refusals

_REFUSALS: dict[str, tuple[Callable[[KVCacheManager], object], str]] = {
    "fractions for tokens": (
        lambda m: m.create_kv_cache([1.5] * 20),  # type: ignore[list-item]
        "tokens must be one row of whole numbers, and not float64 [20]",
    ),
    "a batch of tokens": (
        lambda m: m.create_kv_cache(np.zeros((4, 4), np.int32)),
        "tokens must be one row of whole numbers, and not int32 [4, 4]",
    ),
    "a token that is too large": (
        lambda m: m.create_kv_cache([2**40]),
        f"{2**40} is no token id: ids lie between {-(2**31)} and {2**31 - 1}, in 32 bits",
    ),
    "a salt for a scope": (
        lambda m: m.create_kv_cache(_TOKENS, scope="salt"),  # type: ignore[arg-type]
        "scope is 'salt': give a ReuseScope, or None for the common one",
    ),
    "no salt for a scope": (
        lambda m: m.create_kv_cache(_TOKENS, scope=""),  # type: ignore[arg-type]
        "scope is '': give a ReuseScope, or None for the common one",
    ),
    "a word for a priority": (
        lambda m: m.create_kv_cache(_TOKENS, priority="high"),  # type: ignore[arg-type]
        "priority is 'high': give a whole number from -32768 to 32767",
    ),
    "half a priority": (
        lambda m: m.create_kv_cache(_TOKENS, priority=35.5),  # type: ignore[arg-type]
        "priority is 35.5: give a whole number from -32768 to 32767",
    ),
    "a priority that no page can have": (
        lambda m: m.create_kv_cache(_TOKENS, priority=Priority(32_768)),
        "priority is 32768: give a whole number from -32768 to 32767",
    ),
    "a word for what becomes of losses": (
        lambda m: m.create_kv_cache(_TOKENS, on_missing="recompute"),  # type: ignore[arg-type]
        "on_missing is 'recompute': give OnMissing.RECOMPUTE or OnMissing.HOLE",
    ),
    "a quota in words": (
        lambda m: m.resize(CacheLevel(1), "1MiB"),  # type: ignore[arg-type]
        "quota_bytes is '1MiB': give a whole number of bytes",
    ),
    "a level by name": (
        lambda m: m.resize("host", 1 << 20),  # type: ignore[arg-type]
        "there is no level 'host': this manager has 0 to 1",
    ),
    "a level that is not there": (
        lambda m: m.defragment(CacheLevel(2)),
        "there is no level 2: this manager has 0 to 1",
    ),
    "a budget in words": (
        lambda m: m.flush("1s"),  # type: ignore[arg-type]
        "budget_s is '1s': give a number of seconds",
    ),
    "a wait for ever": (
        lambda m: m.wait_for_progress(None),  # type: ignore[arg-type]
        "timeout_s is None: give a number of seconds",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), _REFUSALS.values(), ids=_REFUSALS.keys())
def test_a_wrong_call_is_refused_in_one_sentence_and_changes_nothing(
    call: Callable[[KVCacheManager], object], sentence: str, manager: KVCacheManager
) -> None:
    _write(manager)
    before = manager.stats()
    with pytest.raises(UsageError) as raised:
        call(manager)
    assert str(raised.value) == sentence
    assert manager.stats() == before
    manager.check_integrity()


def test_priorities_and_tokens_of_any_integers_are_taken(manager: KVCacheManager) -> None:
    _write(manager)
    for tokens in (_TOKENS, tuple(_TOKENS), range(20), np.array(_TOKENS), np.array(_TOKENS, "u1")):
        for priority in (Priority(-32_768), Priority(32_767), np.int16(4)):
            cache = manager.create_kv_cache(
                tokens,
                priority=priority,  # type: ignore[arg-type]
                scope=ReuseScope(),
                on_missing=OnMissing.HOLE,
            )
            assert cache.history_length == 20
            cache.close()


# ---------------------------------------------------------------------- what stays on disk


def test_another_model_finds_nothing_on_disk(tmp_path: Path) -> None:
    config = _with_disk(tmp_path)
    with KVCacheManager(config) as manager:
        _write(manager)
        assert manager.flush(30.0) == 0
    assert _num_found(replace(config, model_fingerprint=b"another model")) == 0
    with pytest.raises(ConfigurationError, match=r"^a disk tier needs a model_fingerprint, or"):
        replace(config, model_fingerprint=b"")
    assert _num_found(config) == 20


@pytest.mark.parametrize("write_behind", [False, True])
def test_closing_without_a_flush_writes_nothing_and_says_so(
    write_behind: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = _with_disk(tmp_path, write_behind=write_behind)
    with KVCacheManager(config) as manager:
        _write(manager)
    assert caplog.messages == [
        "5 committed pages were in memory only when the manager was closed and are gone: a flush "
        "before keeps what the disk has room for"
    ]
    assert _num_found(config) == 0


def test_a_flush_before_closing_keeps_all_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = _with_disk(tmp_path)
    with KVCacheManager(config) as manager:
        _write(manager)
        assert manager.flush(30.0) == 0
    assert _num_found(config) == 20
    with KVCacheManager(_CONFIG) as without_disk:
        _write(without_disk)
    assert caplog.messages == []


def test_a_relative_path_stays_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with KVCacheManager(_with_disk("tier")) as manager:
        _write(manager)
        monkeypatch.chdir(elsewhere)
        assert manager.flush(30.0) == 0
        cache = manager.create_kv_cache(_TOKENS)
        paths = {blob.path for blob in cache.blobs_on_disk()}
    assert caplog.messages == []
    (instance,) = (tmp_path / "tier" / "paged").iterdir()
    assert (instance / SIDECAR_NAME).exists()
    assert paths == {instance / "pool-0.slots"}
    assert list(elsewhere.iterdir()) == []
    assert _num_found(_with_disk(tmp_path / "tier")) == 20
