"""``python -m coldpage`` is the command line."""

from coldpage.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
