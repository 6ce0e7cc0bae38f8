"""What is computed again with holes before it never reaches those who have none."""

from __future__ import annotations

import pytest

from coldpage.testing.pattern_engine import PatternSequence
from tests.property.driver import Driver
from tests.sim.scenes import PER_BLOCK, Make, filled, prompt, push_out, suspended


def drop_first_block(driver: Driver, sequence: PatternSequence) -> None:
    driver.drop_blocks(driver.sequences.index(sequence), 0, PER_BLOCK)


def test_a_lost_page_after_a_hole_is_recomputed_apart_from_those_who_share_it(make: Make) -> None:
    driver = make(hot_blocks=8)
    sequence = suspended(driver, prompt(3))
    fork = driver.adopt(sequence.fork())
    push_out(driver, 8)
    assert fork.cache.missing_blocks() == [0, 1, 2]
    drop_first_block(driver, sequence)
    assert sequence.resume()
    sequence.cache.synchronize()
    assert sequence.recompute() == [1, 2]
    sequence.check()
    assert fork.cache.missing_blocks() == [0, 1, 2], "they have been filled with other bytes"
    assert driver.manager.create_kv_cache(prompt(3)).num_committed_tokens == 0
    assert fork.resume()
    fork.cache.synchronize()
    assert fork.recompute() == [0, 1, 2]
    fork.check()


@pytest.mark.parametrize("order", ["drop", "fork"])
def test_so_it_is_when_the_pages_wait_for_it_already(make: Make, order: str) -> None:
    driver = make(hot_blocks=8)
    sequence = suspended(driver, prompt(3))
    push_out(driver, 8)
    assert sequence.resume()
    sequence.cache.synchronize()
    fork = driver.adopt(sequence.fork()) if order == "drop" else None
    drop_first_block(driver, sequence)
    if fork is None:
        sequence.cache.synchronize()
        fork = driver.adopt(sequence.fork())
    sequence.cache.synchronize()
    assert sequence.recompute() == [1, 2]
    sequence.check()
    sequence.cache.suspend()
    assert fork.resume()
    fork.cache.synchronize()
    fork.recompute()
    fork.check()
    driver.assert_clean()


def test_blocks_after_a_hole_that_were_not_lost_stay_shared(make: Make) -> None:
    driver = make(hot_blocks=8)
    sequence = filled(driver, prompt(3))
    drop_first_block(driver, sequence)
    sequence.cache.synchronize()
    sequence.check()
    assert driver.manager.create_kv_cache(prompt(3)).num_committed_tokens == 3 * PER_BLOCK
    assert driver.manager.stats().levels[0].used_slots == 3
