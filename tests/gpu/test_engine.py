"""The engine on a GPU: attention, pages and a whole run, against the model's own attention and
against a run that never left hot memory.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from coldpage.config import DeviceTierConfig, DiskTierConfig, HostTierConfig
from coldpage.engine.assembly import block_bytes, build_manager, with_hot_types
from coldpage.engine.attention.dense_attention import dense_attention, plain_attention
from coldpage.engine.forward.runner import LogitsWanted, ModelRunner, StepItem
from coldpage.engine.messages import EngineSettings, Finished, Loading
from coldpage.engine.model.hot_types import HotTypes
from coldpage.engine.model.placement import page_device
from coldpage.engine.model.random_model import (
    EIGHT_BILLION,
    SMALL,
    random_model,
    write_random_model,
)
from coldpage.engine.proof.conversations import make_conversations, play, serve_tokens
from coldpage.engine.proof.verify import run_verify
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.settings import Injection, VerifyOptions
from coldpage.kernels.kv_types import F16, F32, Q8_0, TURBO4
from tests.engine.attention_cases import bias_of, defined, sides
from tests.engine.engine_peer import RunningEngine, generate
from tests.engine.runner_bench import Bench, text
from tests.engine.stored_attention import attention_of_stored

pytestmark = pytest.mark.gpu
HALF, SINGLE = torch.bfloat16, torch.float32
BLOCK = 16
SIZES: dict[str, Any] = {"tokens_per_block": BLOCK, "head_dim": 16}


# Attention


@pytest.mark.parametrize("dtype", [SINGLE, HALF, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys"),
    [(1, 6, 2, 5, 19), (3, 2, 2, 3, 16), (1, 4, 1, 64, 40), (1, 8, 2, 33, 130)],
)
def test_an_operator_does_what_attention_is(
    gpu: torch.device,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
) -> None:
    attend = dense_attention(gpu, dtype, 8)
    bound: dict[str, float] = {"rtol": 0, "atol": 2e-5 if dtype == SINGLE else 2e-2}
    here = sides(dtype, batch, heads, kv_heads, queries, keys)
    there = [t.to(gpu) for t in here]
    for bias in (None, bias_of(1, queries, keys, dtype), bias_of(batch, 1, keys, dtype)):
        on_gpu = None if bias is None else bias.to(gpu)
        out, lse = attend(*there, bias=on_gpu, scale=0.3)
        assert out.dtype == dtype and lse.dtype == SINGLE
        wanted = defined(*here, bias, False, 0.3)
        torch.testing.assert_close(out.double().cpu(), wanted[0], **bound)
        torch.testing.assert_close(lse.double().cpu(), wanted[1], **bound)
    square = sides(dtype, batch, heads, kv_heads, queries, queries)
    out, lse = attend(*(t.to(gpu) for t in square), is_causal=True, scale=None)
    wanted = defined(*square, None, True, None)
    torch.testing.assert_close(out.double().cpu(), wanted[0], **bound)
    torch.testing.assert_close(lse.double().cpu(), wanted[1], **bound)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1024, 1024), (512, 4096), (512, 4112), (512, 4080), (300, 999)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_chunks_of_grouped_heads_agree_and_repeat_bit_for_bit(
    gpu: torch.device, dtype: torch.dtype, queries: int, keys: int, is_causal: bool
) -> None:
    keys = queries if is_causal else keys
    torch.manual_seed(0)
    shapes = [(1, queries, 32, 128), (1, keys, 8, 128), (1, keys, 8, 128)]
    query, key, value = (torch.randn(s, device=gpu, dtype=dtype).transpose(1, 2) for s in shapes)
    attend = dense_attention(gpu, dtype, 128)
    out, lse = attend(query, key, value, is_causal=is_causal, scale=None)
    again, lse_again = attend(query, key, value, is_causal=is_causal, scale=None)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    assert lse.shape == (1, 32, queries)
    wanted, lse_wanted = plain_attention(query, key, value, is_causal=is_causal, scale=None)
    atol = 2e-5 if dtype == SINGLE else 2e-2
    torch.testing.assert_close(out.float(), wanted.float(), rtol=0, atol=atol)
    torch.testing.assert_close(lse, lse_wanted, rtol=0, atol=atol)


# The runner


class Witness:
    """A bench on a GPU; what its model says in float32, and how far half precision lies from it."""

    def __init__(self, kind: str, gpu: torch.device, dtype: torch.dtype, **more: Any) -> None:
        self.bench = Bench(kind, device=gpu, dtype=dtype, **SIZES, **more)
        self._own = self.bench.reference
        self._exact = copy.deepcopy(self._own).float()
        self._is_exact = dtype == SINGLE

    def check(self, ours: torch.Tensor | None, tokens: np.ndarray, rows: slice) -> None:
        """``ours`` are the logits of ``rows`` of the whole text."""
        assert ours is not None and ours.device.type == "cpu" and ours.dtype == SINGLE
        ids = torch.from_numpy(tokens).long()[None].to(self.bench.device)
        with torch.inference_mode():
            exact = self._exact(input_ids=ids).logits[0].cpu()
            own = self._own(input_ids=ids).logits[0].float().cpu()
        error = float((ours - exact[rows]).abs().max())
        # Half precision must be no worse here than in the model's own attention, by much.
        bound = 5e-4 if self._is_exact else 3 * float((own - exact).abs().max())
        assert error <= bound


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("chunk", [None, 1, 7, 33])
def test_prefill_in_any_chunks_over_shuffled_pages(
    gpu: torch.device, kind: str, dtype: torch.dtype, chunk: int | None
) -> None:
    witness = Witness(kind, gpu, dtype)
    tokens = text(71)
    logits = witness.bench.prefill(witness.bench.table(71), tokens, chunk)
    witness.check(logits, tokens, slice(0, 71))


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_decoding_together_and_beside_chunks(
    gpu: torch.device, kind: str, dtype: torch.dtype
) -> None:
    witness = Witness(kind, gpu, dtype)
    bench = witness.bench
    lengths, starts = [30, 22, 41, 61, 9], [26, 18, 37, 57, 0]
    texts = [text(n, seed=n) for n in lengths]
    tables = [bench.table(n) for n in lengths]
    for tokens, table, start in zip(texts, tables, starts, strict=True):
        if start:
            bench.prefill(table, tokens[:start], 16)
    for step in range(4):
        items = [
            StepItem(table, s + step, tokens[s + step : s + step + 1], LogitsWanted.LAST)
            for tokens, table, s in zip(texts, tables, starts, strict=True)
        ]
        if step == 3:  # the last one goes on with a chunk, the one before it says nothing
            items[-1] = StepItem(tables[-1], 3, texts[-1][3:], LogitsWanted.ALL)
            items[-2] = dataclasses.replace(items[-2], logits=LogitsWanted.NONE)
        outputs = bench.runner.forward(items)
        for item, tokens, logits in zip(items, texts, outputs, strict=True):
            stop = item.start + len(item.token_ids)
            if item.logits is not LogitsWanted.NONE:
                assert logits is not None
                witness.check(logits, tokens[:stop], slice(stop - len(logits), stop))


def test_slots_and_what_else_the_pool_holds_change_no_bit(gpu: torch.device, kind: str) -> None:
    results = []
    for seed, fill in ((1, 0xFF), (2, 0x00), (2, 0x00)):
        bench = Bench(kind, seed, fill, gpu, HALF, **SIZES)
        tables = [bench.table(50), bench.table(30)]
        logits = [
            bench.prefill(tables[0], text(50)[:37], 16),
            bench.prefill(tables[1], text(30, 1)[:29]),
        ]
        items = [
            StepItem(tables[0], 37, text(50)[37:38], LogitsWanted.LAST),
            StepItem(tables[1], 29, text(30, 1)[29:], LogitsWanted.LAST),
        ]
        logits += [part for part in bench.runner.forward(items) if part is not None]
        assert all(torch.isfinite(part).all() for part in logits)
        results.append(torch.cat(logits))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])


PAIRS = [HotTypes(F32, F32), HotTypes(Q8_0, Q8_0), HotTypes(TURBO4, TURBO4), HotTypes(F16, TURBO4)]


@pytest.mark.parametrize("types", PAIRS, ids=str)
def test_every_type_says_what_the_cpu_says(gpu: torch.device, kind: str, types: HotTypes) -> None:
    """Prompts in chunks, sequences together and apart, in float32."""
    lengths = [1, 3, 17, 40, 61]
    texts = [text(n + 9, seed=n) for n in lengths]
    results = []
    for device in (gpu, torch.device("cpu")):
        bench = Bench(kind, device=device, tokens_per_block=BLOCK, head_dim=64, types=types)
        tables = [bench.table(n + 9) for n in lengths]
        outputs = [
            bench.prefill(table, tokens[:n], 13)
            for tokens, table, n in zip(texts, tables, lengths, strict=True)
        ]
        for step in range(8):
            items = [
                StepItem(table, n + step, tokens[n + step : n + step + 1], LogitsWanted.LAST)
                for tokens, table, n in zip(texts, tables, lengths, strict=True)
            ]
            outputs += [out for out in bench.runner.forward(items) if out is not None]
        results.append(torch.cat(outputs))
    ours, theirs = results
    difference = ours - theirs
    if types.is_plain(SINGLE):
        assert float(difference.abs().max()) < 5e-4
        return
    # A GPU multiplies packed numbers in half precision, and a stored number on the border of two
    # may then be rounded to either. Roundings that share nothing would lie sqrt(2) times as far
    # from each other as from what is exact.
    own = [bench.own_logits(tokens) for tokens in texts]
    rows = [logits[:n] for logits, n in zip(own, lengths, strict=True)]
    rows += [own[i][n + step][None] for step in range(8) for i, n in enumerate(lengths)]
    loss = theirs - torch.cat(rows)
    assert float(difference.square().mean()) < 2 * float(loss.square().mean())


def test_sinks_weigh_as_on_the_cpu(gpu: torch.device) -> None:
    tokens, results = text(60), []
    for device in (gpu, torch.device("cpu")):
        bench = Bench("gpt_oss", device=device, use_graphs=False, **SIZES)
        table = bench.table(60)
        rows = [bench.prefill(table, tokens[:50], 13), bench.prefill(table, tokens, None)]
        item = StepItem(table, 59, tokens[59:], LogitsWanted.LAST)
        rows += [row for row in bench.runner.forward([item]) if row is not None]
        results.append(torch.cat(rows))
    torch.testing.assert_close(*results, rtol=0, atol=5e-4)


def test_a_step_is_over_when_forward_returns(gpu: torch.device) -> None:
    bench = Bench("llama", device=gpu, **SIZES)
    bench.runner.forward([StepItem(bench.table(64), 0, text(64), LogitsWanted.NONE)])
    assert torch.cuda.current_stream(gpu).query()


# The manager's pages


@pytest.fixture
def large_model(gpu: torch.device) -> Any:
    """Two layers of a large model."""
    return random_model(dataclasses.replace(EIGHT_BILLION, num_layers=2), gpu, HALF)


@pytest.mark.parametrize("types", [("auto", "auto"), ("q8_0", "q8_0"), ("q8_0", "turbo4")])
def test_pages_of_the_manager_serve_a_large_model(large_model: Any, types: tuple[str, str]) -> None:
    """Chunks as long as cuDNN's, and histories of every kind. No position may be further from what
    is exact than where the model's own attention sees what was stored: twice as far, since results
    are rounded once each for history and new tokens, and once more where they are merged."""
    large_model = with_hot_types(large_model, *types, BLOCK)
    gpu, num_tokens = large_model.model.device, 3000
    own = copy.deepcopy(large_model.model)
    tokens = np.random.default_rng(0).integers(2, 2048, num_tokens).astype(np.int32)
    tiers = [DeviceTierConfig(256 * block_bytes(large_model, BLOCK))]
    with (
        page_device(gpu) as device,
        build_manager(large_model, tiers, BLOCK, device=device) as manager,
    ):
        runner = ModelRunner(large_model, manager)
        cache = manager.create_kv_cache()
        assert cache.resume() and cache.resize(num_tokens)
        cache.synchronize()
        parts = []
        for start, stop in ((0, 1024), (1024, 2048), (2048, 2700), (2700, 2999), (2999, 3000)):
            item = StepItem(cache, start, tokens[start:stop], LogitsWanted.ALL)
            (logits,) = runner.forward([item])
            assert logits is not None
            cache.commit(tokens[start:stop])
            parts.append(logits)
        ours = torch.cat(parts)
    ids = torch.from_numpy(tokens).long()[None].to(gpu)
    with torch.inference_mode():
        with attention_of_stored(large_model.hot_types):
            theirs = own(input_ids=ids).logits[0].float()
        exact = own.float()(input_ids=ids).logits[0]
        errors, own_errors = ((x - exact).square().mean(1) for x in (ours.to(gpu), theirs))
    assert bool((errors <= 2**2 * own_errors).all()), float((errors / own_errors).max().sqrt())


def answers(
    model: Any, hot_blocks: int, directory: Path, rounds: int = 3
) -> tuple[list[list[np.ndarray]], dict[str, int]]:
    """What conversations answer that take turns alone, and the pages moved by path."""
    one = block_bytes(model, BLOCK)
    tiers = (
        DeviceTierConfig(hot_blocks * one),
        HostTierConfig(40 * one),
        DiskTierConfig(str(directory), 600 * one),
    )
    conversations = make_conversations(model.tokenizer, 5, 300, rounds)
    with (
        page_device(model.model.device) as device,
        build_manager(model, tiers, BLOCK, device=device) as manager,
    ):
        scheduler = Scheduler(ModelRunner(model, manager), manager, serve_tokens(model, manager))
        for _ in range(rounds):
            for conversation in conversations:
                play(scheduler, manager, [conversation], lambda: None)
        moved = dict(manager.stats().moved_pages)
        scheduler.close()
        manager.check_integrity()
    return [[turn.answer for turn in c.turns] for c in conversations], moved


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_conversations_that_left_the_gpu_answer_as_if_they_had_stayed(
    gpu: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    results = []
    for hot_blocks in (40, 400):
        model = random_model(SMALL, gpu, dtype)
        (tmp_path / str(hot_blocks)).mkdir()
        results.append(answers(model, hot_blocks, tmp_path / str(hot_blocks)))
    (tight, moved), (roomy, not_moved) = results
    for path in ("hot-host", "host-hot", "disk-hot"):
        assert moved.get(path, 0) > 0
    assert not_moved.get("host-hot", 0) == not_moved.get("disk-hot", 0) == 0
    for one, other in zip(tight, roomy, strict=True):
        for left, right in zip(one, other, strict=True):
            assert np.array_equal(left, right)


def test_an_engine_process_gives_the_hot_level_its_part_of_the_gpu(
    gpu: torch.device, tmp_path: Path
) -> None:
    write_random_model(tmp_path / "model")
    (tmp_path / "socket").mkdir()
    settings = EngineSettings(
        hot_bytes=1, gpu_hot_fraction=0.001, model=str(tmp_path / "model"), device="auto"
    )
    total_bytes = torch.cuda.mem_get_info(gpu)[1]
    with RunningEngine(settings, tmp_path / "socket") as engine:
        assert (engine.ready.device, engine.ready.dtype) == ("cuda:0", "bfloat16")
        assert any(
            isinstance(reply, Loading) and "CUDA graph of a batch of 8" in reply.sentence
            for reply in engine.peer.replies
        )
        assert 0.0002 * total_bytes < engine.ready.tiers[0].total_bytes <= 0.001 * total_bytes
        _, end = engine.peer.answers(generate("one", token_ids=list(range(2, 60))))["one"]
        assert isinstance(end, Finished)


def test_verify_restores_packed_pages_bit_for_bit(gpu: torch.device) -> None:
    output = io.StringIO()
    options = VerifyOptions(
        has_random_model=True,
        device=str(gpu),
        conversation_tokens=256,
        cache_type_k="q8_0",
        cache_type_v="f16",
    )
    status = run_verify(options, Console(file=output, width=120))
    assert status == 0, output.getvalue()


@pytest.mark.parametrize("injection", list(Injection))
def test_verify_finds_no_difference(gpu: torch.device, injection: Injection) -> None:
    output = io.StringIO()
    options = VerifyOptions(
        has_random_model=True, device=str(gpu), conversation_tokens=256, injection=injection
    )
    status = run_verify(options, Console(file=output, width=120))
    printed = output.getvalue()
    assert "random in float32 on cuda:0" in printed
    assert "\n0 differences" in printed, printed
    assert status == 0, printed
    if injection is Injection.NONE:
        rows = (line.split("│") for line in printed.splitlines() if "│" in line)
        moved = {row[0].strip(): int(row[1].replace(",", "")) for row in rows}
        paths = {"hot-host", "host-hot", "host-disk", "disk-hot", "hot-disk", "disk-host"}
        assert paths == {path for path, count in moved.items() if count > 0}
