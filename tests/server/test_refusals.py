"""Bad input: one sentence in OpenAI's shape and a proper status, and the server lives."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.running_server import RunningServer, chat, wait_until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refusal, its shape checked."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {}, "messages", "required"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "not 'image_url'",
        ),
        (CHAT, chat("x", n=2), "n", "only n = 1"),
        (CHAT, chat("x", temperature=3), "temperature", "less than or equal to 2"),
        (CHAT, chat("x", top_p=0), "top_p", "greater than 0"),
        (CHAT, chat("x", top_k=-2), "top_k", "-1"),
        (CHAT, chat("x", seed=2**70), "seed", ""),
        (CHAT, chat("x", max_tokens=0), "max_tokens", "1"),
        (CHAT, chat("x", stop=["a"] * 5), "stop", "at most 4"),
        (CHAT, chat("x", stop=""), "stop", "non-empty"),
        (CHAT, chat("x", stop=["a{b}", 1]), "stop", "non-empty"),
        (CHAT, chat("x", stream_options={}), None, "only allowed when stream"),
        (CHAT, chat("x", logprobs=True), "logprobs", "not supported"),
        (CHAT, chat("x", frequency_penalty=0.5), "frequency_penalty", "not supported"),
        (CHAT, chat("x", response_format={"type": "json_object"}), "response_format", "'text'"),
        (CHAT, chat("x", tools=[{"type": "function"}]), "tools", "not supported"),
        (CHAT, chat("x", functions=[{"name": "f"}]), "functions", "not supported"),
        (CHAT, chat("x", tool_choice="required"), "tool_choice", "not supported"),
        (CHAT, chat("x", modalities=["text", "audio"]), "modalities", "only the modality 'text'"),
        (CHAT, chat("x", top_logprobs=2), "top_logprobs", "not supported"),
        (CHAT, chat("x", logit_bias={"5": 1}), "logit_bias", "not supported"),
        (CHAT, chat("x", min_p=0.1), "min_p", "not supported"),
        (CHAT, chat("x", repetition_penalty=1.1), "repetition_penalty", "not supported"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls",
            "not supported",
        ),
        (CHAT, chat("x", session=""), "session", "at least 1"),
        (CHAT, [1], None, "dictionary"),
        (TEXT, {}, "prompt", "required"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": []}, "prompt", "token ids"),
        (TEXT, {"prompt": ["a", "b"]}, "prompt", "one prompt"),
        (TEXT, {"prompt": [[1], [2]]}, "prompt", "one prompt"),
        (TEXT, {"prompt": [1, -1]}, "prompt", "token ids"),
        (TEXT, {"prompt": [1, True]}, "prompt", "token ids"),
        (TEXT, {"prompt": [1, 2**40]}, "prompt", "token ids"),
        (TEXT, {"prompt": "x", "echo": True}, "echo", "not supported"),
        (TEXT, {"prompt": "x", "best_of": 2}, "best_of", "best_of = 1"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        (TEXT, {"prompt": "x", "logprobs": 0}, "logprobs", "not supported"),
        (TEXT, {"prompt": "x", "min_tokens": 3}, "min_tokens", "not supported"),
        ("/sessions/any/fork", {"session": "b", "salt": "x"}, "salt", "not permitted"),
        ("/sessions/any/save", {"filname": "b"}, "filname", "not permitted"),
    ],
)
def test_an_invalid_field_is_named(
    http: httpx.Client, path: str, body: object, param: str | None, words: str
) -> None:
    error = refused(http.post(path, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": "\\ud800"}', "invalid_value"),
        (b'{"\xff": 1}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
    ],
)
def test_what_is_no_json_is_refused(http: httpx.Client, content: bytes, code: str) -> None:
    headers = {"Content-Type": "application/json"}
    error = refused(http.post(CHAT, content=content, headers=headers), 400)
    assert error["code"] == code


def test_fields_that_nobody_knows_are_logged_once_and_counted() -> None:
    # All but the first ask for nothing that this server does not do.
    body = chat("count 1", max_token=3, tools=[], logit_bias={}, user="me", sesion=None)
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        counter = "coldpage_requests_with_unread_fields_total"
        assert http.post(CHAT, json=chat("count 1", user="me")).status_code == 200
        assert server.metric(counter) == 0.0
        for _ in range(2):
            assert http.post(CHAT, json=body).status_code == 200
        text = {"prompt": "count 1", "x" * 5000: 1, "a\n": 2}
        assert http.post(TEXT, json=text).status_code == 200
        assert server.metric(counter) == 3.0
        lines = [line for line in server.errors.splitlines() if "is not read by" in line]
    assert len(lines) == 3
    assert "'max_token'" in lines[0] and "'max_tokens'" in lines[0]
    assert len(lines[1]) < 200 and "x" * 64 in lines[1]
    assert repr("a\n") in lines[2]


def test_another_content_type_is_refused(http: httpx.Client) -> None:
    # A page in a browser can send text/plain anywhere without asking; JSON it can not.
    headers = {"Content-Type": "text/plain"}
    content = b'{"messages": [{"role": "user", "content": "count 1"}]}'
    error = refused(http.post(CHAT, content=content, headers=headers), 400)
    assert error["code"] == "invalid_content_type"
    assert "text/plain" in error["message"]


@pytest.mark.parametrize("path", [CHAT, "/sessions/any/save"])
def test_a_request_without_its_body_is_told_so(http: httpx.Client, path: str) -> None:
    error = refused(http.post(path), 400)
    assert error["message"] == "The request has no body: send a JSON object."
    assert error["code"] == "invalid_value"


def test_another_model_does_not_exist(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError) as failure:
        client.completions.create(model="gpt-9", prompt="count 1")
    assert failure.value.code == "model_not_found"
    assert "scripted/model" in failure.value.message
    error = refused(http.get("/v1/models/gpt-9"), 404)
    assert error["code"] == "model_not_found"


def test_unknown_routes_and_methods_have_the_same_shape(http: httpx.Client) -> None:
    refused(http.get("/v1/nothing"), 404)
    response = http.get(CHAT)
    refused(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_large_body_is_refused_announced_or_not(http: httpx.Client) -> None:
    large = b" " * (8 * 1024 * 1024 + 1)
    headers = {"Content-Type": "application/json"}

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 1 << 20):
            yield large[start : start + (1 << 20)]

    for content in (large, pieces()):
        error = refused(http.post(CHAT, content=content, headers=headers), 413)
        assert error["code"] == "request_too_large"
        assert "8388608 bytes" in error["message"]
    assert http.post(CHAT, json=chat("count 1")).status_code == 200


def test_an_announced_large_body_is_not_read(server: RunningServer) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as sock:
        sock.sendall(head.encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_body_just_below_the_limit_is_served(http: httpx.Client) -> None:
    prompt = "count 1 0 " + "x" * (8 * 1024 * 1024 - 1000)
    assert http.post(CHAT, json=chat(prompt)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_refusal_has_its_status_and_code(client: openai.OpenAI, stream: bool) -> None:
    sentence = "The prompt has 9000 tokens and the context holds 8192."
    prompt = f"fail 400 context_length_exceeded {sentence}"
    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(
            model="scripted/model", messages=[{"role": "user", "content": prompt}], stream=stream
        )
    assert failure.value.code == "context_length_exceeded"
    assert sentence in failure.value.message


def test_too_many_requests_are_told_to_come_again() -> None:
    with (
        RunningServer(max_batch=1, max_waiting=1) as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        body = chat("wait first", stream=True)
        with (
            http.stream("POST", CHAT, json=body) as one,
            http.stream("POST", CHAT, json=body) as two,
        ):
            assert (one.status_code, two.status_code) == (200, 200)
            response = http.post(CHAT, json=chat("count 1"))
            error = refused(response, 429)
            assert error["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
            assert server.metric('coldpage_answers_total{outcome="refused"}') == 1.0
        wait_until(lambda: server.metric("coldpage_open_requests") == 0.0)
        assert http.post(CHAT, json=chat("count 1")).status_code == 200
