"""Sizes as people write them: ``512MiB``, ``1.5G``, ``25%``, ``none``. Pure functions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from coldpage.errors import ConfigurationError

__all__ = [
    "AbsoluteSize",
    "DiskChoice",
    "RelativeSize",
    "Size",
    "format_bytes",
    "parse_disk",
    "parse_ratio",
    "parse_size",
    "resolve_size",
]

_NUMBER_AND_UNIT: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z%]*)", re.IGNORECASE)
_PREFIXES: Final = "kmgtp"
_LARGEST_BYTES: Final = 2**60


@dataclass(frozen=True, slots=True)
class AbsoluteSize:
    """A number of bytes."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class RelativeSize:
    """A part of what the machine has, ``0 < fraction <= 1``."""

    fraction: float


Size = AbsoluteSize | RelativeSize


@dataclass(frozen=True, slots=True)
class DiskChoice:
    """``--disk`` as given; None where the default is meant."""

    path: str | None
    size: Size | None


def _unit_bytes(unit: str) -> int | None:
    """The convention of GNU coreutils: K and KiB are 1024 bytes, KB is 1000."""
    name = unit.lower()
    if name == "b":
        return 1
    if name[:1] and name[0] in _PREFIXES:
        power = _PREFIXES.index(name[0]) + 1
        if name[1:] in ("", "ib"):
            return int(1024**power)
        if name[1:] == "b":
            return int(1000**power)
    return None


def parse_size(text: str) -> Size:
    """Reads a size; ``0`` and ``none`` are no bytes. Raises ``ConfigurationError``."""
    stripped = text.strip()
    if stripped.lower() in ("0", "none"):
        return AbsoluteSize(0)
    match = _NUMBER_AND_UNIT.fullmatch(stripped)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a size; write for example 512MiB, 8GiB or 25%")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0.0 < number <= 100.0:
            raise ConfigurationError(f"{text!r} must lie above 0% and not above 100%")
        return RelativeSize(number / 100.0)
    if not unit:
        raise ConfigurationError(f"{text!r} has no unit; write for example {stripped}MiB")
    scale = _unit_bytes(unit)
    if scale is None:
        raise ConfigurationError(
            f"{text!r} has the unknown unit {unit!r}; use KiB, MiB, GiB, TiB or %"
        )
    num_bytes = number * scale
    if num_bytes > _LARGEST_BYTES:
        raise ConfigurationError(f"{text!r} is more than any machine has")
    return AbsoluteSize(int(num_bytes))


def resolve_size(size: Size, resource_bytes: int) -> int:
    """The bytes that a size means on a machine with ``resource_bytes`` of the resource."""
    if isinstance(size, AbsoluteSize):
        return size.num_bytes
    return int(size.fraction * resource_bytes)


def parse_disk(text: str) -> DiskChoice:
    """Reads ``PATH:SIZE``, ``PATH``, ``SIZE`` or ``none``. Raises ``ConfigurationError``.

    The last colon separates, so a path may hold others; one that looks like a size needs a ``./``.
    """
    if not text.strip():
        raise ConfigurationError("--disk is empty; write PATH:SIZE, or none to leave the disk out")
    path, colon, size = text.rpartition(":")
    if colon:
        return DiskChoice(path or None, parse_size(size))
    try:
        return DiskChoice(None, parse_size(text))
    except ConfigurationError:
        return DiskChoice(text, None)


def parse_ratio(text: str) -> tuple[float, ...]:
    """Reads ``0.7,0.3``: positive shares. Raises ``ConfigurationError``."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ConfigurationError(
            f"{text!r} is no ratio; write a positive share for each layer group, such as 0.7,0.3"
        )
    return shares


def format_bytes(num_bytes: int) -> str:
    """For people: ``512 B``, ``1.5 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024.0:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"
