"""The documents keep their promises: links, commands, examples and decision records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.tree import REPOSITORY

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
DECISIONS = sorted((REPOSITORY / "docs" / "adr").glob("*.md"))
SECTIONS = ("Status", "Context", "Decision", "Consequences")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
EXTERNAL = ("http://", "https://", "mailto:")


def _name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def _anchors(text: str) -> set[str]:
    """Heading anchors as forges make them: lower case, spaces to hyphens, punctuation gone."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def broken_links(document: Path) -> list[str]:
    """Relative links of ``document`` whose file or heading does not exist."""
    text = document.read_text(encoding="utf-8")
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        if link.startswith(EXTERNAL):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (
            anchor and anchor not in _anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    return broken


def unknown_targets(text: str, makefile: str) -> set[str]:
    """Targets that ``text`` tells a reader to make and ``makefile`` does not have."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    fenced = "\n".join(body for language, body in FENCE.findall(text) if language != "python")
    inline = "\n".join(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))
    return set(re.findall(r"\bmake ([a-z][a-z-]*)", f"{fenced}\n{inline}")) - targets


def unknown_tests(text: str, root: Path) -> set[str]:
    """Test files, and tests or classes in them, that ``text`` names and ``root`` does not have."""
    unknown = set()
    for place, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?[`:\[]", text):
        file = root / place
        defined = rf"^ *(?:def|class) {name}\b|^{name} ="
        if not file.exists() or not re.search(defined, file.read_text(), re.MULTILINE):
            unknown.add(f"{place}::{name}")
    return unknown


def missing_sections(decision: str) -> list[str]:
    """Sections of a decision record that are absent or empty."""
    found = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", decision, re.MULTILINE | re.DOTALL))
    return [section for section in SECTIONS if not found.get(section, "").strip()]


def python_blocks() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        blocks = [body for lang, body in FENCE.findall(document.read_text()) if lang == "python"]
        for number, body in enumerate(blocks, start=1):
            yield f"{_name(document)}#{number}", body


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_relative_links_resolve(document: Path) -> None:
    assert broken_links(document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_named_make_targets_exist(document: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert unknown_targets(document.read_text(encoding="utf-8"), makefile) == set()


@pytest.mark.parametrize("decision", DECISIONS, ids=_name)
def test_a_decision_record_is_whole(decision: Path) -> None:
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", decision.name)
    assert missing_sections(decision.read_text(encoding="utf-8")) == []


def test_decision_numbers_are_unique_and_leave_no_gap() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_documents_that_the_sources_name_exist() -> None:
    named = {
        (_name(source), document)
        for source in (REPOSITORY / "src").rglob("*.py")
        for document in re.findall(r"docs/[\w/.-]+\.md", source.read_text(encoding="utf-8"))
    }
    assert sorted((s, d) for s, d in named if not (REPOSITORY / d).exists()) == []


@pytest.mark.parametrize("example", [pytest.param(body, id=name) for name, body in python_blocks()])
def test_an_example_runs_as_printed(example: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # A line '# prints X' in the example is a promise about what it prints.
    assert result.stdout.splitlines() == re.findall(r"# prints (.*)$", example, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_named_tests_exist(document: Path) -> None:
    assert unknown_tests(document.read_text(encoding="utf-8"), REPOSITORY) == set()


def test_readme_has_an_example() -> None:
    assert any(name.startswith("README.md") for name, _ in python_blocks())


def test_the_checks_above_bite(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](gone.md) [c](#two) [d](https://x.y)\n")
    assert broken_links(page) == ["gone.md", "#two"]
    assert unknown_targets("`make cake`\n```\nmake test\n```\n", "test:\n") == {"cake"}
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_b() -> None: ...\n")
    named = "`tests/test_a.py::test_b` `tests/test_a.py::test_c` `tests/test_d.py`"
    assert unknown_tests(named, tmp_path) == {"tests/test_a.py::test_c", "tests/test_d.py::"}
    assert missing_sections("## Status\nok\n## Context\n\n## Decision\nx\n") == [
        "Context",
        "Consequences",
    ]
