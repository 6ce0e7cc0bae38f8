"""Every attention operator against its definition in float64, and the whole runner on the rules of
CUDA's operators.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coldpage.engine.attention import attention_choice, step_plan
from coldpage.engine.attention.dense_attention import (
    CudaAttention,
    CudaOperators,
    DenseAttention,
    cpu_attention,
    plain_attention,
)
from coldpage.engine.forward.runner import LogitsWanted, StepItem
from coldpage.kernels.merge_attention import merge_attention_reference
from tests.engine.attention_cases import bias_of, defined, sides
from tests.engine.runner_bench import Bench, assert_close, text
from tests.engine.stand_ins import StandIns

pytestmark = pytest.mark.usefixtures("one_thread")


def attention(name: str, dtype: torch.dtype) -> DenseAttention:
    if name == "cuda":
        return CudaAttention(StandIns().operators(dtype))
    if name == "cuda without operators":
        return CudaAttention(CudaOperators(None, None, None))
    return {"cpu": cpu_attention, "plain": plain_attention}[name]


@pytest.mark.parametrize("name", ["cpu", "plain", "cuda", "cuda without operators"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys"),
    [(1, 6, 2, 5, 19), (1, 4, 4, 33, 7), (3, 2, 2, 3, 16), (1, 4, 1, 64, 40)],
)
def test_an_operator_does_what_attention_is(
    name: str,
    dtype: torch.dtype,
    scale: float | None,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
) -> None:
    attend = attention(name, dtype)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 2e-2}
    query, key, value = sides(dtype, batch, heads, kv_heads, queries, keys)
    biases = [None, bias_of(1, queries, keys, dtype), bias_of(batch, 1, keys, dtype)]
    for bias in biases:
        out, lse = attend(query, key, value, bias=bias, scale=scale)
        assert out.dtype == dtype and lse.dtype == torch.float32
        wanted = defined(query, key, value, bias, False, scale)
        torch.testing.assert_close(out.double(), wanted[0], **tolerance)
        torch.testing.assert_close(lse.double(), wanted[1], **tolerance)
    query, key, value = sides(dtype, batch, heads, kv_heads, queries, queries)
    out, lse = attend(query, key, value, is_causal=True, scale=scale)
    wanted = defined(query, key, value, None, True, scale)
    torch.testing.assert_close(out.double(), wanted[0], **tolerance)
    torch.testing.assert_close(lse.double(), wanted[1], **tolerance)


@pytest.mark.parametrize(
    ("queries", "keys", "dtype", "has_bias", "operator"),
    [
        (512, 1024, torch.bfloat16, False, "cudnn"),
        (512, 512, torch.float16, False, "cudnn"),
        (512, 1008, torch.bfloat16, False, "flash"),
        (512, 4096, torch.bfloat16, False, "cudnn"),
        (300, 4112, torch.bfloat16, False, "flash"),
        (256, 1024, torch.bfloat16, False, "flash"),
        (1, 1024, torch.bfloat16, False, "flash"),
        (512, 1024, torch.bfloat16, True, "efficient"),
        (512, 1024, torch.float32, False, "efficient"),
    ],
)
def test_the_shapes_choose_the_operator(
    queries: int, keys: int, dtype: torch.dtype, has_bias: bool, operator: str
) -> None:
    stand_ins = StandIns()
    attend = CudaAttention(stand_ins.operators(dtype))
    query, key, value = sides(dtype, 1, 2, 1, queries, keys)
    bias = bias_of(1, 1, keys, dtype) if has_bias else None
    _, lse = attend(query, key, value, bias=bias, scale=None)
    assert stand_ins.calls == [operator]
    assert lse.shape == (1, 2, queries)


@pytest.mark.parametrize(
    ("queries", "keys", "split"),
    [(512, 4112, 4096), (768, 33_000, 32_768), (512, 12_300, 12_288), (512, 6000, 5888)],
)
def test_most_of_a_long_odd_history_goes_to_cudnn(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, split: int
) -> None:
    stand_ins = StandIns()
    attend = CudaAttention(stand_ins.operators(torch.bfloat16))
    sizes: list[int] = []

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> Any:
        sizes.append(key.shape[2])
        return plain_attention(query[:, :, :3], key, value, **more)

    monkeypatch.setattr("tests.engine.stand_ins.plain_attention", plain)
    merged: list[tuple[torch.Tensor, ...]] = []

    def merge(*parts: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        merged.append(parts)
        result, lse = merge_attention_reference(*parts)
        return out.copy_(result), lse

    monkeypatch.setattr("coldpage.kernels.merge_attention.merge_attention", merge)
    query, key, value = sides(torch.bfloat16, 1, 2, 1, queries, keys)
    out, lse = attend(query, key, value, scale=None)
    assert stand_ins.calls == ["cudnn", "flash"]
    assert sizes == [split, keys - split]
    wanted, lse_wanted = plain_attention(query[:, :, :3], key, value, scale=None)
    torch.testing.assert_close(out.float(), wanted.float(), rtol=0, atol=2e-2)
    torch.testing.assert_close(lse, lse_wanted, rtol=0, atol=2e-2)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Runners made in the test attend as on CUDA."""
    made = StandIns()
    monkeypatch.setattr(
        attention_choice,
        "dense_attention",
        lambda device, dtype, head_dim: CudaAttention(made.operators(dtype)),
    )
    return made


@pytest.mark.parametrize("segment_tokens", [512, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_runner_keeps_the_rules_of_cuda(
    kind: str,
    dtype: torch.dtype,
    segment_tokens: int,
    stand_ins: StandIns,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_plan, "SEGMENT_TOKENS", segment_tokens)
    monkeypatch.setattr(step_plan, "MIN_TILE_TOKENS", 3)
    on_cuda = Bench(kind, dtype=dtype)
    monkeypatch.undo()
    on_cpu = Bench(kind, dtype=dtype)
    monkeypatch.setattr(step_plan, "SEGMENT_TOKENS", segment_tokens)
    lengths = [30, 22, 41, 9, 40]
    starts = [29, 10, 30, 8, 39]
    results = []
    for bench in (on_cuda, on_cpu):
        tables = [bench.table(n) for n in lengths]
        texts = [text(n, seed=n) for n in lengths]
        for tokens, table, start in zip(texts, tables, starts, strict=True):
            bench.prefill(table, tokens[:start], 13)
        items = [
            StepItem(table, start, tokens[start:], LogitsWanted.ALL)
            for tokens, table, start in zip(texts, tables, starts, strict=True)
        ]
        outputs = [out for out in bench.runner.forward(items) if out is not None]
        alone = bench.prefill(bench.table(6), texts[0][:6], 1)  # each token by itself
        if dtype == torch.float32:
            assert_close(alone, bench.own_logits(texts[0][:6]))
        results.append(torch.cat([*outputs, alone]))
        if dtype == torch.float32:
            for out, tokens, start in zip(outputs, texts, starts, strict=True):
                assert_close(out, bench.own_logits(tokens)[start:])
    # Half precision is compared with half precision: what differs is the order of summation.
    bound = 1e-4 if dtype == torch.float32 else 0.05 * float(results[1].abs().max())
    assert float((results[0] - results[1]).abs().max()) < bound
    used = {"efficient"} if dtype == torch.float32 else {"efficient", "flash"}
    assert set(stand_ins.calls) == used
