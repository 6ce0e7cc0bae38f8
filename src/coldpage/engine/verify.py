"""``coldpage verify``: the output of a run under pressure against the same run without any."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from coldpage.config import DeviceTierConfig, DiskTierConfig, HostTierConfig
from coldpage.engine.assembly import (
    MAX_LOCKED_FRACTION,
    block_bytes,
    build_manager,
    with_hot_types,
)
from coldpage.engine.conversations import (
    ANSWER_TOKENS,
    TURN_TOKENS,
    Conversation,
    Turn,
    make_conversations,
    play,
    serve_tokens,
)
from coldpage.engine.geometry import cache_argument
from coldpage.engine.model import LoadedModel, load_model
from coldpage.engine.placement import choose_device, page_device
from coldpage.engine.random_model import write_random_model
from coldpage.engine.recording import PageHasher, Recorder
from coldpage.engine.replay import Comparison, Replay
from coldpage.engine.runner import ModelRunner
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.settings import Injection, VerifyOptions
from coldpage.errors import ModelError
from coldpage.manager import ManagerStats
from coldpage.types import Int32Array

__all__ = ["run_verify"]

# Where the two best logits lie closer than this, another order of summation may choose the other.
_NEAR_TIE: Final = 1e-3
_NUM_HOST_CONVERSATIONS: Final = 2


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the tiers for one kind of run."""

    hot: int
    host: int
    disk: int


@dataclass(frozen=True, slots=True)
class _PressureRun:
    """The recorded run and what the manager and the scheduler counted in it."""

    recorder: Recorder
    conversations: list[Conversation]
    stats: ManagerStats
    num_recomputed_blocks: int


def _conversation_tokens(options: VerifyOptions) -> int:
    return options.conversation_tokens + options.num_rounds * (TURN_TOKENS + ANSWER_TOKENS)


def _sizes(options: VerifyOptions, bytes_per_block: int) -> _Sizes:
    blocks = -(-_conversation_tokens(options) // options.tokens_per_block) + 1
    per_conversation = blocks * bytes_per_block
    # Too small: host and disk hold fewer blocks than the idle sessions, whose pages go last.
    is_full = options.injection is Injection.FULL
    disk = per_conversation // 4 if is_full else 2 * options.num_conversations * per_conversation
    num_host = _NUM_HOST_CONVERSATIONS // 2 if is_full else _NUM_HOST_CONVERSATIONS
    return _Sizes(
        hot=int(options.num_hot_conversations * per_conversation / MAX_LOCKED_FRACTION)
        + bytes_per_block,
        host=num_host * per_conversation,
        disk=disk,
    )


@contextlib.contextmanager
def _disk_directory(options: VerifyOptions) -> Iterator[str]:
    if options.disk_directory is not None:
        yield options.disk_directory
    else:
        with tempfile.TemporaryDirectory(prefix="coldpage-verify-") as directory:
            yield directory


@contextlib.contextmanager
def _model_source(options: VerifyOptions) -> Iterator[str | None]:
    if not options.has_random_model:
        yield options.model
        return
    with tempfile.TemporaryDirectory(prefix="coldpage-model-") as directory:
        write_random_model(Path(directory) / "random")
        yield str(Path(directory) / "random")


def run_verify(options: VerifyOptions, console: Console) -> int:
    """Run, replay and compare; 0 when nothing differs, else 1. Raises ColdpageError for
    bad input.
    """
    device = choose_device(options.device)
    with (
        Progress(console=console, transient=True) as progress,
        _model_source(options) as source,
    ):
        task = progress.add_task("loading the model", total=None)
        model = load_model(
            source, torch.float32, lambda text: progress.update(task, description=text), device
        )
        progress.remove_task(task)
        model = with_hot_types(
            model, options.cache_type_k, options.cache_type_v, options.tokens_per_block
        )
        with _disk_directory(options) as directory:
            run = _run_under_pressure(model, options, directory, progress)
        comparison = _replay(model, options, run, progress)
        num_near_ties: int | None = None
        if model.hot_types.is_plain(model.dtype):
            reference = load_model(source, torch.float32, lambda text: None, device)
            num_near_ties = _compare_with_generate(reference, run, comparison, progress)
    console.print(f"{model.name} in {model.form} on {device}")
    _report(console, options, run, comparison, num_near_ties)
    is_proven = comparison.num_differences == 0 and _injection_showed(options, run)
    return 0 if is_proven else 1


def _run_under_pressure(
    model: LoadedModel, options: VerifyOptions, directory: str, progress: Progress
) -> _PressureRun:
    sizes = _sizes(options, block_bytes(model, options.tokens_per_block))
    tiers = (
        DeviceTierConfig(sizes.hot),
        HostTierConfig(sizes.host),
        DiskTierConfig(directory, sizes.disk),
    )
    conversations = make_conversations(
        model.tokenizer, options.num_conversations, options.conversation_tokens, options.num_rounds
    )
    total = options.num_conversations * options.num_rounds
    task = progress.add_task("run under pressure", total=total)
    with (
        page_device(model.model.device) as device,
        build_manager(model, tiers, options.tokens_per_block, device=device) as manager,
    ):
        recorder = Recorder(PageHasher(model, manager))
        runner = ModelRunner(model, manager)
        scheduler = Scheduler(runner, manager, serve_tokens(model, manager))
        scheduler.observer = recorder
        for round_index in range(options.num_rounds):
            if round_index == 1 and options.injection is Injection.FLIP:
                manager.finish_transfers()
                _flip_one_bit(recorder, conversations)
            play(scheduler, manager, conversations, lambda: progress.advance(task))
        manager.finish_transfers()
        manager.poll()
        stats = manager.stats()
        scheduler.close()
        manager.check_integrity()
    return _PressureRun(recorder, conversations, stats, scheduler.counters["recomputed_blocks"])


def _flip_one_bit(recorder: Recorder, conversations: list[Conversation]) -> None:
    """Damage the only copy of one block of a conversation that will go on."""
    for conversation in conversations:
        if conversation.session is None:
            continue
        blobs = recorder.caches[conversation.request_id(0)].blobs_on_disk()
        for blob in blobs:
            if blob.is_only_copy:
                with open(blob.path, "r+b") as file:
                    file.seek(blob.offset_bytes)
                    (byte,) = file.read(1)
                    file.seek(blob.offset_bytes)
                    file.write(bytes([byte ^ 1]))
                    file.flush()
                    os.fsync(file.fileno())
                return
    raise ModelError(
        "no block lies on disk alone, so none can be damaged: use more or longer conversations"
    )


def _replay(
    model: LoadedModel, options: VerifyOptions, run: _PressureRun, progress: Progress
) -> Comparison:
    blocks = -(-_conversation_tokens(options) // options.tokens_per_block) + 2
    # Half as much again: a recomputed step needs a second copy of what it writes.
    hot = int(
        1.5
        * (options.num_conversations + 1)
        * blocks
        * block_bytes(model, options.tokens_per_block)
    )
    name_of = {
        conversation.request_id(index): conversation.name
        for conversation in run.conversations
        for index in range(options.num_rounds)
    }
    task = progress.add_task("replay without pressure", total=len(run.recorder.steps))
    tiers = [DeviceTierConfig(hot)]
    with (
        page_device(model.model.device) as device,
        build_manager(model, tiers, options.tokens_per_block, device=device) as manager,
    ):
        replay = Replay(
            run.recorder,
            name_of.__getitem__,
            manager,
            ModelRunner(model, manager),
            PageHasher(model, manager),
            is_lossy=not model.hot_types.is_plain(model.dtype),
        )
        return replay.run(lambda num_done: progress.update(task, completed=num_done))


def _compare_with_generate(
    reference: LoadedModel, run: _PressureRun, comparison: Comparison, progress: Progress
) -> int:
    """Compare every answer with plain transformers; returns how many near ties
    chose differently.
    """
    gaps = _logit_gaps(run.recorder)
    task = progress.add_task("transformers' generate", total=len(run.conversations))
    num_near_ties = 0
    for conversation in run.conversations:
        witness = _Witness(reference.model)
        for turn in conversation.turns:
            num_near_ties += _compare_answer(turn, witness, gaps[turn.request_id], comparison)
        progress.advance(task)
    return num_near_ties


def _compare_answer(
    turn: Turn, witness: _Witness, gaps: list[float], comparison: Comparison
) -> int:
    """Returns 1 when a near tie was chosen differently: from there the two texts differ."""
    answer = witness.generate(turn.prompt, turn.answer.size)
    for index in range(turn.answer.size):
        if turn.answer[index] == answer[index]:
            comparison.num_tokens += 1
            continue
        if gaps[index] < _NEAR_TIE:
            return 1
        comparison.differ(
            f"{turn.request_id}: token {index + 1} is {turn.answer[index]}, "
            f"generate gives {answer[index]}"
        )
        return 0
    return 0


class _Witness:
    """One conversation by plain transformers, with transformers' own cache kept between turns."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = transformers.DynamicCache()
        self._cached = np.zeros(0, np.int32)

    def generate(self, prompt: Int32Array, num_tokens: int) -> Int32Array:
        """Greedy tokens after ``prompt``."""
        if not np.array_equal(prompt[: self._cached.size], self._cached):
            # An earlier answer differed from the recorded one: its cache is of another text.
            self._cache = transformers.DynamicCache()
        ids = torch.from_numpy(prompt.astype(np.int64))[None].to(self._model.device)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                **{cache_argument(self._model): self._cache},
            )
        text: Int32Array = out[0].cpu().numpy().astype(np.int32)
        self._cached = text[: self._cache.get_seq_length()]
        return text[prompt.size :]


def _logit_gaps(recorder: Recorder) -> dict[str, list[float]]:
    """By request, the distance between the two best logits of each answered token."""
    gaps: dict[str, list[float]] = {}
    for step in recorder.steps:
        for item in step.items:
            if item.logits is not None:
                best = torch.topk(item.logits[-1], 2).values
                gaps.setdefault(item.request_id, []).append(float(best[0] - best[1]))
    return gaps


def _injection_showed(options: VerifyOptions, run: _PressureRun) -> bool:
    """Whether the damage done on purpose had the effect that it must have."""
    totals = run.stats.totals
    if options.injection is Injection.FLIP:
        return totals.get("read_misses", 0) == 1 and run.num_recomputed_blocks == 1
    if options.injection is Injection.FULL:
        return totals.get("lost_held_pages", 0) > 0 and run.num_recomputed_blocks > 0
    return totals.get("read_misses", 0) == 0


def _report(
    console: Console,
    options: VerifyOptions,
    run: _PressureRun,
    comparison: Comparison,
    num_near_ties: int | None,
) -> None:
    """``num_near_ties`` None: generate says something else, so it was not asked."""
    table = Table(title="Moves", show_edge=False)
    table.add_column("path")
    table.add_column("pages", justify="right")
    table.add_column("MiB", justify="right")
    for path in sorted(run.stats.moved_pages):
        mib = run.stats.moved_bytes[path] / 2**20
        table.add_row(path, f"{run.stats.moved_pages[path]:,}", f"{mib:,.1f}")
    console.print(table)
    totals = run.stats.totals
    lost = totals.get("dropped_pages", 0) + totals.get("lost_held_pages", 0)
    console.print(
        f"{len(run.recorder.steps):,} steps, {len(run.recorder.restores):,} restores; "
        f"blobs that failed their checksum: {totals.get('read_misses', 0)}; "
        f"pages dropped: {lost}; blocks recomputed: {run.num_recomputed_blocks}"
    )
    console.print(
        f"against the replay: {comparison.num_pages:,} restored pages and "
        f"{comparison.num_rows:,} logit rows bit for bit"
    )
    if comparison.num_close_rows:
        console.print(
            f"after a recomputed block: {comparison.num_close_rows:,} logit rows within "
            f"{comparison.tolerance:g} "
            f"(largest difference {comparison.largest_close_difference:.1e})"
        )
    if num_near_ties is None:
        console.print(f"against the replay: {comparison.num_tokens:,} tokens equal")
        console.print(
            "against transformers' generate: not compared, since it keeps keys and values in "
            "float32 and these hot types lose some of that"
        )
    else:
        console.print(
            f"against the replay and transformers' generate: {comparison.num_tokens:,} tokens "
            f"equal, {num_near_ties} near ties (two best logits within {_NEAR_TIE:g}) chosen "
            "differently"
        )
    for sentence in comparison.sentences:
        console.print(f"difference: {sentence}", style="red")
    if not _injection_showed(options, run):
        sentence = (
            "blobs failed their checksum, and nothing was damaged on purpose"
            if options.injection is Injection.NONE
            else "the injected damage did not have the effect it must have"
        )
        console.print(sentence, style="red")
    console.print(f"{comparison.num_differences} differences", style="bold")
