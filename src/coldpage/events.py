"""Counters and observers: what happened, told to whoever asked, with no reference upward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coldpage.types import CacheTier, Int32Array

__all__ = ["Counters", "StorageObserver", "level_names"]

_NAMES = {CacheTier.GPU: "hot", CacheTier.HOST: "host", CacheTier.DISK: "disk"}


def level_names(tiers: Sequence[CacheTier]) -> tuple[str, ...]:
    """A name for each level: ``hot``, ``host``, ``disk``, numbered where a medium is used twice."""
    names: list[str] = []
    for tier in tiers:
        name = _NAMES[tier]
        num_same = sum(n.rstrip("0123456789") == name for n in names)
        names.append(f"{name}{num_same + 1}" if num_same else name)
    return tuple(names)


class StorageObserver(Protocol):
    """Called on the owner's thread, after the fact. It must not call back into the storage."""

    def on_forgotten(self, nodes: Int32Array, life_cycles: npt.NDArray[np.int16]) -> None:
        """The committed pages of these prefix-tree nodes and life cycles have vanished."""
        ...


class Counters:
    """Monotonic counts since the start, by name."""

    def __init__(self) -> None:
        self.moved_pages: Counter[str] = Counter()  # by path, such as "hot-host"
        self.moved_bytes: Counter[str] = Counter()  # by path, in cold bytes
        self.totals: Counter[str] = Counter()

    def count_move(self, path: str, num_pages: int, num_bytes: int) -> None:
        """Note pages that have a copy at the end of ``path`` now."""
        if num_pages:
            self.moved_pages[path] += num_pages
            self.moved_bytes[path] += num_bytes
