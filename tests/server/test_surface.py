"""What programs read about the server: the OpenAPI document, the metrics, its imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.openapi.models import OpenAPI
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from coldpage.server.schema import ChatChunk, ChatCompletion, Completion, ErrorBody
from tests.server.running_server import REPOSITORY, RunningServer, chat, events

OPERATIONS = {
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model_name}"),
    ("get", "/slots"),
    ("post", "/slots/{slot_id}"),
    ("get", "/sessions"),
    ("post", "/sessions/{name}/save"),
    ("post", "/sessions/{name}/restore"),
    ("post", "/sessions/{name}/fork"),
    ("delete", "/sessions/{name}"),
    ("get", "/health"),
    ("get", "/metrics"),
}


def references(node: object) -> Iterator[str]:
    """Every ``$ref`` below a node."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    """The OpenAPI document as served."""
    body: dict[str, Any] = http.get("/openapi.json").json()
    return body


def test_the_openapi_document_is_valid_and_whole(document: dict[str, Any]) -> None:
    OpenAPI.model_validate(document)
    assert document["openapi"].startswith("3.1")
    operations = {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert set(operations) == OPERATIONS
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(set(ids)) == len(ids)
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    used = set(references(document))
    assert used - known == set()
    assert "#/components/schemas/ChatChunk" in used


def test_the_openapi_document_tells_the_true_statuses(document: dict[str, Any]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        responses = document["paths"][path]["post"]["responses"]
        assert sorted(responses) == ["200", "4XX", "5XX"]
        assert sorted(responses["200"]["content"]) == ["application/json", "text/event-stream"]
        error = responses["4XX"]["content"]["application/json"]["schema"]["$ref"]
        assert error == f"#/components/schemas/{ErrorBody.__name__}"


def test_the_request_schema_shows_what_is_taken(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    request = schemas["ChatRequest"]["properties"]
    for name in ("temperature", "top_k", "seed", "stop", "session", "max_completion_tokens"):
        assert name in request
    assert schemas["ChatRequest"]["required"] == ["messages"]
    prompt = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert [kind["type"] for kind in prompt] == ["string", "array", "array", "array"]


@pytest.mark.parametrize(
    ("path", "whole", "chunk", "body"),
    [
        ("/v1/chat/completions", ChatCompletion, ChatChunk, chat("count 2")),
        ("/v1/completions", Completion, Completion, {"prompt": "count 2"}),
    ],
)
def test_answers_are_what_the_document_says(
    http: httpx.Client, path: str, whole: type, chunk: type, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body).content
    TypeAdapter(whole).validate_json(answer, strict=True, extra="forbid")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for data in list(events(http.post(path, json={**body, **options})))[:-1]:
        TypeAdapter(chunk).validate_json(data, strict=True, extra="forbid")


def test_metrics_show_the_tiers_and_what_clients_saw(
    server: RunningServer, http: httpx.Client
) -> None:
    http.post("/v1/chat/completions", json=chat("count 3 10"))
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    assert all(name.startswith("coldpage_") for name in families)
    capacity = {
        sample.labels["tier"]: sample.value
        for sample in families["coldpage_tier_capacity_tokens"].samples
    }
    assert capacity == {"hot": 160.0, "host": 320.0, "disk": 640.0}
    assert server.metric('coldpage_tier_used_bytes{tier="hot"}') == 400.0
    assert server.metric('coldpage_moved_bytes_total{path="hot-host"}') == 700.0
    assert server.metric('coldpage_moved_pages_total{path="hot-host"}') == 7.0
    assert server.metric('coldpage_reused_tokens_total{tier="host"}') == 48.0
    assert server.metric('coldpage_tier_quarantined_blocks{tier="disk"}') == 2.0
    assert server.metric('coldpage_tier_state{state="read_only",tier="disk"}') == 1.0
    assert server.metric('coldpage_tier_state{state="ok",tier="disk"}') == 0.0
    assert server.metric('coldpage_tier_state{state="ok",tier="hot"}') == 1.0
    assert server.metric('coldpage_tier_dropped_pages_total{tier="disk"}') == 5.0
    assert families["coldpage_sessions"].documentation == "Idle named conversations that are kept."
    assert server.metric("coldpage_engine_up") == 1.0
    assert server.metric("coldpage_running_requests") == 1.0
    assert server.metric("coldpage_waiting_requests") == 2.0
    assert (server.metric('coldpage_answers_total{outcome="length"}') or 0.0) >= 1.0
    for name in ("time_to_first_token", "time_per_output_token", "restore"):
        family = families[f"coldpage_{name}_seconds"]
        assert family.type == "histogram"
        assert (server.metric(f"coldpage_{name}_seconds_count") or 0.0) >= 1.0


def test_a_restore_of_3_ms_counts_as_3_ms(server: RunningServer, http: httpx.Client) -> None:
    def sample(suffix: str) -> float:
        return server.metric(f"coldpage_restore_seconds_{suffix}") or 0.0

    count, total = sample("count"), sample("sum")
    http.post("/v1/chat/completions", json=chat("count 1"))
    assert sample("count") == count + 1
    assert sample("sum") - total == pytest.approx(0.003)


def test_metrics_show_what_codecs_lose(server: RunningServer) -> None:
    for name, values in {
        "checked_pages_total": (12, 3),
        "not_finite_pages_total": (0, 1),
        "relative_error_mean": (0.1, 0.2),
        "relative_error_max": (0.12, 0.25),
        "relative_error_last": (0.09, 0.15),
    }.items():
        for group, value in enumerate(values):
            labels = f'{{codec="turbo4",layer_group="{group}"}}'
            assert server.metric(f"coldpage_codec_{name}{labels}") == value
    for call, count in (("decode", 0.0), ("encode", 7.0)):
        labels = f'{{call="{call}",codec="turbo4"}}'
        assert server.metric(f"coldpage_codec_failures_total{labels}") == count


def test_metrics_come_in_the_openmetrics_format_too(http: httpx.Client) -> None:
    response = http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert len(list(openmetrics.text_string_to_metric_families(response.text))) > 10


def test_the_http_process_imports_no_model_code() -> None:
    code = (
        "import json, sys, coldpage.server, coldpage.cli;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    output = subprocess.check_output(
        [sys.executable, "-c", code], text=True, env={"PYTHONPATH": str(REPOSITORY / "src")}
    )
    loaded = set(json.loads(output))
    assert {"coldpage", "fastapi"} <= loaded
    assert loaded & {"torch", "transformers", "tokenizers", "triton"} == set()
