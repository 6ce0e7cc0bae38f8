"""A CUDA device for each test, closed afterwards, and where and of what kind models are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from coldpage.device.base import Device
from coldpage.engine.model.placement import compute_exactly


@pytest.fixture
def device() -> Iterator[Device]:
    """The first GPU."""
    from coldpage.device.cuda import CudaDevice

    device = CudaDevice()
    yield device
    device.close()


@pytest.fixture
def gpu() -> torch.device:
    """The first GPU, computing exactly."""
    device = torch.device("cuda", 0)
    compute_exactly(device)
    return device


@pytest.fixture(params=["llama", "qwen2", "gemma3"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each family of tiny model; the last one has sliding windows."""
    value: str = request.param
    return value
