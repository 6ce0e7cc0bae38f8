"""The engine's step: who runs, on which positions, in which hot memory, and what follows from the
logits.

One thread drives a scheduler: the one that owns the manager. There are no sockets and no threads
here, so a server, a benchmark and a test drive the same code.

A request waits in the queue, onboards (its pages are locked and on their way), runs, and ends.
Preemption sends the newest one back to the head of the queue with its cache suspended; nothing is
lost by it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from coldpage.engine.admission import (
    EngineLimits,
    HotCapacity,
    Refusal,
    refuse_prompt,
    refuse_sampling,
    working_set_blocks,
)
from coldpage.engine.forward.runner import LogitsWanted, StepItem
from coldpage.engine.messages import Delta, Failed, Finished
from coldpage.engine.opening import CacheOpener
from coldpage.engine.planning import ItemPurpose, missing_chunk, prefill_chunk
from coldpage.engine.requests import GenerationRequest, LiveRequest, RequestPhase
from coldpage.engine.sampling import new_generator, sample
from coldpage.engine.sessions import SessionKey, SessionStore
from coldpage.engine.steps import (
    PlannedItem,
    ScheduledItem,
    ServedModel,
    StepObserver,
    StepResult,
    StepRunner,
    StepState,
)
from coldpage.errors import ColdpageError, OutOfPagesError
from coldpage.types import CacheLevel, HalfOpenRange

if TYPE_CHECKING:
    from coldpage.manager import KVCacheManager

__all__ = ["Scheduler"]

_LOG = logging.getLogger(__name__)
_FIRST_COLD_LEVEL: Final = CacheLevel(1)


class Scheduler:
    """Runs requests on one manager and one model. Every method belongs to the manager's thread.

    ``counters`` only grow. ``observer`` may be set at any time between steps.
    """

    def __init__(
        self,
        runner: StepRunner,
        manager: KVCacheManager,
        model: ServedModel,
        limits: EngineLimits | None = None,
    ) -> None:
        """Raises ConfigurationError where ``limits`` can not work."""
        self._runner = runner
        self._manager = manager
        self._model = model
        self._limits = EngineLimits() if limits is None else limits
        self._limits.check(manager.tokens_per_block)
        self._capacity = HotCapacity(
            manager.num_hot_blocks, manager.max_sequence_tokens, manager.tokens_per_block
        )
        self._unwindowed_groups = [
            group.layer_group_id
            for group in manager.layout.layer_groups
            if group.sliding_window_tokens is None
        ]
        self.sessions = SessionStore(self._limits.max_sessions)
        self._opener = CacheOpener(manager, self.sessions, model.has_sliding_window)
        self._waiting: deque[LiveRequest] = deque()
        self._active: list[LiveRequest] = []  # onboarding or running, in the order of admission
        self._num_admissions = 0
        self._tokens: list[tuple[str, int]] = []
        self._replies: list[Delta | Finished | Failed] = []
        self.observer: StepObserver | None = None
        self.counters: Counter[str] = Counter()
        self.hits_tokens: Counter[str] = Counter()  # reused prompt tokens by tier name

    # What the owner calls

    @property
    def num_running(self) -> int:
        """Requests that hold locked pages."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_sessions(self) -> int:
        """Idle sessions kept."""
        return len(self.sessions)

    @property
    def runner_counters(self) -> Mapping[str, int]:
        """How the runner ran its steps."""
        return self._runner.counters

    def live_in(self, key: SessionKey) -> LiveRequest | None:
        """The request that is open in a session, if there is one."""
        open_requests = (*self._active, *self._waiting)
        return next((live for live in open_requests if live.request.session_key == key), None)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. What can never run is answered with a ``Failed`` by the next step."""
        self.counters["requests"] += 1
        refusal = refuse_sampling(request.sampling) or refuse_prompt(
            request.prompt, self._capacity, self._model.context_tokens, self._model.vocab_size
        )
        if refusal is None and len(self._waiting) >= self._limits.max_waiting:
            refusal = Refusal(
                503, "queue_full", f"{len(self._waiting)} requests are waiting already; try later."
            )
        if refusal is not None:
            self._reply_failed(request.request_id, refusal)
            return
        most_tokens = min(self._model.context_tokens, self._capacity.allowed_tokens)
        room = most_tokens - len(request.prompt)
        wanted = request.sampling.max_tokens
        live = LiveRequest(
            request,
            text=self._model.new_text(request.sampling.stop, request.prompt),
            generator=new_generator(request.sampling),
            max_new_tokens=room if wanted is None else min(room, wanted),
        )
        self._waiting.append(live)
        self.counters["prompt_tokens"] += live.num_prompt_tokens

    def cancel(self, request_id: str) -> None:
        """Free what a request holds, at once. Nothing more is said about it; unknown ids are
        ignored.
        """
        for live in (*self._active, *self._waiting):
            if live.request_id == request_id:
                self._release(live)
                self.counters["cancelled"] += 1

    def step(self) -> StepResult:
        """Advance everything by one model step at most. Never blocks but for computing."""
        self._manager.poll()
        self._admit()
        self._start_restored()
        self._refresh_missing()
        self._prefetch_waiting()
        plan = self._plan_step()
        if plan:
            self._run(plan)
        replies, self._replies = tuple(self._replies), []
        tokens, self._tokens = tuple(self._tokens), []
        state = StepState.BLOCKED if self._active or self._waiting else StepState.IDLE
        return StepResult(
            state=StepState.WORKED if plan else state,
            num_batched_tokens=sum(len(item.positions) for item in plan),
            tokens=tokens,
            replies=replies,
        )

    def abort_all(
        self, status: int, code: str, sentence: str
    ) -> tuple[Delta | Finished | Failed, ...]:
        """Fail every request; all answers that no step has given, which none gives again.

        Never raises: what is broken may be what a request holds.
        """
        for live in (*self._active, *self._waiting):
            try:
                self._fail(live, Refusal(status, code, sentence))
            except Exception:
                _LOG.exception("the cache of %s can not be closed", live.request_id)
        replies, self._replies = tuple(self._replies), []
        return replies

    def close(self) -> None:
        """Let go of every cache, requests' and sessions'. The manager stays open."""
        for live in (*self._active, *self._waiting):
            self._release(live)
        self.sessions.close()

    # Admission

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._limits.max_batch:
            live = self._waiting[0]
            try:
                if not self._try_admit(live):
                    break
            except ColdpageError as error:
                self._fail(live, _refusal_of(error))

    def _try_admit(self, live: LiveRequest) -> bool:
        """Resume the head of the queue if it fits beside what runs; False when it must wait."""
        is_just_opened = live.kv is None
        if is_just_opened:
            self._opener.open(live)
        # With nothing running it is resumed whatever the estimate: what can never run was refused.
        if self._active and not self._fits_beside_active(live):
            return False
        if not is_just_opened and not live.was_admitted:
            self._opener.rematch(live)
        if not live.cache.resume():
            if self._active:  # those that run will end
                live.forget_waiting()
            elif self._waited_for_room_s(live) > self._limits.admission_deadline_s:
                self._fail(live, self._no_room(live.num_tokens + 1))
            return False
        live.was_admitted = True
        self._waiting.popleft()
        live.admission_number = self._num_admissions
        self._num_admissions += 1
        live.enter(RequestPhase.ONBOARDING, time.monotonic())
        self._active.append(live)
        return True

    def _fits_beside_active(self, live: LiveRequest) -> bool:
        footprints = [
            one.footprint(self._capacity.blocks_for(one.num_tokens) + 1)
            for one in (*self._active, live)
        ]
        blocks = working_set_blocks(footprints, self._capacity.tokens_per_block)
        return blocks <= self._capacity.allowed_blocks

    def _start_restored(self) -> None:
        now_s = time.monotonic()
        for live in list(self._active):
            if live.phase is not RequestPhase.ONBOARDING:
                continue
            if not live.cache.is_ready():
                waited_s = now_s - live.phase_since_s
                if waited_s > self._limits.onboarding_deadline_s:
                    sentence = f"The request's pages did not arrive within {waited_s:.0f} s."
                    self._fail(live, Refusal(503, "restore_timeout", sentence))
                continue
            live.restore_s += now_s - live.phase_since_s
            live.enter(RequestPhase.RUNNING, now_s)
            if self.observer is not None:
                self.observer.on_restored(live.request_id, live.cache)
            self._note_missing(live)

    def _note_missing(self, live: LiveRequest) -> None:
        live.missing = sorted(live.cache.missing_blocks())
        if not live.missing or not self._model.has_sliding_window:
            return
        # Recomputing a middle block needs the window before it, which is stale: start from what
        # matches.
        self.counters["rebuilt_sequences"] += 1
        self.counters["recomputed_blocks"] += len(live.missing)
        live.num_rebuilds += 1
        self._leave_queues(live)
        live.cache.close()
        live.kv = None
        live.missing = []
        live.enter(RequestPhase.WAITING, time.monotonic())
        self._waiting.appendleft(live)

    def _refresh_missing(self) -> None:
        """Another sequence may have filled a lost page that this one shares."""
        for live in self._active:
            if live.missing and live.phase is RequestPhase.RUNNING:
                live.missing = sorted(live.cache.missing_blocks())

    def _prefetch_waiting(self) -> None:
        """Pull the next requests' pages off the disk while they wait."""
        if len(self._model.tier_names) <= _FIRST_COLD_LEVEL + 1:
            return
        for live in list(self._waiting)[: self._limits.prefetch_depth]:
            if live.is_prefetched:
                continue
            live.is_prefetched = True
            try:
                if live.kv is None:
                    self._opener.open(live)
                live.cache.prefetch(_FIRST_COLD_LEVEL)
            except ColdpageError as error:
                self._fail(live, _refusal_of(error))

    # Planning a step

    def _plan_step(self) -> list[PlannedItem]:
        """The step's items: decoding first, then recomputing, then prompts, within the budget."""
        plan: dict[LiveRequest, PlannedItem] = {}
        running = [live for live in self._active if live.phase is RequestPhase.RUNNING]
        decoding = [live for live in running if not live.missing and live.num_pending_tokens == 1]
        for live in decoding:
            start = live.cache.history_length
            self._plan_item(
                plan, PlannedItem(live, ItemPurpose.DECODE, HalfOpenRange(start, start + 1))
            )
        limits = self._limits
        budget = limits.prefill_tokens_beside_decode if decoding else limits.prefill_tokens
        # Recomputing comes first, so that its whole blocks always find the budget they need. Two
        # sequences may share a lost page, which one step must not write twice: one at a time.
        recomputing = [live for live in running if live.missing]
        prefilling = [live for live in running if not live.missing and live not in decoding]
        for live in (*recomputing[:1], *prefilling):
            item = self._next_chunk(live, budget)
            if item is not None and self._plan_item(plan, item):
                budget -= len(item.positions)
        return list(plan.values())

    def _next_chunk(self, live: LiveRequest, budget: int) -> PlannedItem | None:
        if live.phase is not RequestPhase.RUNNING or budget <= 0:
            return None
        history = live.cache.history_length
        block = self._capacity.tokens_per_block
        if live.missing:
            chunk = missing_chunk(live.missing, history, budget, block)
            return PlannedItem(live, ItemPurpose.RECOMPUTE, chunk.positions, chunk.ordinals)
        # Beside a sliding window a long prompt may fit the hot level only in steps.
        most = max(live.cache.max_capacity, history + 1)
        positions = prefill_chunk(history, min(live.num_tokens, most), budget, block)
        return PlannedItem(live, ItemPurpose.PREFILL, positions)

    def _plan_item(self, plan: dict[LiveRequest, PlannedItem], item: PlannedItem) -> bool:
        """Add an item if there is room for it now. May preempt, which removes the victim's item."""
        live = item.live
        if live.phase is not RequestPhase.RUNNING:  # preempted by an item planned before
            return False
        try:
            if not self._make_room(plan, live, item.positions.stop):
                return False
            # A page granted just now may still be read by the copy that saves its last owner.
            if not live.cache.is_ready():
                return False
        except ColdpageError as error:
            self._fail(live, _refusal_of(error))
            return False
        plan[live] = item
        return True

    def _make_room(
        self, plan: dict[LiveRequest, PlannedItem], live: LiveRequest, stop: int
    ) -> bool:
        """Grow the cache to write positions below ``stop``; False: not in this step."""
        kv = live.cache
        block = self._capacity.tokens_per_block
        while kv.capacity < stop and not kv.resize(self._capacity.blocks_for(stop) * block):
            waited_s = self._waited_for_room_s(live)
            if waited_s > self._limits.room_deadline_s:
                self._fail(live, self._no_room(stop))
                return False
            patience_s = self._limits.room_patience_s * (1 + live.num_victims)
            is_patient = waited_s <= patience_s and self._moving_pages_are_in_the_way(live, stop)
            if is_patient or len(self._active) == 1:
                return False
            victim = self._active[-1]
            self._preempt(victim)
            plan.pop(victim, None)
            if victim is live:
                return False
            live.num_victims += 1
        live.forget_waiting()
        return True

    def _moving_pages_are_in_the_way(self, live: LiveRequest, stop: int) -> bool:
        """Whether all that runs seems to fit, so that no locked page is what is in the way."""
        footprints = [
            one.footprint(
                self._capacity.blocks_for(max(one.cache.capacity, stop if one is live else 0))
            )
            for one in self._active
        ]
        blocks = working_set_blocks(footprints, self._capacity.tokens_per_block)
        return blocks <= self._capacity.num_blocks

    def _waited_for_room_s(self, live: LiveRequest) -> float:
        """How long the request has waited for room; starts its clock."""
        now_s = time.monotonic()
        if live.waiting_for_room_since_s is None:
            live.waiting_for_room_since_s = now_s
        return now_s - live.waiting_for_room_since_s

    def _no_room(self, num_tokens: int) -> Refusal:
        return Refusal(
            503,
            "hot_level_full",
            f"The request needs {self._capacity.blocks_for(num_tokens)} blocks on the hot level, "
            f"which has {self._capacity.num_blocks}, and they did not become free.",
        )

    def _preempt(self, live: LiveRequest) -> None:
        self.counters["preemptions"] += 1
        self._leave_queues(live)
        live.cache.suspend()
        live.enter(RequestPhase.WAITING, time.monotonic())
        self._waiting.appendleft(live)

    # Running a step

    def _run(self, plan: list[PlannedItem]) -> None:
        try:
            scheduled = [self._scheduled(item) for item in plan]
            outputs = self._runner.forward([one.item for one in scheduled])
        except Exception as error:  # whatever the model raises, only this step pays for it
            _LOG.exception("a step with %d requests failed", len(plan))
            for item in plan:
                self._fail(item.live, _refusal_of(error))
            return
        if self.observer is not None:
            self.observer.on_step(scheduled, outputs)
        logits: list[torch.Tensor] = []
        sampled: list[LiveRequest] = []
        for item, output in zip(plan, outputs, strict=True):
            try:
                self._keep(item)
            except ColdpageError as error:
                self._fail(item.live, _refusal_of(error))
                continue
            if output is not None:
                logits.append(output)
                sampled.append(item.live)
        if sampled:
            self._sample(torch.cat(logits), sampled)

    def _scheduled(self, item: PlannedItem) -> ScheduledItem:
        live, positions = item.live, item.positions
        num_blocks = self._capacity.blocks_for(positions.stop)
        for group_id in self._unwindowed_groups:
            # Attention leaves a hole out without a word: the answer would be another text.
            slots = live.cache.page_indices(group_id)[:num_blocks]
            assert slots.size == num_blocks and slots.min() >= 0, "the history has a hole"
        is_last = positions.stop == live.num_tokens
        wants_logits = is_last and item.purpose is not ItemPurpose.RECOMPUTE
        return ScheduledItem(
            live.request_id,
            item.purpose,
            StepItem(
                kv_cache=live.cache,
                start=positions.start,
                token_ids=live.tokens[positions.start : positions.stop],
                logits=LogitsWanted.LAST if wants_logits else LogitsWanted.NONE,
            ),
        )

    def _keep(self, item: PlannedItem) -> None:
        """Make what the step wrote part of the cache."""
        live, positions = item.live, item.positions
        if item.purpose is ItemPurpose.RECOMPUTE:
            live.cache.fill_missing(list(item.ordinals))
            self.counters["recomputed_blocks"] += len(item.ordinals)
            if live.first_token_at_s is None:
                live.uncache_tokens(len(positions))
        else:
            live.cache.commit(live.tokens[positions.start : positions.stop])

    def _sample(self, logits: torch.Tensor, lives: list[LiveRequest]) -> None:
        result = sample(logits, [live.sampling_row for live in lives])
        now_s = time.monotonic()
        for live, token_id, is_valid in zip(
            lives, result.token_ids.tolist(), result.is_valid.tolist(), strict=True
        ):
            if is_valid:
                self._accept(live, token_id, now_s)
            else:
                sentence = "The model's output for this request is not finite."
                self._fail(live, Refusal(500, "engine_error", sentence))

    def _accept(self, live: LiveRequest, token_id: int, now_s: float) -> None:
        if live.first_token_at_s is None:
            live.first_token_at_s = now_s
            for name, num in zip(self._model.tier_names, live.cached_tokens, strict=False):
                self.hits_tokens[name] += num
        live.append(token_id)
        self._tokens.append((live.request_id, token_id))
        self.counters["generated_tokens"] += 1
        sampling = live.request.sampling
        if token_id in self._model.eos_token_ids and not sampling.ignore_eos:
            self._finish(live, "stop", live.text.flush())
            return
        text, hit_stop = live.text.push(token_id)
        if hit_stop:
            self._finish(live, "stop", text)
        elif live.num_new_tokens == live.max_new_tokens:
            self._finish(live, "length", text + live.text.flush())
        elif text:
            self._replies.append(Delta(live.request_id, text))

    # Ways out

    def _finish(self, live: LiveRequest, reason: str, text: str) -> None:
        if text:
            self._replies.append(Delta(live.request_id, text))
        usage = live.usage(self._model.tier_names)
        self._replies.append(Finished(live.request_id, reason, usage))
        self.counters["finished"] += 1
        self._release(live)

    def _fail(self, live: LiveRequest, refusal: Refusal) -> None:
        self._leave_queues(live)
        live.phase = RequestPhase.ENDED
        self._reply_failed(live.request_id, refusal)
        kv, live.kv = live.kv, None
        if kv is not None:
            kv.close()

    def _release(self, live: LiveRequest) -> None:
        self._leave_queues(live)
        live.phase = RequestPhase.ENDED
        self._opener.give_back(live)

    def _leave_queues(self, live: LiveRequest) -> None:
        if live in self._active:
            self._active.remove(live)
        if live in self._waiting:
            self._waiting.remove(live)

    def _reply_failed(self, request_id: str, refusal: Refusal) -> None:
        self.counters["failed"] += 1
        self._replies.append(Failed(request_id, refusal.status, refusal.sentence, refusal.code))


def _refusal_of(error: Exception) -> Refusal:
    if isinstance(error, OutOfPagesError):
        return Refusal(400, "hot_level_too_small", str(error))
    sentence = " ".join(str(error).split()) or "no details"
    return Refusal(500, "engine_error", f"The engine failed ({type(error).__name__}): {sentence}")
