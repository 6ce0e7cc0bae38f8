"""Codecs by name: those of this package, and those that other packages offer.

A package offers a codec by an entry point of the group ``coldpage.codecs``: its name, and a
callable that takes the model's pages and returns a new codec. docs/CODECS.md has the rules.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from coldpage.codecs.base import ColdPageCodec
from coldpage.codecs.concat import create_default_cold_page_codec
from coldpage.codecs.configured import check_format, close_codec
from coldpage.codecs.guard import CHECK_INTERVAL_PAGES
from coldpage.codecs.model_pages import ModelPages
from coldpage.codecs.packed import LOSSLESS, PACKED_FORMATS, PackedCodec
from coldpage.errors import ConfigurationError
from coldpage.types import LayerGroupId

__all__ = ["ENTRY_POINT_GROUP", "codec_names", "create_codec", "uses_calibration"]

_logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "coldpage.codecs"

# Between the package of a codec and its own name in a ``codec_id``; no package has it in its name.
_PACKAGE_END: Final = ":"

# What an entry point refers to.
_Factory = Callable[[ModelPages], object]


def codec_names() -> tuple[str, ...]:
    """What ``create_codec`` takes: the built-in names, then those of other packages by alphabet.
    Names that packages offer in vain are logged once.
    """
    offered = set()
    for point in entry_points(group=ENTRY_POINT_GROUP):
        why_not = _why_not(point)
        if why_not:
            _log_left_out(point.name, _origin(point), why_not)
        else:
            offered.add(point.name)
    return (*PACKED_FORMATS, *sorted(offered))


def create_codec(
    spec: str,
    pages: ModelPages,
    *,
    max_page_kernel_bytes: int = 0,
    check_interval_pages: int = CHECK_INTERVAL_PAGES,
) -> ColdPageCodec:
    """A new codec. ``spec`` is ``NAME``, or ``NAME,GROUP=NAME,...`` where layer groups, by number,
    differ; such a list has built-in names only. ``max_page_kernel_bytes`` is the device's, for the
    lossless codec; ``check_interval_pages`` is for the other built-in ones.

    Raises ConfigurationError: of an unknown name with the list of names.
    """
    name, overrides = _parse(spec)
    if name not in PACKED_FORMATS:
        return _from_entry_point(_find(name), pages)
    if name == LOSSLESS and all(other == LOSSLESS for other in overrides.values()):
        return create_default_cold_page_codec(max_page_kernel_bytes)
    return PackedCodec(name, pages, overrides, check_interval_pages=check_interval_pages)


def uses_calibration(spec: str) -> bool:
    """Whether what ``create_codec`` makes of it has use for the frequencies and means of keys: a
    package says so of its own. Raises as that does.
    """
    name, overrides = _parse(spec)
    if name not in PACKED_FORMATS:
        return _wants_calibration(_load(_find(name)))
    formats = [PACKED_FORMATS[it] for it in (name, *overrides.values())]
    return any(it is not None and it.turns_back for it in formats)


def _parse(spec: str) -> tuple[str, dict[LayerGroupId, str]]:
    """The codec, and those of layer groups that differ."""
    name, *others = (part.strip() for part in spec.split(","))
    if others and name not in PACKED_FORMATS and name in codec_names():
        raise ConfigurationError(
            f"codec {spec!r}: {name} is of another package, takes no options and stands alone, "
            f"since only built-in codecs can be mixed: {', '.join(PACKED_FORMATS)}"
        )
    return name, _overrides(spec, others) if name in PACKED_FORMATS else {}


def _overrides(spec: str, parts: list[str]) -> dict[LayerGroupId, str]:
    """From ``GROUP=NAME`` each."""
    overrides: dict[LayerGroupId, str] = {}
    for part in parts:
        number, equals, name = (word.strip() for word in part.partition("="))
        if not equals or not _is_number(number):
            raise ConfigurationError(
                f"codec {spec!r}: {part!r} is not GROUP=NAME, such as 1=int8 for layer group 1"
            )
        group = LayerGroupId(int(number))
        if group in overrides:
            raise ConfigurationError(f"codec {spec!r} names layer group {group} twice")
        if name not in PACKED_FORMATS:
            raise ConfigurationError(
                f"codec {spec!r}: a layer group can have one of {', '.join(PACKED_FORMATS)}, "
                f"and {name!r} is none of them"
            )
        overrides[group] = name
    return overrides


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


# ---------------------------------------------------------------------- entry points


def _why_not(point: EntryPoint) -> str | None:
    """Why a name can not be asked for; None where it can."""
    if point.name in PACKED_FORMATS:
        return "is that of a built-in codec"
    if "," in point.name or "=" in point.name:
        return "has a ',' or '=' in it, which stand between names"
    return None


@cache
def _log_left_out(name: str, origin: str, why: str) -> None:
    _logger.warning("codec %r of %s is left out: the name %s", name, origin, why)


def _find(name: str) -> EntryPoint:
    """The only one of this name."""
    points = entry_points(group=ENTRY_POINT_GROUP)
    found = [point for point in points if point.name == name and _why_not(point) is None]
    if not found:
        raise ConfigurationError(_describe_unknown(name))
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} packages offer a codec {name!r} ({', '.join(map(_origin, found))}): "
            "uninstall all but one"
        )
    return found[0]


def _describe_unknown(name: str) -> str:
    if "=" in name and _is_number(name.partition("=")[0].strip()):
        return (
            f"codec {name!r} says what a layer group has and not what the others have: "
            f"put a codec for those first, such as {LOSSLESS},{name}"
        )
    are_options = any(sign in name for sign in ":=")
    why = " (codecs take no options: a package has a name for each setting)" if are_options else ""
    return f"there is no codec {name!r}{why}: choose one of {', '.join(codec_names())}"


def _from_entry_point(point: EntryPoint, pages: ModelPages) -> ColdPageCodec:
    make = _load(point)
    if not _wants_calibration(make):
        plain = {id_: replace(it, frequencies=None, key_means=None) for id_, it in pages.items()}
        pages = plain
    with _failures_named(point):
        codec = make(pages)
    if not isinstance(codec, ColdPageCodec):
        raise ConfigurationError(
            f"{_described(point)} is {codec!r}: its entry point has to return an "
            "instance of a subclass of ColdPageCodec"
        )
    if codec.is_consumed:
        raise ConfigurationError(
            f"{_described(point)} is an object that a manager has had already: "
            "its entry point has to return a new one each time"
        )
    try:
        check_format(codec)
        _check_owner(codec.codec_id, point)
    except ConfigurationError:
        close_codec(codec)
        raise
    return codec


def _load(point: EntryPoint) -> _Factory:
    with _failures_named(point):
        make: _Factory = point.load()
    return make


def _wants_calibration(make: _Factory) -> bool:
    return getattr(make, "uses_calibration", False) is True


@contextlib.contextmanager
def _failures_named(point: EntryPoint) -> Iterator[None]:
    """What another package raises, also to leave the process, says whose codec it is."""
    try:
        yield
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{_described(point)} can not be made: {error!r}") from error


def _check_owner(codec_id: str, point: EntryPoint) -> None:
    """Pages are found by the ``codec_id``, so no two packages may have the same."""
    owner = f"{_package(point)}{_PACKAGE_END}"
    if codec_id.startswith(owner):
        return
    is_built_in = codec_id.partition(",")[0] in PACKED_FORMATS
    whose = ", which is that of a built-in codec" if is_built_in else ""
    proper = f"{owner}{codec_id.rpartition(_PACKAGE_END)[2]}"
    raise ConfigurationError(
        f"{_described(point)} has the codec_id {codec_id!r}{whose}: let it begin with its "
        f"package, such as {proper!r}, so that no codec reads the pages of another"
    )


def _described(point: EntryPoint) -> str:
    return f"codec {point.name!r} of {_origin(point)}"


def _origin(point: EntryPoint) -> str:
    """The package, or, for an entry point of none, what it refers to."""
    return point.value if point.dist is None else point.dist.name


def _package(point: EntryPoint) -> str:
    """The package as an index lists it, or, for an entry point of none, its module."""
    name = point.value.partition(":")[0] if point.dist is None else point.dist.name
    return re.sub(r"[-_.]+", "-", name).lower()
