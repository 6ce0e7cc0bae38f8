"""The tables of codecs in docs/CODECS.md have their places, and nobody is left out of them."""

from __future__ import annotations

import re

import pytest

from coldpage.bench.quality.document import section_marks
from coldpage.codecs.packed import PACKED_FORMATS
from tests.tidy.tree import REPOSITORY

COMMANDS = ("coldpage quality", "coldpage quality gemma3", "coldpage quality --study")


def generated(command: str) -> str:
    document = (REPOSITORY / "docs" / "CODECS.md").read_text(encoding="utf-8")
    begin, end = section_marks(command)
    assert document.count(begin) == document.count(end) == 1
    return document.partition(begin)[2].partition(end)[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_table_says_which_command_wrote_it(command: str) -> None:
    assert f"`{command}`" in generated(command)


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_every_built_in_codec_is_in_the_table(command: str) -> None:
    assert re.findall(r"^\| ([a-z][\w-]*) \|", generated(command), re.MULTILINE) == [
        "codec",
        *PACKED_FORMATS,
    ]
