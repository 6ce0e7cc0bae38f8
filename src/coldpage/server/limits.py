"""Bounds on what a client may send."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coldpage.server.errors import ApiError, error_response

__all__ = ["MAX_BODY_BYTES", "BodyLimit"]

# A million token ids as JSON is about 7 MB.
MAX_BODY_BYTES: Final = 8 * 1024 * 1024


class BodyLimit:
    """Answers 413 to a body of more than ``max_body_bytes``, announced or not."""

    def __init__(self, app: ASGIApp, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, its body counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            await error_response(self._too_large())(scope, receive, send)
            return
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted_receive, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The request body exceeds the limit of {self._max_body_bytes} bytes.",
            code="request_too_large",
        )
