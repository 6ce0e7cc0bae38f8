"""The source tree as the tidy rules see it: files, parsed modules and the imports between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "coldpage"


@dataclass(frozen=True)
class Import:
    """``module`` (dotted, absolute) is imported on ``line``."""

    module: str
    line: int


class Module:
    """One parsed Python file; ``name`` is its dotted name from the root of its import path."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.source = path.read_text(encoding="utf-8")
        self.syntax = ast.parse(self.source, filename=str(path))
        parts = path.relative_to(root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)

    @property
    def room(self) -> str:
        """The name below the package, such as ``device.host``; empty for the package itself."""
        return self.name.partition(".")[2]

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, nested ones too."""
        for node in ast.walk(self.syntax):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    @cached_property
    def exported(self) -> list[str] | None:
        """The names in ``__all__``; None where the module has none or computes it."""
        for node in self.syntax.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id == "__all__":
                    try:
                        return list(ast.literal_eval(node.value))  # type: ignore[union-attr,arg-type]
                    except ValueError:
                        return None
        return None

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, wherever it stands: at the top, in a function, under TYPE_CHECKING."""
        found = []
        for node in ast.walk(self.syntax):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found += [
                    Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names
                ]
        return found


class Tree:
    """A checkout: ``src/coldpage``, ``tests`` and ``benchmarks`` below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _parse(self, folder: str, import_root: str) -> list[Module]:
        files = sorted((self.root / folder).rglob("*.py"))
        return [Module(path, self.root / import_root) for path in files]

    @cached_property
    def package(self) -> list[Module]:
        """The modules of the package."""
        return self._parse("src", "src")

    @cached_property
    def tests(self) -> list[Module]:
        """The test files and what they share."""
        return self._parse("tests", ".")

    @cached_property
    def everything(self) -> list[Module]:
        """All Python that the house rules hold for."""
        return self.package + self.tests + self._parse("benchmarks", ".")

    @cached_property
    def names(self) -> frozenset[str]:
        """The dotted names of the package's modules."""
        return frozenset(module.name for module in self.package)

    def place(self, module: Module, line: int | None = None) -> str:
        """Where a reader finds it."""
        where = str(module.path.relative_to(self.root))
        return where if line is None else f"{where}:{line}"

    def resolve(self, dotted: str) -> str | None:
        """The module of this package that an import names, or that holds the imported name."""
        if dotted in self.names:
            return dotted
        parent = dotted.rpartition(".")[0]
        return parent if parent in self.names else None

    def internal_imports(self, module: Module) -> Iterator[tuple[str, int]]:
        """``(module name, line)`` of every import from the package."""
        for item in module.imports:
            if item.module == PACKAGE or item.module.startswith(PACKAGE + "."):
                yield self.resolve(item.module) or item.module, item.line
