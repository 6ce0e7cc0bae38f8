"""Random conversations, cancellations, evictions, damage: every answer is right, ends once."""

from __future__ import annotations

import random
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpage.engine.admission import EngineLimits
from coldpage.engine.messages import Finished
from tests.engine.pattern_runner import VOCAB
from tests.engine.rig import Rig


class Walk:
    """Random calls on a rig."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(5)]
        self.cancelled: set[str] = set()

    def submit(self) -> None:
        rng, number = self.rng, len(self.rig.prompts)
        which = rng.randrange(len(self.texts))
        text = self.texts[which]
        prompt = [
            *text[: rng.randint(1, len(text))],
            *rng.choices(range(VOCAB), k=rng.randint(0, 9)),
        ]
        session = f"s{which}" if rng.random() < 0.5 else None
        self.rig.submit(str(number), prompt, rng.randint(1, 30), session=session)
        if rng.random() < 0.3:
            self.texts[which] = prompt[:80]

    def cancel(self) -> None:
        if self.rig.prompts:
            request_id = self.rng.choice(list(self.rig.prompts))
            if request_id not in self.rig.ends:
                self.cancelled.add(request_id)
            self.rig.scheduler.cancel(request_id)

    def evict(self) -> None:
        self.rig.manager.offload_everything()

    def damage(self) -> None:
        self.rig.manager.faults.flip_on_disk = {self.rng.randrange(12) for _ in range(2)}

    def change_speed(self) -> None:
        self.rig.manager.faults.polls_to_onboard = self.rng.randrange(4)
        self.rig.manager.faults.polls_to_grow = self.rng.randrange(3)

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            self.rig.step()

    def go(self) -> None:
        calls = [self.submit, self.step, self.cancel, self.evict, self.damage, self.change_speed]
        for call in self.rng.choices(calls, weights=[6, 8, 1, 1, 1, 1], k=60):
            call()
        self.rig.run()
        for request_id in self.rig.prompts:
            if request_id in self.cancelled:
                assert not isinstance(self.rig.ends.get(request_id), Finished)
            else:
                self.rig.check_tokens(request_id)


@pytest.mark.parametrize("has_sliding_window", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 6, 60])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=5)
def test_random_walks(has_sliding_window: bool, num_host_blocks: int, seed: int) -> None:
    limits = EngineLimits(
        max_batch=3, prefill_tokens=16, prefill_tokens_beside_decode=8, max_sessions=2
    )
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(
            directory,
            40,
            num_host_blocks=num_host_blocks,
            limits=limits,
            has_sliding_window=has_sliding_window,
        )
        Walk(rig, random.Random(seed)).go()
        rig.close()
