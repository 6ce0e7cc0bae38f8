"""The HTTP process's view of the engine: its state, and the requests that are open in it."""

from __future__ import annotations

import asyncio
import enum
import time
from types import TracebackType
from typing import Final, Protocol

from coldpage.engine.messages import (
    Cancel,
    Delta,
    EngineFailed,
    EngineReady,
    Failed,
    Finished,
    Generate,
    Loading,
    Reply,
    SessionCommand,
    SessionDone,
    StartFailed,
    Stats,
)
from coldpage.engine.transport import ServerChannel
from coldpage.server.errors import ApiError, api_error_of
from coldpage.server.metrics import ServerMetrics

__all__ = ["AnswerStream", "EngineClient", "EngineState", "StartListener"]

_RETRY_BUSY_S: Final = 1
_RETRY_LOADING_S: Final = 5


class EngineState(enum.Enum):
    """Where the engine is in its life."""

    LOADING = "loading"  # the process starts or loads its model
    READY = "ready"  # requests are served
    STOPPING = "stopping"  # the server is being stopped: no new requests
    DOWN = "down"  # the process has gone, or could not start


class StartListener(Protocol):
    """Who is told how the start goes."""

    def loading(self, sentence: str) -> None:
        """The engine does something that takes a while."""

    def ready(self, ready: EngineReady) -> None:
        """Requests are served from now on."""


class AnswerStream:
    """The replies to one request, in order. Closing it early cancels the request in the engine.

    At most one reply a token waits here, so the context length bounds what a slow client can hold.
    """

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._replies: asyncio.Queue[Delta | Finished | Failed] = asyncio.Queue()
        self._opened_s = time.perf_counter()
        self._first_token_s: float | None = None

    async def next(self) -> Delta | Finished | Failed:
        """Waits for the next reply; the last one is ``Finished`` or ``Failed``."""
        return await self._replies.get()

    def close(self) -> None:
        """Cancels the request unless its last reply has come. Idempotent."""
        self._client.cancel(self._request_id)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def deliver(self, reply: Delta | Finished | Failed, metrics: ServerMetrics) -> None:
        """Enqueues a reply and observes its time; called by the client alone."""
        self._replies.put_nowait(reply)
        now_s = time.perf_counter()
        if self._first_token_s is None and not isinstance(reply, Failed):
            self._first_token_s = now_s
            metrics.observe_first_token(now_s - self._opened_s)
        if isinstance(reply, Failed):
            metrics.count_answer("failed")
        elif isinstance(reply, Finished):
            metrics.count_answer(reply.finish_reason)
            usage = reply.usage
            assert self._first_token_s is not None
            if usage.completion_tokens > 1:
                seconds = now_s - self._first_token_s
                metrics.observe_tokens(seconds / (usage.completion_tokens - 1))
            if sum(usage.cached_tokens_by_tier.values()) > 0:
                metrics.observe_restore(usage.restore_ms / 1000)


class EngineClient:
    """Multiplexes requests over the channel. Belongs to one event loop.

    At most ``max_open_requests`` are open at once; more are refused with 429.
    """

    def __init__(
        self, listener: StartListener, metrics: ServerMetrics, max_open_requests: int
    ) -> None:
        self.state = EngineState.LOADING
        self.detail = "The engine process is starting."
        self.model: EngineReady | None = None
        self.stats: Stats | None = None
        self.start_failed = False
        self.failure = ""  # why the engine could not go on, if it said so
        self.started_s = int(time.time())
        self._listener = listener
        self._metrics = metrics
        self._max_open_requests = max_open_requests
        self._streams: dict[str, AnswerStream] = {}
        self._commands: dict[str, asyncio.Future[SessionDone | Failed]] = {}
        self._channel: ServerChannel | None = None
        self._idle = asyncio.Event()  # no request and no command is open
        self._idle.set()

    @property
    def num_open_requests(self) -> int:
        """Requests handed to the engine whose last reply has not come."""
        return len(self._streams)

    def ready_model(self) -> EngineReady:
        """The served model. Raises ``ApiError`` 503 while there is none."""
        if self.state is EngineState.READY and self.model is not None:
            return self.model
        retry_after_s = _RETRY_LOADING_S if self.state is EngineState.LOADING else None
        code = f"engine_{self.state.value}"
        raise ApiError(503, self.detail, code=code, retry_after_s=retry_after_s)

    def open(self, generate: Generate) -> AnswerStream:
        """Hands a request to the engine. Raises ``ApiError`` 503 or 429; the caller closes it."""
        self.ready_model()
        assert self._channel is not None
        if len(self._streams) >= self._max_open_requests:
            self._metrics.count_answer("refused")
            raise ApiError(
                429,
                f"The server already works on {self._max_open_requests} requests, its limit;"
                " try again in a moment.",
                code="too_many_requests",
                retry_after_s=_RETRY_BUSY_S,
            )
        stream = AnswerStream(self, generate.request_id)
        self._channel.send(generate)
        self._streams[generate.request_id] = stream
        self._update_idle()
        return stream

    async def ask(self, command: SessionCommand) -> SessionDone:
        """Hands a session command to the engine and waits. Raises ``ApiError`` when it refuses."""
        self.ready_model()
        assert self._channel is not None
        if len(self._commands) >= self._max_open_requests:
            sentence = "Too many session commands are open; try again in a moment."
            code = "too_many_requests"
            raise ApiError(429, sentence, code=code, retry_after_s=_RETRY_BUSY_S)
        answer: asyncio.Future[SessionDone | Failed] = asyncio.get_running_loop().create_future()
        self._commands[command.request_id] = answer
        self._update_idle()
        try:
            self._channel.send(command)
            reply = await answer
        finally:
            self._commands.pop(command.request_id, None)
            self._update_idle()
        if isinstance(reply, Failed):
            raise api_error_of(reply)
        return reply

    def cancel(self, request_id: str) -> None:
        """Forgets an open request and tells the engine; does nothing when it has ended."""
        if self._forget(request_id) is not None:
            self._metrics.count_answer("cancelled")
            if self._channel is not None:
                self._channel.send(Cancel(request_id))

    async def run(self, channel: ServerChannel) -> None:
        """Dispatches replies until the engine goes. Raises ``ConnectionError`` on a bad message."""
        self._channel = channel
        while replies := await channel.receive():
            for reply in replies:
                self._dispatch(reply)

    async def wait_idle(self) -> None:
        """Waits until no request is open."""
        await self._idle.wait()

    def stop(self, sentence: str) -> None:
        """Takes no new requests; the open ones go on."""
        self.state = EngineState.STOPPING
        self.detail = sentence

    def go_down(self, sentence: str) -> int:
        """Answers every open request with 503 and this sentence; how many there were."""
        self.state = EngineState.DOWN
        self.detail = sentence
        return self.fail_open_requests(sentence, "engine_down")

    def fail_open_requests(self, sentence: str, code: str) -> int:
        """Answers every open request with 503 and this sentence; how many there were."""
        request_ids = list(self._streams)
        for request_id in request_ids:
            if self._channel is not None:
                self._channel.send(Cancel(request_id))
        commands = list(self._commands)
        for request_id in (*request_ids, *commands):
            self._dispatch(Failed(request_id, 503, sentence, code))
        return len(request_ids) + len(commands)

    def _forget(self, request_id: str) -> AnswerStream | None:
        stream = self._streams.pop(request_id, None)
        self._update_idle()
        return stream

    def _update_idle(self) -> None:
        if self._streams or self._commands:
            self._idle.clear()
        else:
            self._idle.set()

    def _dispatch(self, reply: Reply) -> None:
        match reply:
            case SessionDone(request_id=request_id) | Failed(request_id=request_id) if (
                request_id in self._commands
            ):
                if not self._commands[request_id].done():
                    self._commands[request_id].set_result(reply)
            case Delta(request_id=request_id):
                # None: the reply crossed a cancellation on its way.
                if (stream := self._streams.get(request_id)) is not None:
                    stream.deliver(reply, self._metrics)
            case Finished(request_id=request_id) | Failed(request_id=request_id):
                if (stream := self._forget(request_id)) is not None:
                    stream.deliver(reply, self._metrics)
            case Stats():
                self.stats = reply
            case Loading(sentence=sentence):
                if self.state is EngineState.LOADING:
                    self.detail = sentence
                    self._listener.loading(sentence)
            case EngineReady():
                if self.state is EngineState.LOADING:
                    self.model = reply
                    self.state = EngineState.READY
                    self.detail = f"Serving {reply.model_name}."
                    self._listener.ready(reply)
            case StartFailed(sentence=sentence):
                self.start_failed = True
                self.detail = sentence
            case EngineFailed(sentence=sentence):
                self.failure = sentence
