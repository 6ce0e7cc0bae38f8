"""The rules about imports: the room of a module, what it may import, that somebody needs it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator

from tests.tidy.tree import PACKAGE, Module, Tree

# docs/ARCHITECTURE.md explains the layers. A name stands for a module, or a package and all below.
# The package itself ("") re-exports the library, so the engine above may use its names.
LAYERS: dict[str, float] = {
    "types": 0,
    "errors": 0,
    "config": 0,
    "layout": 1,
    "device": 2,
    "kernels": 2,
    "slots": 3,
    "pools": 3,
    "staging": 3,
    "store": 3,
    "codecs": 3,
    "page": 4,
    "eviction": 4,
    "copy_engine": 4,
    "events": 4,
    "migration": 5,
    "storage": 5,
    "block_table": 6,
    "prefix": 6,
    "sequence": 6,
    "manager": 7,
    "snapshot": 7,
    "semantic": 7,
    "": 7,
    "engine.attention": 8.1,
    "engine.model": 8.2,
    "engine.forward": 8.3,
    "engine": 8.4,
    "engine.proof": 8.5,
    "engine.demo": 8.6,
    "server": 9,
    "bench": 9,
    "cli": 9,
    "__main__": 9,
    "testing": 10,
}
LIBRARY_TOP = 7

# Third-party modules with heavy or special needs, and the only rooms that may import them.
CONFINED: dict[str, tuple[str, ...]] = {
    "torch": (
        "device.cuda",
        "kernels",
        "engine",
        "semantic.embedder",
        "bench.attention",
        "bench.clock",
        "bench.decode",
        "bench.decode_load",
        "bench.prefill",
        "bench.quality",
    ),
    "triton": ("kernels",),
    "numba": ("kernels",),
    "cuda": ("device.cuda",),
    "transformers": ("engine",),
}
LIBRARY_THIRD_PARTY = frozenset({"numpy", "xxhash"})
# The kits in testing are written for these.
TEST_TOOLS = frozenset({"pytest", "hypothesis"})


def layer_of(room: str) -> float | None:
    """The layer of the longest entry that covers ``room``; None when there is no room for it."""
    if room == "":
        return LAYERS[""]
    parts = room.split(".")
    for length in range(len(parts), 0, -1):
        layer = LAYERS.get(".".join(parts[:length]))
        if layer is not None:
            return layer
    return None


def homeless_modules(tree: Tree) -> list[str]:
    """Every module has a layer."""
    return [
        f"{tree.place(module)}: no room: the layer table has no place for '{module.room}'"
        for module in tree.package
        if layer_of(module.room) is None
    ]


def upward_imports(tree: Tree) -> list[str]:
    """Imports go down the layer table, or sideways."""
    breaches = []
    for module in tree.package:
        own = layer_of(module.room)
        for name, line in tree.internal_imports(module):
            other = layer_of(name.partition(".")[2])
            if own is not None and other is not None and other > own:
                breaches.append(
                    f"{tree.place(module, line)} layer {own} imports {name} of layer {other}"
                )
    return breaches


def import_cycles(tree: Tree) -> list[str]:
    """Sideways imports never come back."""
    graph = {
        module.name: sorted({name for name, _ in tree.internal_imports(module)} - {module.name})
        for module in tree.package
    }
    breaches: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            breaches.append("import cycle: " + " -> ".join((*path[path.index(name) :], name)))
            return
        if name in done or name not in graph:
            return
        for other in graph[name]:
            visit(other, (*path, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return breaches


def misplaced_third_party(tree: Tree) -> list[str]:
    """The library runs with numpy alone; heavy parts stay in their rooms; nothing is undeclared."""
    declared = _declared_modules(tree)
    breaches = []
    for module in tree.package:
        layer = layer_of(module.room)
        for top, line in _third_party_imports(module):
            rooms = CONFINED.get(top)
            if rooms is not None:
                if not any(_lies_in(module.room, room) for room in rooms):
                    breaches.append(
                        f"{tree.place(module, line)} imports {top}, which only "
                        f"{', '.join(rooms)} may"
                    )
            elif layer is not None and layer <= LIBRARY_TOP and top not in LIBRARY_THIRD_PARTY:
                breaches.append(
                    f"{tree.place(module, line)} imports {top}: layers 0 to {LIBRARY_TOP} "
                    "use the standard library, numpy and xxhash"
                )
            elif top in TEST_TOOLS and _lies_in(module.room, "testing"):
                continue
            elif top not in declared:
                breaches.append(
                    f"{tree.place(module, line)} imports {top}: pyproject.toml does not declare it"
                )
    return breaches


def dead_files(tree: Tree) -> list[str]:
    """Every module is reached from the library's names, the command line or, for kits, a test."""
    modules = {module.name: module for module in tree.package}
    tested = {name for test in tree.tests for name, _ in tree.internal_imports(test)}
    # Other engines mount the store; nobody here has to.
    roots = {PACKAGE, f"{PACKAGE}.store", f"{PACKAGE}.cli", f"{PACKAGE}.__main__"}
    roots |= {name for name in tested if _lies_in(name.partition(".")[2], "testing")}
    # The simulated device proves the others; only tests make one.
    roots |= {name for name in tested if name == f"{PACKAGE}.device.simulated"}
    # What fast kernels are held against runs nowhere else.
    roots |= {name for name in tested if name == f"{PACKAGE}.kernels.cold.reference"}
    reached: set[str] = set()
    waiting = [name for name in roots if name in modules]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in modules:
            continue
        reached.add(name)
        waiting.append(name.rpartition(".")[0])  # importing a module runs its packages
        waiting += _references(tree, modules[name])
    return [
        f"{tree.place(module)}: dead: nothing that runs imports {module.name}"
        for name, module in sorted(modules.items())
        if name not in reached and not (module.is_package and _only_reexports(module))
    ]


def _references(tree: Tree, module: Module) -> Iterator[str]:
    for name, _ in tree.internal_imports(module):
        yield name
    for node in ast.walk(
        module.syntax
    ):  # 'python -m coldpage.engine.process' names one in a string
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = tree.resolve(node.value.partition(":")[0])
            if name is not None:
                yield name


def _only_reexports(module: Module) -> bool:
    return all(
        isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in module.syntax.body
    )


def _third_party_imports(module: Module) -> Iterator[tuple[str, int]]:
    for item in module.imports:
        top = item.module.partition(".")[0]
        if top not in sys.stdlib_module_names and top != PACKAGE:
            yield top, item.line


def _lies_in(room: str, package: str) -> bool:
    return room == package or room.startswith(package + ".")


def _declared_modules(tree: Tree) -> set[str]:
    project = tomllib.loads((tree.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    # A model package is installed without its dependencies from a list of its own.
    requirements += (tree.root / "models-serve.txt").read_text(encoding="utf-8").splitlines()
    names = [match for line in requirements if (match := re.match(r"[A-Za-z0-9._-]+", line))]
    return {match.group().lower().replace("-", "_") for match in names}
