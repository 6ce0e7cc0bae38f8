"""Tables are as wide as the terminal, and whole in a file."""

from __future__ import annotations

import pytest

from coldpage.cli.table_console import table_console


@pytest.mark.parametrize(("is_terminal", "num_columns"), [("1", 70), ("0", 200)])
def test_the_width_is_that_of_the_output(
    is_terminal: str, num_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", is_terminal)
    monkeypatch.setenv("COLUMNS", "70")
    assert table_console().width == num_columns
