"""The command line."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line of this process, and exits."""
    try:
        from coldpage.cli.commands import coldpage
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "coldpage":
            raise
        # The library alone is installed without what the command needs, and with its script.
        sys.exit(
            f"coldpage: the command needs {error.name}, which is not installed: "
            "install coldpage with its extra 'serve'"
        )
    coldpage.main(prog_name="coldpage")
