"""Which positions of a sequence one step computes. Pure arithmetic."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from coldpage.types import BlockOrdinal, HalfOpenRange

__all__ = ["ItemPurpose", "MissingChunk", "missing_chunk", "prefill_chunk"]


class ItemPurpose(enum.Enum):
    """Why a step computes an item."""

    PREFILL = "prefill"  # new positions, more than one
    DECODE = "decode"  # the one position that is still to be fed
    RECOMPUTE = "recompute"  # positions of blocks whose contents were lost


@dataclass(frozen=True, slots=True)
class MissingChunk:
    """Whole lost blocks in one contiguous run and the positions to compute for them."""

    ordinals: tuple[BlockOrdinal, ...]
    positions: HalfOpenRange


def prefill_chunk(start: int, stop: int, budget: int, tokens_per_block: int) -> HalfOpenRange:
    """The next positions of ``[start, stop)``, at most ``budget``, ending at a block's end where it
    can.
    """
    end = min(stop, start + budget)
    if end < stop:
        aligned = end - end % tokens_per_block
        end = aligned if aligned > start else end
    return HalfOpenRange(start, end)


def missing_chunk(
    missing: Sequence[BlockOrdinal], history_length: int, budget: int, tokens_per_block: int
) -> MissingChunk:
    """The first run of ``missing`` (ascending, not empty), as many whole blocks as fit ``budget``,
    which is at least one block.
    """
    ordinals: list[BlockOrdinal] = []
    for ordinal in missing:
        follows = not ordinals or ordinal == ordinals[-1] + 1
        if not follows or (len(ordinals) + 1) * tokens_per_block > budget:
            break
        ordinals.append(ordinal)
    assert ordinals, "a step's budget holds no block"
    start = ordinals[0] * tokens_per_block
    stop = min((ordinals[-1] + 1) * tokens_per_block, history_length)
    return MissingChunk(tuple(ordinals), HalfOpenRange(start, stop))
