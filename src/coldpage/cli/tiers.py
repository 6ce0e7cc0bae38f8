"""Tiers that fit the machine. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coldpage.cli.sizes import RelativeSize, Size, format_bytes, resolve_size
from coldpage.errors import ConfigurationError

__all__ = [
    "DEFAULT_GPU_HOT_FRACTION",
    "DEFAULT_TIERS",
    "DefaultSize",
    "plan_beside_gpu",
    "plan_disk",
    "plan_memory",
]

_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class DefaultSize:
    """A part of what the machine has, but not more than a bound."""

    fraction: float
    max_bytes: int

    def of(self, resource_bytes: int) -> int:
        """The bytes on a machine with ``resource_bytes``."""
        return min(int(self.fraction * resource_bytes), self.max_bytes)

    def __str__(self) -> str:
        return f"{self.fraction:.0%}, at most {format_bytes(self.max_bytes)}"


# Of the memory, the memory, and the free space of the file system.
DEFAULT_TIERS: Final = {
    "hot": DefaultSize(0.10, 4 * _GIB),
    "host": DefaultSize(0.20, 32 * _GIB),
    "disk": DefaultSize(0.10, 8 * _GIB),
}
# Of the GPU memory that is free with the weights loaded. The rest is for what a step computes:
# gathered pages, activations of a chunk, logits.
DEFAULT_GPU_HOT_FRACTION: Final = 0.80


def _choose(tier: str, size: Size | None, resource_bytes: int) -> int:
    if size is None:
        return DEFAULT_TIERS[tier].of(resource_bytes)
    return resolve_size(size, resource_bytes)


def plan_memory(hot: Size | None, host: Size | None, ram_bytes: int) -> tuple[int, int]:
    """Bytes of the hot and the host tier; None is the default. Raises ``ConfigurationError``."""
    hot_bytes = _choose("hot", hot, ram_bytes)
    host_bytes = _choose("host", host, ram_bytes)
    _check_hot(hot_bytes)
    if hot_bytes + host_bytes > ram_bytes:
        raise ConfigurationError(
            f"--hot {format_bytes(hot_bytes)} and --host {format_bytes(host_bytes)} together"
            f" exceed the {format_bytes(ram_bytes)} of memory that this machine has"
        )
    return hot_bytes, host_bytes


def plan_beside_gpu(
    hot: Size | None, host: Size | None, ram_bytes: int
) -> tuple[int, float | None, int]:
    """For a machine that may have a GPU: bytes of the hot tier if they are given, and else where it
    has none after all; the fraction of what will be free on the GPU with the weights loaded, None
    where bytes are given; bytes of the host tier. Raises ``ConfigurationError``.
    """
    host_bytes = _choose("host", host, ram_bytes)
    if host_bytes > ram_bytes:
        raise ConfigurationError(
            f"--host {format_bytes(host_bytes)} exceeds the {format_bytes(ram_bytes)} of memory"
            " that this machine has"
        )
    hot_bytes = _choose("hot", hot, ram_bytes)
    _check_hot(hot_bytes)
    if hot is None:
        return hot_bytes, DEFAULT_GPU_HOT_FRACTION, host_bytes
    return hot_bytes, hot.fraction if isinstance(hot, RelativeSize) else None, host_bytes


def _check_hot(hot_bytes: int) -> None:
    if hot_bytes <= 0:
        raise ConfigurationError("--hot can not be left out: it is the memory that attention reads")


def plan_disk(size: Size | None, free_bytes: int) -> int:
    """Bytes of the disk tier; None is the default. Raises ``ConfigurationError``."""
    num_bytes = _choose("disk", size, free_bytes)
    if num_bytes > free_bytes:
        raise ConfigurationError(
            f"--disk asks for {format_bytes(num_bytes)}, and only {format_bytes(free_bytes)}"
            " are free there"
        )
    return num_bytes
