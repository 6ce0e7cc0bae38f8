"""Keys and values in other types than the model's: what is stored is what attention sees."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from coldpage.engine.assembly import build_manager, with_hot_types
from coldpage.engine.forward.runner import LogitsWanted, StepItem
from coldpage.engine.model.hot_types import HotTypes, choose_hot_types, why_unsupported
from coldpage.engine.model.model import manager_layers
from coldpage.engine.settings import CACHE_TYPES
from coldpage.errors import ConfigurationError
from coldpage.kernels.kv_types import BF16, F16, F32, KV_TYPES, Q8_0, TURBO4
from tests.engine.runner_bench import Bench, text
from tests.engine.stored_attention import attention_of_stored

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
HEAD_DIM = 64  # the smallest that every type can hold

PAIRS = [HotTypes(Q8_0, Q8_0), HotTypes(TURBO4, TURBO4), HotTypes(F16, TURBO4), HotTypes(Q8_0, F32)]


def own_logits(bench: Bench, types: HotTypes, tokens: np.ndarray) -> torch.Tensor:
    """transformers' own forward of the whole text, where attention sees what would be stored."""
    with attention_of_stored(types):
        return bench.own_logits(tokens)


def check(ours: torch.Tensor | None, expected: torch.Tensor, exact: torch.Tensor) -> None:
    """Sums in another order round a few stored numbers to a neighbour, which is little beside what
    storing changes."""
    assert ours is not None
    loss = float((expected - exact).abs().max())
    assert float((ours - expected).abs().max()) < 0.2 * loss


@pytest.mark.parametrize("types", PAIRS, ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_attention_reads_what_was_stored_however_a_prompt_is_cut(
    kind: str, types: HotTypes, chunk: int | None
) -> None:
    bench = Bench(kind, types=types, head_dim=HEAD_DIM)
    tokens = text(40)
    expected = own_logits(bench, types, tokens)
    check(bench.prefill(bench.table(40), tokens, chunk), expected, bench.own_logits(tokens))


@pytest.mark.parametrize("types", PAIRS, ids=str)
def test_sequences_of_any_length_decode_from_what_was_stored(kind: str, types: HotTypes) -> None:
    bench = Bench(kind, types=types, head_dim=HEAD_DIM)
    lengths = [1, 3, 17, 30]
    texts = [text(n + 2, seed=n) for n in lengths]
    tables = [bench.table(n + 2) for n in lengths]
    for tokens, table, n in zip(texts, tables, lengths, strict=True):
        bench.prefill(table, tokens[:n])
    for step in range(2):
        items = [
            StepItem(table, n + step, tokens[n + step : n + step + 1], LogitsWanted.LAST)
            for tokens, table, n in zip(texts, tables, lengths, strict=True)
        ]
        for tokens, n, logits in zip(texts, lengths, bench.runner.forward(items), strict=True):
            seen = tokens[: n + step + 1]
            expected = own_logits(bench, types, seen)[-1:]
            check(logits, expected, bench.own_logits(seen)[-1:])


def test_what_a_pool_held_before_changes_no_bit() -> None:
    types, results = HotTypes(TURBO4, Q8_0), []
    for seed, fill in ((1, 0xFF), (2, 0x00)):
        bench = Bench("gemma3", seed, fill, types=types, head_dim=HEAD_DIM)
        table, tokens = bench.table(30), text(30)
        results.append(bench.prefill(table, tokens, 13))
        (row,) = bench.runner.forward([StepItem(table, 29, tokens[29:], LogitsWanted.LAST)])
        assert row is not None
        results[-1] = torch.cat([results[-1], row])
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[0], results[1])


def test_each_type_has_its_bytes_and_its_identity() -> None:
    bench = Bench("llama", head_dim=HEAD_DIM)
    models = [
        dataclasses.replace(bench.loaded, hot_types=HotTypes(key, value))
        for key, value in ((F32, F32), (Q8_0, F32), (F32, Q8_0), (Q8_0, TURBO4))
    ]
    vectors = 16 * 2
    sizes = [tuple(b.num_bytes for b in manager_layers(m, 16)[0].buffers) for m in models]
    f32, q8, turbo4 = (vectors * n for n in (4 * 64, 64 + 2 * 2, 32 + 2))
    assert sizes == [(f32, f32), (q8, f32), (f32, q8), (q8, turbo4)]
    assert len({m.page_fingerprint for m in models}) == len(models)


def test_the_command_line_knows_every_type_and_auto_is_the_models() -> None:
    assert set(CACHE_TYPES) == {"auto", *KV_TYPES}
    assert choose_hot_types("auto", "q8_0", torch.bfloat16) == HotTypes(BF16, Q8_0)
    assert choose_hot_types("auto", "auto", torch.float16).is_plain(torch.float16)


@pytest.mark.parametrize(
    ("head_dim", "tokens_per_block", "device", "words"),
    [
        (16, 16, "cpu", "f32, f16, bf16, q8_0 for either"),
        (80, 16, "cpu", "f32, f16, bf16 for either"),
        (128, 24, "cuda", "a power of two from 16 to 256"),
        (128, 8, "cuda", "a power of two from 16 to 256"),
        (128, 512, "cuda", "a power of two from 16 to 256"),
        (80, 16, "cuda", "a power of two from 16 to 256"),
    ],
)
def test_what_can_not_be_kept_is_refused_with_what_can(
    head_dim: int, tokens_per_block: int, device: str, words: str
) -> None:
    sentence = why_unsupported(
        HotTypes(F16, TURBO4), [head_dim], tokens_per_block, torch.float16, torch.device(device)
    )
    assert sentence is not None
    assert words in sentence
    assert "keys as f16 and values as turbo4" in sentence
    assert "\n" not in sentence


def test_a_machine_without_triton_serves_every_type() -> None:
    program = """
import sys
sys.modules["triton"] = None
from coldpage.engine import process
from coldpage.engine.model.hot_types import HotTypes
from coldpage.kernels.kv_types import Q8_0, TURBO4
from tests.engine.runner_bench import Bench, text
bench = Bench("llama", types=HotTypes(Q8_0, TURBO4), head_dim=64)
table = bench.table(9)
print(len(bench.prefill(table, text(9), 8)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == "9\n"


def test_what_can_be_kept_is_not_refused() -> None:
    types = HotTypes(TURBO4, TURBO4)
    for device, block in (("cpu", 1), ("cpu", 24), ("cuda", 16), ("cuda", 256)):
        sentence = why_unsupported(types, [64, 128], block, torch.bfloat16, torch.device(device))
        assert sentence is None


def test_a_manager_is_not_built_for_what_is_refused() -> None:
    model = Bench("llama").loaded  # heads of 8
    with pytest.raises(ConfigurationError, match="heads of 8"):
        with_hot_types(model, "auto", "turbo4", 16)
    with pytest.raises(ConfigurationError, match="heads of 8"):
        build_manager(dataclasses.replace(model, hot_types=HotTypes(TURBO4, F32)), [], 16)
