"""What the command file does with an interpreter and the test runner's exit status."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.tidy.tree import REPOSITORY


@pytest.mark.parametrize("variable", ["PY", "GPU_PYTHON"])
@pytest.mark.parametrize("status", [0, 1, 5])
def test_gpu_tests_run_by_the_interpreter_that_was_named(
    variable: str, status: int, tmp_path: Path
) -> None:
    target, python = "test-gpu", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    python.chmod(0o700)
    # The virtual environment counts as made, so that nothing is installed.
    made = subprocess.run(
        ["make", "-s", "-o", ".venv/.coldpage-dev", "VENV=.venv", f"{variable}={python}", target],
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert "-m pytest -m gpu" in made.stdout
    # That nothing was collected is a failure too: there are GPU tests.
    assert (made.returncode == 0) is (status == 0), made.stderr
