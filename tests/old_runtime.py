"""Runs scripts with the plugin in an old ONNX Runtime, in an interpreter of its own.

That interpreter is named by the environment variable ORT_OPS_TEST_OLD_RUNTIME_PYTHON. It needs
onnxruntime-training-cpu 1.19.2 (an old onnxruntime, and the one whose artifacts are converted), torch,
onnxruntime-extensions, onnx and ml_dtypes; the plugin is copied to it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import ort_ops

VARIABLE = "ORT_OPS_TEST_OLD_RUNTIME_PYTHON"

needs_old_runtime = pytest.mark.skipif(
    not os.environ.get(VARIABLE),
    reason=f"set {VARIABLE} to a Python with onnxruntime-training-cpu 1.19.2, torch, onnxruntime-extensions, "
    "onnx and ml_dtypes",
)


def run_in_old_runtime(script: Path, folder: Path) -> str:
    """What `script`, called with `folder`, prints there. The plugin is copied into the folder first."""
    package = folder / "package" / "ort_ops"
    shutil.copytree(Path(ort_ops.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    library = Path(ort_ops.library_path())
    for file in {library, *library.parent.glob("libhwy*")}:
        shutil.copy(file, package)
    done = subprocess.run(
        [os.environ[VARIABLE], str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
