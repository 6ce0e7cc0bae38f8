"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.cli.sizes import (
    AbsoluteSize,
    DiskChoice,
    RelativeSize,
    Size,
    format_bytes,
    parse_disk,
    parse_ratio,
    parse_size,
    resolve_size,
)
from coldpage.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 * 1024**2),
        ("8GiB", 8 * 1024**3),
        ("8 gib", 8 * 1024**3),
        ("1.5G", 1536 * 1024**2),
        (".5k", 512),
        ("2TB", 2 * 10**12),
        ("3kb", 3000),
        ("7B", 7),
        ("1PiB", 2**50),
        ("0", 0),
        ("none", 0),
        (" NONE ", 0),
        ("0GiB", 0),
    ],
)
def test_absolute_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == AbsoluteSize(num_bytes)


def test_percentages_are_of_the_resource() -> None:
    assert parse_size("25%") == RelativeSize(0.25)
    assert resolve_size(parse_size("25%"), 1000) == 250
    assert resolve_size(parse_size("100 %"), 1000) == 1000
    assert resolve_size(parse_size("3B"), 1000) == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("-1GiB", "is not a size"),
        ("1e3MiB", "is not a size"),
        ("1,5GiB", "is not a size"),
        ("nan", "is not a size"),
        ("512", "write for example 512MiB"),
        ("5x", "unknown unit 'x'"),
        ("5mibi", "unknown unit 'mibi'"),
        ("0%", "above 0%"),
        ("101%", "not above 100%"),
        ("9999999PiB", "more than any machine has"),
    ],
)
def test_what_is_no_size_is_explained(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as failure:
        parse_size(text)
    assert repr(text) in str(failure.value)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_sentence(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigurationError:
        return
    assert 0 <= resolve_size(size, 10**12) <= 2**60


@pytest.mark.parametrize(
    ("text", "path", "size"),
    [
        ("/data:8GiB", "/data", AbsoluteSize(8 * 1024**3)),
        ("/da:ta:50%", "/da:ta", RelativeSize(0.5)),
        ("~/pages:1G", "~/pages", AbsoluteSize(1024**3)),
        ("/data", "/data", None),
        ("4GiB", None, AbsoluteSize(4 * 1024**3)),
        (":4GiB", None, AbsoluteSize(4 * 1024**3)),
        ("10%", None, RelativeSize(0.1)),
        ("none", None, AbsoluteSize(0)),
        ("0", None, AbsoluteSize(0)),
        ("/data:0", "/data", AbsoluteSize(0)),
    ],
)
def test_disk_is_a_path_and_a_size(text: str, path: str | None, size: Size | None) -> None:
    assert parse_disk(text) == DiskChoice(path, size)


@pytest.mark.parametrize("text", ["", "  ", "/data:", "/data:much", "/data:8"])
def test_a_disk_without_a_proper_size_is_explained(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_disk(text)


@pytest.mark.parametrize("text", ["", "a", "0.5,", "1,0", "1,-2", "nan", "inf,1", "0.7;0.3"])
def test_what_is_no_ratio_is_explained(text: str) -> None:
    with pytest.raises(ConfigurationError, match="for each layer group"):
        parse_ratio(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (8 * 1024**3, "8.0 GiB"),
        (3 * 1024**4, "3.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
