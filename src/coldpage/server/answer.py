"""From an open request to an HTTP answer: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from coldpage.engine.messages import Delta, Failed, Finished
from coldpage.server.engine_client import AnswerStream
from coldpage.server.errors import ApiError, api_error_of
from coldpage.server.shapes import AnswerShape

__all__ = ["EventStream", "answer_whole", "answer_with_events"]

_DONE: Final = b"data: [DONE]\n\n"
# What proxies that log requests of vanished clients show; nobody receives it.
_CLIENT_CLOSED_REQUEST: Final = 499


def _event(body: BaseModel) -> bytes:
    return b"data: " + body.model_dump_json(exclude_unset=True).encode() + b"\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next_reply(request: Request, stream: AnswerStream) -> Delta | Finished | Failed:
    """The next reply, unless the client goes first: then ``ApiError``, which nobody will read."""
    gone = asyncio.ensure_future(_disconnected(request))
    reply = asyncio.ensure_future(stream.next())
    try:
        await asyncio.wait((gone, reply), return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            raise ApiError(_CLIENT_CLOSED_REQUEST, "The client closed the connection.")
        return reply.result()
    finally:
        gone.cancel()
        reply.cancel()


async def answer_whole(request: Request, stream: AnswerStream, shape: AnswerShape) -> Response:
    """Collects the answer. Closes the stream. Raises ``ApiError`` when the engine refuses."""
    texts: list[str] = []
    with stream:
        while True:
            match await _next_reply(request, stream):
                case Delta(text=text):
                    texts.append(text)
                case Finished(finish_reason=finish_reason, usage=usage):
                    whole = shape.whole("".join(texts), finish_reason, usage)
                    return Response(
                        whole.model_dump_json(exclude_unset=True), media_type="application/json"
                    )
                case Failed() as failed:
                    raise api_error_of(failed)


class EventStream(StreamingResponse):
    """Server-sent events that own their request: however the response ends, the request does."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], stream: AnswerStream) -> None:
        # The two headers keep proxies from storing events or collecting them.
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the answer ends or the client goes."""
        with self._stream:
            await super().__call__(scope, receive, send)


async def answer_with_events(
    request: Request, stream: AnswerStream, shape: AnswerShape, *, include_usage: bool
) -> Response:
    """Starts a streamed answer once its first reply is there, so that a refusal has its status.

    Takes the stream over. Raises ``ApiError`` when the engine refuses.
    """
    try:
        first = await _next_reply(request, stream)
        if isinstance(first, Failed):
            raise api_error_of(first)
    except BaseException:
        stream.close()
        raise
    return EventStream(_events(first, stream, shape, include_usage), stream)


async def _events(
    reply: Delta | Finished | Failed,
    stream: AnswerStream,
    shape: AnswerShape,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    if (first := shape.first()) is not None:
        yield _event(first)
    while True:
        match reply:
            case Delta(text=text):
                if text:
                    yield _event(shape.text(text))
            case Finished(finish_reason=finish_reason, usage=usage):
                yield _event(shape.last(finish_reason))
                if include_usage:
                    yield _event(shape.usage(usage))
                yield _DONE
                return
            case Failed() as failed:
                # The status has been sent; [DONE] would say that the answer is complete.
                yield _event(api_error_of(failed).body)
                return
        reply = await stream.next()
