"""The ASGI application: routes, and the OpenAPI document that describes them."""

from __future__ import annotations

import uuid
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client.exposition import choose_encoder
from pydantic.json_schema import models_json_schema

from coldpage.engine.messages import EngineReady, Generate
from coldpage.server.answer import answer_whole, answer_with_events
from coldpage.server.engine_client import AnswerStream, EngineClient, EngineState
from coldpage.server.errors import ApiError, add_error_handlers
from coldpage.server.limits import MAX_BODY_BYTES, BodyLimit
from coldpage.server.metrics import EngineCollector, ServerMetrics
from coldpage.server.schema import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
    GenerationRequest,
    Health,
    ModelCard,
    ModelList,
)
from coldpage.server.session_routes import session_routes
from coldpage.server.shapes import AnswerShape, ChatShape, CompletionShape
from coldpage.server.unread_fields import UnreadFields

__all__ = ["create_app"]

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorBody, "description": "The request can not be served as it is."},
    "5XX": {"model": ErrorBody, "description": "The engine can not serve it now."},
}
_DESCRIPTION: Final = (
    "An OpenAI-compatible server whose KV cache lives in tiers: a conversation that has left"
    " hot memory comes back by a copy. Prefixes are found by content; no session id is needed."
)


def create_app(
    client: EngineClient, metrics: ServerMetrics, *, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The application over one engine. Registers the engine's metrics in ``metrics.registry``."""
    metrics.registry.register(
        EngineCollector(
            lambda: client.model if client.state is EngineState.READY else None,
            lambda: client.stats,
            lambda: client.num_open_requests,
        )
    )
    # The pages that show the document would load scripts from elsewhere.
    app = FastAPI(
        title="coldpage", version="1", description=_DESCRIPTION, docs_url=None, redoc_url=None
    )
    app.include_router(_generation_routes(client, UnreadFields(metrics)))
    app.include_router(_model_routes(client))
    app.include_router(session_routes(client, _ERRORS))
    app.include_router(_operation_routes(client, metrics))
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    add_error_handlers(app)
    _describe_chunks(app)
    return app


def _describe_chunks(app: FastAPI) -> None:
    """Adds the models of events, which FastAPI can not see, to the document that it serves."""
    _, definitions = models_json_schema(
        [(ChatChunk, "serialization")], ref_template="#/components/schemas/{model}"
    )
    app.openapi()["components"]["schemas"].update(definitions["$defs"])


def _answers(whole: type[Any], chunk: str) -> dict[int | str, dict[str, Any]]:
    schema = {"$ref": f"#/components/schemas/{chunk}"}
    content = {"text/event-stream": {"schema": schema}}
    description = "The answer; with `stream` true, events of chunks that end with `[DONE]`."
    return {200: {"model": whole, "description": description, "content": content}, **_ERRORS}


def _served_model(client: EngineClient, name: str | None) -> EngineReady:
    model = client.ready_model()
    if name is not None and name != model.model_name:
        raise ApiError(
            404,
            f"The model {name!r} does not exist; this server serves {model.model_name!r}.",
            code="model_not_found",
            param="model",
        )
    return model


def _generation_routes(client: EngineClient, unread: UnreadFields) -> APIRouter:
    router = APIRouter(tags=["generation"])

    def served_model(body: GenerationRequest) -> EngineReady:
        unread.note(body.unread_fields, type(body).model_fields)
        return _served_model(client, body.model)

    async def answer(
        request: Request, body: GenerationRequest, stream: AnswerStream, shape: AnswerShape
    ) -> Response:
        if body.stream:
            return await answer_with_events(
                request, stream, shape, include_usage=body.include_usage
            )
        return await answer_whole(request, stream, shape)

    @router.post(
        "/v1/chat/completions",
        operation_id="create_chat_completion",
        response_model=None,
        responses=_answers(ChatCompletion, ChatChunk.__name__),
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        model = served_model(body)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        generate = Generate(
            request_id=answer_id,
            sampling=body.sampling_params,
            messages=body.chat_messages,
            session=body.session,
            salt=body.cache_salt or "",
            retain=body.retain,
        )
        shape = ChatShape(answer_id, model.model_name, include_usage=body.include_usage)
        return await answer(request, body, client.open(generate), shape)

    @router.post(
        "/v1/completions",
        operation_id="create_completion",
        response_model=None,
        responses=_answers(Completion, Completion.__name__),
    )
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues a text or a list of token ids."""
        model = served_model(body)
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        prompt = body.prompt
        generate = Generate(
            request_id=answer_id,
            sampling=body.sampling_params,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            session=body.session,
            salt=body.cache_salt or "",
            retain=body.retain,
        )
        shape = CompletionShape(answer_id, model.model_name, include_usage=body.include_usage)
        return await answer(request, body, client.open(generate), shape)

    return router


def _model_routes(client: EngineClient) -> APIRouter:
    router = APIRouter(tags=["models"])

    def card(model: EngineReady) -> ModelCard:
        return ModelCard(
            id=model.model_name,
            object="model",
            created=client.started_s,
            owned_by="coldpage",
            context_tokens=model.context_tokens,
            dtype=model.dtype,
        )

    @router.get("/v1/models", operation_id="list_models", responses=_ERRORS)
    async def list_models() -> ModelList:
        """The one served model."""
        return ModelList(object="list", data=[card(client.ready_model())])

    @router.get("/v1/models/{model_name:path}", operation_id="get_model", responses=_ERRORS)
    async def get_model(model_name: str) -> ModelCard:
        """The served model, by name."""
        return card(_served_model(client, model_name))

    return router


def _operation_routes(client: EngineClient, metrics: ServerMetrics) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get(
        "/health",
        operation_id="get_health",
        responses={200: {"model": Health}, 503: {"model": Health, "description": "Not ready."}},
    )
    async def get_health() -> JSONResponse:
        """200 only when requests are served."""
        health = Health(status=client.state.value, detail=client.detail)
        return JSONResponse(health.model_dump(), 200 if health.status == "ready" else 503)

    @router.get(
        "/metrics",
        operation_id="get_metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def get_metrics(request: Request) -> Response:
        """Prometheus metrics."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), media_type=content_type)

    return router
