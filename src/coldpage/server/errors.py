"""Errors as OpenAI shapes them, whatever raised them."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from coldpage.engine.messages import Failed
from coldpage.server.schema import ErrorBody, ErrorDetail

__all__ = ["ApiError", "add_error_handlers", "api_error_of", "error_response"]

_TYPE_BY_STATUS: Final = {
    401: "authentication_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


def _error_type(status: int) -> str:
    return _TYPE_BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")


class ApiError(HTTPException):
    """A request that is answered with an error: one sentence, a status, a code for programs."""

    def __init__(
        self,
        status: int,
        sentence: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        super().__init__(status, sentence, headers)
        self.code = code
        self.param = param

    @property
    def body(self) -> ErrorBody:
        """The JSON body, also sent as the last event of a stream that fails."""
        return ErrorBody(
            error=ErrorDetail(
                message=self.detail,
                type=_error_type(self.status_code),
                param=self.param,
                code=self.code,
            )
        )


def api_error_of(failed: Failed) -> ApiError:
    """The error that the engine's refusal is answered with."""
    return ApiError(failed.status, failed.sentence, code=failed.code)


def error_response(error: ApiError) -> JSONResponse:
    """The whole HTTP answer."""
    return JSONResponse(error.body.model_dump(), error.status_code, error.headers)


def _validation_error(error: RequestValidationError, content_type: str) -> ApiError:
    first: dict[str, Any] = error.errors()[0]
    location = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"The request body is not valid JSON: {reason}.", code="invalid_json")
    if not location and isinstance(error.body, bytes):
        return ApiError(
            400,
            "The request body must be JSON, sent with 'Content-Type: application/json'"
            f" and not {content_type!r}.",
            code="invalid_content_type",
        )
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
    if not location and first["type"] == "missing":
        return ApiError(400, "The request has no body: send a JSON object.", code="invalid_value")
    sentence = f"{param}: {first['msg']}." if param else f"{first['msg']}."
    return ApiError(400, sentence, code="invalid_value", param=param or None)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(_validation_error(error, request.headers.get("content-type", "")))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    if isinstance(error, ApiError):
        return error_response(error)
    if error.status_code == 400:
        # What FastAPI makes of bytes that are no text, or of JSON nested without end.
        return error_response(
            ApiError(400, "The request body is not valid JSON.", code="invalid_json")
        )
    sentence = f"{request.method} {request.url.path}: {error.detail}."
    response = error_response(ApiError(error.status_code, sentence))
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises the exception again after this answer, so the traceback reaches the log.
    return error_response(ApiError(500, "An internal error occurred; the server's log has it."))


def add_error_handlers(app: FastAPI) -> None:
    """Makes every error of ``app`` leave in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(StarletteHTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
