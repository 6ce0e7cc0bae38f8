"""Starting, stopping, and the deaths of each of the three parties."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import sys
import time

import httpx
import pytest
import uvloop

from coldpage.engine.messages import EngineSettings, Reply, StartFailed
from coldpage.server.engine_process import EngineProcess
from coldpage.server.serve import bind
from tests.server.running_server import (
    ENGINE,
    RunningServer,
    chat,
    events,
    is_alive,
    wait_until,
)

CHAT = "/v1/chat/completions"


def engine_pid(http: httpx.Client) -> int:
    """The process id of the scripted engine."""
    answer = http.post(CHAT, json=chat("pid")).json()
    return int(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["wait", "wait text"])
def test_a_client_that_goes_cancels_its_request(
    server: RunningServer, http: httpx.Client, stream: bool, prompt: str
) -> None:
    sample = "coldpage_cancelled_by_client_total"
    before = server.metric(sample)
    assert before is not None
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=chat(prompt, stream=stream), timeout=0.4)
    wait_until(lambda: server.metric(sample) == before + 1)
    assert server.metric("coldpage_open_requests") == 0.0


def test_nothing_is_served_while_the_engine_loads() -> None:
    with RunningServer(model=_start("never-ready")) as server:
        wait_until(lambda: (h := server.health()) is not None and "script" in h.text)
        health = server.health()
        assert health is not None
        assert health.status_code == 503
        assert health.json() == {"status": "loading", "detail": "Reading the script."}
        response = httpx.post(server.url + CHAT, json=chat("count 1"))
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.json()["error"]["message"] == "Reading the script."
        assert server.metric("coldpage_engine_up") == 0.0
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 5.0
        assert server.errors == ""


@pytest.mark.parametrize(
    ("start", "status", "sentence"),
    [
        ("fail-to-start", 2, "the hot tier of 1 B holds no block of 23,040 B: raise --hot"),
        ("exit-at-once", 1, "The engine process exited with status 7 before it was ready."),
    ],
)
def test_a_start_that_fails_says_why(start: str, status: int, sentence: str) -> None:
    with RunningServer(model=_start(start)) as server:
        assert server.wait_exit() == status
        assert server.errors == f"coldpage: {sentence}\n"


def test_a_start_that_fails_while_the_server_is_busy_says_why() -> None:
    async def first_replies() -> list[Reply]:
        command = (sys.executable, str(ENGINE))
        settings = EngineSettings(hot_bytes=1, model=_start("fail-to-start"))
        async with EngineProcess.running(command, settings) as engine:
            # The loop learns of the exit and of the connection at the same moment.
            time.sleep(1.5)
            channel = await engine.connected()
            return [] if channel is None else await channel.receive()

    assert any(isinstance(reply, StartFailed) for reply in uvloop.run(first_replies()))


def test_a_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with RunningServer(port=port) as server:
            assert server.wait_exit() == 2
            assert server.errors == (
                f"coldpage: Port {port} on 127.0.0.1 is taken; choose another with --port.\n"
            )


def test_an_address_of_another_machine_is_one_sentence() -> None:
    with pytest.raises(OSError, match=r"Can not listen on 192\.0\.2\.1, port 0: Cannot assign"):
        bind("192.0.2.1", 0)
    with pytest.raises(OSError, match=r"Can not listen on no\.such\.host\.invalid, port 0: "):
        bind("no.such.host.invalid", 0)


def test_the_engines_death_is_told_to_every_client() -> None:
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        # Not streamed; streamed with no token yet; streamed in the middle of its text.
        bodies = [chat("wait x"), chat("wait", stream=True), chat("die text", stream=True)]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            answers = [pool.submit(http.post, CHAT, json=body) for body in bodies[:2]]
            wait_until(lambda: server.metric("coldpage_open_requests") == 2.0)
            answers.append(pool.submit(http.post, CHAT, json=bodies[2]))
            whole, unstarted, started = [answer.result() for answer in answers]
        sentence = "The engine process was ended by SIGKILL, maybe for want of memory"
        *chunks, last = events(started)
        assert "text" in chunks[1]
        error = json.loads(last)["error"]
        assert error["message"].startswith(sentence)
        assert error["code"] == "engine_down"
        for answer in (whole, unstarted):
            assert answer.status_code == 503
            assert answer.json()["error"] == error
        health = server.health()
        assert health is not None
        assert health.status_code == 503
        assert health.json()["status"] == "down"
        assert health.json()["detail"].startswith(sentence)
        assert server.wait_exit() == 1
        assert server.errors == (
            f"coldpage: {sentence}. 3 open requests were answered with an error.\n"
        )


def test_why_the_engine_gave_up_is_the_last_line() -> None:
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        answer = http.post(CHAT, json=chat("give-up codec x failed"))
        assert answer.status_code == 503
        assert server.wait_exit() == 1
        assert server.errors == (
            "coldpage: The engine process exited with status 1: codec x failed. "
            "1 open requests were answered with an error.\n"
        )


def test_an_engine_that_breaks_the_protocol_is_ended() -> None:
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        pid = engine_pid(http)
        assert http.post(CHAT, json=chat("garbage")).status_code == 503
        assert server.wait_exit() == 1
        assert "broke the protocol" in server.errors
        assert not is_alive(pid)


def test_a_stop_signal_lets_the_engine_close_cleanly() -> None:
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        pid = engine_pid(http)
        started = time.monotonic()
        # As a terminal does it: to every process of the group.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait_exit() == 0
        assert time.monotonic() - started < 3.0
        assert server.errors == "scripted engine: closed cleanly\n"
        assert not is_alive(pid)


def test_open_answers_get_a_moment_and_then_an_error() -> None:
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        brief = chat("count 10 100", stream=True)
        endless = chat("wait text", stream=True)
        with (
            http.stream("POST", CHAT, json=brief) as one,
            http.stream("POST", CHAT, json=endless) as two,
        ):
            server.process.send_signal(signal.SIGTERM)
            assert list(events(one))[-1] == "[DONE]"
            error = json.loads(list(events(two))[-1])["error"]
        assert error["code"] == "server_stopping"
        assert server.wait_exit() == 0


def test_a_second_signal_does_not_wait_for_answers() -> None:
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        with http.stream("POST", CHAT, json=chat("wait text", stream=True)) as response:
            started = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            server.process.send_signal(signal.SIGINT)
            assert "server_stopping" in list(events(response))[-1]
            assert time.monotonic() - started < 2.0
        assert server.wait_exit() == 0


def test_the_engine_does_not_outlive_a_killed_server() -> None:
    with (
        RunningServer() as server,
        httpx.Client(base_url=server.wait_ready().url, timeout=20.0) as http,
    ):
        pid = engine_pid(http)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))


def test_a_client_that_does_not_read_holds_up_nobody(server: RunningServer) -> None:
    body = json.dumps(chat("count 50000", stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: (server.metric("coldpage_open_requests") or 0.0) == 0.0)
        assert httpx.post(server.url + CHAT, json=chat("count 2")).status_code == 200


def _start(name: str) -> str:
    """A model path that exists and tells the scripted engine how to start."""
    return os.path.join(os.path.dirname(__file__), "starts", name)
