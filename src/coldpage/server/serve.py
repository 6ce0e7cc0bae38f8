"""One server's life: bind, start the engine, serve, stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import uvicorn
import uvloop

from coldpage.engine.messages import EngineSettings
from coldpage.server.app import create_app
from coldpage.server.engine_client import EngineClient, EngineState, StartListener
from coldpage.server.engine_process import ENGINE_COMMAND, STOP_TIMEOUT_S, EngineProcess
from coldpage.server.metrics import ServerMetrics

__all__ = ["ServeOptions", "ServeOutcome", "bind", "serve"]

# After a stop signal open answers may go on this long before they are ended with an error.
_DRAIN_TIMEOUT_S: Final = 3
# When the engine dies in service, the server says so to who asks this long before it exits.
_DEATH_NOTICE_S: Final = 1.0
# A client that does not read what is sent to it must not hold up the end.
_CLOSE_TIMEOUT_S: Final = 2
_BACKLOG: Final = 512


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve and where."""

    settings: EngineSettings
    bind: str = "127.0.0.1"
    port: int = 8080


@dataclass(frozen=True, slots=True)
class ServeOutcome:
    """How serving ended: the exit status, and the sentence that explains one that is not 0."""

    exit_code: int
    sentence: str = ""


class _Uvicorn(uvicorn.Server):
    """Leaves signals to ``serve``; uvicorn would take them over and raise them again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ``OSError`` with a sentence for people."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            sentence = f"Port {port} on {host} is taken; choose another with --port."
        else:
            sentence = f"Can not listen on {host}, port {port}: {error.strerror}."
        raise OSError(error.errno, sentence) from error


def serve(
    options: ServeOptions,
    listener: StartListener,
    sock: socket.socket,
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> ServeOutcome:
    """Blocks until a stop signal, the engine's death or a failed start. Takes ``sock`` over."""
    with sock:
        return uvloop.run(_serve(options, listener, sock, engine_command))


async def _serve(
    options: ServeOptions,
    listener: StartListener,
    sock: socket.socket,
    engine_command: Sequence[str],
) -> ServeOutcome:
    stop_signal = asyncio.Event()
    hurry_signal = asyncio.Event()

    def on_signal() -> None:
        (hurry_signal if stop_signal.is_set() else stop_signal).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)

    metrics = ServerMetrics()
    max_open_requests = options.settings.max_batch + options.settings.max_waiting
    client = EngineClient(listener, metrics, max_open_requests)
    config = uvicorn.Config(
        create_app(client, metrics),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_TIMEOUT_S + _CLOSE_TIMEOUT_S,
    )
    web = _Uvicorn(config)
    web_task = asyncio.ensure_future(web.serve([sock]))
    async with EngineProcess.running(engine_command, options.settings) as engine:
        engine_task = asyncio.ensure_future(_run_engine(client, engine))
        stop_task = asyncio.ensure_future(stop_signal.wait())
        await asyncio.wait((engine_task, stop_task, web_task), return_when=asyncio.FIRST_COMPLETED)
        if stop_task.done():
            web.should_exit = True
            await _drain(client, hurry_signal)
            outcome = ServeOutcome(0)
        elif web_task.done():
            raise AssertionError("the HTTP server ended by itself") from web_task.exception()
        else:
            stop_task.cancel()
            outcome = engine_task.result()
            if client.model is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop_signal.wait(), _DEATH_NOTICE_S)
            web.should_exit = True
        await web_task
        if client.model is not None:
            engine.stop_timeout_s = STOP_TIMEOUT_S + options.settings.shutdown_budget_s
    engine_task.cancel()
    return outcome


async def _run_engine(client: EngineClient, engine: EngineProcess) -> ServeOutcome:
    """Talks to the engine until it goes, which is never what was wanted; says how it went."""
    was_ready = False
    channel = await engine.connected()
    if channel is None:
        how = await engine.exit_sentence()
    else:
        try:
            await client.run(channel)
            how = await engine.exit_sentence()
        except ConnectionError as error:
            how = f"broke the protocol ({error})"
        was_ready = client.model is not None
    if client.start_failed:
        client.go_down(client.detail)
        return ServeOutcome(2, client.detail)
    when = "" if was_ready else " before it was ready"
    num_failed = client.go_down(f"The engine process {how}{when}; the server is stopping.")
    answered = f" {num_failed} open requests were answered with an error." if num_failed else ""
    cause = f": {client.failure}" if client.failure else ""
    return ServeOutcome(1, f"The engine process {how}{when}{cause}.{answered}")


async def _drain(client: EngineClient, hurry_signal: asyncio.Event) -> None:
    if client.state is not EngineState.DOWN:
        client.stop("The server is stopping.")
    idle = asyncio.ensure_future(client.wait_idle())
    hurry = asyncio.ensure_future(hurry_signal.wait())
    await asyncio.wait((idle, hurry), timeout=_DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    hurry.cancel()
    client.fail_open_requests("The server is stopping.", "server_stopping")
