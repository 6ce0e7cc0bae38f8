"""What this machine has: memory, a cache directory, free space."""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from coldpage.errors import ConfigurationError

__all__ = [
    "default_disk_directory",
    "expand_user",
    "free_bytes_for",
    "memory_bytes",
    "prepare_directory",
]

# The limit of a container: version 2, then version 1 of control groups.
_MEMORY_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

# What the disk tier calls its own files.
_POOL_FILES: Final = "pool-*.slots"


def memory_bytes() -> int:
    """The machine's memory, or less where a container limits it."""
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _MEMORY_LIMITS:
        if path.exists() and (text := path.read_text().strip()).isdecimal():
            num_bytes = min(num_bytes, int(text))
    return num_bytes


def expand_user(path: str) -> Path:
    """``path`` with its ``~`` or ``~user`` replaced. Raises ``ConfigurationError``."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{path}: there is no home directory for that name") from error


def default_disk_directory() -> Path:
    """Where the disk tier lives unless told otherwise: under the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or expand_user("~/.cache")
    return Path(cache) / "coldpage" / "disk"


def prepare_directory(path: Path) -> None:
    """Makes the directory, 0700, and tries to write there. Raises ``ConfigurationError``."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(f"--disk: can not write to {path}: {reason}") from error


def free_bytes_for(path: Path) -> int:
    """Free space for a disk tier in a directory: the pools that an earlier run left there will be
    reused. Raises ``ConfigurationError``.
    """
    try:
        with os.scandir(path) as entries:
            left_bytes = sum(
                entry.stat(follow_symlinks=False).st_blocks * 512
                for entry in entries
                if fnmatch.fnmatchcase(entry.name, _POOL_FILES)
                and entry.is_file(follow_symlinks=False)
            )
        return shutil.disk_usage(path).free + left_bytes
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(f"--disk: can not look into {path}: {reason}") from error
