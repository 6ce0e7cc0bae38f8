"""What callers pass to a sequence's cache, checked before anything is done with it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from coldpage.device.base import Stream
from coldpage.errors import UsageError
from coldpage.types import BlockOrdinal, LayerGroupId

__all__ = [
    "check_blocks",
    "check_layer_group",
    "check_stream",
    "whole_number",
]


def whole_number(value: int, what: str) -> int:
    """The number as Python's own. Raises UsageError for what is none, also for 1.0."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{what} must be a whole number, not {value!r}") from None


def check_stream(stream: Stream | None) -> None:
    """Raises UsageError for what is neither."""
    if not (stream is None or isinstance(stream, Stream)):
        raise UsageError(f"a stream must be one that the manager's device made, not {stream!r}")


def check_layer_group(layer_group_id: LayerGroupId, num_layer_groups: int) -> None:
    """Raises UsageError where there is no such layer group."""
    is_whole = isinstance(layer_group_id, int | np.integer)  # asked in every step: the fast way
    if not (is_whole and 0 <= layer_group_id < num_layer_groups):
        raise UsageError(
            f"there is no layer group {layer_group_id!r}: this model has 0 to "
            f"{num_layer_groups - 1}"
        )


def check_blocks(ordinals: Sequence[BlockOrdinal], num_blocks: int) -> None:
    """Raises UsageError where a sequence of so many blocks has not all of these."""
    for ordinal in ordinals:
        if not 0 <= whole_number(ordinal, "a block's ordinal") < num_blocks:
            raise UsageError(f"there is no block {ordinal}: this sequence has {num_blocks}")
