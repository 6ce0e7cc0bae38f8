"""Frames over a real socket, from both ends."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.engine.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    Delta,
    Generate,
    Loading,
    Reply,
    SamplingParams,
    Shutdown,
)
from coldpage.engine.transport import EngineChannel, FrameParser, ServerChannel, encode_frame

GENERATE = Generate("a", SamplingParams(stop=("x",)), token_ids=(1, 2, 3))


@given(
    texts=st.lists(st.text(max_size=50), max_size=10),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=50),
)
def test_frames_survive_any_cutting_of_the_stream(texts: list[str], cuts: list[int]) -> None:
    replies = [Delta("id", text) for text in texts]
    stream = b"".join(encode_frame(reply) for reply in replies)
    parser = FrameParser()
    payloads: list[bytes] = []
    start = 0
    while start < len(stream):
        stop = start + cuts[start % len(cuts)]
        payloads += parser.feed(stream[start:stop])
        start = stop
    assert [msgspec.msgpack.decode(payload, type=Reply) for payload in payloads] == replies


def test_an_absurd_length_is_refused_before_it_is_awaited() -> None:
    with pytest.raises(ConnectionError, match="a frame of 4294967295 bytes"):
        FrameParser().feed(b"\xff\xff\xff\xff")


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        encode_frame(Loading("x" * MAX_FRAME_BYTES))


@pytest.fixture
def ends() -> Iterator[tuple[EngineChannel, socket.socket]]:
    """The engine's channel and the bare socket of its peer."""
    ours, theirs = socket.socketpair()
    with theirs, EngineChannel(ours) as channel:
        yield channel, theirs


def received(channel: EngineChannel, num_requests: int) -> list[object]:
    """The next requests."""
    requests: list[object] = []
    while len(requests) < num_requests:
        batch = channel.receive(timeout_s=5.0)
        assert batch, "nothing came"
        requests += batch
    return requests


def test_requests_arrive_in_order(ends: tuple[EngineChannel, socket.socket]) -> None:
    channel, peer = ends
    assert channel.receive() == []
    peer.sendall(encode_frame(GENERATE) + encode_frame(Cancel("a")))
    assert received(channel, 2) == [GENERATE, Cancel("a")]


def test_a_peer_that_goes_is_a_shutdown_after_its_last_request(
    ends: tuple[EngineChannel, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    channel, peer = ends
    peer.sendall(encode_frame(GENERATE))
    peer.close()
    assert received(channel, 2) == [GENERATE, Shutdown()]
    assert caplog.text == ""
    assert channel.peer_gone
    channel.send(Loading("to nobody"))
    assert channel.receive(timeout_s=0.05) == []


def test_a_peer_that_talks_nonsense_is_a_shutdown(
    ends: tuple[EngineChannel, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    channel, peer = ends
    peer.sendall(b"\x01\x00\x00\x00\xc1")
    assert received(channel, 1) == [Shutdown()]
    assert "sent what is no message" in caplog.text


def test_closing_sends_everything_first(ends: tuple[EngineChannel, socket.socket]) -> None:
    channel, peer = ends
    for number in range(2000):
        channel.send(Delta("a", str(number)))
    reader = threading.Thread(target=channel.close)
    reader.start()
    data = bytearray()
    while piece := peer.recv(1 << 16):
        data += piece
    reader.join()
    payloads = FrameParser().feed(bytes(data))
    texts = [msgspec.msgpack.decode(payload, type=Delta).text for payload in payloads]
    assert texts == [str(number) for number in range(2000)]


def test_a_full_outbox_lets_the_sender_go_when_the_peer_goes(
    ends: tuple[EngineChannel, socket.socket],
) -> None:
    channel, peer = ends
    is_done = threading.Event()

    def send_much() -> None:
        for _ in range(20_000):
            channel.send(Loading("x" * 200))
        is_done.set()

    threading.Thread(target=send_much, daemon=True).start()
    assert not is_done.wait(0.3)
    peer.close()
    assert is_done.wait(5.0)


def test_a_sender_does_not_wait_for_its_peer(ends: tuple[EngineChannel, socket.socket]) -> None:
    channel, peer = ends
    started = time.perf_counter()
    for _ in range(1000):
        channel.send(Loading("x" * 1000))
    assert time.perf_counter() - started < 0.5
    peer.close()


def test_both_ends_understand_each_other(tmp_path: Path) -> None:
    path = os.path.relpath(tmp_path / "socket")  # the absolute name may be too long for a socket

    def engine() -> None:
        with EngineChannel.connect(path) as channel:
            channel.send(Loading("one"))
            channel.send(Loading("two"))
            requests = received(channel, 2)
            channel.send(Delta("a", str(requests == [GENERATE, Shutdown()])))

    async def server() -> list[Reply]:
        connection: asyncio.Queue[ServerChannel] = asyncio.Queue()
        listener = await asyncio.start_unix_server(
            lambda reader, writer: connection.put_nowait(ServerChannel(reader, writer)), path
        )
        thread = asyncio.ensure_future(asyncio.to_thread(engine))
        channel = await connection.get()
        channel.send(GENERATE)
        channel.send(Shutdown())
        replies: list[Reply] = []
        while batch := await channel.receive():
            replies += batch
        await thread
        channel.close()
        listener.close()
        return replies

    assert asyncio.run(server()) == [Loading("one"), Loading("two"), Delta("a", "True")]
