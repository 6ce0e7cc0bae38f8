"""Codecs by name: those of this package, and those that other packages offer.

A package offers a codec by an entry point of the group ``coldpage.codecs``: its name, and a
callable that takes the model's pages and returns a new codec.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from coldpage.codecs.base import ColdPageCodec
from coldpage.codecs.concat import create_default_cold_page_codec
from coldpage.codecs.guard import CHECK_INTERVAL_PAGES
from coldpage.codecs.model_pages import ModelPages
from coldpage.codecs.packed import LOSSLESS, PACKED_FORMATS, PackedCodec
from coldpage.errors import ConfigurationError
from coldpage.types import LayerGroupId

__all__ = ["ENTRY_POINT_GROUP", "codec_names", "create_codec"]

ENTRY_POINT_GROUP: Final = "coldpage.codecs"


def codec_names() -> tuple[str, ...]:
    """What ``create_codec`` takes: the built-in names, then those of other packages by alphabet."""
    offered = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return (*PACKED_FORMATS, *sorted(offered - PACKED_FORMATS.keys()))


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
    name, *others = (part.strip() for part in spec.split(","))
    overrides = _overrides(spec, others)
    if name not in PACKED_FORMATS:
        if overrides and name in codec_names():
            raise ConfigurationError(
                f"codec {spec!r}: {name} is no built-in codec, and only those can be mixed: "
                f"{', '.join(PACKED_FORMATS)}"
            )
        return _from_entry_point(name, pages)
    if name == LOSSLESS and all(other == LOSSLESS for other in overrides.values()):
        return create_default_cold_page_codec(max_page_kernel_bytes)
    return PackedCodec(name, pages, overrides, check_interval_pages=check_interval_pages)


def _overrides(spec: str, parts: list[str]) -> dict[LayerGroupId, str]:
    """From ``GROUP=NAME`` each."""
    overrides: dict[LayerGroupId, str] = {}
    for part in parts:
        number, equals, name = (word.strip() for word in part.partition("="))
        if not equals or not (number.isascii() and number.isdigit()):
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


def _from_entry_point(name: str, pages: ModelPages) -> ColdPageCodec:
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found and "=" in name:
        raise ConfigurationError(
            f"codec {name!r} says what a layer group has and not what the others have: "
            f"put a codec for those first, such as {LOSSLESS},{name}"
        )
    if not found:
        raise ConfigurationError(
            f"there is no codec {name!r}: choose one of {', '.join(codec_names())}"
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} packages offer a codec {name!r} ({', '.join(map(_origin, found))}): "
            "uninstall all but one"
        )
    point = found[0]
    try:
        codec = point.load()(pages)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"codec {name!r} of {_origin(point)} can not be made: {error!r}"
        ) from error
    if not isinstance(codec, ColdPageCodec):
        raise ConfigurationError(
            f"codec {name!r} of {_origin(point)} is {codec!r}: its entry point has to return an "
            "instance of a subclass of ColdPageCodec"
        )
    return codec


def _origin(point: EntryPoint) -> str:
    """The package, or, for an entry point of none, what it refers to."""
    return point.value if point.dist is None else point.dist.name
