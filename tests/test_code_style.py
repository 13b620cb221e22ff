"""The rules that tools can check: ruff on everything, mypy on the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--no-incremental"],
    ],
    ids=" ".join,
)
def test_no_findings(command: list[str]) -> None:
    completed = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, text=True, capture_output=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
