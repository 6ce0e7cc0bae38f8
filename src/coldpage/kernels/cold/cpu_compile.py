"""How functions of the CPU path are compiled, and where the result is kept.

numba keeps compiled functions on disk and takes them back where neither their source file nor the
processor changed. They call functions of other files, so the folder is named by all these files.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
import numba.core.config
from numba.extending import intrinsic

__all__ = ["cache_directory", "carray", "compiled", "compiled_and_kept", "inlined", "pointer_to"]

_Function = TypeVar("_Function", bound=Callable[..., object])

# What its annotations leave out.
_config: Final[Any] = numba.core.config
_njit: Final[Any] = numba.njit
carray: Final[Any] = vars(numba)["carray"]
"""An array of the memory at a pointer; for compiled functions."""

_logger = logging.getLogger(__name__)

# Numbers are cleaned when they are loaded, so none is NaN and no sum of squares is infinite.
_FAST_MATH: Final = {"nnan", "ninf", "nsz", "reassoc", "contract"}
# The error model: no division checks for 0, which is a branch that vectors can not take.
_OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "fastmath": _FAST_MATH,
    "error_model": "numpy",
}


def cache_directory() -> Path:
    """Where functions of this version of the package are kept compiled."""
    digest = hashlib.sha256(numba.__version__.encode())
    folder = Path(__file__).parent
    for path in [*sorted(folder.glob("cpu*.py")), folder / "formats.py", folder / "numbers.py"]:
        digest.update(path.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "coldpage" / "compiled" / digest.hexdigest()[:16]


def _usable(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        if os.access(directory, os.W_OK | os.X_OK):
            return True
        reason = "it is not writable"
    _logger.warning(
        "codecs are compiled anew in each process, some seconds: %s can not be used: %s",
        directory,
        reason,
    )
    return False


_DIRECTORY: Final = cache_directory()
_IS_KEPT: Final = _usable(_DIRECTORY)


def compiled(function: _Function) -> _Function:
    """Compile for others that are compiled to call: Python can not."""
    decorate = _njit(**_OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    return cast("_Function", decorate(function))


def inlined(function: _Function) -> _Function:
    """Compile as part of each caller: worth it where every caller differs, as each function on the
    way to the outermost is optimised with all that it calls."""
    return cast("_Function", _njit(**_OPTIONS, inline="always")(function))


def compiled_and_kept(function: _Function) -> _Function:
    """Compile with the first call from Python, to run without the interpreter lock, and keep on
    disk."""
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(_DIRECTORY)  # numba reads it now; others' functions go where they went
    try:
        return cast("_Function", _njit(**_OPTIONS, cache=_IS_KEPT)(function))
    finally:
        _config.CACHE_DIR = before


@intrinsic
def _pointer_to(_: Any, address: Any) -> Any:
    signature = numba.types.voidptr(numba.types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


pointer_to: Final[Any] = _pointer_to
"""An address (int64) as the pointer that ``carray`` wants; for compiled functions."""
