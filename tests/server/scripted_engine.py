"""A process that speaks the engine's protocol and does what prompts tell it: a peer for edge cases.

Run as the engine is: ``scripted_engine.py --socket PATH --settings JSON``. The settings' ``model``
says how to start, a prompt's first word what to answer.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from coldpage.engine.messages import (
    Cancel,
    CodecErrorStats,
    CodecFailureStats,
    Delta,
    EngineFailed,
    EngineReady,
    EngineSettings,
    Failed,
    Finished,
    Generate,
    Loading,
    Shutdown,
    StartFailed,
    Stats,
    TierStats,
    Usage,
)
from coldpage.engine.transport import EngineChannel

MODEL_NAME = "scripted/model"
TIERS = (
    TierStats("hot", 1000, 400, 10, 4, 160),
    TierStats("host", 2000, 0, 20, 0, 320),
    TierStats("disk", 4000, 4000, 40, 40, 640, 2, 5, "read_only"),
)

CODEC_ERRORS = (
    CodecErrorStats("turbo4", 0, 12, 0, 0.1, 0.12, 0.09),
    CodecErrorStats("turbo4", 1, 3, 1, 0.2, 0.25, 0.15),
)
CODEC_FAILURES = (
    CodecFailureStats("turbo4", "decode", 0),
    CodecFailureStats("turbo4", "encode", 7),
)


class ScriptedEngine:
    """Answers each request in a thread of its own."""

    def __init__(self, channel: EngineChannel) -> None:
        self.channel = channel
        self.cancelled: dict[str, threading.Event] = {}
        self.num_cancelled = 0
        self.scripts: dict[str, Callable[[Generate, list[str]], None]] = {
            "count": self.count,
            "die": self.die,
            "give-up": self.give_up,
            "echo": self.echo,
            "fail": self.fail,
            "garbage": self.garbage,
            "pid": self.pid,
            "wait": self.wait,
        }

    def serve(self) -> None:
        """Until ``Shutdown``."""
        self.send_stats()
        while True:
            for request in self.channel.receive(timeout_s=60.0):
                match request:
                    case Generate():
                        self.cancelled[request.request_id] = threading.Event()
                        threading.Thread(target=self.answer, args=(request,), daemon=True).start()
                    case Cancel(request_id=request_id):
                        self.num_cancelled += 1
                        self.cancelled[request_id].set()
                        self.send_stats()
                    case Shutdown():
                        return

    def send_stats(self) -> None:
        """The moves are constant, the counter is what tests wait for."""
        counters = {"cancelled_by_client": self.num_cancelled}
        moves, hits = ({"hot-host": 7}, {"hot-host": 700}), {"host": 48}
        codecs = CODEC_ERRORS, CODEC_FAILURES
        stats = Stats(TIERS, *moves, hits, counters, 1, 2, 3, *codecs)
        self.channel.send(stats)

    def answer(self, request: Generate) -> None:
        """Runs the script that the last message or the text names."""
        text = request.messages[-1].content if request.messages else request.text or "echo"
        name, *words = text.split()
        self.scripts.get(name, self.echo)(request, words)

    def finish(self, request: Generate, num_tokens: int, reason: str = "stop") -> None:
        """The last reply of an answer that went well."""
        usage = Usage(70, num_tokens, {"hot": 16, "host": 32}, 12.0, 3.0)
        self.channel.send(Finished(request.request_id, reason, usage))

    def count(self, request: Generate, words: list[str]) -> None:
        """``count N [PAUSE_MS]``: N deltas, the numbers from 0."""
        pause_s = int(words[1]) / 1000 if len(words) > 1 else 0.0
        for number in range(int(words[0])):
            if self.cancelled[request.request_id].wait(pause_s):
                return
            self.channel.send(Delta(request.request_id, f"{number} "))
        self.finish(request, int(words[0]), "length")

    def echo(self, request: Generate, words: list[str]) -> None:
        """The request itself, as JSON."""
        self.channel.send(Delta(request.request_id, msgspec.json.encode(request).decode()))
        self.finish(request, 1)

    def fail(self, request: Generate, words: list[str]) -> None:
        """``fail STATUS CODE sentence ...``."""
        status, code, *sentence = words
        self.channel.send(Failed(request.request_id, int(status), " ".join(sentence), code))

    def wait(self, request: Generate, words: list[str]) -> None:
        """``wait [text]``: perhaps one delta, then nothing until the client goes."""
        if words:
            self.channel.send(Delta(request.request_id, words[0]))
        self.cancelled[request.request_id].wait()

    def die(self, request: Generate, words: list[str]) -> None:
        """``die [text]``: perhaps one delta, then SIGKILL, as the kernel does it out of memory."""
        if words:
            self.channel.send(Delta(request.request_id, words[0]))
            time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    def give_up(self, request: Generate, words: list[str]) -> None:
        """``give-up text``: what it can not go on for, then the end."""
        self.channel.send(EngineFailed(" ".join(words)))
        time.sleep(0.3)
        os._exit(1)

    def garbage(self, request: Generate, words: list[str]) -> None:
        """A frame that is no message."""
        self.channel._outbox.put(b"\x03\x00\x00\x00abc")

    def pid(self, request: Generate, words: list[str]) -> None:
        """The engine's process id."""
        self.channel.send(Delta(request.request_id, str(os.getpid())))
        self.finish(request, 1)


def main() -> int:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--settings", required=True)
    arguments = parser.parse_args()
    settings = msgspec.json.decode(arguments.settings, type=EngineSettings)
    start = os.path.basename(settings.model or "")
    if start == "exit-at-once":
        return 7
    with EngineChannel.connect(arguments.socket) as channel:
        channel.send(Loading("Reading the script."))
        if start == "fail-to-start":
            channel.send(StartFailed("the hot tier of 1 B holds no block of 23,040 B: raise --hot"))
            return 2
        if start == "never-ready":
            while Shutdown() not in channel.receive(timeout_s=60.0):
                pass
            return 0
        channel.send(EngineReady(MODEL_NAME, 8192, settings.tokens_per_block, "float32", TIERS))
        ScriptedEngine(channel).serve()
    print("scripted engine: closed cleanly", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
