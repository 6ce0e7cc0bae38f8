"""What this machine has: memory, a cache directory, free space."""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from coldpage.errors import ConfigurationError, DeviceError
from coldpage.store import list_instances

__all__ = [
    "default_disk_directory",
    "default_save_directory",
    "expand_user",
    "free_bytes_for",
    "has_gpu_driver",
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


def has_gpu_driver() -> bool:
    """Whether the machine has NVIDIA's driver, and so perhaps a GPU. Loads it."""
    from coldpage.device.cuda.driver import load_library

    try:
        load_library()
    except DeviceError:
        return False
    return True


def default_disk_directory() -> Path:
    """Where the disk tier lives unless told otherwise: under the user's cache directory."""
    return _cache_directory() / "disk"


def default_save_directory() -> Path:
    """Where sessions are saved unless told otherwise: under the user's cache directory."""
    return _cache_directory() / "saved"


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or expand_user("~/.cache")) / "coldpage"


def prepare_directory(path: Path, flag: str) -> None:
    """Makes the directory, 0700, and tries to write there. Raises ``ConfigurationError``."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(f"{flag}: can not write to {path}: {reason}") from error


def free_bytes_for(path: Path, instance_id: str | None = None) -> int:
    """Free space for a disk tier in a directory: what the instance of that id left there will be
    reused. With None it is not known yet which that is: the largest that nobody has open.

    Raises ``ConfigurationError``.
    """
    try:
        left_bytes = max(
            (
                _pool_bytes(instance.directory)
                for instance in list_instances(path)
                if not instance.is_locked and instance_id in (None, instance.instance_id)
            ),
            default=0,
        )
        return shutil.disk_usage(path).free + left_bytes
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(f"--disk: can not look into {path}: {reason}") from error


def _pool_bytes(directory: Path) -> int:
    with os.scandir(directory) as entries:
        return sum(
            entry.stat(follow_symlinks=False).st_blocks * 512
            for entry in entries
            if fnmatch.fnmatchcase(entry.name, _POOL_FILES) and entry.is_file(follow_symlinks=False)
        )
