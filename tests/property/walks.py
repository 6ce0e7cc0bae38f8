"""Seeded random walks: the same operations as the state machine, by plain random choice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from coldpage.sequence import OnMissing
from tests.property.driver import MAX_TOKENS, NUM_STREAMS, SCOPES, Driver

# Few prompts, of few tokens, so that prefixes are shared.
ALPHABET = 2
# Operations between changes of what goes wrong.
FAULT_PERIOD = 40


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    """One of a few streams of tokens, sometimes with another end."""
    source = random.Random(rng.randrange(3))
    tokens = [source.randrange(ALPHABET) for _ in range(num_tokens)]
    if tokens and rng.random() < 0.2:
        tokens[-1] ^= 1
    return tokens


class Walk:
    """Random operations on a driver, with the weights of a busy server."""

    def __init__(self, driver: Driver, seed: int, *, with_faults: bool) -> None:
        self.driver = driver
        self.rng = random.Random(seed)
        self.with_faults = with_faults
        self.operations: Counter[str] = Counter()  # those that did something, by kind
        self._choices: list[tuple[int, Callable[[], None]]] = [
            (10, self._create),
            (8, self._resume),
            (12, self._suspend),
            (14, self._step),
            (8, self._resume_and_step),
            (2, self._ask_ready),
            (2, self._resize),
            (4, self._commit),
            (3, self._fork),
            (2, self._truncate),
            (18, self._prefetch),
            (2, self._drop_blocks),
            (1, self._plan_drop),
            (10, self._resize_level),
            (2, self._defragment),
            (1, self._take_peaks),
            (6, self._close),
            (5, driver.poll),
            (4, driver.wait),
            (2, self._ready),
        ]
        if with_faults:
            self._choices.append((1, self._fail_next_submission))

    def run(self, num_operations: int) -> None:
        """Until so many operations have been done; a choice that fits nothing is none."""
        works = [work for _, work in self._choices]
        weights = [weight for weight, _ in self._choices]
        done = self.driver.operations
        while num_operations > 0:
            if self.with_faults and num_operations % FAULT_PERIOD == 0:
                self._change_faults()
            before = done.total()
            work = self.rng.choices(works, weights)[0]
            work()
            if done.total() > before:
                self.operations[work.__name__.strip("_").replace("_", " ")] += 1
                num_operations -= 1

    def _change_faults(self) -> None:
        rng = self.rng
        self.driver.set_faults(
            submission=rng.choice([0.0, 0.0, 0.1, 0.3]),
            io=rng.choice([0.0, 0.0, 0.05, 0.3]),
            delay=rng.choice([0.0, 0.5]),
        )

    def _index(self, *, active: bool | None = None) -> int | None:
        """A sequence, most often one in the wanted state."""
        sequences = self.driver.sequences
        fitting = [i for i, s in enumerate(sequences) if active is None or s.is_active is active]
        return self.rng.choice(fitting) if fitting else None

    def _create(self) -> None:
        tokens = prompt_of(self.rng, self.rng.randrange(MAX_TOKENS))
        scope = SCOPES[self.rng.random() < 0.25]
        if self.driver.sequences and self.rng.random() < 0.5:  # what somebody has said before
            other = self.rng.choice(self.driver.sequences)
            tokens, scope = other.tokens + tokens[:2], other.scope
        on_missing = OnMissing.HOLE if self.rng.random() < 0.2 else OnMissing.RECOMPUTE
        self.driver.create(tokens, scope, self.rng.choice([35, 35, 10]), on_missing)

    def _resume(self) -> None:
        index = self._index(active=False)
        if index is not None:
            self.driver.resume(index, self.rng.randrange(NUM_STREAMS))

    def _suspend(self) -> None:
        index = self._index(active=True)
        if index is not None:
            self.driver.suspend(index)

    def _step(self) -> None:
        index = self._index(active=True)
        if index is not None:
            self._step_of(index)

    def _step_of(self, index: int) -> None:
        history = self.driver.sequences[index].cache.history_length
        num_new = self.rng.choice([1, 1, 2, 3, 5, 9, 14])
        # Go on with the same prompts, so that another sequence may have committed it already.
        tokens = prompt_of(self.rng, history + num_new)[history:]
        self.driver.step(index, tokens, self.rng.choice([0, num_new, num_new, num_new + 4]))

    def _resume_and_step(self) -> None:
        """Write to pages that were on their way a moment ago."""
        index = self._index(active=False)
        if index is not None:
            self.driver.resume(index, self.rng.randrange(NUM_STREAMS))
            self._step_of(index)

    def _ready(self) -> None:
        index = self._index(active=True)
        if index is not None:
            self.driver.ready(index)

    def _ask_ready(self) -> None:
        index = self._index(active=True)
        if index is not None:
            self.driver.ask_ready(index)

    def _resize(self) -> None:
        index = self._index(active=True)
        if index is None:
            return
        history = self.driver.sequences[index].cache.history_length
        capacity = min(MAX_TOKENS, history + self.rng.randrange(8))
        back = history - self.rng.randrange(4) if self.rng.random() < 0.3 else None
        self.driver.resize(index, capacity, back)

    def _commit(self) -> None:
        caches = [(i, s.cache) for i, s in enumerate(self.driver.sequences) if s.is_active]
        written = [i for i, cache in caches if cache.history_length > cache.num_committed_tokens]
        if written:
            self.driver.commit(self.rng.choice(written), self.rng.randrange(1, 9))

    def _fork(self) -> None:
        index = self._index()
        if index is not None:
            self.driver.fork(index)

    def _truncate(self) -> None:
        index = self._index()
        if index is not None:
            history = self.driver.sequences[index].cache.history_length
            back = self.rng.choice([0, 1, 2, 3, 7])
            self.driver.truncate(index, max(0, history - back))

    def _prefetch(self) -> None:
        index = self._index(active=False)
        if index is not None:
            level = self.rng.randrange(len(self.driver.levels))
            luck = self.rng.random()
            if luck < 0.7:
                emptiest, coldest = self.driver.levels.hosts()
                level = (emptiest if luck < 0.55 else coldest) or level
            self.driver.prefetch(index, level)

    def _drop_blocks(self) -> None:
        index = self._index()
        if index is not None:
            history = self.driver.sequences[index].cache.history_length
            per_block = self.driver.setup.per_block
            start = self.rng.randrange(history + 1)
            if self.rng.random() < 0.5:
                start -= start % per_block
            self.driver.drop_blocks(index, start, start + self.rng.randrange(3 * per_block))

    def _plan_drop(self) -> None:
        index = self._index()
        if index is not None:
            self.driver.plan_drop(index, self.rng.randrange(4))

    def _resize_level(self) -> None:
        """Most often back and forth between the first size and a part of it."""
        level = self.rng.randrange(len(self.driver.levels))
        first = self.driver.setup.blocks[level]
        if self.driver.levels.blocks[level] != first and self.rng.random() < 0.7:
            self.driver.resize_level(level, first)
            return
        factor = self.rng.choice([0.2, 0.2, 0.5, 0.7, 2, self.rng.uniform(0, 4.2)])
        self.driver.resize_level(level, int(first * factor))

    def _defragment(self) -> None:
        self.driver.defragment(self.rng.randrange(len(self.driver.levels)))

    def _fail_next_submission(self) -> None:
        self.driver.fail_next_submission(self.rng.choice(["offload", "onboard"]))

    def _take_peaks(self) -> None:
        self.driver.take_peaks(self.rng.randrange(len(self.driver.levels)))

    def _close(self) -> None:
        index = self._index()
        if index is not None:
            self.driver.close_sequence(index)
