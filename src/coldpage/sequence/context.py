"""What the sequences of one manager share, and the values that go in and out of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coldpage.block_table import BlockTable
from coldpage.layout import LayerGroup
from coldpage.prefix import PrefixTree, RecentKeys
from coldpage.storage import Storage
from coldpage.types import BlockKey, BlockOrdinal, Int32Array, LifeCycleId

__all__ = [
    "DiskBlob",
    "DroppedBlocks",
    "KVCacheStatus",
    "OnMissing",
    "ReusedPrefix",
    "SequenceContext",
]


class KVCacheStatus(enum.Enum):
    """Where a sequence's cache is in its life."""

    SUSPENDED = "suspended"  # its pages may migrate
    ACTIVE = "active"  # its pages are locked hot
    CLOSED = "closed"  # it holds nothing


class OnMissing(enum.Enum):
    """What becomes of a block whose contents were lost."""

    RECOMPUTE = "recompute"  # ``missing_blocks`` lists it until the caller has written it again
    HOLE = "hole"  # attention goes on without it


@dataclass(frozen=True, slots=True)
class SequenceContext:
    """What every sequence of one manager shares. ``check_thread`` raises for any thread but the
    owner.
    """

    storage: Storage
    tree: PrefixTree
    layer_groups: tuple[LayerGroup, ...]
    # The life cycle of a layer group's first block, of its others, and of the newest of those,
    # [num_layer_groups].
    first_life_cycle: npt.NDArray[np.int16]
    body_life_cycle: npt.NDArray[np.int16]
    recent_life_cycle: npt.NDArray[np.int16]
    num_recent_blocks: int
    tokens_per_block: int
    max_util_for_resume: float
    check_thread: Callable[[], None]
    is_open: Callable[[], bool]
    max_capacity_tokens: Callable[[], int]  # of a sequence that has the whole hot level
    wait_for_progress: Callable[[float], None]
    recent_keys: RecentKeys | None  # None: every committed block may be written to disk
    # A block was committed: parent, key, tokens, and the pages the tree took.
    on_stored: Callable[[BlockKey, BlockKey, Int32Array, Int32Array], None]

    def life_cycles(
        self, layer_groups: npt.NDArray[np.integer], ordinals: Int32Array
    ) -> npt.NDArray[np.int16]:
        """The life cycle of each new page, by its layer group and block: locked pages do not leave
        the hot level, so which of them are recent is asked when they are let go of.
        """
        first, body = self.first_life_cycle[layer_groups], self.body_life_cycle[layer_groups]
        found: npt.NDArray[np.int16] = np.where(ordinals == 0, first, body)
        return found


@dataclass(frozen=True, slots=True)
class DiskBlob:
    """One cold blob on disk: its payload starts at ``offset_bytes`` of the file ``path``."""

    life_cycle_id: LifeCycleId
    ordinal: BlockOrdinal
    path: Path
    offset_bytes: int
    is_only_copy: bool  # no other level has the page


@dataclass(frozen=True, slots=True)
class DroppedBlocks:
    """What ``drop_blocks`` did: whole blocks became holes, blocks cut in part were kept."""

    dropped: tuple[BlockOrdinal, ...]
    kept: tuple[BlockOrdinal, ...]


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """What a new sequence begins with. The table is the sequence's own from then on."""

    root: BlockKey
    keys: list[BlockKey]
    table: BlockTable
    tokens: Int32Array
    tokens_by_level: tuple[int, ...]
