"""``coldpage demo``: more conversations than fit the hot level, and what coming back costs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from coldpage.config import DeviceTierConfig, DiskTierConfig, HostTierConfig, ReuseScope
from coldpage.engine.assembly import (
    MAX_LOCKED_FRACTION,
    block_bytes,
    build_manager,
    with_hot_types,
)
from coldpage.engine.forward.runner import ModelRunner
from coldpage.engine.messages import Failed, Finished, SamplingParams
from coldpage.engine.model.cold_codecs import ColdCodecs, make_cold_codecs
from coldpage.engine.model.model import LoadedModel, load_model
from coldpage.engine.model.placement import choose_device, choose_dtype, page_device
from coldpage.engine.proof.conversations import (
    ANSWER_TOKENS,
    TURN_TOKENS,
    Conversation,
    Turn,
    make_conversations,
    play,
    serve_tokens,
)
from coldpage.engine.requests import GenerationRequest
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.settings import DemoOptions
from coldpage.engine.stage_progress import StageProgress
from coldpage.errors import ModelError
from coldpage.manager import KVCacheManager

__all__ = ["run_demo"]

_NUM_HOST_CONVERSATIONS: Final = 3


@dataclass(frozen=True, slots=True)
class _Row:
    """One turn, and the same turn with nothing reused."""

    round_index: int
    turn: Turn
    recomputed_ms: float


def run_demo(options: DemoOptions, console: Console) -> int:
    """Play the conversations and print a table; 0. Raises ColdpageError for bad input."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with StageProgress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("loading the model", total=None)
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        model = load_model(
            options.model, dtype, lambda text: progress.update(task, description=text), device
        )
        model = with_hot_types(
            model, options.cache_type_k, options.cache_type_v, options.tokens_per_block
        )
        codecs = make_cold_codecs(
            model,
            options.tokens_per_block,
            options.host_codec,
            options.disk_codec,
            lambda text: progress.update(task, description=text),
        )
        progress.remove_task(task)
        with _managers(model, codecs, options) as (manager, plain_manager):
            rows = _play_and_recompute(model, options, manager, plain_manager, progress)
            moved = dict(manager.stats().moved_pages)
            levels = manager.stats().levels
    sizes = ", ".join(f"{level.name} {level.capacity_tokens:,} tokens" for level in levels)
    console.print(f"{model.name}, {model.form} on {device}; tiers: {sizes}")
    if described := codecs.describe(num_recent_blocks=options.num_recent_blocks):
        console.print(f"cold pages: {described}")
    console.print(_table(rows, options.num_conversations))
    _summarize(console, rows, moved)
    return 0


@contextlib.contextmanager
def _managers(
    model: LoadedModel, codecs: ColdCodecs, options: DemoOptions
) -> Iterator[tuple[KVCacheManager, KVCacheManager]]:
    """The tiered manager, and one with room for a single conversation to recompute in."""
    tokens = options.conversation_tokens + options.num_rounds * (TURN_TOKENS + ANSWER_TOKENS)
    blocks = -(-tokens // options.tokens_per_block) + 1
    one = int(blocks * block_bytes(model, options.tokens_per_block) / MAX_LOCKED_FRACTION)
    with contextlib.ExitStack() as stack:
        directory = options.disk_directory or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="coldpage-demo-")
        )
        tiers = (
            DeviceTierConfig(options.num_hot_conversations * one),
            HostTierConfig(_NUM_HOST_CONVERSATIONS * one, codecs.host),
            DiskTierConfig(directory, 2 * options.num_conversations * one, codecs.disk),
        )
        device = stack.enter_context(page_device(model.model.device))
        block = options.tokens_per_block
        manager = stack.enter_context(
            build_manager(
                model, tiers, block, device=device, num_recent_blocks=options.num_recent_blocks
            )
        )
        plain = stack.enter_context(
            build_manager(model, [DeviceTierConfig(2 * one)], block, device=device)
        )
        yield manager, plain


def _play_and_recompute(
    model: LoadedModel,
    options: DemoOptions,
    manager: KVCacheManager,
    plain_manager: KVCacheManager,
    progress: StageProgress,
) -> list[_Row]:
    conversations = make_conversations(
        model.tokenizer, options.num_conversations, options.conversation_tokens, options.num_rounds
    )
    scheduler = _scheduler(model, manager)
    plain_scheduler = _scheduler(model, plain_manager)
    total = 2 * options.num_conversations * options.num_rounds
    task = progress.add_task("taking turns", total=total)
    rows: list[_Row] = []
    for round_index in range(options.num_rounds):
        for conversation in conversations:
            _play_one(scheduler, manager, conversation, lambda: progress.advance(task))
        # Apart from the turns, so that the tiers see nothing but the conversations.
        for conversation in conversations:
            turn = conversation.turns[round_index]
            recomputed_ms = _recompute(plain_scheduler, turn)
            rows.append(_Row(round_index, turn, recomputed_ms))
            progress.advance(task)
    scheduler.close()
    return rows


def _scheduler(model: LoadedModel, manager: KVCacheManager) -> Scheduler:
    return Scheduler(
        ModelRunner(model, manager),
        manager,
        serve_tokens(model, manager),
    )


def _play_one(
    scheduler: Scheduler,
    manager: KVCacheManager,
    conversation: Conversation,
    on_turn: Callable[[], None],
) -> None:
    """One turn alone, so that its time to first token is its own."""
    play(scheduler, manager, [conversation], on_turn)
    manager.poll()


def _recompute(scheduler: Scheduler, turn: Turn) -> float:
    """Time to first token, in ms, of the same prompt where nothing can be reused."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    # A salt of its own: not even its own earlier turns are found.
    scope = ReuseScope(salt=turn.request_id)
    scheduler.submit(
        GenerationRequest(turn.request_id, turn.prompt, sampling, time.monotonic(), None, scope)
    )
    while True:
        for reply in scheduler.step().replies:
            if isinstance(reply, Failed):
                raise ModelError(f"{reply.request_id} failed: {reply.sentence}")
            if isinstance(reply, Finished):
                return reply.usage.time_to_first_token_ms


def _table(rows: list[_Row], num_conversations: int) -> Table:
    """Prompt tokens reused by tier and both times."""
    table = Table(title="Time to first token", show_edge=False)
    for name in (
        "turn",
        "chat",
        "prompt",
        "hot",
        "host",
        "disk",
        "coldpage",
        "recomputed",
        "ratio",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    last_round = 0
    for index, row in enumerate(rows):
        usage = row.turn.usage
        cached = usage.cached_tokens_by_tier
        if row.round_index != last_round:
            table.add_section()
            last_round = row.round_index
        table.add_row(
            f"{row.round_index + 1}",
            f"{index % num_conversations + 1}",
            f"{usage.prompt_tokens:,}",
            *(f"{cached.get(name, 0):,}" for name in ("hot", "host", "disk")),
            f"{usage.time_to_first_token_ms:,.0f} ms",
            f"{row.recomputed_ms:,.0f} ms",
            f"{row.recomputed_ms / usage.time_to_first_token_ms:.1f}x",
        )
    return table


def _summarize(console: Console, rows: list[_Row], moved: dict[str, int]) -> None:
    for name in ("host", "disk"):
        ratios = [
            row.recomputed_ms / row.turn.usage.time_to_first_token_ms
            for row in rows
            if max(
                row.turn.usage.cached_tokens_by_tier,
                key=row.turn.usage.cached_tokens_by_tier.__getitem__,
            )
            == name
            and row.turn.usage.cached_tokens_by_tier[name] > 0
        ]
        if ratios:
            console.print(
                f"back from {name}: {len(ratios)} turns, median {median(ratios):.1f} times faster "
                "than recomputing"
            )
    paths = ", ".join(f"{path} {count:,}" for path, count in sorted(moved.items()))
    console.print(f"pages moved: {paths}")
