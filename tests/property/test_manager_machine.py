"""Hypothesis drives a small manager on the simulated device against the naive model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coldpage import ReuseScope
from coldpage.sequence import OnMissing
from tests.property.driver import MAX_TOKENS, NUM_STREAMS, SCOPES, Driver
from tests.property.setups import CODECS, KINDS, LOSSY_CODECS, ROOMY_BLOCKS, Setup

# A profile of 'make fuzz' may ask for more examples than this.
NUM_EXAMPLES = 400
STEPS = 60

# Most managers have one codec and one cold level or two: what fails shrinks to something short.
any_codec = st.none() | st.sampled_from(CODECS + LOSSY_CODECS)
setups = st.builds(
    Setup,
    kind=st.sampled_from(KINDS),
    per_block=st.integers(2, 4),
    hot_blocks=st.integers(4, 10),
    host_blocks=st.sampled_from([0, 4, 6, 20]),
    disk_blocks=st.sampled_from([0, 4, 6, 20, ROOMY_BLOCKS]),
    is_ring_tiny=st.booleans(),
    max_util=st.sampled_from([0.6, 0.97, 1.0]),
    host2_blocks=st.sampled_from([0, 0, 0, 4]),
    codec=st.sampled_from(("concat", *CODECS, *LOSSY_CODECS)),
    host_codec=any_codec,
    host2_codec=any_codec,
    disk_codec=any_codec,
    separate_sinks=st.booleans(),
    watermark=st.sampled_from([0.0, 0.0, 0.25]),
    has_pool_ratio=st.booleans(),
    gpu_blocks=st.sampled_from([0, 0, 4, 8]),
    gpu_codec=any_codec,
    gpu_place=st.integers(0, 3),
    copies_behind=st.booleans(),
    is_prepared_late=st.booleans(),
    num_recent_blocks=st.sampled_from([0, 0, 1, 3]),
)
tokens = st.lists(st.integers(0, 1), max_size=MAX_TOKENS // 2)
streams = st.integers(0, NUM_STREAMS - 1)
which = st.integers(0, 5)


class ManagerMachine(RuleBasedStateMachine):
    """Every rule is one operation of the driver, which checks everything after it."""

    driver: Driver

    @initialize(setup=setups, seed=st.integers(0, 1 << 16))
    def build(self, setup: Setup, seed: int) -> None:
        self.driver = Driver(setup, seed)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            try:
                self.driver.finish()
            finally:
                self.driver.abandon()

    def _index(self, number: int) -> int:
        return number % len(self.driver.sequences)

    def has_sequences(self) -> bool:
        return hasattr(self, "driver") and bool(self.driver.sequences)

    @rule(
        prompt=tokens,
        scope=st.sampled_from(SCOPES),
        priority=st.sampled_from([10, 35]),
        on_missing=st.sampled_from(OnMissing),
    )
    def create(
        self, prompt: list[int], scope: ReuseScope, priority: int, on_missing: OnMissing
    ) -> None:
        self.driver.create(prompt, scope, priority, on_missing)

    @precondition(has_sequences)
    @rule(number=which, stream=streams)
    def resume(self, number: int, stream: int) -> None:
        self.driver.resume(self._index(number), stream)

    @precondition(has_sequences)
    @rule(number=which)
    def suspend(self, number: int) -> None:
        self.driver.suspend(self._index(number))

    @precondition(has_sequences)
    @rule(number=which, stream=streams, new=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def resume_and_step(self, number: int, stream: int, new: list[int]) -> None:
        self.driver.resume(self._index(number), stream)
        self.driver.step(self._index(number), new, len(new))

    @precondition(has_sequences)
    @rule(
        number=which,
        new=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        num_committed=st.integers(0, 12),
    )
    def step(self, number: int, new: list[int], num_committed: int) -> None:
        self.driver.step(self._index(number), new, num_committed)

    @precondition(has_sequences)
    @rule(number=which)
    def ready(self, number: int) -> None:
        self.driver.ready(self._index(number))

    @precondition(has_sequences)
    @rule(number=which)
    def ask_ready(self, number: int) -> None:
        self.driver.ask_ready(self._index(number))

    @precondition(has_sequences)
    @rule(
        number=which,
        capacity=st.integers(0, MAX_TOKENS),
        history=st.none() | st.integers(0, MAX_TOKENS),
    )
    def resize(self, number: int, capacity: int, history: int | None) -> None:
        self.driver.resize(self._index(number), capacity, history)

    @precondition(has_sequences)
    @rule(number=which, num_tokens=st.integers(1, 8))
    def commit(self, number: int, num_tokens: int) -> None:
        self.driver.commit(self._index(number), num_tokens)

    @precondition(has_sequences)
    @rule(number=which)
    def fork(self, number: int) -> None:
        self.driver.fork(self._index(number))

    @precondition(has_sequences)
    @rule(number=which, num_tokens=st.integers(0, MAX_TOKENS))
    def truncate(self, number: int, num_tokens: int) -> None:
        self.driver.truncate(self._index(number), num_tokens)

    @precondition(has_sequences)
    @rule(number=which, start=st.integers(0, MAX_TOKENS), num_tokens=st.integers(0, 12))
    def drop_blocks(self, number: int, start: int, num_tokens: int) -> None:
        self.driver.drop_blocks(self._index(number), start, start + num_tokens)

    @precondition(has_sequences)
    @rule(number=which, first_block=st.integers(0, 3))
    def plan_drop(self, number: int, first_block: int) -> None:
        self.driver.plan_drop(self._index(number), first_block)

    @rule(level=st.integers(0, 4), num_blocks=st.integers(1, 20))
    def resize_level(self, level: int, num_blocks: int) -> None:
        self.driver.resize_level(level % len(self.driver.levels), num_blocks)

    @rule(level=st.integers(0, 4))
    def defragment(self, level: int) -> None:
        self.driver.defragment(level % len(self.driver.levels))

    @rule(level=st.integers(0, 4))
    def take_peaks(self, level: int) -> None:
        self.driver.take_peaks(level % len(self.driver.levels))

    @precondition(has_sequences)
    @rule(number=which, level=st.integers(0, 4))
    def prefetch(self, number: int, level: int) -> None:
        self.driver.prefetch(self._index(number), level % len(self.driver.levels))

    @precondition(has_sequences)
    @rule(number=which)
    def close(self, number: int) -> None:
        self.driver.close_sequence(self._index(number))

    @rule()
    def poll(self) -> None:
        self.driver.poll()

    @rule()
    def wait(self) -> None:
        self.driver.wait()

    @rule(num_bytes=st.integers(1, 2000))
    def prepare(self, num_bytes: int) -> None:
        self.driver.prepare(num_bytes)

    @rule(
        submission=st.sampled_from([0.0, 0.2]),
        io=st.sampled_from([0.0, 0.2]),
        delay=st.sampled_from([0.0, 0.5]),
    )
    def change_faults(self, submission: float, io: float, delay: float) -> None:
        self.driver.set_faults(submission=submission, io=io, delay=delay)

    @rule(stream=st.sampled_from(["offload", "onboard"]))
    def fail_next_submission(self, stream: str) -> None:
        self.driver.fail_next_submission(stream)


def test_the_manager_does_what_the_naive_model_says() -> None:
    current = settings()
    is_fuzzing = current.max_examples > settings.get_profile("default").max_examples
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        ManagerMachine,
        settings=settings(
            current,
            max_examples=current.max_examples if is_fuzzing else NUM_EXAMPLES,
            stateful_step_count=STEPS,
        ),
    )
