"""Where a model computes: what is chosen, and what is refused in a sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coldpage.device.host import HostDevice
from coldpage.engine.forward.hot_pages import hot_pages
from coldpage.engine.model.placement import choose_device, choose_dtype, page_device
from coldpage.errors import ConfigurationError, DeviceError, ModelError
from coldpage.types import BufferRole, LayerId
from tests.engine.arena import Arena

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.mark.parametrize(
    ("gpus", "name", "device"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "cpu", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_a_name_means_a_device(name: str, device: str) -> None:
    assert str(choose_device(name)) == device


@pytest.mark.parametrize(
    ("gpus", "name", "words"),
    [(0, "cuda", "cuda can not be used.*no GPU"), (2, "cuda:2", r"cuda:2 can .* 2 GPU\(s\)")],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_is_not_there_is_refused(name: str, words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        choose_device(name)


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'tpu' is no device"):
        choose_device("tpu")


def test_the_dtype_fits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, dtype in (((9, 0), torch.bfloat16), ((7, 5), torch.float32)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert choose_dtype("auto", gpu) == dtype
    assert choose_dtype("float32", gpu) == torch.float32
    assert choose_dtype("auto", CPU) in (torch.bfloat16, torch.float32)
    with pytest.raises(ModelError, match="'int4' is not supported"):
        choose_dtype("int4", CPU)


def test_pages_of_a_model_on_the_cpu_lie_in_host_memory() -> None:
    with page_device(CPU) as device:
        assert isinstance(device, HostDevice)


def test_pages_must_lie_where_the_model_computes() -> None:
    key = BufferRole("key")
    layers: list[tuple[int | None, int, int]] = [(None, 16, 16)]
    pages = hot_pages(Arena(layers, 3, 4), LayerId(0), key, CPU)
    assert pages.shape == (3, 16) and pages.dtype == torch.uint8
    arena = Arena(layers, 3, 4)
    hot_pages(arena, LayerId(0), key, CPU)[1] = 7
    assert np.array_equal(arena.pools[0][1][:16], np.full(16, 7))
    with pytest.raises(AssertionError, match="not on the model's device"):
        hot_pages(arena, LayerId(0), key, torch.device("cuda", 0))
