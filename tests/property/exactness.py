"""A naive model of which blocks are byte for byte what was written, where codecs that lose
something keep the newest blocks of a sequence whole.

A block is exact while it is written, and stays so as long as it is among the newest whenever its
sequence lets go of it. Of a block that is not, nothing is known: nobody may have had to pack it.
"""

from __future__ import annotations

import numpy as np

from coldpage.testing.pattern_engine import PatternEngine, PatternSequence
from coldpage.types import NO_SLOT

__all__ = ["Exactness"]


class Exactness:
    """Of all sequences of one manager. ``num_recent_blocks`` 0: nothing is promised."""

    def __init__(self, engine: PatternEngine, per_block: int, num_recent_blocks: int) -> None:
        self._engine = engine
        self._per_block = per_block
        self._num_recent = num_recent_blocks
        self._exact: dict[PatternSequence, set[int]] = {}
        self.num_checked = 0  # parts of blocks, since the start
        self.num_outgrown = 0  # blocks that were exact and of which nothing is promised any more

    def counts(self) -> dict[str, int]:
        """Nothing where nothing is promised."""
        if not self._num_recent:
            return {}
        return {
            "recent: pieces compared": self.num_checked,
            "recent: blocks grown past": self.num_outgrown,
        }

    def wrote(self, sequence: PatternSequence, start: int, stop: int) -> None:
        """Positions [start, stop). What came before them in the first block is as it was."""
        known = self._of(sequence)
        first = start // self._per_block
        if start % self._per_block and first not in known:
            first += 1
        known.update(range(first, -(-stop // self._per_block)))

    def let_go(self, sequence: PatternSequence) -> None:
        """Suspended now, and all its pages may be packed but for the newest."""
        self._keep_newest(sequence)

    def forked(self, sequence: PatternSequence, other: PatternSequence) -> None:
        """``other`` is a suspended copy."""
        self._exact[other] = set(self._of(sequence))
        if sequence.is_active:
            self._keep_newest(other)

    def went_back(self, sequence: PatternSequence) -> None:
        """It is shorter now."""
        num_blocks = -(-sequence.cache.history_length // self._per_block)
        self._exact[sequence] = {block for block in self._of(sequence) if block < num_blocks}

    def forget(self, sequence: PatternSequence) -> None:
        self._exact.pop(sequence, None)

    def check(self, sequence: PatternSequence) -> None:
        """Compare the exact blocks of a ready sequence, every byte of them."""
        exact, holes, missing = self._of(sequence), sequence._holes(), sequence._missing()
        if not self._num_recent or not exact:
            return
        pieces = [
            piece
            for piece in sequence._pieces(0, sequence.cache.history_length)
            if piece.ordinal in exact
            and piece.slot != NO_SLOT
            and piece.ordinal not in holes[piece.buffer.layer_group_id]
            and piece.ordinal not in missing[piece.buffer.layer_group_id]
        ]
        self.num_checked += len(pieces)

        def compare() -> None:
            for piece in pieces:
                if not np.array_equal(piece.place, piece.expected.ravel()):
                    self._engine.report(f"{piece.where}, slot {piece.slot}: it is not whole")

        reads = [piece.bytes_touched for piece in pieces]
        if pieces:
            self._engine._run(compare, sequence.stream, reads=reads)

    def _of(self, sequence: PatternSequence) -> set[int]:
        return self._exact.setdefault(sequence, set())

    def _keep_newest(self, sequence: PatternSequence) -> None:
        num_full = sequence.cache.history_length // self._per_block
        newest = {block for block in self._of(sequence) if block >= num_full - self._num_recent}
        self.num_outgrown += len(self._of(sequence)) - len(newest)
        self._exact[sequence] = newest
