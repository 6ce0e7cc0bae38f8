from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.rig import Rig


@pytest.fixture(params=["llama", "qwen2", "gemma3"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each family of tiny model."""
    value: str = request.param
    return value


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny operations on one thread: on busy cores a second one only waits for its turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def new_rig(tmp_path: Path) -> Iterator[Any]:
    """Makes rigs, which are closed and looked over at the end."""
    rigs: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        directory = tmp_path / str(len(rigs))
        directory.mkdir()
        rigs.append(Rig(str(directory), *args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
