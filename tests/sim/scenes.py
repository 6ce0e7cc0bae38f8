"""Small scenes for tests of the manager: sequences that are full, suspended, pushed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coldpage import ReuseScope
from coldpage.device.base import Stream
from coldpage.testing.pattern_engine import PatternSequence
from coldpage.types import NO_SLOT, LayerGroupId
from tests.property.driver import Driver
from tests.sim.rig import Rig

GROUP = LayerGroupId(0)
PER_BLOCK = 2

Make = Callable[..., Driver]
Build = Callable[..., Rig]
# What a scene needs of either.
Stage = Driver | Rig


def prompt(num_blocks: int, first: int = 0) -> list[int]:
    """Tokens that share no block with those of another ``first``."""
    return [first, *range(100, 99 + PER_BLOCK * num_blocks)]


def filled(
    driver: Stage,
    tokens: Sequence[int],
    *,
    stream: Stream | None = None,
    num_committed: int | None = None,
    scope: ReuseScope | None = None,
) -> PatternSequence:
    """An active sequence that has written ``tokens``."""
    sequence = driver.adopt(driver.engine.create(tokens, scope=scope))
    assert sequence.resume(stream)
    history = sequence.cache.history_length
    assert sequence.step(tokens[history:], num_committed=num_committed)
    driver.check()
    return sequence


def suspended(driver: Stage, tokens: Sequence[int], **settings: int) -> PatternSequence:
    """A suspended sequence that has written ``tokens``."""
    sequence = filled(driver, tokens, **settings)  # type: ignore[arg-type]
    sequence.cache.suspend()
    return sequence


def push_out(driver: Stage, num_blocks: int) -> None:
    """Have the hot level make room for so many blocks, which nobody keeps."""
    sequence = driver.engine.create()
    assert sequence.resume()
    assert sequence.cache.resize(num_blocks * PER_BLOCK)
    sequence.cache.synchronize()
    sequence.cache.close()
    driver.manager.finish_transfers()
    driver.check()


def resumed(driver: Stage, sequence: PatternSequence, stream: Stream | None = None) -> None:
    assert sequence.resume(stream)
    sequence.cache.synchronize()
    sequence.check()
    driver.check()


def totals(driver: Stage, name: str) -> int:
    return driver.manager.stats().totals.get(name, 0)


def moves(driver: Stage, path: str) -> int:
    return driver.manager.stats().moved_pages.get(path, 0)


def hot_blocks(sequence: PatternSequence) -> list[int]:
    slots = sequence.cache.page_indices(GROUP)
    return [ordinal for ordinal, slot in enumerate(slots.tolist()) if slot != NO_SLOT]
