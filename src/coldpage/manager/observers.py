"""What happens to blocks, named by their content: for routers, other caches and logs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coldpage.page import PageTable
from coldpage.prefix import PrefixTree
from coldpage.types import (
    BlockKey,
    BlockOrdinal,
    CacheLevel,
    Int32Array,
    LayerGroupId,
    TokenId,
)

__all__ = ["BlockStored", "CacheObserver", "ObserverHub", "PageName", "PagesDropped", "PagesMoved"]


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageName:
    """A page by what it holds. ``block_key`` is None while the block is not committed."""

    block_key: BlockKey | None
    layer_group_id: LayerGroupId
    block_ordinal: BlockOrdinal


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block was committed and can be reused: its pages in these layer groups were not known
    before.
    """

    block_key: BlockKey
    parent_key: BlockKey
    tokens: tuple[TokenId, ...]
    layer_group_ids: tuple[LayerGroupId, ...]


@dataclass(frozen=True, slots=True)
class PagesMoved:
    """Pages have a copy on ``target`` now, made from the one on ``source``."""

    pages: tuple[PageName, ...]
    source: CacheLevel
    target: CacheLevel


@dataclass(frozen=True, slots=True)
class PagesDropped:
    """The contents of these pages are gone from every level."""

    pages: tuple[PageName, ...]
    cause: str


class CacheObserver(Protocol):
    """Called on the manager's thread, in the middle of what happens: it must not call the manager.
    What it raises goes no further: ``observer_failures`` in ``ManagerStats.totals`` counts it, and
    the first of each observer is logged.
    """

    def on_stored(self, event: BlockStored) -> None:
        """A block can be reused."""
        ...

    def on_moved(self, event: PagesMoved) -> None:
        """Pages were copied from one level to another."""
        ...

    def on_dropped(self, event: PagesDropped) -> None:
        """Pages are gone."""
        ...


class ObserverHub:
    """Keeps the prefix tree up to date with the storage, and translates for observers. Translation
    costs nothing while there are none.
    """

    def __init__(
        self,
        table: PageTable,
        tree: PrefixTree,
        layer_group_of: Sequence[LayerGroupId],
        totals: Counter[str],
    ) -> None:
        self._table = table
        self._tree = tree
        self._layer_group_of = layer_group_of
        self._totals = totals
        self._failed: list[CacheObserver] = []
        self.observers: list[CacheObserver] = []

    def _names(self, pages: Int32Array) -> tuple[PageName, ...]:
        table = self._table
        return tuple(
            PageName(
                self._tree.key_of(page),
                self._layer_group_of[int(table.life_cycle[page])],
                BlockOrdinal(int(table.ordinal[page])),
            )
            for page in pages.tolist()
        )

    def on_stored(
        self, parent: BlockKey, key: BlockKey, tokens: Int32Array, pages: Int32Array
    ) -> None:
        """The tree took ``pages`` for a block."""
        if not self.observers or not pages.size:
            return
        groups = [self._layer_group_of[i] for i in self._table.life_cycle[pages].tolist()]
        event = BlockStored(key, parent, tuple(map(TokenId, tokens.tolist())), tuple(groups))
        self._tell(lambda observer: observer.on_stored(event))

    def _tell(self, call: Callable[[CacheObserver], None]) -> None:
        """An observer that fails is heard of once in the log; the cache goes on."""
        for observer in self.observers:
            try:
                call(observer)
            except Exception:
                self._totals["observer_failures"] += 1
                if not any(observer is known for known in self._failed):
                    self._failed.append(observer)
                    _logger.exception(
                        "an observer of the cache failed (observer_failures counts this and what "
                        "follows): %r",
                        observer,
                    )

    def on_moved(self, pages: Int32Array, source: CacheLevel, target: CacheLevel) -> None:
        """See StorageObserver."""
        if self.observers:
            event = PagesMoved(self._names(pages), source, target)
            self._tell(lambda observer: observer.on_moved(event))

    def on_lost(self, pages: Int32Array, cause: str) -> None:
        """See StorageObserver."""
        if self.observers:
            event = PagesDropped(self._names(pages), cause)
            self._tell(lambda observer: observer.on_dropped(event))

    def on_forgotten(self, nodes: Int32Array, life_cycles: npt.NDArray[np.int16]) -> None:
        """See StorageObserver."""
        self._tree.remove(nodes, life_cycles)
