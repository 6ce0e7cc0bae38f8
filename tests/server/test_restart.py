"""The real model behind the real server, killed and stopped: what was said is found again."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from coldpage.engine.model.texts import documentation_text
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
