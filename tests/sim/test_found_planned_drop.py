"""Observers learn of planned drops, as of all others."""

from __future__ import annotations

from coldpage.manager import BlockStored, PagesDropped, PagesMoved
from tests.sim.scenes import PER_BLOCK, Make, filled, prompt


class _Log:
    def __init__(self) -> None:
        self.dropped: list[PagesDropped] = []

    def on_stored(self, event: BlockStored) -> None:
        pass

    def on_moved(self, event: PagesMoved) -> None:
        pass

    def on_dropped(self, event: PagesDropped) -> None:
        self.dropped.append(event)


def test_a_planned_drop_is_told_when_the_last_holder_goes(make: Make) -> None:
    driver = make(hot_blocks=8)
    log = _Log()
    driver.manager.add_observer(log)
    sequence = filled(driver, prompt(3))
    keys = sequence.cache.block_keys
    fork = driver.adopt(sequence.fork())
    sequence.cache.plan_drop(1)
    driver.close_sequence(driver.sequences.index(sequence))
    assert log.dropped == [], "the fork still holds them"
    driver.close_sequence(driver.sequences.index(fork))
    (event,) = log.dropped
    assert [page.block_key for page in event.pages] == list(keys[1:])
    assert "planned" in event.cause
    assert driver.manager.create_kv_cache(prompt(3)).num_committed_tokens == PER_BLOCK
