"""The directory of one instance of a disk tier, its lock, and what it may be opened as.

Several processes share a path; each has ``paged/instance-ID/`` in it for itself alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Final

from coldpage.errors import ConfigurationError, StorageError
from coldpage.store.format import FORMAT_VERSION
from coldpage.store.sidecar import sync_directory

__all__ = [
    "IDENTITY_NAME",
    "LOCK_NAME",
    "InstanceDirectory",
    "InstanceIdentity",
    "InstanceInfo",
    "LockHolder",
    "default_instance_id",
    "list_instances",
]

LOCK_NAME: Final = "instance.lock"
IDENTITY_NAME: Final = "identity.json"
_ROOT: Final = "paged"
_PREFIX: Final = "instance-"
_MAX_COMMAND_CHARS: Final = 60
# No separator, and never "." or ".." since the prefix stands before it.
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Somebody who lists instances holds a lock for some microseconds; an instance for as long as it
# runs. This tells them apart.
_LOCK_TRIES: Final = 5
_LOCK_PAUSE_S: Final = 0.01
_MAX_JSON_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class InstanceIdentity:
    """What pages in a directory are good for. Another identity can reuse none of them."""

    model_fingerprint: bytes
    codec: str  # id, version and parameters of every codec of the tier
    geometry: str  # layer groups, bytes a page, tokens a block, number types: for people

    @property
    def digest(self) -> bytes:
        """32 bytes that differ when anything does."""
        hasher = hashlib.sha256()
        for part in (self.model_fingerprint, self.codec.encode(), self.geometry.encode()):
            hasher.update(len(part).to_bytes(8, "little") + part)
        return hasher.digest()

    def to_json(self, coldpage_version: str) -> str:
        """The text of ``identity.json``."""
        fields = {
            "format": FORMAT_VERSION,
            "model_fingerprint": self.model_fingerprint.hex(),
            "codec": self.codec,
            "geometry": self.geometry,
            "coldpage": coldpage_version,  # who made it; not compared
        }
        return json.dumps(fields, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who has an instance open."""

    pid: int
    started: str  # ISO 8601, UTC
    command: str


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """One instance below a path, as somebody sees it who does not open it."""

    instance_id: str
    directory: Path
    is_locked: bool
    holder: LockHolder | None  # None: not locked, or it does not say
    identity: dict[str, object] | None  # of identity.json; None: none, or not readable


def default_instance_id(identity: InstanceIdentity) -> str:
    """An id that is the same at each start with the same model, codec and number types."""
    return identity.digest.hex()[:16]


class InstanceDirectory:
    """An instance's directory, open: the lock is held until ``close``, or the process ends."""

    def __init__(self, path: Path, instance_id: str, lock_fd: int) -> None:
        """Called by ``open``."""
        self.path = path
        self.instance_id = instance_id
        self._lock_fd = lock_fd

    @classmethod
    def open(
        cls, path: str | Path, instance_id: str, identity: InstanceIdentity
    ) -> InstanceDirectory:
        """Open or create ``path/paged/instance-ID``. A relative path is one of the directory that
        the process works in now.

        Raises ConfigurationError for an id that can not be one, and StorageError when it is in use
        (by whom), holds pages of another identity, or can not be made; nothing is changed then.
        """
        if not _ID.fullmatch(instance_id):
            raise ConfigurationError(
                f"{instance_id!r} can not be an instance id: use 1 to 64 of the characters "
                "A-Z a-z 0-9 . _ -"
            )
        path = Path(path).absolute()
        directory = path / _ROOT / f"{_PREFIX}{instance_id}"
        try:
            _make_directories(path, directory)
            fd = _lock(directory)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            if isinstance(error, FileExistsError | NotADirectoryError):
                raise StorageError(_no_directory(directory)) from error
            raise StorageError(
                f"{directory} can not be opened ({error.strerror or error}): "
                "change its owner or mode, or choose another path"
            ) from error
        try:
            _check_identity(directory, identity)
            _write_whole(fd, _holder_json())
        except BaseException:
            os.close(fd)
            raise
        return cls(directory, instance_id, fd)

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):  # a name left in it only makes messages worse
                os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> InstanceDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def list_instances(path: str | Path) -> list[InstanceInfo]:
    """The instances below ``path``, by id. Opens and changes none of them."""
    try:
        directories = sorted((Path(path) / _ROOT).glob(f"{_PREFIX}*"))
    except OSError as error:
        raise StorageError(f"{path} can not be listed ({error.strerror})") from error
    return [_look_at(entry) for entry in directories if entry.is_dir() and not entry.is_symlink()]


def _look_at(directory: Path) -> InstanceInfo:
    is_locked, holder = False, None
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        fd = -1  # never opened to its end, or another user's
    if fd >= 0:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked, holder = True, _read_holder(fd)
        finally:
            os.close(fd)
    identity = _read_json(directory / IDENTITY_NAME)
    instance_id = directory.name.removeprefix(_PREFIX)
    return InstanceInfo(instance_id, directory, is_locked, holder, identity)


def _no_directory(directory: Path) -> str:
    """What stands where a directory is needed."""
    levels = (directory, *directory.parents)
    file = next((p for p in levels if os.path.lexists(p) and not os.path.isdir(p)), directory)
    return (
        f"{file} is a file, and a directory is needed there: choose another path, or move the "
        "file away"
    )


def _make_directories(path: Path, directory: Path) -> None:
    """Private to the user where they are new; names that survive a power cut."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for level in (directory.parent, directory):
        if level.is_symlink():
            raise StorageError(f"{level} is a symbolic link: remove it or choose another path")
        level.mkdir(mode=0o700, exist_ok=True)
        level.chmod(0o700)
        sync_directory(level.parent)


def _lock(directory: Path) -> int:
    """A file descriptor that holds the lock. Raises StorageError that names the holder."""
    name = directory / LOCK_NAME
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(_LOCK_TRIES):
        if attempt:
            time.sleep(_LOCK_PAUSE_S)
        fd = os.open(name, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_named(fd, name):
                return fd
        except BlockingIOError:
            holder = _read_holder(fd)
        except BaseException:
            os.close(fd)
            raise
        else:
            holder = None  # somebody removed the instance at this moment
        os.close(fd)
    who = (
        f"by process {holder.pid} ({holder.command}), which started at {holder.started}"
        if holder
        else "by another process"
    )
    raise StorageError(
        f"{directory} is in use {who}: stop that process, or choose another instance id"
    )


def _is_still_named(fd: int, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _check_identity(directory: Path, identity: InstanceIdentity) -> None:
    """Raise StorageError when the directory is of another identity; write it when of none."""
    name = directory / IDENTITY_NAME
    if not name.exists():
        _write_identity(directory, identity)
        return
    found = _read_json(name)
    if found is None:
        raise StorageError(
            f"{name} is damaged, so nobody knows what the pages beside it are: "
            "remove the directory, or choose another instance id. Nothing was touched"
        )
    expected = json.loads(identity.to_json(""))
    names = {
        "format": "the format",
        "model_fingerprint": "the model",
        "codec": "the codec",
        "geometry": "the geometry",
    }
    differing = [
        f"{words} ({found.get(field)!r} there, {expected[field]!r} here)"
        for field, words in names.items()
        if found.get(field) != expected[field]
    ]
    if differing:
        raise StorageError(
            f"{directory} holds pages of something else: {', '.join(differing)} differ. "
            "Nothing was touched: choose another instance id, or remove the directory"
        )


def _write_identity(directory: Path, identity: InstanceIdentity) -> None:
    temporary = directory / f"{IDENTITY_NAME}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o600)
        try:
            _write_whole(fd, identity.to_json(_own_version()))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, directory / IDENTITY_NAME)
        sync_directory(directory)
    except OSError as error:
        raise StorageError(f"{temporary} can not be written ({error.strerror})") from error


def _own_version() -> str:
    try:
        return metadata.version("coldpage")
    except metadata.PackageNotFoundError:
        return "unknown"  # a source tree that was not installed


def _holder_json() -> str:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps({"pid": os.getpid(), "started": started, "command": _command()}) + "\n"


def _command() -> str:
    """The program and its first arguments, whole ones, as far as they are for people to read."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = os.path.basename(sys.argv[0]) if spec is None else spec.name.removesuffix(".__main__")
    command = (name or "python")[:_MAX_COMMAND_CHARS]
    for argument in sys.argv[1:]:
        if len(command) + 1 + len(argument) > _MAX_COMMAND_CHARS:
            return f"{command} …"
        command += f" {argument}"
    return command


def _write_whole(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)


def _read_holder(fd: int) -> LockHolder | None:
    fields = _parse(os.pread(fd, _MAX_JSON_BYTES, 0))
    if fields is None:
        return None
    pid = fields.get("pid")
    started, command = fields.get("started"), fields.get("command")
    return LockHolder(pid if isinstance(pid, int) else 0, str(started), str(command))


def _read_json(path: Path) -> dict[str, object] | None:
    try:
        with open(path, "rb") as file:
            return _parse(file.read(_MAX_JSON_BYTES))
    except OSError:
        return None


def _parse(data: bytes) -> dict[str, object] | None:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
