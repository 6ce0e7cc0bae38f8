"""What ``coldpage verify`` found, for people, and whether it is a proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from coldpage.engine.proof.codec_replay import CodecTrips, Loss
from coldpage.engine.proof.conversations import Conversation
from coldpage.engine.proof.recording import Recorder
from coldpage.engine.proof.replay import Comparison
from coldpage.engine.settings import Injection, VerifyOptions
from coldpage.manager import ManagerStats

__all__ = ["NEAR_TIE", "Findings", "PressureRun", "report"]

# Where the two best logits lie closer than this, another order of summation may choose the other.
NEAR_TIE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class PressureRun:
    """The recorded run and what the manager and the scheduler counted in it. ``codecs`` says how
    cold pages were packed; empty: they were copied."""

    recorder: Recorder
    conversations: list[Conversation]
    stats: ManagerStats
    num_recomputed_blocks: int
    codecs: str


@dataclass(slots=True)
class Findings:
    """``trips`` and ``loss``: where codecs lose something. ``num_near_ties`` None: transformers'
    generate says something else, so it was not asked."""

    comparison: Comparison
    trips: CodecTrips | None = None
    loss: Loss | None = None
    num_near_ties: int | None = None


def report(console: Console, options: VerifyOptions, run: PressureRun, findings: Findings) -> bool:
    """Print everything; whether nothing differs that must not."""
    comparison = findings.comparison
    if run.codecs:
        console.print(f"cold pages: {run.codecs}", highlight=False)
    _report_run(console, run)
    _report_replay(console, findings)
    _report_tokens(console, findings)
    for sentence in comparison.sentences:
        console.print(f"difference: {sentence}", style="red")
    has_shown = _injection_showed(options, run)
    if not has_shown:
        sentence = (
            "blobs failed their checksum, and nothing was damaged on purpose"
            if options.injection is Injection.NONE
            else "the injected damage did not have the effect it must have"
        )
        console.print(sentence, style="red")
    console.print(f"{comparison.num_differences} differences", style="bold")
    return comparison.num_differences == 0 and has_shown


def _injection_showed(options: VerifyOptions, run: PressureRun) -> bool:
    """Whether the damage done on purpose had the effect that it must have."""
    totals = run.stats.totals
    if options.injection is Injection.FLIP:
        return totals.get("read_misses", 0) == 1 and run.num_recomputed_blocks == 1
    if options.injection is Injection.FULL:
        return totals.get("lost_held_pages", 0) > 0 and run.num_recomputed_blocks > 0
    return totals.get("read_misses", 0) == 0


def _report_run(console: Console, run: PressureRun) -> None:
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


def _report_replay(console: Console, findings: Findings) -> None:
    comparison, trips, loss = findings.comparison, findings.trips, findings.loss
    if trips is None:
        console.print(
            f"against the replay: {comparison.num_pages:,} restored pages and "
            f"{comparison.num_rows:,} logit rows bit for bit"
        )
    else:
        console.print(
            f"against the replay, whose pages went through the same codecs where the run's did: "
            f"{trips.num_pages:,} restored pages that were packed, {comparison.num_pages:,} that "
            f"were not, and {comparison.num_rows:,} logit rows bit for bit"
        )
        if trips.num_taken_over:
            console.print(
                f"not compared: {trips.num_taken_over:,} last pages, which a codec packs together "
                "with what lies behind their tokens; the replay took them as they came back"
            )
        if trips.num_rows:
            console.print(
                f"not compared: {trips.num_rows:,} logit rows after a recomputed block, whose "
                "other rounding a codec makes larger"
            )
    if comparison.num_close_rows:
        console.print(
            f"after a recomputed block: {comparison.num_close_rows:,} logit rows within "
            f"{comparison.tolerance:g} "
            f"(largest difference {comparison.largest_close_difference:.1e})"
        )
    if loss is not None:
        console.print(
            f"measured, against the same steps on pages that were never packed: "
            f"{len(loss.divergences):,} logit rows, {loss}"
        )


def _report_tokens(console: Console, findings: Findings) -> None:
    num_tokens = findings.comparison.num_tokens
    if findings.num_near_ties is not None:
        console.print(
            f"against the replay and transformers' generate: {num_tokens:,} tokens "
            f"equal, {findings.num_near_ties} near ties (two best logits within {NEAR_TIE:g}) "
            "chosen differently"
        )
        return
    console.print(f"against the replay: {num_tokens:,} tokens equal")
    what = "these hot types lose" if findings.trips is None else "packed pages lose"
    console.print(
        "against transformers' generate: not compared, since it keeps keys and values in "
        f"float32 and {what} some of that"
    )
