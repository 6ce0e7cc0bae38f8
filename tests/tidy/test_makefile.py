"""What the command file does with the test runner's exit status."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.tidy.tree import REPOSITORY


@pytest.mark.parametrize(("status", "is_good"), [(0, True), (1, False), (5, True)])
def test_nothing_to_run_is_no_failure(status: int, is_good: bool, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {status}\n")
    python.chmod(0o700)
    # The virtual environment counts as made, so that nothing is installed.
    made = subprocess.run(
        ["make", "-s", "-o", ".venv/.coldpage-dev", "VENV=.venv", f"PY={python}", "test-gpu"],
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (made.returncode == 0) is is_good, made.stderr
    assert ("no GPU tests yet" in made.stdout) is (status == 5)
