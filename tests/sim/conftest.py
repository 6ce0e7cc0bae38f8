"""Managers on the simulated device that are checked to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.property.driver import Driver
from tests.property.setups import Setup
from tests.sim.persistent import Place
from tests.sim.rig import Rig
from tests.sim.scenes import PER_BLOCK, Make


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes drivers, and checks each at the end for leaks, races and wrong bytes."""
    drivers: list[Driver] = []

    def make_driver(seed: int = 0, **setup: int) -> Driver:
        driver = Driver(Setup(per_block=PER_BLOCK, **setup), seed)  # type: ignore[arg-type]
        drivers.append(driver)
        return driver

    yield make_driver
    try:
        for driver in drivers:
            driver.finish()
    finally:
        for driver in drivers:
            driver.abandon()


@pytest.fixture
def build() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and checks each at the end for leaks, races and wrong bytes."""
    rigs: list[Rig] = []

    def make_rig(**settings: object) -> Rig:
        rigs.append(Rig(**settings))  # type: ignore[arg-type]
        return rigs[-1]

    yield make_rig
    try:
        for rig in rigs:
            rig.finish()
    finally:
        for rig in rigs:
            rig.abandon()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Makes places for managers that follow each other, and closes what is open at the end."""
    places: list[Place] = []

    def make(**settings: object) -> Place:
        places.append(Place(tmp_path / f"tier{len(places)}", **settings))
        return places[-1]

    yield make
    for made in places:
        made.close()
