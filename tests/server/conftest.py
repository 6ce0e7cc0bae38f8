"""One server for the tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.running_server import RunningServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A server that is ready."""
    with RunningServer() as running:
        yield running.wait_ready()


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """Raw HTTP to the shared server."""
    with httpx.Client(base_url=server.url, timeout=20.0) as client:
        yield client


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client to the shared server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
