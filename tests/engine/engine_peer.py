"""The HTTP process's end of an engine process, for tests: it starts one and talks to it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from coldpage.engine.messages import (
    Delta,
    EngineReady,
    EngineSettings,
    Failed,
    Finished,
    Generate,
    Reply,
    Request,
    SamplingParams,
    StartFailed,
)
from coldpage.engine.transport import FrameParser, encode_frame

DEADLINE_S = 60.0


@contextlib.contextmanager
def listening(directory: Path) -> Iterator[socket.socket]:
    """A socket that an engine can connect to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(directory / "engine.sock"))
        listener.listen()
        listener.settimeout(DEADLINE_S)
        yield listener


class Peer:
    """One connection. ``replies`` are all messages so far."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.settimeout(DEADLINE_S)
        self.replies: list[Reply] = []
        self._parser = FrameParser()
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def send(self, *requests: Request) -> None:
        self.connection.sendall(b"".join(encode_frame(request) for request in requests))

    def receive(self) -> bool:
        """Waits for more; False when the engine has hung up."""
        data = self.connection.recv(65536)
        self.replies += [self._decoder.decode(payload) for payload in self._parser.feed(data)]
        return bool(data)

    def wait_for(self, *kinds: type, num: int = 1) -> list[Reply]:
        """Waits for ``num`` messages of these kinds, which are taken out of ``replies``."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = [reply for reply in self.replies if isinstance(reply, kinds)][:num]
            if len(found) == num:
                self.replies = [reply for reply in self.replies if reply not in found]
                return found
            assert time.monotonic() < deadline, "no answer"
            assert self.receive(), "the engine hung up"

    def answers(self, *requests: Generate) -> dict[str, tuple[str, Finished | Failed]]:
        """Sends requests and waits for the ends of all; text and end by request id."""
        self.send(*requests)
        return self.ends(*(request.request_id for request in requests))

    def ends(self, *request_ids: str) -> dict[str, tuple[str, Finished | Failed]]:
        """Waits for the ends of requests that have been sent."""
        texts = dict.fromkeys(request_ids, "")
        ends: dict[str, Finished | Failed] = {}
        while len(ends) < len(texts):
            (reply,) = self.wait_for(Delta, Finished, Failed)
            if reply.request_id not in texts:  # of a cancelled request
                continue
            assert reply.request_id not in ends, "nothing follows the end"
            if isinstance(reply, Delta):
                texts[reply.request_id] += reply.text
            else:
                ends[reply.request_id] = reply
        return {request_id: (texts[request_id], ends[request_id]) for request_id in texts}


class RunningEngine:
    """An engine in a process of its own. Leaving the block kills what still runs."""

    def __init__(self, settings: EngineSettings, directory: Path) -> None:
        with listening(directory) as listener:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "coldpage.engine.process"),
                    *("--socket", listener.getsockname()),
                    *("--settings", msgspec.json.encode(settings).decode()),
                ]
            )
            self.peer = Peer(listener.accept()[0])
        first = self.peer.wait_for(EngineReady, StartFailed)[0]
        assert isinstance(first, EngineReady), first
        self.ready = first

    def exit_status(self) -> int:
        """Waits for the end of the process; everything that it sent is in ``peer.replies``."""
        with contextlib.suppress(OSError):
            while self.peer.receive():
                pass
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> RunningEngine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.peer.connection.close()
        self.process.kill()
        self.process.wait()


def generate(request_id: str, *, num_new: int = 16, **fields: object) -> Generate:
    """A greedy request."""
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    return msgspec.convert(
        {"request_id": request_id, "sampling": msgspec.to_builtins(sampling), **fields}, Generate
    )
