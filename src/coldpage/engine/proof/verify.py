"""``coldpage verify``: the output of a run under pressure against the same run without any."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from rich.console import Console

from coldpage.config import DeviceTierConfig, DiskTierConfig, HostTierConfig
from coldpage.engine.assembly import (
    MAX_LOCKED_FRACTION,
    block_bytes,
    build_manager,
    with_hot_types,
)
from coldpage.engine.forward.runner import ModelRunner
from coldpage.engine.model.cold_codecs import ColdCodecs, make_cold_codecs
from coldpage.engine.model.geometry import cache_argument
from coldpage.engine.model.model import LoadedModel, load_model
from coldpage.engine.model.placement import choose_device, page_device
from coldpage.engine.model.random_model import SMALL, write_random_model
from coldpage.engine.proof.codec_replay import CodecReplay, LosslessReplay
from coldpage.engine.proof.conversations import (
    ANSWER_TOKENS,
    TURN_TOKENS,
    Conversation,
    Turn,
    make_conversations,
    play,
    serve_tokens,
)
from coldpage.engine.proof.recording import PageHasher, Recorder
from coldpage.engine.proof.replay import Comparison, Replay
from coldpage.engine.proof.round_trip import RoundTrip
from coldpage.engine.proof.verify_report import NEAR_TIE, Findings, PressureRun, report
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.settings import Injection, VerifyOptions
from coldpage.engine.stage_progress import StageProgress
from coldpage.errors import ModelError
from coldpage.manager import KVCacheManager
from coldpage.types import Int32Array

__all__ = ["run_verify"]

_NUM_HOST_CONVERSATIONS: Final = 2
# Heads that every codec can pack.
_RANDOM_MODEL: Final = replace(SMALL, head_dim=64)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the tiers for one kind of run."""

    hot: int
    host: int
    disk: int


def _conversation_tokens(options: VerifyOptions) -> int:
    return options.conversation_tokens + options.num_rounds * (TURN_TOKENS + ANSWER_TOKENS)


def _sizes(options: VerifyOptions, bytes_per_block: int, codecs: ColdCodecs) -> _Sizes:
    """The host tier has room for as many blocks whatever its codec is."""
    blocks = -(-_conversation_tokens(options) // options.tokens_per_block) + 1
    per_conversation = blocks * bytes_per_block
    # Too small: host and disk hold fewer blocks than the idle sessions, whose pages go last.
    is_full = options.injection is Injection.FULL
    disk = per_conversation // 4 if is_full else 2 * options.num_conversations * per_conversation
    num_host = _NUM_HOST_CONVERSATIONS // 2 if is_full else _NUM_HOST_CONVERSATIONS
    # First blocks are kept whole, and recent ones with the one behind them.
    num_recent = options.num_recent_blocks
    num_whole = min(blocks, 1 + (num_recent + 1 if num_recent else 0))
    fraction, _ = codecs.fractions()
    host_part = fraction + (1 - fraction) * num_whole / blocks
    return _Sizes(
        hot=int(options.num_hot_conversations * per_conversation / MAX_LOCKED_FRACTION)
        + bytes_per_block,
        host=int(num_host * per_conversation * host_part),
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
        write_random_model(Path(directory) / "random", _RANDOM_MODEL)
        yield str(Path(directory) / "random")


def run_verify(options: VerifyOptions, console: Console) -> int:
    """Run, replay and compare; 0 when nothing differs, else 1. Raises ColdpageError for
    bad input.
    """
    device = choose_device(options.device)
    with (
        StageProgress(console=console) as progress,
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
        codecs = _codecs(model, options, progress)
        with _disk_directory(options) as directory:
            run = _run_under_pressure(model, options, codecs, directory, progress)
        findings = _Replays(model, codecs, options, run, progress).compare()
        if not codecs.is_lossy and model.hot_types.is_plain(model.dtype):
            reference = load_model(source, torch.float32, lambda text: None, device)
            findings.num_near_ties = _compare_with_generate(
                reference, run, findings.comparison, progress
            )
    console.print(f"{model.name} in {model.form} on {device}")
    return 0 if report(console, options, run, findings) else 1


def _codecs(model: LoadedModel, options: VerifyOptions, progress: StageProgress) -> ColdCodecs:
    """Before the model is switched to paged attention, for good."""
    task = progress.add_task("making the codecs", total=None)
    codecs = make_cold_codecs(
        model,
        options.tokens_per_block,
        options.host_codec,
        options.disk_codec,
        lambda text: progress.update(task, description=text),
    )
    progress.remove_task(task)
    return codecs


def _run_under_pressure(
    model: LoadedModel,
    options: VerifyOptions,
    codecs: ColdCodecs,
    directory: str,
    progress: StageProgress,
) -> PressureRun:
    sizes = _sizes(options, block_bytes(model, options.tokens_per_block), codecs)
    tiers = (
        DeviceTierConfig(sizes.hot),
        HostTierConfig(sizes.host, codecs.host),
        DiskTierConfig(directory, sizes.disk, codecs.disk),
    )
    conversations = make_conversations(
        model.tokenizer, options.num_conversations, options.conversation_tokens, options.num_rounds
    )
    total = options.num_conversations * options.num_rounds
    task = progress.add_task("run under pressure", total=total)
    with (
        page_device(model.model.device) as device,
        build_manager(
            model,
            tiers,
            options.tokens_per_block,
            device=device,
            num_recent_blocks=options.num_recent_blocks,
        ) as manager,
    ):
        recorder = Recorder(PageHasher(model, manager), keeps_partial=codecs.is_lossy)
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
    num_recomputed = scheduler.counters["recomputed_blocks"]
    described = codecs.describe(num_recent_blocks=options.num_recent_blocks)
    return PressureRun(recorder, conversations, stats, num_recomputed, described)


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


@dataclass(frozen=True, slots=True)
class _Replays:
    """The recorded steps again, on a hot level that holds everything."""

    model: LoadedModel
    codecs: ColdCodecs
    options: VerifyOptions
    run: PressureRun
    progress: StageProgress

    def compare(self) -> Findings:
        """With one replay; where codecs lose something, with one that does what they did, and one
        that does not."""
        if not self.codecs.is_lossy:
            with self._manager() as manager:
                is_lossy = not self.model.hot_types.is_plain(self.model.dtype)
                plain = Replay(*self._arguments(manager), is_lossy=is_lossy)
                return Findings(self._finish(plain, "replay without pressure"))
        with contextlib.ExitStack() as stack:
            manager = stack.enter_context(self._manager(keeps_sinks_apart=True))
            trips = [
                stack.enter_context(contextlib.closing(RoundTrip(manager, codec)))
                for codec in self.codecs.again().distinct
            ]
            same = CodecReplay(*self._arguments(manager), trips=trips)
            comparison = self._finish(same, "replay with the codecs")
        with self._manager() as manager:
            lossless = LosslessReplay(*self._arguments(manager))
            self._finish(lossless, "replay without codecs")
        return Findings(comparison, same.trips, lossless.loss)

    def _arguments(self, manager: KVCacheManager) -> tuple[Any, ...]:
        name_of = {
            conversation.request_id(index): conversation.name
            for conversation in self.run.conversations
            for index in range(self.options.num_rounds)
        }
        runner, hasher = ModelRunner(self.model, manager), PageHasher(self.model, manager)
        return self.run.recorder, name_of.__getitem__, manager, runner, hasher

    def _finish(self, replay: Replay, title: str) -> Comparison:
        task = self.progress.add_task(title, total=len(self.run.recorder.steps))
        return replay.run(lambda num_done: self.progress.update(task, completed=num_done))

    @contextlib.contextmanager
    def _manager(self, *, keeps_sinks_apart: bool = False) -> Iterator[KVCacheManager]:
        options, block = self.options, self.options.tokens_per_block
        blocks = -(-_conversation_tokens(options) // block) + 2
        # Half as much again: a recomputed step needs a second copy of what it writes.
        hot = int(1.5 * (options.num_conversations + 1) * blocks * block_bytes(self.model, block))
        with (
            page_device(self.model.model.device) as device,
            build_manager(
                self.model,
                [DeviceTierConfig(hot)],
                block,
                device=device,
                keeps_sinks_apart=keeps_sinks_apart,
            ) as manager,
        ):
            yield manager


def _compare_with_generate(
    reference: LoadedModel, run: PressureRun, comparison: Comparison, progress: StageProgress
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
        if gaps[index] < NEAR_TIE:
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
                generation_config=self._config(num_tokens),
                **{cache_argument(self._model): self._cache},
            )
        text: Int32Array = out[0].cpu().numpy().astype(np.int32)
        self._cached = text[: self._cache.get_seq_length()]
        return text[prompt.size :]

    def _config(self, num_tokens: int) -> Any:
        """So many tokens, the best each time, whichever that is: an end ends nothing, as in the
        run. Asking for a least number instead would rule ends out.
        """
        config: Any = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=num_tokens, do_sample=False
        )
        # What is None here is filled in from the model's own.
        config.eos_token_id = config.pad_token_id = self._model.config.get_text_config().vocab_size
        return config


def _logit_gaps(recorder: Recorder) -> dict[str, list[float]]:
    """By request, the distance between the two best logits of each answered token."""
    gaps: dict[str, list[float]] = {}
    for step in recorder.steps:
        for item in step.items:
            if item.logits is not None:
                best = torch.topk(item.logits[-1], 2).values
                gaps.setdefault(item.request_id, []).append(float(best[0] - best[1]))
    return gaps
