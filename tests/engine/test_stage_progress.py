"""Progress in a log: a line where a stage begins, few lines while it lasts, none in the output."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coldpage.engine.stage_progress import StageProgress


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_log_has_a_line_a_stage_and_one_each_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, output = _Clock(), io.StringIO()
    with StageProgress(console=Console(file=output), clock=clock) as progress:
        loading = progress.add_task("loading the model", total=None)
        progress.update(loading, description="reading weights")
        progress.update(loading, description="reading weights")
        progress.remove_task(loading)
        replay = progress.add_task("replay", total=1500)
        for _ in range(25):
            clock.now_s += 1.0
            progress.advance(replay, 50)
        progress.update(replay, completed=1400)
        clock.now_s += 10.0
        progress.update(replay, description="codec [a]", advance=1)
    assert capsys.readouterr().err.splitlines() == [
        "loading the model",
        "reading weights",
        "replay",
        "replay 500/1,500",
        "replay 1,000/1,500",
        "codec [a] 1,401/1,500",
    ]
    assert output.getvalue() == ""


def test_a_terminal_has_bars_and_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, _environ={"TERM": "xterm"})
    with StageProgress(console=console) as progress:
        progress.advance(progress.add_task("replay", total=2))
    assert "replay" in output.getvalue()
    assert capsys.readouterr().err == ""
