"""What has been promised, held against what is found after a crash."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.crash.board import Board
from tests.crash.work import Id, Place, Reporter, Work


@dataclass
class Tally:
    """Counts of many crashes."""

    num_crashes: int = 0
    num_inside: int = 0  # while a slot was being written
    num_read: int = 0
    num_acknowledged: int = 0  # pages promised at the moment of a crash
    num_overwritten: int = 0  # of them, given up for others since
    num_cut_off: int = 0  # of them, given up since a block before them was
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    back: list[str] = field(default_factory=list)  # deleted, and found again

    def __str__(self) -> str:
        return (
            f"{self.num_crashes} crashes, {self.num_inside} inside a write, {self.num_read} pages "
            f"read, {len(self.wrong)} wrong, {self.num_acknowledged} acknowledged, "
            f"{self.num_overwritten + self.num_cut_off} given up by rule, {len(self.lost)} lost, "
            f"{len(self.back)} deleted and back"
        )


class Ledger(Reporter):
    """The promises of one tier."""

    def __init__(self, board: Board, tally: Tally) -> None:
        self._board = board
        self._tally = tally
        self._durable: dict[Id, Place] = {}
        self._gone: set[Id] = set()

    def durable(self, places: dict[Id, Place]) -> None:
        self._durable.update(places)
        self._gone -= places.keys()

    def returning(self, ids: list[Id]) -> None:
        self._gone.difference_update(ids)

    def unsure(self, ids: list[Id]) -> None:
        for entry in ids:
            self._durable.pop(entry, None)
            self._gone.discard(entry)

    def gone(self, ids: list[Id]) -> None:
        for entry in ids:
            self._durable.pop(entry, None)
            self._gone.add(entry)

    def settle(self, good: set[Id], work: Work) -> None:
        """After a crash ``good`` was found."""
        self._tally.num_acknowledged += len(self._durable)
        for entry, (file, slot, num_begun) in list(self._durable.items()):
            if self._board.num_begun[file, slot] != num_begun:
                self._tally.num_overwritten += 1
                del self._durable[entry]
            elif entry not in good and work.is_cut_off(entry):
                self._tally.num_cut_off += 1
                del self._durable[entry]
            elif entry not in good:
                self._tally.lost.append(entry)
                del self._durable[entry]
        self._tally.back += sorted(self._gone & good)
