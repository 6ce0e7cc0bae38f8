"""Frozen, validated configuration.

It stops at the constructors of the manager; below, plain values travel.
"""

from __future__ import annotations

import enum
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coldpage.errors import ConfigurationError
from coldpage.types import BufferRole, CacheTier, CodecIdentity, LayerId, is_number, is_whole_number

__all__ = [
    "MAX_CACHE_TIERS",
    "AttentionLayerConfig",
    "BatchDesc",
    "BufferConfig",
    "CacheTierConfig",
    "DeviceTierConfig",
    "DiskAdmission",
    "DiskTierConfig",
    "HostTierConfig",
    "KVCacheDesc",
    "KVCacheManagerConfig",
    "ReuseScope",
]


# A page has a bit for each level in columns of bytes.
MAX_CACHE_TIERS: Final = 8


class DiskAdmission(enum.Enum):
    """Which committed blocks that no sequence holds are written to disk."""

    ALWAYS = "always"  # all of them
    SECOND_USE = "second-use"  # those that were computed or asked for a second time


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigurationError(sentence)


def _require_whole(name: str, value: object, unit: str) -> None:
    _require(is_whole_number(value), f"{name} is {value!r}: give a whole number of {unit}")


def _require_number(name: str, value: object) -> None:
    _require(is_number(value), f"{name} is {value!r}: give a number")


def _are_shares(ratio: object) -> bool:
    return (
        isinstance(ratio, Sequence)
        and len(ratio) > 0
        and all(is_number(share) and 0 < share < math.inf for share in ratio)
    )


def _repeated(values: Sequence[object]) -> str:
    """The values that occur more than once, for a sentence; empty when there are none."""
    return ", ".join(str(value) for value, count in Counter(values).items() if count > 1)


@dataclass(frozen=True, slots=True)
class DeviceTierConfig:
    """The memory that attention reads: the first tier is the hot level. ``quota_bytes`` bounds it.

    A later one is a cold level in the same memory, where sessions lie in the form of a ``codec``,
    which makes its cold pages; None: the manager's. ``write_behind`` is as a HostTierConfig's. Both
    are a cold level's only.
    """

    quota_bytes: int
    codec: CodecIdentity | None = field(default=None, repr=False, compare=False)
    write_behind: bool = True

    def __post_init__(self) -> None:
        _require_whole("quota_bytes", self.quota_bytes, "bytes")

    @property
    def tier(self) -> CacheTier:
        """The medium."""
        return CacheTier.GPU


@dataclass(frozen=True, slots=True)
class HostTierConfig:
    """A cold level in host memory. ``codec`` makes its cold pages; None: the manager's.

    With ``write_behind``, which the first cold level in memory heeds, the full pages of a sequence
    are copied there when it is suspended, in the background, as far as there is room for nothing
    that would be lost, so that their hot slots can be had at once; without, when somebody wants
    those.
    """

    quota_bytes: int
    codec: CodecIdentity | None = field(default=None, repr=False, compare=False)
    write_behind: bool = True

    def __post_init__(self) -> None:
        _require_whole("quota_bytes", self.quota_bytes, "bytes")

    @property
    def tier(self) -> CacheTier:
        """The medium."""
        return CacheTier.HOST


@dataclass(frozen=True, slots=True)
class DiskTierConfig:
    """A cold level in files of fixed-size slots, in ``path/paged/instance-ID``. ``codec`` makes its
    cold pages; None: the manager's.

    What it holds is found again by the next manager with the same ``instance_id``; None is an id
    that follows from model, geometry and codec. A relative ``path`` is one of the directory that
    the process works in when the manager is made.

    Committed pages get there when their room in memory is needed, and by
    ``KVCacheManager.flush``. With ``write_behind`` they also do when their sequence lets go of
    them, in the background as ``poll`` is called, so that a crash loses little. Closing the manager
    writes none: what is in memory only is gone then, so call ``flush`` before ``close``.

    A read that takes longer than ``read_deadline_s`` is a miss. Pages that nobody has used for
    ``time_to_live_s`` are dropped. ``admission`` spares the disk writes of what may never be wanted
    again.
    """

    path: str
    quota_bytes: int
    codec: CodecIdentity | None = field(default=None, repr=False, compare=False)
    instance_id: str | None = None
    write_behind: bool = False
    read_deadline_s: float = 10.0
    time_to_live_s: float | None = None
    admission: DiskAdmission = DiskAdmission.ALWAYS

    def __post_init__(self) -> None:
        path: object = self.path
        _require(
            isinstance(path, str | os.PathLike) and str(path) != "" and "\0" not in str(path),
            f"the disk tier has no usable path ({self.path!r}): name a directory",
        )
        _require_whole("quota_bytes", self.quota_bytes, "bytes")
        _require_number("read_deadline_s", self.read_deadline_s)
        _require(
            self.read_deadline_s > 0,
            f"read_deadline_s is {self.read_deadline_s}: give the disk some time, such as 10 s",
        )
        if self.time_to_live_s is not None:
            _require_number("time_to_live_s", self.time_to_live_s)
        _require(
            self.time_to_live_s is None or self.time_to_live_s > 0,
            f"time_to_live_s is {self.time_to_live_s}: give a positive time, or None for ever",
        )
        _require(
            isinstance(self.admission, DiskAdmission),
            f"admission is {self.admission!r}: give a DiskAdmission, such as DiskAdmission.ALWAYS",
        )

    @property
    def tier(self) -> CacheTier:
        """The medium."""
        return CacheTier.DISK


CacheTierConfig = DeviceTierConfig | HostTierConfig | DiskTierConfig


@dataclass(frozen=True, slots=True)
class BufferConfig:
    """One buffer of a layer: ``num_bytes`` a block (``tokens_per_block`` tokens)."""

    role: BufferRole
    num_bytes: int

    def __post_init__(self) -> None:
        _require_whole(f"num_bytes of buffer {self.role!r}", self.num_bytes, "bytes")
        _require(
            self.num_bytes > 0,
            f"buffer {self.role!r} needs a positive size, not {self.num_bytes} bytes",
        )


@dataclass(frozen=True, slots=True)
class AttentionLayerConfig:
    """An attention layer. Layers with equal windows and sinks form a layer group."""

    layer_id: LayerId
    buffers: tuple[BufferConfig, ...]
    sliding_window_tokens: int | None = None
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        _require(
            is_whole_number(self.layer_id), f"layer_id is {self.layer_id!r}: give a whole number"
        )
        _require(
            len(self.buffers) > 0,
            f"layer {self.layer_id} has no buffers: give it a key and a value buffer",
        )
        roles = [b.role for b in self.buffers]
        _require(
            len(set(roles)) == len(roles),
            f"layer {self.layer_id} names a buffer role twice ({', '.join(roles)}): "
            "use each role once",
        )
        if self.sliding_window_tokens is not None:
            name = f"sliding_window_tokens of layer {self.layer_id}"
            _require_whole(name, self.sliding_window_tokens, "tokens")
        _require(
            self.sliding_window_tokens is None or self.sliding_window_tokens > 0,
            f"layer {self.layer_id} has a sliding window of {self.sliding_window_tokens} tokens: "
            "give it at least one, or None for no window",
        )
        name = f"num_sink_tokens of layer {self.layer_id}"
        _require_whole(name, self.num_sink_tokens, "tokens")
        _require(
            self.num_sink_tokens >= 0,
            f"layer {self.layer_id} has {self.num_sink_tokens} sink tokens: use 0 for none",
        )


@dataclass(frozen=True, slots=True)
class ReuseScope:
    """Sequences share blocks only within one scope: another adapter or another tenant's salt never
    matches.
    """

    adapter: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        for name, value in (("adapter", self.adapter), ("salt", self.salt)):
            _require(isinstance(value, str), f"{name} is {value!r}: give a str")


@dataclass(frozen=True, slots=True)
class KVCacheDesc:
    """One sequence of a batch, in numbers: room for ``capacity`` tokens, of which
    ``history_length`` are written.
    """

    capacity: int
    history_length: int

    def __post_init__(self) -> None:
        _require_whole("capacity", self.capacity, "tokens")
        _require_whole("history_length", self.history_length, "tokens")
        _require(
            0 <= self.history_length <= self.capacity and self.capacity > 0,
            f"a sequence with a capacity of {self.capacity} and a history of {self.history_length} "
            "tokens can not be: use 0 <= history_length <= capacity, and a capacity of at least 1",
        )


@dataclass(frozen=True, slots=True)
class BatchDesc:
    """Sequences that are active at the same time. The first ``system_prompt_length`` tokens are the
    same in all of them, and so are their whole blocks.
    """

    kv_caches: tuple[KVCacheDesc, ...]
    system_prompt_length: int = 0

    def __post_init__(self) -> None:
        _require(len(self.kv_caches) > 0, "a batch needs at least one sequence")
        _require_whole("system_prompt_length", self.system_prompt_length, "tokens")
        _require(
            self.system_prompt_length >= 0,
            f"a system prompt of {self.system_prompt_length} tokens can not be: use 0 for none",
        )
        _require(
            self.system_prompt_length <= min(c.capacity for c in self.kv_caches),
            f"a system prompt of {self.system_prompt_length} tokens does not fit every sequence of "
            "the batch: make it shorter or the capacities larger",
        )


@dataclass(frozen=True, slots=True)
class KVCacheManagerConfig:
    """Everything a manager needs to know; ``cache_tiers`` in order from hot to cold.

    ``model_fingerprint`` is bytes that name the model and its weights, such as a SHA-256 over them:
    K and V are reused, from disk and from saved files, only under the same ones. With a disk tier
    it must be given, since the pages there outlive the manager, and without it another model of the
    same geometry would find them.

    The quota of each tier is divided between the layer groups by ``initial_pool_ratio``, one share
    of the hot bytes for each in the order of their ids; without it as ``typical_step`` needs them;
    without that as the ``constraints`` do; and without any as one sequence of 4,096 tokens does.
    The hot level has room for each of the ``constraints`` in any case.

    With ``separate_sink_pages`` the pages of the first block are a class of their own, which a
    codec may keep in another form. So are, with ``num_recent_blocks``, those of a sequence's newest
    so many full blocks and of the last one that is not full, whenever the sequence lets go of its
    pages, until it has grown past them. The hot level keeps ``free_watermark`` of its slots free,
    for sequences that come next.
    """

    tokens_per_block: int
    cache_tiers: tuple[CacheTierConfig, ...]
    layers: tuple[AttentionLayerConfig, ...]
    max_util_for_resume: float = 0.97
    model_fingerprint: bytes = field(default=b"", repr=False)
    initial_pool_ratio: tuple[float, ...] | None = None
    typical_step: BatchDesc | None = None
    constraints: tuple[BatchDesc, ...] = ()
    separate_sink_pages: bool = False
    free_watermark: float = 0.0
    num_recent_blocks: int = 0

    def __post_init__(self) -> None:
        _require_whole("tokens_per_block", self.tokens_per_block, "tokens")
        _require_whole("num_recent_blocks", self.num_recent_blocks, "blocks")
        _require_number("max_util_for_resume", self.max_util_for_resume)
        _require_number("free_watermark", self.free_watermark)
        _require(
            self.tokens_per_block > 0,
            f"tokens_per_block is {self.tokens_per_block}: use at least 1, usually 16",
        )
        _require(len(self.layers) > 0, "a manager needs at least one layer")
        twice = _repeated([layer.layer_id for layer in self.layers])
        _require(not twice, f"layer_id {twice} is used twice: give each layer an id of its own")
        _require(
            0.0 < self.max_util_for_resume <= 1.0,
            f"max_util_for_resume is {self.max_util_for_resume}: it must lie in (0, 1]",
        )
        _require(
            0.0 <= self.free_watermark < 1.0,
            f"free_watermark is {self.free_watermark}: it must lie in [0, 1), 0 for none",
        )
        _require(
            self.num_recent_blocks >= 0,
            f"num_recent_blocks is {self.num_recent_blocks}: give a number of blocks, 0 for none",
        )
        ratio = self.initial_pool_ratio
        _require(
            ratio is None or _are_shares(ratio),
            f"initial_pool_ratio is {ratio!r}: give a positive share for each layer group",
        )
        self._require_tiers()
        self._require_fingerprint()

    def _require_tiers(self) -> None:
        _require(
            len(self.cache_tiers) > 0 and isinstance(self.cache_tiers[0], DeviceTierConfig),
            "the first cache tier must be a DeviceTierConfig: the level that attention reads",
        )
        _require(
            len(self.cache_tiers) <= MAX_CACHE_TIERS,
            f"{len(self.cache_tiers)} cache tiers: use at most {MAX_CACHE_TIERS}",
        )
        for tier in self.cache_tiers:
            _require(
                tier.quota_bytes > 0,
                f"the {tier.tier.value} tier has no bytes: give it a positive quota",
            )
        _require(
            self.cache_tiers[0].codec is None,
            "the first cache tier, which attention reads, can not have a codec: give it to a "
            "later one",
        )
        paths = [t.path for t in self.cache_tiers if isinstance(t, DiskTierConfig)]
        shared = _repeated(paths)
        _require(not shared, f"two disk tiers use the directory {shared}: give each its own")

    def _require_fingerprint(self) -> None:
        _require(
            isinstance(self.model_fingerprint, bytes),
            f"model_fingerprint is a {type(self.model_fingerprint).__name__}: give bytes that name "
            "the model and its weights, such as a SHA-256 over them",
        )
        has_disk = any(isinstance(tier, DiskTierConfig) for tier in self.cache_tiers)
        _require(
            not has_disk or self.model_fingerprint != b"",
            "a disk tier needs a model_fingerprint, or another model would find this one's pages "
            "there: give bytes that name the model and its weights, such as a SHA-256 over them",
        )
