"""What a blob store has under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coldpage.device.base import IoBatch
from coldpage.errors import UsageError
from coldpage.store.base import StoreTicket
from coldpage.store.durability import SyncPoint
from coldpage.store.format import BlobName
from coldpage.types import BlockKey, LayerGroupId

__all__ = ["Deletion", "Key", "PendingBlob", "Read", "Ticket", "Write"]

Key = tuple[BlockKey, LayerGroupId]
_Bytes = npt.NDArray[np.uint8]


class Ticket(StoreTicket):
    """Rows that are settled one by one."""

    def __init__(self, num_rows: int, wait: Callable[[Ticket], None]) -> None:
        self._ok = np.zeros(num_rows, np.bool_)
        self._num_left = num_rows
        self._wait = wait

    def is_done(self) -> bool:
        """Whether every row is settled."""
        return self._num_left == 0

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """See ``StoreTicket.ok``."""
        if self._num_left:
            raise UsageError("the ticket is not done: wait for is_done() before reading ok")
        return self._ok

    def synchronize(self) -> None:
        """Block until every row is settled."""
        if self._num_left:
            self._wait(self)

    def settle(self, row: int, ok: bool) -> None:
        """How a row ended; once a row."""
        assert self._num_left > 0, "each row is settled once"
        self._ok[row] = ok
        self._num_left -= 1

    def settler(self, row: int) -> Callable[[bool, bool], None]:
        """What a ``Read`` tells how it ended."""

        def settle(ok: bool, was_damaged: bool) -> None:
            self.settle(row, ok)

        return settle


class PendingBlob:
    """A blob from its put until it is durable."""

    def __init__(self, key: Key, name: BlobName) -> None:
        self.key = key
        self.name = name
        self.slot = 0  # known when its write starts
        self.waiters: list[tuple[Ticket, int]] = []
        self.is_deleted = False  # while its write was in flight
        self.point: SyncPoint | None = None  # once its write has ended

    def settle(self, ok: bool) -> None:
        """Tell everybody who put it."""
        for ticket, row in self.waiters:
            ticket.settle(row, ok)
        self.waiters = []


@dataclass(slots=True, eq=False)
class Write:
    """Slots being written, or erased (no blobs)."""

    batch: IoBatch
    slots: list[int]
    blobs: list[PendingBlob]
    payloads: _Bytes | None  # kept alive until the I/O has ended


@dataclass(slots=True, eq=False)
class Read:
    """One blob being read."""

    slot: int
    batch: IoBatch
    target: _Bytes  # kept alive until the I/O has ended
    copy_to: _Bytes | None  # where it is wanted, if that is not where it is read to
    overdue_at: float | None
    done: Callable[[bool, bool], None]  # is told whether it is good, and whether it was damaged
    is_overdue: bool = False  # it was told that this is a miss, and is not told again


@dataclass(slots=True, eq=False)
class Deletion:
    """Keys that shall not be found after a restart either."""

    ticket: Ticket
    rows: dict[int, Key]  # not settled yet
    point: SyncPoint | None = None  # once no slot has any of them
