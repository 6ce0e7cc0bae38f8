"""What each level's pool groups really hold, sampled while the manager runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.pools import LevelPools
from coldpage.types import CacheLevel

__all__ = ["MIN_USAGE_SAMPLES", "UsageSamples"]

# With fewer samples a level is divided as its configuration says.
MIN_USAGE_SAMPLES: Final = 256
# The weight of the newest sample in the moving average.
_NEWEST: Final = 1 / MIN_USAGE_SAMPLES


class UsageSamples:
    """A moving average of the bytes that pages fill, by level and pool group."""

    def __init__(self, levels: Sequence[LevelPools]) -> None:
        self._levels = levels
        self._num_samples = [0] * len(levels)
        self._average: list[npt.NDArray[np.float64]] = [
            np.zeros(len(level.groups)) for level in levels
        ]

    def sample(self) -> None:
        """Note what is used now."""
        for level in self._levels:
            used = np.array([g.slots.num_used * g.slot_bytes for g in level.groups], np.float64)
            average = self._average[level.level]
            is_first = self._num_samples[level.level] == 0
            average += (used - average) * (1.0 if is_first else _NEWEST)
            self._num_samples[level.level] += 1

    def byte_weights(self, level: CacheLevel) -> tuple[float, ...] | None:
        """The average bytes in use, by pool group of the level; None while there are too few
        samples, or nothing was in use.
        """
        average = self._average[level]
        if self._num_samples[level] < MIN_USAGE_SAMPLES or not average.any():
            return None
        return tuple(average.tolist())

    def forget(self, level: CacheLevel) -> None:
        """Begin again: the level has another size."""
        self._num_samples[level] = 0
