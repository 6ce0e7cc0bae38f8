"""The command line."""

from coldpage.cli.commands import coldpage

__all__ = ["main"]


def main() -> None:
    """Runs the command line of this process, and exits."""
    coldpage.main(prog_name="coldpage")
