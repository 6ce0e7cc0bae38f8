"""Run benchmarks: ``python -m benchmarks [NAME ...] [--quick]``; all of them when none is named."""

from __future__ import annotations

import importlib
import sys

from rich.console import Console

from benchmarks.rows import report

NAMES = (
    "manager_cost",
    "descriptors",
    "restore",
    "disk",
    "resume",
    "slow_disk",
    "reopen",
    "save_restore",
    "engine",
    "codecs_cpu",
    "codec_capacity",
)


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    console = Console(width=160)
    is_quick = "--quick" in arguments
    names = [a for a in arguments if not a.startswith("-")] or list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        console.print(f"no benchmark is called {unknown[0]}: use some of {', '.join(NAMES)}")
        return 2
    for name in names:
        with console.status(f"{name} ..."):
            rows = importlib.import_module(f"benchmarks.{name}").run(is_quick)
        report(name, rows, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
