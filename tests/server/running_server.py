"""A real server process over the scripted engine, and what tests do with it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.server.scripted_engine import MODEL_NAME

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).with_name("scripted_engine.py")
# The command line's own path with another engine process.
LAUNCH = """
import json, sys
from rich.console import Console
from coldpage.cli.failure import failures_as_sentences
from coldpage.cli.serve_command import ServeFlags, run_serve
from coldpage.server import ENGINE_COMMAND
import click

@click.command()
def command():
    flags, engine = json.loads(sys.stdin.read())
    with failures_as_sentences():
        command = (sys.executable, engine) if engine else ENGINE_COMMAND
        run_serve(ServeFlags(**flags), Console(), command)

command([])
"""
DEADLINE_S = 20.0


def free_port() -> int:
    """A port that was free a moment ago, and that no connection is given by chance."""
    while True:
        # Below those that Linux hands out, of which other tests take many in that moment.
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Waits for a condition. Raises ``AssertionError`` when it does not come."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come in time"
        time.sleep(0.02)


class RunningServer:
    """``coldpage serve`` in a process of its own. Leaving the block kills what still runs."""

    def __init__(self, *, is_scripted: bool = True, **flags: Any) -> None:
        self.port = flags.setdefault("port", free_port())
        flags.setdefault("disk", "none")
        flags.setdefault("hot", "64MiB")
        flags.setdefault("host", "none")
        flags.setdefault("save_dir", "none")
        self.url = f"http://127.0.0.1:{self.port}"
        self._files = contextlib.ExitStack()
        self._output = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self._errors = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            text=True,
            cwd=REPOSITORY,
            process_group=0,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "100"},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([flags, str(ENGINE) if is_scripted else ""]))
        self.process.stdin.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._files.close()

    @property
    def output(self) -> str:
        """What was printed so far."""
        self._output.seek(0)
        return self._output.read()

    @property
    def errors(self) -> str:
        """What was printed to the error stream so far."""
        self._errors.seek(0)
        return self._errors.read()

    def health(self) -> httpx.Response | None:
        """The answer of ``/health``, None while nobody listens."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health")
        return None

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> RunningServer:
        """Waits until requests are served."""
        wait_until(
            lambda: (health := self.health()) is not None and health.status_code == 200, deadline_s
        )
        return self

    @property
    def engine_pid(self) -> int:
        """The engine's process id."""
        pid = self.process.pid
        (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(engine)

    def kill(self) -> None:
        """SIGKILL for both processes, as a power cut ends them; returns when they are gone."""
        engine = self.engine_pid
        os.kill(engine, signal.SIGKILL)
        self.process.kill()
        self.process.wait(DEADLINE_S)
        wait_until(lambda: not is_alive(engine))

    def wait_exit(self) -> int:
        """Waits for the end of the process; its status."""
        return self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM, then the status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def metric(self, sample: str) -> float | None:
        """The value of a sample such as ``name{label="x"}``, None where it is not shown."""
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.rpartition(" ")[0] == sample:
                return float(line.rpartition(" ")[2])
        return None


def chat(prompt: str, **fields: Any) -> dict[str, Any]:
    """A chat request's body."""
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": prompt}], **fields}


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each server-sent event, the framing checked."""
    for block in response.read().decode().split("\n\n")[:-1]:
        assert block.startswith("data: ")
        assert "\n" not in block
        yield block.removeprefix("data: ")
