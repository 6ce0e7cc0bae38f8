"""Counters and observers: what happened, told to whoever asked, with no reference upward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coldpage.types import CacheLevel, CacheTier, Int32Array

__all__ = ["StorageEvents", "StorageObserver", "level_names"]

_NAMES = {CacheTier.GPU: "gpu", CacheTier.HOST: "host", CacheTier.DISK: "disk"}


def level_names(tiers: Sequence[CacheTier]) -> tuple[str, ...]:
    """A name for each level: ``hot`` for the first, then ``gpu``, ``host`` and ``disk``, numbered
    where cold levels use a medium twice.
    """
    names = ["hot"]
    for tier in tiers[1:]:
        name = _NAMES[tier]
        num_same = sum(n.rstrip("0123456789") == name for n in names)
        names.append(f"{name}{num_same + 1}" if num_same else name)
    return tuple(names)


class StorageObserver(Protocol):
    """Called on the owner's thread, after the fact. It must not call back into the storage."""

    def on_moved(self, pages: Int32Array, source: CacheLevel, target: CacheLevel) -> None:
        """The pages have a copy on ``target`` now; those of ``source`` may still be there."""
        ...

    def on_lost(self, pages: Int32Array, cause: str) -> None:
        """The contents of the pages are gone. Called while their columns are still as they were."""
        ...

    def on_forgotten(self, nodes: Int32Array, life_cycles: npt.NDArray[np.int16]) -> None:
        """The committed pages of these prefix-tree nodes and life cycles have vanished."""
        ...


class StorageEvents:
    """Monotonic counts since the start, by name, and those who want to be told."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names`` is by level."""
        self.moved_pages: Counter[str] = Counter()  # by path, such as "hot-host"
        self.moved_bytes: Counter[str] = Counter()  # by path, in cold bytes
        self.totals: Counter[str] = Counter()
        self.codec_failures: Counter[tuple[str, str]] = Counter()  # by codec and call
        self.observers: list[StorageObserver] = []
        self._names = tuple(names)

    def moved(
        self, pages: Int32Array, source: CacheLevel, target: CacheLevel, page_bytes: int
    ) -> None:
        """Pages have a copy on ``target`` now, made from the one on ``source``."""
        if not pages.size:
            return
        path = f"{self._names[source]}-{self._names[target]}"
        self.moved_pages[path] += int(pages.size)
        self.moved_bytes[path] += int(pages.size) * page_bytes
        for observer in self.observers:
            observer.on_moved(pages, source, target)

    def lost(self, pages: Int32Array, cause: str) -> None:
        """The contents of the pages are gone."""
        for observer in self.observers:
            observer.on_lost(pages, cause)

    def forgotten(self, nodes: Int32Array, life_cycles: npt.NDArray[np.int16]) -> None:
        """Committed pages have vanished from these nodes."""
        for observer in self.observers:
            observer.on_forgotten(nodes, life_cycles)
