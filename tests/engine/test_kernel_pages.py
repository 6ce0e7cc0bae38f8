"""The engine on kernels for pages, under Triton's interpreter: against the CPU's attention."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from coldpage.engine.forward.runner import LogitsWanted, StepItem
from coldpage.engine.model.hot_types import HotTypes
from coldpage.engine.proof import conversations, verify
from coldpage.engine.settings import VerifyOptions
from coldpage.kernels.kv_types import F16, F32, Q8_0, TURBO4
from tests.engine.kernel_rig import use_kernels
from tests.engine.runner_bench import Bench, text

pytestmark = pytest.mark.usefixtures("one_thread")
LAST, ALL = LogitsWanted.LAST, LogitsWanted.ALL
BLOCK = 16
TYPES = [HotTypes(F32, F32), HotTypes(Q8_0, TURBO4), HotTypes(TURBO4, F16)]


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Bench, Bench]]:
    """Makes one on kernels, and one on the CPU's own attention."""

    def make(kind: str, **more: Any) -> tuple[Bench, Bench]:
        sizes = {"tokens_per_block": BLOCK, "head_dim": 64, **more}
        on_cpu = Bench(kind, **sizes)
        use_kernels(monkeypatch)
        return Bench(kind, **sizes), on_cpu

    return make


def check(ours: torch.Tensor | None, theirs: torch.Tensor | None, types: HotTypes) -> None:
    assert ours is not None and theirs is not None
    assert ours.dtype == torch.float32
    if types.is_plain(torch.float32):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    else:  # a stored number on the border of two may be rounded to either
        assert float((ours - theirs).abs().max()) < 0.1 * float(theirs.abs().max())
        assert float((ours - theirs).abs().mean()) < 0.01 * float(theirs.abs().mean())


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("llama", TYPES[0]),
        ("llama", TYPES[1]),
        ("gemma3", TYPES[0]),
        ("gemma3", TYPES[2]),
        ("gpt_oss", TYPES[0]),
    ],
    ids=str,
)
def test_steps_of_every_kind_agree_with_the_cpu(
    benches: Callable[..., tuple[Bench, Bench]], kind: str, types: HotTypes
) -> None:
    """The interpreter takes seconds for each."""
    lengths, starts = [30, 22, 41], [29, 10, 30]
    results = []
    for bench in benches(kind, types=types):
        tables = [bench.table(n + 1) for n in lengths]
        texts = [text(n + 1, seed=n) for n in lengths]
        outputs = [
            bench.prefill(table, tokens[:start], 16)
            for tokens, table, start in zip(texts, tables, starts, strict=True)
        ]
        mixed = [
            StepItem(table, start, tokens[start:n], ALL)
            for tokens, table, start, n in zip(texts, tables, starts, lengths, strict=True)
        ]
        outputs += [out for out in bench.runner.forward(mixed) if out is not None]
        together = [
            StepItem(table, n, tokens[n : n + 1], LAST)
            for tokens, table, n in zip(texts, tables, lengths, strict=True)
        ]
        outputs += [out for out in bench.runner.forward(together) if out is not None]
        results.append(outputs)
    for ours, theirs in zip(*results, strict=True):
        check(ours, theirs, types)


def test_holes_and_pages_that_a_window_has_left_are_not_read(
    benches: Callable[..., tuple[Bench, Bench]],
) -> None:
    """NaN lies there."""
    results = []
    for bench in benches("gemma3", types=TYPES[1]):
        tokens, table = text(70), bench.table(70)
        windowed = table.slots[bench.windows.index(8)]
        outputs = [bench.prefill(table, tokens[:40])]
        windowed[:2] = -1  # position 40 sees from 33 on, and a chunk from 40 to 68 its own start
        for slots in table.slots:
            slots[0] = -1
        (chunk,) = bench.runner.forward([StepItem(table, 40, tokens[40:68], ALL)])
        windowed[:3] = -1
        (row,) = bench.runner.forward([StepItem(table, 68, tokens[68:69], LAST)])
        assert chunk is not None and row is not None
        results.append([*outputs, chunk, row])
    for ours, theirs in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        check(ours, theirs, TYPES[1])


def test_a_run_under_pressure_equals_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler, the manager's pages and the kernels together."""
    use_kernels(monkeypatch)
    for module in (conversations, verify):
        monkeypatch.setattr(module, "ANSWER_TOKENS", 2)
    options = VerifyOptions(
        has_random_model=True,
        device="cpu",
        cache_type_k="q8_0",
        cache_type_v="f16",
        num_conversations=3,
        num_hot_conversations=1,
        num_rounds=2,
        conversation_tokens=64,
    )
    output = io.StringIO()
    status = verify.run_verify(options, Console(file=output, width=120))
    printed = output.getvalue()
    assert status == 0, printed
    assert "host-hot" in printed
    assert " 0 restored pages" not in printed
