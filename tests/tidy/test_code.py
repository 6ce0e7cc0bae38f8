"""The house rules hold for this checkout, and each of them bites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tidy import layers, rules
from tests.tidy.tree import REPOSITORY, Tree

RULES: tuple[Callable[[Tree], list[str]], ...] = (
    rules.long_files,
    rules.long_functions,
    rules.vague_names,
    rules.missing_exports,
    rules.missing_docstrings,
    rules.loose_pool_group_indices,
    rules.silent_excepts,
    layers.homeless_modules,
    layers.upward_imports,
    layers.import_cycles,
    layers.misplaced_third_party,
    layers.dead_files,
)

GOOD = '"""A module."""\n\n__all__: list[str] = []\n'
PYPROJECT = '[project]\ndependencies = ["numpy"]\noptional-dependencies.serve = ["click>=8"]\n'

# rule, {file: source} added to a tidy tree, what the one complaint must say
BREACHES: tuple[tuple[Callable[[Tree], list[str]], dict[str, str], str], ...] = (
    (rules.long_files, {"tests/test_a.py": "x = 1\n" * 601}, "test_a.py has 601 lines"),
    (rules.long_files, {"benchmarks/a.py": "x = 1\n" * 601}, "a.py has 601 lines"),
    (
        rules.long_functions,
        {"src/coldpage/page.py": GOOD + "def _f():\n" + "    x = 1\n" * 70},
        "_f has 71 lines",
    ),
    (rules.vague_names, {"src/coldpage/engine/helpers.py": GOOD}, "'helpers'"),
    (rules.missing_exports, {"src/coldpage/page.py": '"""A."""\n'}, "no literal __all__"),
    (
        rules.missing_exports,
        {"src/coldpage/page.py": GOOD + 'def f():\n    """Do."""\n'},
        "f is public and not in __all__",
    ),
    (rules.missing_exports, {"src/coldpage/page.py": GOOD + "LIMIT = 3\n"}, "LIMIT is public"),
    (rules.missing_docstrings, {"src/coldpage/page.py": "x = 1\n"}, "no module docstring"),
    (
        rules.missing_docstrings,
        {"src/coldpage/page.py": GOOD + "class Page:\n    x = 1\n"},
        "Page has no docstring",
    ),
    (
        rules.missing_docstrings,
        {
            "src/coldpage/page.py": GOOD
            + 'class Page:\n    """A."""\n    @abc.abstractmethod\n    def f(self): ...\n'
        },
        "Page.f is abstract",
    ),
    (
        rules.loose_pool_group_indices,
        {"src/coldpage/storage.py": GOOD + "x = hot.index == cold_index\n"},
        "uses index: pass the PoolGroup itself",
    ),
    (
        rules.silent_excepts,
        {"src/coldpage/page.py": GOOD + "try:\n    f()\nexcept:\n    raise\n"},
        "bare except",
    ),
    (
        rules.silent_excepts,
        {"tests/test_a.py": "try:\n    f()\nexcept (ValueError, Exception):\n    x = 1\n"},
        "broad except",
    ),
    (
        rules.silent_excepts,
        {"tests/test_a.py": "with contextlib.suppress(Exception):\n    f()\n"},
        "suppresses every error",
    ),
    (layers.homeless_modules, {"src/coldpage/gadget.py": GOOD}, "no room"),
    (
        layers.upward_imports,
        {"src/coldpage/layout.py": GOOD + "from coldpage.page import x\n"},
        "layer 1 imports coldpage.page.x of layer 4",
    ),
    (
        layers.upward_imports,
        {
            "src/coldpage/layout.py": GOOD
            + "if TYPE_CHECKING:\n    from coldpage.device.base import Device\n"
        },
        "layer 1 imports coldpage.device.base of layer 2",
    ),
    (
        layers.upward_imports,
        {"src/coldpage/page.py": GOOD + "def _f():\n    import coldpage\n"},
        "layer 4 imports coldpage of layer 7",
    ),
    (
        layers.import_cycles,
        {
            "src/coldpage/page.py": GOOD + "import coldpage.events\n",
            "src/coldpage/events.py": GOOD + "from coldpage import page\n",
        },
        "coldpage.events -> coldpage.page -> coldpage.events",
    ),
    (
        layers.misplaced_third_party,
        {"src/coldpage/manager.py": GOOD + "def _f():\n    import torch\n"},
        "imports torch, which only device.cuda, kernels, engine",
    ),
    (
        layers.misplaced_third_party,
        {"src/coldpage/manager.py": GOOD + "import msgspec\n"},
        "layers 0 to 7",
    ),
    (
        layers.misplaced_third_party,
        {"src/coldpage/server/app.py": GOOD + "import flask\n"},
        "does not declare it",
    ),
    (layers.dead_files, {"src/coldpage/page.py": GOOD}, "nothing that runs imports coldpage.page"),
)


def _write(root: Path, files: dict[str, str]) -> Tree:
    tidy = {
        "pyproject.toml": PYPROJECT,
        "models-serve.txt": "",
        "src/coldpage/__init__.py": GOOD,
        "src/coldpage/device/__init__.py": GOOD,
        "src/coldpage/device/base.py": GOOD,
        "src/coldpage/cli.py": GOOD + "import click\nfrom coldpage.device.base import x\n",
    }
    for name, source in (tidy | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return Tree(root)


@pytest.fixture(scope="module")
def checkout() -> Tree:
    return Tree(REPOSITORY)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_checkout_is_tidy(rule: Callable[[Tree], list[str]], checkout: Tree) -> None:
    breaches = rule(checkout)
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize(("rule", "files", "complaint"), BREACHES)
def test_a_breach_is_reported(
    rule: Callable[[Tree], list[str]], files: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    breaches = rule(_write(tmp_path, files))
    assert len(breaches) == 1, breaches
    assert complaint in breaches[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_tidy_tree_passes(rule: Callable[[Tree], list[str]], tmp_path: Path) -> None:
    assert rule(_write(tmp_path, {})) == []


def test_every_rule_has_a_breach_that_shows_it_biting() -> None:
    assert {rule.__name__ for rule, _, _ in BREACHES} == {rule.__name__ for rule in RULES}
