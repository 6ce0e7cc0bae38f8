"""``coldpage verify`` and ``coldpage demo`` on a tiny model: what they prove, and that they can
fail.
"""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from coldpage.codecs import create_codec
from coldpage.engine import demo
from coldpage.engine.assembly import build_manager
from coldpage.engine.demo import run_demo
from coldpage.engine.forward import runner
from coldpage.engine.model.cold_codecs import ColdCodecs
from coldpage.engine.model.random_model import SMALL, random_model, write_random_model
from coldpage.engine.planning import ItemPurpose
from coldpage.engine.proof import replay
from coldpage.engine.proof import verify as verification
from coldpage.engine.proof.codec_replay import CodecReplay
from coldpage.engine.proof.recording import RecordedRestore, Recorder
from coldpage.engine.proof.verify import run_verify
from coldpage.engine.settings import DemoOptions, Injection, VerifyOptions
from coldpage.manager import KVCacheManager
from coldpage.migration.disk_reads import DiskReads
from coldpage.sequence import KVCache
from coldpage.types import BlockOrdinal, LayerGroupId

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with random weights whose next token depends on its whole text."""
    path = tmp_path_factory.mktemp("model") / "random"
    write_random_model(path)
    return str(path)


def verify(model_path: str, **changes: Any) -> tuple[int, str]:
    """The exit status and what was printed."""
    options: dict[str, Any] = {"conversation_tokens": 256, "num_rounds": 3, **changes}
    output = io.StringIO()
    status = run_verify(VerifyOptions(model=model_path, **options), Console(file=output, width=120))
    return status, output.getvalue()


def moves(output: str) -> dict[str, int]:
    """Pages by path, from the printed table."""
    rows = (line.split("│") for line in output.splitlines() if "│" in line)
    return {row[0].strip(): int(row[1].replace(",", "")) for row in rows}


def test_a_run_under_pressure_equals_its_replay_and_generate(model_path: str) -> None:
    status, output = verify(model_path)
    assert "0 differences" in output
    assert status == 0
    paths = {"hot-host", "host-hot", "host-disk", "disk-hot", "hot-disk", "disk-host"}
    assert paths == {path for path, count in moves(output).items() if count > 0}


def test_a_model_made_for_the_run_is_proven_too() -> None:
    output = io.StringIO()
    options = VerifyOptions(has_random_model=True, device="cpu", conversation_tokens=256)
    assert run_verify(options, Console(file=output, width=120)) == 0
    assert "random in float32 on cpu" in output.getvalue()


def test_to_generate_the_end_of_a_sequence_is_a_token_like_others() -> None:
    model = random_model(SMALL, torch.device("cpu"), torch.float32).model
    prompt = np.arange(3, 40, dtype=np.int32)
    answer = verification._Witness(model).generate(prompt, 12)
    assert len(answer) == 12
    for config in (model.config, model.generation_config):
        config.eos_token_id = int(answer[3])
    assert verification._Witness(model).generate(prompt, 12).tolist() == answer.tolist()


@pytest.mark.parametrize("injection", [Injection.NONE, Injection.FULL])
def test_pages_that_hold_rounded_numbers_come_back_bit_for_bit(
    model_path: str, injection: Injection
) -> None:
    """Plain transformers says something else there, which is said instead of compared."""
    status, output = verify(
        model_path, injection=injection, cache_type_k="q8_0", cache_type_v="f16"
    )
    assert "float32 with keys as q8_0 and values as f16" in output
    assert "generate: not compared" in output
    assert ("blocks recomputed: 0" in output) == (injection is Injection.NONE)
    assert "\n0 differences" in output, output
    assert status == 0


def counts(output: str) -> dict[str, int]:
    """What the replay with codecs says."""
    text = " ".join(output.split())
    found = re.search(r"([\d,]+) restored pages that were packed, ([\d,]+) that", text)
    assert found is not None, output
    taken_over = re.search(r"not compared: ([\d,]+) last pages", text)
    return {
        "packed": int(found.group(1).replace(",", "")),
        "as they were": int(found.group(2).replace(",", "")),
        "taken over": int(taken_over.group(1)) if taken_over else 0,
    }


@pytest.mark.parametrize(
    ("host", "disk"), [("int8", None), ("int4-block", "int8"), ("concat", "fp8")]
)
def test_pages_that_codecs_packed_are_what_they_make_of_the_replays(
    model_path: str, host: str, disk: str | None
) -> None:
    """Pages may go through both codecs on their way to disk."""
    status, output = verify(model_path, host_codec=host, disk_codec=disk)
    assert f"cold pages: host {host} (" in output
    assert status == 0, output
    assert "\n0 differences" in output
    assert "blocks recomputed: 0" in output
    found = counts(output)
    assert found["packed"] > 50
    assert found["as they were"] >= 24  # the first blocks at least
    # One scale for all tokens of a block is one for what lies behind the last of them too.
    assert host == "int4-block" or found["taken over"] == 0
    assert "384 logit rows bit for bit" in " ".join(output.split())
    assert "384 logit rows, mean KL" in " ".join(output.split())
    assert "generate: not compared" in output
    paths = {"hot-host", "host-hot", "host-disk", "disk-hot", "hot-disk"}
    assert paths <= {path for path, count in moves(output).items() if count > 0}


def test_recent_blocks_come_back_as_they_were(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of conversations that were kept, and of those that were closed and found by their beginning.
    What was packed is what the codec makes of it.
    """
    from_the_end: list[int] = []  # of each page that came back packed: which block it is
    compare = CodecReplay.compare_pages

    def note(self: CodecReplay, restore: RecordedRestore, kv_cache: KVCache) -> None:
        num_full = restore.history_length // 16
        from_the_end.extend(num_full - block for _, block in self.differing(restore, kv_cache))
        compare(self, restore, kv_cache)

    monkeypatch.setattr(CodecReplay, "compare_pages", note)
    for num_blocks, newest_packed in ((0, 0), (4, 5)):
        from_the_end.clear()
        status, output = verify(model_path, host_codec="int4-block", num_recent_blocks=num_blocks)
        assert status == 0, output
        assert "\n0 differences" in output
        assert counts(output)["packed"] > 50
        assert min(from_the_end) == newest_packed
        text = " ".join(output.split())
        assert ("the newest 4 full blocks and the last one whole" in text) == bool(num_blocks)


def test_what_codecs_cost_is_measured(model_path: str) -> None:
    """4 bits of a whole block cost much, and more than 8 bits of a vector."""
    costs = []
    for name in ("int8", "int4-block"):
        _, output = verify(model_path, host_codec=name)
        found = re.search(r"mean KL (\S+), .* equal in ([\d.]+)%", " ".join(output.split()))
        assert found is not None
        costs.append((float(found.group(1)), float(found.group(2))))
    assert 0 < costs[0][0] < 0.01 * costs[1][0]
    assert 100 > costs[0][1] > costs[1][1]


def test_a_packed_page_restored_with_other_bytes_is_a_difference(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskReads, "_unstage", damaging(DiskReads._unstage))
    status, output = verify(model_path, host_codec="int8")
    assert status == 1
    assert "came back with other bytes" in output


def test_pages_that_went_through_another_codec_are_a_difference(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay has int8 where the run had fp8, which is as exact to the eye."""
    again = ColdCodecs.again

    def other(self: ColdCodecs) -> ColdCodecs:
        return dataclasses.replace(again(self), host=create_codec("int8", self.pages), disk=None)

    monkeypatch.setattr(ColdCodecs, "again", other)
    status, output = verify(model_path, host_codec="fp8")
    assert status == 1
    assert "came back with other bytes" in output


def test_a_flipped_bit_of_a_packed_page_is_one_recomputed_block(model_path: str) -> None:
    status, output = verify(model_path, injection=Injection.FLIP, host_codec="int8")
    assert "checksum: 1;" in output
    assert "blocks recomputed: 1" in output
    assert "logit rows after a recomputed block" in " ".join(output.split())
    assert "\n0 differences" in output, output
    assert status == 0


def test_a_flipped_bit_is_one_miss_and_one_recomputed_block(model_path: str) -> None:
    status, output = verify(model_path, injection=Injection.FLIP)
    assert "checksum: 1;" in output
    assert "blocks recomputed: 1" in output
    assert "0 differences" in output
    assert status == 0


def test_a_full_coldest_level_drops_and_recomputes(model_path: str) -> None:
    status, output = verify(model_path, injection=Injection.FULL)
    assert "blocks recomputed: 0" not in output
    assert "0 differences" in output
    assert status == 0


def damaging(unstage: Any) -> Any:
    """Changes one bit of what it brings up."""

    def damage(self: DiskReads, transfer: Any, lease: Any, ok: Any) -> Any:
        ring = self._end.ring
        ring._memory.array[lease.address - ring.base_address] ^= 1
        return unstage(self, transfer, lease, ok)

    return damage


def test_a_page_restored_with_other_bytes_is_a_difference(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk's bytes change after their checksum was verified: nothing below would notice."""
    monkeypatch.setattr(DiskReads, "_unstage", damaging(DiskReads._unstage))
    status, output = verify(model_path)
    assert status == 1
    assert "came back with other bytes" in output
    assert "\n0 differences" not in output


def test_a_lost_block_that_is_not_recomputed_is_a_difference(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = runner.ModelRunner.forward

    def skip(self: runner.ModelRunner, items: Any) -> Any:
        outputs = forward(self, items)
        for item in items:
            if item.logits is runner.LogitsWanted.NONE and item.start < 200:
                for layer in self._model.groups[0].layers:
                    slots = item.kv_cache.page_indices(0)[item.start // 16 :]
                    layer.pages.keys.values[slots[slots >= 0][:1].tolist()] += 0.5
        return outputs

    def run_step(self: replay.Replay, items: Any) -> None:
        with monkeypatch.context() as unharmed:
            unharmed.setattr(runner.ModelRunner, "forward", forward)
            original(self, items)

    original = replay.Replay._run_step
    monkeypatch.setattr(replay.Replay, "_run_step", run_step)
    monkeypatch.setattr(runner.ModelRunner, "forward", skip)
    status, output = verify(model_path, injection=Injection.FULL)
    assert status == 1
    assert "differ" in output


def test_an_injection_without_effect_fails(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flip that nobody detects must not pass for a proof: here the read is never asked for."""
    monkeypatch.setattr("coldpage.engine.proof.verify._flip_one_bit", lambda *arguments: None)
    status, output = verify(model_path, injection=Injection.FLIP)
    assert status == 1
    assert "did not have the effect" in output


def test_blocks_before_a_recomputed_one_are_still_compared(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 0 comes back with other bytes after a later one was recomputed."""
    on_restored, blobs_on_disk = Recorder.on_restored, KVCache.blobs_on_disk
    num_damaged = 0

    def damage(self: Recorder, request_id: str, kv_cache: KVCache) -> None:
        nonlocal num_damaged
        on_restored(self, request_id, kv_cache)
        conversation = request_id.partition(" turn ")[0]
        recomputed = [
            item.start
            for step in self.steps
            for item in step.items
            if item.purpose is ItemPurpose.RECOMPUTE
            and item.request_id.startswith(f"{conversation} turn ")
        ]
        if recomputed and min(recomputed) > 0:
            num_damaged += 1
            self.restores[-1].digests[LayerGroupId(0), BlockOrdinal(0)] = b"other"

    monkeypatch.setattr(KVCache, "blobs_on_disk", lambda self: blobs_on_disk(self)[::-1])
    monkeypatch.setattr(Recorder, "on_restored", damage)
    status, output = verify(model_path, injection=Injection.FLIP)
    assert num_damaged > 0
    assert status == 1
    assert output.count("block 0 of layer group 0 came back with other bytes") == num_damaged
    assert f"\n{num_damaged} differences" in output


def test_a_bad_blob_that_nobody_damaged_is_said_to_be_one(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = verification._run_under_pressure

    def on_a_bad_disk(model: Any, options: VerifyOptions, *more: Any) -> Any:
        return run(model, dataclasses.replace(options, injection=Injection.FLIP), *more)

    monkeypatch.setattr(verification, "_run_under_pressure", on_a_bad_disk)
    status, output = verify(model_path)
    assert status == 1
    assert "blobs failed their checksum, and nothing was damaged on purpose" in output
    assert "did not have the effect" not in output


def test_the_demonstration_shows_reuse_from_every_tier(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []

    def build(*arguments: Any, num_recent_blocks: int = 0, **more: Any) -> KVCacheManager:
        wanted.append(num_recent_blocks)
        return build_manager(*arguments, **more)

    monkeypatch.setattr(demo, "build_manager", build)
    output = io.StringIO()
    options = DemoOptions(
        model=model_path, dtype="float32", conversation_tokens=256, num_recent_blocks=2
    )
    assert run_demo(options, Console(file=output, width=100)) == 0
    assert wanted == [2, 0], "and nothing is packed where the same is recomputed"
    text = output.getvalue()
    rows = [line.split("│") for line in text.splitlines() if line.rstrip().endswith("x")]
    assert len(rows) == options.num_conversations * options.num_rounds
    reused = [[int(cell.replace(",", "")) for cell in row[3:6]] for row in rows]
    assert all(sum(column) > 0 for column in zip(*[r[1:] for r in reused], strict=True))
    assert [sum(r) for r in reused[: options.num_conversations]] == [0] * options.num_conversations
    assert all(sum(r) > 0 for r in reused[options.num_conversations :])
    assert "back from disk:" in text


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no model at"):
        run_verify(VerifyOptions(model=str(tmp_path / "none")), Console(file=io.StringIO()))
