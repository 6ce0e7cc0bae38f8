"""The real model behind the real server, with a real client: more conversations than fit the hot
level.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from coldpage.engine.model.texts import documentation_text
from tests.server.running_server import RunningServer, wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
NUM_CONVERSATIONS = 6


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Hot room for about two of the conversations, host room for two more, the rest on disk."""
    disk = tmp_path_factory.mktemp("disk")
    flags = {"hot": "24MiB", "host": "24MiB", "disk": f"{disk}:256MiB", "dtype": "bfloat16"}
    with RunningServer(is_scripted=False, **flags) as running:
        yield running.wait_ready(240.0)


@pytest.fixture
def client(real_server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    url = f"{real_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=240.0) as client:
        yield client


def test_a_chat_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len(chunks) > 4
    usage = chunks[-1].usage
    assert usage is not None
    assert 1 <= usage.completion_tokens <= 12


def test_old_conversations_come_back_from_every_tier(
    client: openai.OpenAI, real_server: RunningServer
) -> None:
    text = documentation_text()
    size = len(text) // NUM_CONVERSATIONS
    conversations: list[list[dict[str, str]]] = [
        [{"role": "user", "content": f"{index} " + text[index * size : index * size + 1600]}]
        for index in range(NUM_CONVERSATIONS)
    ]
    seen: dict[str, int] = {}
    for turn in range(2):
        for messages in conversations:
            answer = client.chat.completions.create(
                model=MODEL,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=4,
                temperature=0,
            )
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            assert details is not None
            by_tier = details.cached_tokens_by_tier  # type: ignore[attr-defined]
            assert sum(by_tier.values()) == details.cached_tokens
            if turn:
                # All whole blocks of the first turn's prompt at least.
                assert details.cached_tokens > 0.8 * answer.usage.prompt_tokens
                for tier, count in by_tier.items():
                    seen[tier] = seen.get(tier, 0) + count
            reply = answer.choices[0].message.content or ""
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "And then?"},
            ]
    assert seen["disk"] > 0
    assert seen["host"] > 0
    name = 'coldpage_reused_tokens_total{tier="disk"}'
    # The engine reports its numbers about once a second.
    wait_until(lambda: real_server.metric(name) == seen["disk"])


def test_a_named_session_is_reused_up_to_its_last_token(client: openai.OpenAI) -> None:
    prompt = [11, 23] * 40
    extra = {"session": "one"}
    first = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=4, temperature=0, extra_body=extra
    )
    again = client.completions.create(
        model=MODEL, prompt=[*prompt, 5, 6, 7], max_tokens=1, temperature=0, extra_body=extra
    )
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == len(prompt)


def test_a_prompt_over_the_limit_is_refused_and_the_server_lives(
    client: openai.OpenAI, real_server: RunningServer
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"context|blocks") as caught:
        client.completions.create(model=MODEL, prompt=[7] * 9000, max_tokens=1)
    assert "\n" not in caught.value.message
    assert httpx.get(f"{real_server.url}/health").status_code == 200
    answer = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=1)
    assert answer.choices


def test_it_stops_cleanly_when_asked(real_server: RunningServer) -> None:
    assert real_server.stop() == 0
