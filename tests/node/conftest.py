"""Finds onnxruntime-node, or installs it with npm; makes the models of models/ importable by their bare
names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

NODE_MODULES = "ORT_OPS_TEST_NODE_MODULES"
"""Environment variable: the folder `node_modules` in which onnxruntime-node is installed already."""


@pytest.fixture(scope="session")
def node_modules(pytestconfig: pytest.Config) -> Path:
    """The folder with onnxruntime-node."""
    if NODE_MODULES in os.environ:
        return Path(os.environ[NODE_MODULES])
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("Node.js and npm are not installed")
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("onnxruntime-node")
    if not (folder / "node_modules" / "onnxruntime-node").is_dir():
        # Without the package's install script, which would load libraries for CUDA.
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder]
        installed = subprocess.run([*command, "onnxruntime-node@1.30"], text=True, capture_output=True)
        if installed.returncode != 0:
            pytest.skip(f"npm cannot install onnxruntime-node: {installed.stderr.strip().splitlines()[-1]}")
    return folder / "node_modules"
