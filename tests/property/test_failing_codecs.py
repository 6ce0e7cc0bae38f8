"""Seeded walks with codecs whose calls fail now and then, with a part of their work enqueued."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from coldpage.codecs.base import BlockOrdinals, PageIndices
from coldpage.device.base import Stream
from coldpage.testing.index_poison import IndexPoisoningCodec
from coldpage.types import LifeCycleId, MemAddress
from tests.property.driver import Driver
from tests.property.setups import KINDS, Setup
from tests.property.walks import Walk

NUM_OPERATIONS = 250
FAILURE_RATES = {"encode": 0.1, "decode": 0.3}

# host blocks, disk blocks, cold blocks on the device, and the codecs of host and disk
LEVELS = {
    "host": (6, 0, 0, None, None),
    "disk": (0, 6, 0, None, None),
    "host and disk": (5, 6, 0, None, None),
    "host and disk, transcoding": (5, 6, 0, "position", "padding"),
    "device, host and disk, transcoding": (5, 6, 5, "position", "padding"),
}


class _Luck:
    """Fails calls of every codec."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.failures: Counter[str] = Counter()
        self.is_on = True
        self._random = random.Random(seed)
        for call in ("encode", "decode"):
            patch.setattr(IndexPoisoningCodec, call, self._failing(call))

    def _failing(self, call: str) -> object:
        original = getattr(IndexPoisoningCodec, call)

        def run(
            codec: IndexPoisoningCodec,
            life_cycle_id: LifeCycleId,
            base: MemAddress,
            pages: PageIndices,
            stream: Stream,
            ordinals: BlockOrdinals | None,
        ) -> None:
            fails = self.is_on and self._random.random() < FAILURE_RATES[call]
            if fails and isinstance(pages, np.ndarray):
                pages = pages[: pages.size // 2]
                ordinals = ordinals[: pages.size] if isinstance(ordinals, np.ndarray) else None
            original(codec, life_cycle_id, base, pages, stream, ordinals)
            if fails:
                self.failures[call] += 1
                raise ArithmeticError("bad luck")

        return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("with_faults", [False, True])
def test_codecs_that_fail_cost_time_and_no_page_is_wrong(
    kind: str, levels: str, with_faults: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_host, num_disk, num_device, host_codec, disk_codec = LEVELS[levels]
    failures: Counter[str] = Counter()
    for seed in range(2):
        with monkeypatch.context() as patch:
            luck = _Luck(seed, patch)
            setup = Setup(
                kind=kind,
                per_block=2 + seed % 3,
                hot_blocks=8,
                host_blocks=num_host,
                disk_blocks=num_disk,
                gpu_blocks=num_device,
                host_codec=host_codec,
                disk_codec=disk_codec,
                copies_behind=seed == 0,
                write_behind=seed == 1 and num_disk > 0,
            )
            driver = Driver(setup, seed)
            try:
                Walk(driver, seed, with_faults=with_faults).run(NUM_OPERATIONS)
                luck.is_on = False
                counted = sum(driver.manager.stats().codec_failures.values())
                driver.finish()
            finally:
                driver.abandon()
            assert counted == luck.failures.total()
            failures.update(luck.failures)
    assert failures.total() > 0
