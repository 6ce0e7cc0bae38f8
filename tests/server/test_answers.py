"""What a client gets when all goes well."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.running_server import RunningServer, chat, events
from tests.server.scripted_engine import MODEL_NAME


def echoed(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the engine was asked to do."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return json.loads(choice["text"] if "text" in choice else choice["message"]["content"])


def test_a_chat_is_answered_with_its_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "count 3"}]
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL_NAME
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "0 1 2 "
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (70, 3, 73)
    details = usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 48
    by_tier = details.model_dump()["cached_tokens_by_tier"]
    assert by_tier == {"hot": 16, "host": 32, "disk": 0}


def test_a_chat_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": "count 5"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    *texts, counts = chunks
    assert [chunk.choices[0].delta.role for chunk in texts] == ["assistant"] + [None] * 6
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == "0 1 2 3 4 "
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * 6 + ["length"]
    assert [chunk.usage for chunk in texts] == [None] * 7
    assert counts.choices == []
    assert counts.usage is not None
    assert counts.usage.completion_tokens == 5


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_events_are_framed_as_openai_frames_them(
    http: httpx.Client, include_usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    response = http.post("/v1/chat/completions", json=chat("count 1", stream=True, **options))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response)
    assert done == "[DONE]"
    bodies = [json.loads(chunk) for chunk in chunks]
    for body in bodies:
        assert body.pop("id").startswith("chatcmpl-")
        assert body.pop("created") > 0
    common = {"object": "chat.completion.chunk", "model": MODEL_NAME}
    if include_usage:
        assert bodies.pop()["usage"]["total_tokens"] == 71
        common["usage"] = None
    rest = {"index": 0, "logprobs": None}
    assert bodies == [
        {
            **common,
            "choices": [
                {**rest, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            ],
        },
        {**common, "choices": [{**rest, "delta": {"content": "0 "}, "finish_reason": None}]},
        {**common, "choices": [{**rest, "delta": {}, "finish_reason": "length"}]},
    ]


def test_events_arrive_while_the_answer_is_made(http: httpx.Client) -> None:
    body = chat("count 3 300", stream=True)
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        num_events = [piece.count("data: ") for piece in response.iter_text()]
    # Role and first text together at most; with collected events all would be one piece.
    assert len(num_events) >= 3


def test_a_completion_is_answered_and_streams(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt="count 2")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "0 1 "
    assert answer.usage is not None
    assert answer.usage.total_tokens == 72
    chunks = list(client.completions.create(model=MODEL_NAME, prompt="count 2", stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["0 ", "1 ", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]


@pytest.mark.parametrize(
    ("prompt", "field", "value"),
    [
        ("some text", "text", "some text"),
        (["some text"], "text", "some text"),
        ([5, 6, 7], "token_ids", [5, 6, 7]),
        ([[5, 6, 7]], "token_ids", [5, 6, 7]),
    ],
)
def test_prompts_are_text_or_token_ids(
    http: httpx.Client, prompt: object, field: str, value: object
) -> None:
    request = echoed(http, "/v1/completions", {"prompt": prompt})
    given = {name: request[name] for name in ("text", "token_ids", "messages")}
    assert given == {"text": None, "token_ids": None, "messages": None, field: value}
    assert request["sampling"]["max_tokens"] == 16


def test_every_setting_reaches_the_engine(http: httpx.Client) -> None:
    body = chat(
        "echo",
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        seed=11,
        stop=["a", "b"],
        max_tokens=3,
        max_completion_tokens=4,
        ignore_eos=True,
        session="a conversation",
        cache_salt="a tenant",
        retain=True,
        a_field_of_tomorrow={"x": 1},
        presence_penalty=0.0,
        logprobs=False,
        response_format={"type": "text"},
    )
    request = echoed(http, "/v1/chat/completions", body)
    assert request["request_id"].startswith("chatcmpl-")
    assert request["sampling"] == {
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 40,
        "seed": 11,
        "stop": ["a", "b"],
        "ignore_eos": True,
    }
    assert request["session"] == "a conversation"
    assert request["salt"] == "a tenant"
    assert request["retain"] is True


def test_what_a_request_leaves_out_gets_openais_defaults(http: httpx.Client) -> None:
    body = chat("echo", temperature=None, top_p=None, top_k=-1, stop=None, seed=None, stream=None)
    request = echoed(http, "/v1/chat/completions", body)
    assert request["sampling"] == {
        "max_tokens": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": None,
        "stop": [],
        "ignore_eos": False,
    }


def test_a_conversation_arrives_as_it_was_sent(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "echo"}, {"type": "text", "text": "{two} lines é"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": parts},
    ]
    request = echoed(http, "/v1/chat/completions", {"messages": messages, "stop": "é"})
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "echo\n{two} lines é"},
    ]
    assert request["sampling"]["stop"] == ["é"]


def test_answers_made_together_do_not_mix(client: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        prompt = f"count {number} 2"
        chunks = client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": prompt}], stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    numbers = range(20, 40)
    with concurrent.futures.ThreadPoolExecutor(len(numbers)) as pool:
        answers = list(pool.map(ask, numbers))
    assert answers == ["".join(f"{i} " for i in range(number)) for number in numbers]


def test_the_served_model_is_listed(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL_NAME
    assert client.models.retrieve(MODEL_NAME).owned_by == "coldpage"
    assert http.get("/v1/models").json()["data"][0]["context_tokens"] == 8192


def test_health_says_that_requests_are_served(http: httpx.Client) -> None:
    response = http.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "detail": f"Serving {MODEL_NAME}."}


def test_the_start_shows_what_each_tier_holds_and_how_to_ask(server: RunningServer) -> None:
    output = server.output
    assert "Reading the script." in output
    for cells in (("hot", "1000 B", "160"), ("host", "2.0 KiB", "320"), ("disk", "3.9 KiB", "640")):
        assert any(all(cell in line for cell in cells) for line in output.splitlines())
    (curl,) = [line for line in output.splitlines() if line.startswith("  curl ")]
    assert f"{server.url}/v1/chat/completions" in curl
