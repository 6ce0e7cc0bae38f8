"""The real model behind the real server, killed and stopped: what was said is found again."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from coldpage.engine.model import LoadedModel, load_model
from coldpage.engine.texts import documentation_text
from tests.server.running_server import RunningServer, wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

MODEL = "SmolLM2-135M-Instruct"
READY_S = 240.0
QUESTION = documentation_text()[:1500]
BLOCK = 16


class Place:
    """Where servers of one test keep things; each start is one server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.saved = directory / "saved"

    def server(self, **flags: Any) -> RunningServer:
        # Room for about 600 tokens in each level of memory.
        given = {
            "hot": "56MiB",
            "host": "28MiB",
            "disk": f"{self.directory / 'disk'}:256MiB",
            "save_dir": str(self.saved),
            "dtype": "float32",
            **flags,
        }
        return RunningServer(is_scripted=False, **given)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=READY_S
    )


class Talk:
    """A conversation in a session, and what it was told."""

    def __init__(self, server: RunningServer, session: str | None = "old") -> None:
        self.messages: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]
        self.session = session
        self.connect(server)

    def connect(self, server: RunningServer) -> None:
        self.client = client_of(server)

    def turn(self, num_tokens: int = 12) -> tuple[str, dict[str, int]]:
        """The answer, which becomes part of the conversation, and the tokens reused by tier."""
        extra = {"ignore_eos": True}
        answer = self.client.chat.completions.create(
            model=MODEL,
            messages=self.messages,  # type: ignore[arg-type]
            max_tokens=num_tokens,
            temperature=0,
            extra_body=extra if self.session is None else {**extra, "session": self.session},
        )
        text = answer.choices[0].message.content or ""
        self.messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And what else?"},
        ]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        details = answer.usage.prompt_tokens_details
        return text, {
            **details.cached_tokens_by_tier,  # type: ignore[attr-defined]
            "all": details.cached_tokens or 0,
            "prompt": answer.usage.prompt_tokens,
        }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three turns on a server that nothing happens to, with nothing but hot memory."""
    place = Place(tmp_path_factory.mktemp("undisturbed"))
    with place.server(host="none", disk="none").wait_ready(READY_S) as server:
        talk = Talk(server, None)
        return [talk.turn()[0] for _ in range(3)]


def disk_has_all(server: RunningServer, num_tokens: int) -> bool:
    used = server.metric('coldpage_tier_used_blocks{tier="disk"}')
    return used is not None and used >= num_tokens // BLOCK


def generate_until_killed(server: RunningServer) -> None:
    """Kill the server while it is in the middle of an answer."""
    client = client_of(server)
    first = threading.Event()

    def generate() -> None:
        try:
            for _ in client.completions.create(
                model=MODEL, prompt="Once", max_tokens=400, stream=True, temperature=0
            ):
                first.set()
        except (openai.APIError, httpx.TransportError):
            return

    thread = threading.Thread(target=generate)
    thread.start()
    assert first.wait(60.0)
    server.kill()
    thread.join()


def test_after_a_kill_in_mid_generation_a_conversation_goes_on_from_disk(
    place: Place, undisturbed: list[str]
) -> None:
    with place.server().wait_ready(READY_S) as server:
        assert "Instance " in server.output
        talk = Talk(server)
        text, usage = talk.turn()
        assert text == undisturbed[0]
        # Written behind, and durable half a second later.
        wait_until(lambda: disk_has_all(server, usage["prompt"]))
        threading.Event().wait(1.0)
        generate_until_killed(server)
    with place.server().wait_ready(READY_S) as again:
        assert "finding what the disk tier holds" in again.output
        talk.connect(again)
        text, usage = talk.turn()
        assert usage["disk"] == usage["all"] > 0.9 * (usage["prompt"] - 30)
        assert text == undisturbed[1]
        text, _ = talk.turn()
        assert text == undisturbed[2]


def test_after_a_clean_stop_a_conversation_goes_on_from_disk(
    place: Place, undisturbed: list[str]
) -> None:
    with place.server().wait_ready(READY_S) as server:
        talk = Talk(server)
        assert talk.turn()[0] == undisturbed[0]
        assert server.stop() == 0
        assert "everything cached is on disk" in server.errors
        instance = server.output.split("Instance ")[1].split(":")[0]
    (directory,) = (place.directory / "disk" / "paged").iterdir()
    assert directory.name == f"instance-{instance}"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}
    with place.server(host="none").wait_ready(READY_S) as again:
        assert "finding what the disk tier holds" not in again.output  # an index told it
        talk.connect(again)
        text, usage = talk.turn()
        assert usage["disk"] == usage["all"] > 0.9 * (usage["prompt"] - 30)
        assert text == undisturbed[1]


def test_without_time_to_write_nothing_is_wrong(place: Place, undisturbed: list[str]) -> None:
    with place.server(shutdown_budget=0.0).wait_ready(READY_S) as server:
        talk = Talk(server)
        assert talk.turn()[0] == undisturbed[0]
        assert server.stop() == 0
    with place.server().wait_ready(READY_S) as again:
        talk.connect(again)
        assert talk.turn()[0] == undisturbed[1]


def test_a_taken_instance_names_who_has_it(place: Place) -> None:
    with place.server(instance_id="mine").wait_ready(READY_S) as server:
        assert "Instance mine:" in server.output
        with place.server(instance_id="mine") as second:
            assert second.process.wait(READY_S) == 2
            assert f"in use by process {server.engine_pid}" in second.errors
        with place.server(instance_id="other").wait_ready(READY_S) as third:
            assert third.health().status_code == 200  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for the tests that leave it running."""
    place = Place(tmp_path_factory.mktemp("shared"))
    with place.server() as running:
        yield running.wait_ready(READY_S)


@pytest.fixture
def http(shared: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=READY_S) as client:
        yield client


def complete(
    http: httpx.Client, prompt: list[int], session: str | None = None, num: int = 4, **more: Any
) -> tuple[str, int]:
    """The text, and the prompt tokens that were reused."""
    body = {"prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_eos": True, **more}
    answer = http.post("/v1/completions", json={**body, "session": session})
    assert answer.status_code == 200, answer.text
    fields = answer.json()
    return fields["choices"][0]["text"], fields["usage"]["prompt_tokens_details"]["cached_tokens"]


def slot_of(http: httpx.Client, name: str) -> dict[str, Any]:
    (slot,) = (slot for slot in http.get("/slots").json() if slot["name"] == name)
    return dict(slot)


def tokens(seed: int, num: int) -> list[int]:
    return [1000 + (7 * i + 131 * seed + i * i * seed) % 20_000 for i in range(num)]


def test_a_saved_session_survives_its_erasure(http: httpx.Client, model: LoadedModel) -> None:
    prompt = tokens(1, 250)
    complete(http, prompt, "saved")
    slot = slot_of(http, "saved")
    assert slot["n_tokens"] == 250 + 3  # the last answered token has not been computed
    assert not slot["is_processing"]
    tier = slot["tier"]
    assert tier["blocks_hot"] + tier["blocks_warm"] + tier["blocks_cold"] == 16
    assert sorted(tier["fingerprints"]) == ["codec", "dtype", "model", "tokenizer"]
    place = f"/slots/{slot['id']}"
    saved = http.post(f"{place}?action=save", json={"filename": "one.bin"}).json()
    assert saved["id_slot"] == slot["id"]
    assert saved["filename"] == "one.bin"
    assert saved["n_saved"] == 253
    assert saved["timings"]["save_ms"] > 0
    erased = http.post(f"{place}?action=erase").json()
    assert erased == {"id_slot": slot["id"], "session": "saved", "n_erased": 253}
    assert slot_of(http, "saved")["n_tokens"] == 0
    restored = http.post(f"{place}?action=restore", json={"filename": "one.bin"}).json()
    assert restored["n_restored"] == 253
    assert restored["n_read"] == saved["n_written"] > 253 * 23_040 * 2
    assert restored["timings"]["restore_ms"] > 0
    # What it went on with before is what it goes on with now, and nothing of it is computed again.
    ids = [*prompt, *greedy(model, prompt, 3)]
    text, cached = complete(http, [*ids, 77, 78], "saved", 4)
    assert cached == restored["n_restored"] == len(ids)
    unsaved, _ = complete(http, [*ids, 77, 78], None, 4, cache_salt="apart")
    assert text == unsaved


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(None, torch.float32)


def greedy(model: LoadedModel, prompt: list[int], num: int) -> list[int]:
    """What plain transformers goes on with."""
    ids = torch.tensor([prompt])
    out = model.model.generate(  # type: ignore[misc]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num,
        min_new_tokens=num,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
