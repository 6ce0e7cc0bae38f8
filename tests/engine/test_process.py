"""The engine process with a tiny real model, spoken to as the HTTP process does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from coldpage import create_default_cold_page_codec
from coldpage.codecs import CodecErrors, ColdPageCodec, registry
from coldpage.engine.messages import (
    Cancel,
    ChatMessage,
    Delta,
    EngineFailed,
    EngineReady,
    EngineSettings,
    Failed,
    Finished,
    Loading,
    Reply,
    SamplingParams,
    Shutdown,
    StartFailed,
    Stats,
)
from coldpage.engine.process import _build, main
from coldpage.manager import KVCacheManager
from coldpage.testing.example_codecs import CoarseCodec
from tests.engine.engine_peer import Peer, RunningEngine, generate, listening
from tests.engine.tiny_tokenizers import byte_level

BLOCK = 4
# 2 layers, K and V, 2 heads of 8 dimensions, 4 bytes each.
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 8 * 4
CONTEXT = 256


@dataclass
class TinyModel:
    directory: str
    model: PreTrainedModel

    def greedy(self, token_ids: list[int], num_new: int) -> str:
        """What transformers alone answers."""
        tokenizer = byte_level()
        ids = torch.tensor([token_ids])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tokenizer.decode(out[0, len(token_ids) :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_level()
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=CONTEXT,
            initializer_range=0.4,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return TinyModel(str(directory), model)


def settings_for(tiny: TinyModel, disk: Path, **changes: object) -> EngineSettings:
    settings = EngineSettings(
        hot_bytes=40 * BLOCK_BYTES,
        host_bytes=30 * BLOCK_BYTES,
        disk_path=str(disk),
        disk_bytes=4 * 1024 * 1024,
        model=tiny.directory,
        device="cpu",
        gpu_hot_fraction=0.5,  # of a GPU's memory, and this is none
        dtype="float32",
        tokens_per_block=BLOCK,
    )
    return msgspec.structs.replace(settings, **changes)


@pytest.fixture(scope="module")
def engine(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    disk = tmp_path_factory.mktemp("disk")
    with RunningEngine(settings_for(tiny, disk), tmp_path_factory.mktemp("socket")) as running:
        yield running


def token_ids(num: int, seed: int) -> list[int]:
    """Anything, but the last one ends a character."""
    (dot,) = byte_level()(".", add_special_tokens=False)["input_ids"]
    return [*(2 + (11 * n + 17 * seed + n * n * seed) % 250 for n in range(num - 1)), dot]


def test_it_says_what_it_serves(engine: RunningEngine, tiny: TinyModel) -> None:
    ready = engine.ready
    assert ready.model_name == Path(tiny.directory).name
    assert (ready.context_tokens, ready.tokens_per_block, ready.dtype) == (
        CONTEXT,
        BLOCK,
        "float32",
    )
    assert ready.device == "cpu"
    assert [tier.name for tier in ready.tiers] == ["hot", "host", "disk"]
    hot = ready.tiers[0]
    assert (hot.total_blocks, hot.capacity_tokens) == (40, 160)
    assert hot.total_bytes == 40 * BLOCK_BYTES


def test_keys_and_values_in_types_of_their_own_are_served(tiny: TinyModel, tmp_path: Path) -> None:
    """Their pages are smaller, so the same bytes hold more tokens; and they have their own instance
    on disk, so none is taken for a page of another type."""
    ids = token_ids(90, 1)
    texts, ready = [], []
    for types in ({}, {"cache_type_k": "q8_0", "cache_type_v": "f16"}, {}):
        socket = tmp_path / f"socket {len(texts)}"
        socket.mkdir()
        with RunningEngine(settings_for(tiny, tmp_path, **types), socket) as engine:
            text, end = engine.peer.answers(generate("one", token_ids=ids))["one"]
            assert isinstance(end, Finished)
            texts.append(text)
            ready.append(engine.ready)
            engine.peer.send(Shutdown())
            assert engine.exit_status() == 0
    assert texts[0] == texts[2] == tiny.greedy(ids, 16)
    assert [one.cache_types for one in ready] == ["", "keys as q8_0 and values as f16", ""]
    assert ready[0].instance_id == ready[2].instance_id != ready[1].instance_id
    assert ready[1].tiers[0].capacity_tokens > 2 * ready[0].tiers[0].capacity_tokens


def test_recent_blocks_are_those_of_the_settings(tiny: TinyModel, tmp_path: Path) -> None:
    settings = settings_for(
        tiny, tmp_path, host_bytes=200 * BLOCK_BYTES, host_codec="int8", num_recent_blocks=3
    )
    with contextlib.ExitStack() as stack:
        _, manager, described = _build(settings, lambda line: None, stack)
        assert manager.config.num_recent_blocks == 3
        assert described.endswith(", the newest 3 full blocks and the last one whole")


def test_packed_cold_pages_are_served(tiny: TinyModel, tmp_path: Path) -> None:
    """They come back from host memory, and from a disk that the next start finds again."""
    prompts = [token_ids(90, seed) for seed in range(3)]
    settings = settings_for(
        tiny,
        tmp_path,
        host_bytes=20 * BLOCK_BYTES,
        disk_bytes=16 * 1024 * 1024,
        host_codec="int8",
    )
    ready, reused = [], []
    for number in range(2):
        socket = tmp_path / f"socket {number}"
        socket.mkdir()
        with RunningEngine(settings, socket) as engine:
            ready.append(engine.ready)
            for turn, prompt in enumerate(2 * prompts if number == 0 else prompts):
                request = generate(f"turn {turn}", token_ids=prompt)
                text, end = engine.peer.answers(request)[request.request_id]
                assert isinstance(end, Finished), end
                reused.append(end.usage.cached_tokens_by_tier)
                assert sum(reused[-1].values()) == (0 if len(reused) <= 3 else 88)
                if len(reused) <= 3:
                    assert text == tiny.greedy(prompt, 16)
            engine.peer.send(Shutdown())
            assert engine.exit_status() == 0
    assert ready[0].codecs == "host int8 (0.312 of a hot page), disk int8 (0.312 of a hot page)"
    assert ready[0].instance_id == ready[1].instance_id
    assert ready[0].tiers[1].capacity_tokens > 2.5 * 20 * BLOCK
    assert sum(tiers["host"] for tiers in reused[3:6]) > 0
    assert [tiers["disk"] for tiers in reused[6:]] == [88, 88, 88]


def test_a_chat_turn_is_what_transformers_says(engine: RunningEngine, tiny: TinyModel) -> None:
    messages = [ChatMessage("user", "The quick brown fox?"), ChatMessage("assistant", "STOP!")]
    text, end = engine.peer.answers(
        generate("chat", messages=[msgspec.to_builtins(m) for m in messages])
    )["chat"]
    rendered = "<s>user: The quick brown fox?</s><s>assistant: STOP!</s><s>"
    ids = byte_level()(rendered, add_special_tokens=False)["input_ids"]
    assert isinstance(end, Finished)
    assert end.usage.prompt_tokens == len(ids)
    assert end.usage.completion_tokens == 16
    assert text == tiny.greedy(ids, 16)


def test_many_conversations_on_a_small_hot_level(engine: RunningEngine, tiny: TinyModel) -> None:
    prompts = {f"c{n}": token_ids(60 + 7 * n, n) for n in range(6)}
    for turn in range(3):
        requests = [
            generate(f"{name}.{turn}", token_ids=ids, session=name if ids[0] % 2 else None)
            for name, ids in prompts.items()
        ]
        for request_id, (text, end) in engine.peer.answers(*requests).items():
            name = request_id.split(".")[0]
            assert isinstance(end, Finished), end
            assert text == tiny.greedy(prompts[name], 16)
            assert end.finish_reason == "length"
            cached = sum(end.usage.cached_tokens_by_tier.values())
            known = len(prompts[name]) - 5
            assert cached >= (known - known % BLOCK if turn else 0)
        prompts = {name: [*ids, *token_ids(5, turn)] for name, ids in prompts.items()}
    # The counters include earlier tests' requests, and an end may be told before it is counted.
    counters: dict[str, int] = {}
    while counters.get("finished", 0) < max(18, counters.get("requests", 0)):
        (stats,) = engine.peer.wait_for(Stats)
        counters = stats.counters
    assert stats.running == stats.waiting == 0
    assert stats.sessions == len([ids for ids in prompts.values() if ids[0] % 2])
    assert stats.moves["hot-host"] > 0
    assert stats.hits_tokens["host"] + stats.hits_tokens["disk"] > 0


def test_a_salt_keeps_prefixes_apart(engine: RunningEngine) -> None:
    def cached(request_id: str, salt: str) -> int:
        request = generate(request_id, token_ids=token_ids(40, 70), salt=salt)
        _, end = engine.peer.answers(request)[request_id]
        assert isinstance(end, Finished)
        return sum(end.usage.cached_tokens_by_tier.values())

    assert [cached("s1", "x"), cached("s2", "y"), cached("s3", "x")] == [0, 0, 39]


def test_cancelled_requests_say_no_more(engine: RunningEngine) -> None:
    engine.peer.send(generate("gone", token_ids=token_ids(20, 50), num_new=200))
    engine.peer.wait_for(Delta)
    engine.peer.send(Cancel("gone"))
    _, end = engine.peer.answers(generate("next", token_ids=token_ids(20, 51)))["next"]
    assert isinstance(end, Finished)
    engine.peer.replies.clear()
    engine.peer.answers(generate("later", token_ids=token_ids(20, 51)))
    assert not [r for r in engine.peer.replies if isinstance(r, Delta | Finished | Failed)]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({}, "invalid_prompt", "exactly one"),
        ({"text": "a", "token_ids": [3]}, "invalid_prompt", "exactly one"),
        ({"messages": [{"role": "bad", "content": ""}]}, "invalid_prompt", "no such role"),
        ({"token_ids": [2**40]}, "invalid_prompt", "32 bits"),
        ({"token_ids": []}, "empty_prompt", "empty"),
        ({"token_ids": [9999]}, "invalid_token", "9999"),
        ({"token_ids": [3] * CONTEXT}, "context_length_exceeded", str(CONTEXT - 1)),
        ({"token_ids": [3] * 200}, "hot_level_too_small", "152 tokens"),
    ],
)
def test_bad_prompts_get_one_sentence(
    engine: RunningEngine, fields: dict[str, object], code: str, words: str
) -> None:
    _, end = engine.peer.answers(generate("bad", **fields))["bad"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (400, code)
    assert words in end.sentence
    _, good = engine.peer.answers(generate("good", text="The lazy dog."))["good"]
    assert isinstance(good, Finished)


def test_stop_strings_and_sampling_arrive(engine: RunningEngine, tiny: TinyModel) -> None:
    ids = token_ids(30, 60)
    expected = tiny.greedy(ids, 16)
    stop = expected[5:7]
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, stop=(stop,))
    request = msgspec.structs.replace(generate("stop", token_ids=ids), sampling=sampling)
    text, end = engine.peer.answers(request)["stop"]
    assert isinstance(end, Finished)
    assert (end.finish_reason, text) == ("stop", expected[: expected.index(stop)])

    seeded = SamplingParams(max_tokens=16, temperature=2.0, seed=4, ignore_eos=True)
    requests = [
        msgspec.structs.replace(generate(name, token_ids=ids), sampling=seeded) for name in "ab"
    ]
    texts = [text for text, _ in engine.peer.answers(*requests).values()]
    assert texts[0] == texts[1] != expected


def run_here(settings: EngineSettings, directory: Path, script: Callable[[Peer], None]) -> int:
    """The engine on this thread, its peer's script on another; the exit status."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    failures: list[BaseException] = []

    def play() -> None:
        try:
            with listener.accept()[0] as connection:
                script(Peer(connection))
        except BaseException as error:
            failures.append(error)

    with listening(directory) as listener:
        thread = threading.Thread(target=play)
        thread.start()
        try:
            status = main(
                [
                    *("--socket", listener.getsockname()),
                    *("--settings", msgspec.json.encode(settings).decode()),
                ]
            )
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        thread.join()
    if failures:
        raise failures[0]
    return status


def test_a_broken_loop_answers_and_hangs_up_before_it_waits_for_the_disk(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken, has_hung_up = threading.Event(), threading.Event()
    was_hung_up_at_close: list[bool] = []
    replies: list[Reply] = []
    poll, close = KVCacheManager.poll, KVCacheManager.close

    def breaking_poll(self: KVCacheManager) -> None:
        if is_broken.is_set():
            is_broken.clear()
            raise RuntimeError("the loop breaks")
        poll(self)

    def waiting_close(self: KVCacheManager) -> None:
        was_hung_up_at_close.append(has_hung_up.wait(5.0))
        close(self)

    def script(peer: Peer) -> None:
        peer.send(*(generate(name, token_ids=token_ids(20, 1), num_new=200) for name in "abc"))
        peer.wait_for(Delta)
        is_broken.set()
        while peer.receive():
            pass
        has_hung_up.set()
        replies.extend(peer.replies)

    monkeypatch.setattr(KVCacheManager, "poll", breaking_poll)
    monkeypatch.setattr(KVCacheManager, "close", waiting_close)
    assert run_here(settings_for(tiny, tmp_path, max_batch=2), tmp_path, script) == 1
    assert was_hung_up_at_close == [True]
    ends = [reply for reply in replies if isinstance(reply, Finished | Failed)]
    assert sorted(end.request_id for end in ends) == ["a", "b", "c"]
    assert {(end.status, end.code) for end in ends if isinstance(end, Failed)} == {
        (500, "engine_error")
    }


def test_work_of_a_codec_that_fails_is_the_last_thing_it_says(
    tiny: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ValueError("shapes do not match")

    def encode(*arguments: Any) -> None:
        arguments[4].launch(fail, reads=(), writes=())

    replies: list[Reply] = []

    def script(peer: Peer) -> None:
        peer.send(generate("a", token_ids=token_ids(40, 1), num_new=20))
        while peer.receive():
            pass
        replies.extend(peer.replies)

    monkeypatch.setattr(type(create_default_cold_page_codec()), "encode", encode)
    assert run_here(settings_for(tiny, tmp_path), tmp_path, script) == 1
    (failure,) = [reply for reply in replies if isinstance(reply, EngineFailed)]
    assert failure.sentence == (
        "work on stream 'offload' failed: ValueError('shapes do not match') in encode of codec "
        "concat v1 (package coldpage)"
    )
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert [record.message for record in tracebacks] == [f"the engine stops: {failure.sentence}"]
    assert tracebacks[0].exc_info is not None
    assert isinstance(tracebacks[0].exc_info[1], ValueError)


def test_the_queue_is_as_long_as_the_settings_say(tiny: TinyModel, tmp_path: Path) -> None:
    refused: list[int] = []

    def script(peer: Peer) -> None:
        requests = [generate(str(n), token_ids=token_ids(5, n), num_new=200) for n in range(1200)]
        peer.send(*requests)
        (first,) = peer.wait_for(Failed)
        assert isinstance(first, Failed)
        assert (first.status, first.code) == (503, "queue_full")
        refused.append(int(first.request_id))
        peer.send(Shutdown())
        while peer.receive():
            pass

    settings = settings_for(tiny, tmp_path, max_batch=1, max_waiting=1050)
    assert run_here(settings, tmp_path, script) == 0
    assert refused[0] >= 1 + 1050


@pytest.mark.parametrize("how", ["shutdown", "sigterm", "hang up"])
def test_it_ends_cleanly(how: str, tiny: TinyModel, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with RunningEngine(settings_for(tiny, disk), tmp_path) as running:
        running.peer.send(generate("open", token_ids=token_ids(20, 1), num_new=10_000))
        running.peer.wait_for(Delta)
        if how == "shutdown":
            running.peer.send(Shutdown())
        elif how == "sigterm":
            running.process.send_signal(signal.SIGTERM)
        else:
            running.peer.connection.close()
        assert running.exit_status() == 0
        if how != "hang up":
            (end,) = [r for r in running.peer.replies if isinstance(r, Finished | Failed)]
            assert isinstance(end, Failed)
            assert (end.status, end.code) == (503, "shutting_down")
            assert any(isinstance(reply, Stats) for reply in running.peer.replies)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere/at-all"}, "there is no model at '/nowhere/at-all'"),
        ({"dtype": "float8"}, "'float8' is not supported"),
        ({"hot_bytes": 100}, "give it at least"),
        ({"disk_path": None}, "no path"),
        ({"disk_path": "{file}"}, "{file}"),
        ({"host_bytes": 100}, "give it at least"),
        ({"max_batch": 0}, "max_batch"),
        ({"cache_type_k": "q4"}, "'q4' is no cache type: use auto, f32"),
        ({"cache_type_v": "turbo4"}, "heads of 8 numbers"),
        ({"disk_codec": "turbo4"}, "codec turbo4 can not pack the keys of layer 0: heads have 8"),
        ({"host_codec": "zip"}, "there is no codec 'zip': choose one of concat, int8"),
        (
            {"host_codec": "int8", "cache_type_k": "q8_0"},
            "codec int8 can not pack hot pages with keys as q8_0",
        ),
        ({"pool_ratio": (0.5, 0.5)}, "initial_pool_ratio has 2 shares for 1 layer group"),
    ],
)
def test_a_start_that_fails_gets_one_sentence_and_status_2(
    changes: dict[str, object], words: str, tiny: TinyModel, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    if changes.get("disk_path"):
        changes = {**changes, "disk_path": str(file)}
    settings = settings_for(tiny, tmp_path, **changes)
    replies: list[Reply] = []

    def read_everything(peer: Peer) -> None:
        while peer.receive():
            pass
        replies.extend(peer.replies)

    assert run_here(settings, tmp_path, read_everything) == 2
    (failure,) = [reply for reply in replies if isinstance(reply, StartFailed)]
    assert words.format(file=file) in failure.sentence
    assert "\n" not in failure.sentence


class Theirs(CoarseCodec):
    """A codec of another package, of which everything fails that no page depends on."""

    codec_id = "their-package:coarse"

    def measured_errors(self) -> tuple[CodecErrors, ...]:
        raise RuntimeError("no")

    def close(self) -> None:
        raise RuntimeError("no")


def replies_of_a_start(settings: EngineSettings, directory: Path) -> tuple[int, list[Reply]]:
    """With a codec "theirs": the exit status, and what was said; it is stopped when it is ready."""
    replies: list[Reply] = []

    def script(peer: Peer) -> None:
        is_stopped = False
        while peer.receive():
            if not is_stopped and any(isinstance(it, EngineReady) for it in peer.replies):
                is_stopped = True
                peer.send(Shutdown())
        replies.extend(peer.replies)

    return run_here(settings, directory, script), replies


Offer = Callable[[Callable[[], ColdPageCodec]], None]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Another package offers a codec "theirs"."""

    def install(make: Callable[[], ColdPageCodec]) -> None:
        module = ModuleType("their_package")
        module.make = lambda pages: make()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "their_package", module)
        point = EntryPoint("theirs", "their_package:make", registry.ENTRY_POINT_GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])

    return install


def test_what_another_packages_codec_fails_at_beside_pages_ends_nothing(
    tiny: TinyModel, tmp_path: Path, offer: Offer, caplog: pytest.LogCaptureFixture
) -> None:
    offer(Theirs)
    settings = settings_for(tiny, tmp_path, host_codec="theirs")
    status, replies = replies_of_a_start(settings, tmp_path)
    assert status == 0
    (ready,) = [reply for reply in replies if isinstance(reply, EngineReady)]
    assert ready.codecs == "host theirs (0.500 of a hot page), disk theirs (0.500 of a hot page)"
    said = [reply.sentence for reply in replies if isinstance(reply, Loading)]
    assert "making room for the cache" in said, "and compiling nothing"
    assert caplog.text.count("failed in measured_errors") == 1


def test_a_codec_that_leaves_the_process_is_named(
    tiny: TinyModel, tmp_path: Path, offer: Offer
) -> None:
    offer(lambda: sys.exit(3))
    settings = settings_for(tiny, tmp_path, host_codec="theirs")
    status, replies = replies_of_a_start(settings, tmp_path)
    assert status == 2
    (failure,) = [reply for reply in replies if isinstance(reply, StartFailed)]
    assert failure.sentence == (
        "codec 'theirs' of their_package:make can not be made: SystemExit(3)"
    )


def test_a_start_that_is_stopped_in_a_codec_is_no_failure(
    tiny: TinyModel, tmp_path: Path, offer: Offer
) -> None:
    offer(lambda: os.kill(os.getpid(), signal.SIGTERM))  # type: ignore[arg-type, return-value]
    settings = settings_for(tiny, tmp_path, host_codec="theirs")
    status, replies = replies_of_a_start(settings, tmp_path)
    assert status == 0
    assert not any(isinstance(reply, StartFailed | EngineReady) for reply in replies)
