"""The house rules about code: each takes a tree and returns one sentence a breach."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.tidy.tree import Module, Tree

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
BANNED_MODULE_NAMES = frozenset({"utils", "util", "common", "helpers", "core", "misc"})
# Where pages of several levels meet.
ROOMS_WITHOUT_INDICES = frozenset(
    {
        "page",
        "eviction",
        "copy_engine",
        "events",
        "migration",
        "storage",
        "block_table",
        "prefix",
        "sequence",
    }
)
POOL_GROUP_INDEX_NAMES = frozenset({"PoolGroupIndex", "pool_group_of", "hot_pool_group", "index"})
BROAD = frozenset({"Exception", "BaseException"})


def long_files(tree: Tree) -> list[str]:
    """A file is one concept."""
    breaches = []
    for module in tree.everything:
        lines = len(module.source.splitlines())
        if lines > MAX_FILE_LINES:
            breaches.append(
                f"{tree.place(module)} has {lines} lines; the limit is {MAX_FILE_LINES}"
            )
    return breaches


def long_functions(tree: Tree) -> list[str]:
    """A function fits on a screen."""
    breaches = []
    for module in tree.everything:
        for function in module.functions():
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                place = tree.place(module, function.lineno)
                breaches.append(
                    f"{place} {function.name} has {lines} lines; the limit is {MAX_FUNCTION_LINES}"
                )
    return breaches


def vague_names(tree: Tree) -> list[str]:
    """A module that could hold anything ends up holding everything."""
    return [
        f"{tree.place(module)}: '{part}' says nothing about what is inside; name the concept"
        for module in tree.everything
        for part in module.name.split(".")
        if part in BANNED_MODULE_NAMES
    ]


def missing_exports(tree: Tree) -> list[str]:
    """``__all__`` is a literal list, and every name without an underscore is in it."""
    breaches = []
    for module in tree.package:
        if module.is_package and len(module.syntax.body) <= 1:
            continue  # a docstring only: nothing to export
        if module.exported is None:
            breaches.append(f"{tree.place(module)} has no literal __all__")
            continue
        for name, line in _public_definitions(module):
            if name not in module.exported:
                breaches.append(
                    f"{tree.place(module, line)} {name} is public and not in __all__: "
                    "export it or give it an underscore"
                )
    return breaches


def missing_docstrings(tree: Tree) -> list[str]:
    """Modules, exported classes and functions, and abstract methods state their contract."""
    breaches = []
    for module in tree.package:
        if not ast.get_docstring(module.syntax):
            breaches.append(f"{tree.place(module)} has no module docstring")
        for node in module.syntax.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                breaches.append(f"{tree.place(module, node.lineno)} {node.name} has no docstring")
            breaches += [
                f"{tree.place(module, method.lineno)} {node.name}.{method.name} "
                "is abstract and has no docstring"
                for method in _abstract_methods(node)
                if not ast.get_docstring(method)
            ]
    return breaches


def loose_pool_group_indices(tree: Tree) -> list[str]:
    """A pool-group index means something on one level only. Above the pools, groups are objects of
    their level, so that no two indices of different levels can be compared.
    """
    breaches = []
    for module in tree.package:
        if module.room.partition(".")[0] not in ROOMS_WITHOUT_INDICES:
            continue
        called = {id(n.func) for n in ast.walk(module.syntax) if isinstance(n, ast.Call)}
        for node in ast.walk(module.syntax):
            name = ""
            if isinstance(node, ast.Name) and node.id != "index":  # a fine name for a variable
                name = node.id
            elif isinstance(node, ast.Attribute) and id(node) not in called:
                name = node.attr
            if name in POOL_GROUP_INDEX_NAMES:
                breaches.append(
                    f"{tree.place(module, node.lineno)} uses {name}: pass the PoolGroup itself"
                )
    return breaches


def silent_excepts(tree: Tree) -> list[str]:
    """An error that nobody expected is never swallowed."""
    breaches = []
    for module in tree.everything:
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                breaches.append(
                    f"{tree.place(module, node.lineno)} bare except: name the exceptions"
                )
            elif isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                if not _reports(node):
                    breaches.append(
                        f"{tree.place(module, node.lineno)} broad except that neither raises "
                        "nor uses what it caught: name the exceptions, or report this one"
                    )
            elif isinstance(node, ast.Call) and _suppresses_all(node):
                breaches.append(
                    f"{tree.place(module, node.lineno)} suppresses every error: name them"
                )
    return breaches


def _public_definitions(module: Module) -> Iterator[tuple[str, int]]:
    for node in module.syntax.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        for name in names:
            if not name.startswith("_"):
                yield name, node.lineno


def _abstract_methods(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    if not isinstance(node, ast.ClassDef):
        return
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and any(
            ast.unparse(decorator).endswith("abstractmethod") for decorator in method.decorator_list
        ):
            yield method


def _is_broad(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(_is_broad(element) for element in node.elts)
    return isinstance(node, ast.Name) and node.id in BROAD


def _called_name(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _suppresses_all(node: ast.Call) -> bool:
    return _called_name(node) == "suppress" and any(_is_broad(argument) for argument in node.args)


def _reports(handler: ast.ExceptHandler) -> bool:
    for statement in handler.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Raise):
                return True
            if isinstance(node, ast.Name) and handler.name and node.id == handler.name:
                return True
            if isinstance(node, ast.Call) and _called_name(node) in {"exception", "print_exc"}:
                return True
    return False
