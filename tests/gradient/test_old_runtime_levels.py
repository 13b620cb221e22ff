"""Gradient models of real networks in an old ONNX Runtime, at every optimisation level.

The interpreter is named by the environment variable ORT_OPS_TEST_OLD_RUNTIME_PYTHON;
tests/runtime/test_old_runtime.py says what it needs. 1.19.2 replaces an Add before a LayerNormalization by
its own fused node if nothing else reads the sum, and that node leaves the statistics empty: the gradient
models must not let it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from test_exported_models import FOLDER, MODELS, tensor

import ort_ops
from ort_ops.gradient import build_gradient_model

VARIABLE = "ORT_OPS_TEST_OLD_RUNTIME_PYTHON"
SCRIPT = Path(__file__).with_name("old_runtime_levels_script.py")
LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]

pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLE),
    reason=f"set {VARIABLE} to a Python with onnxruntime-training-cpu 1.19.2 (or another old onnxruntime), "
    "onnxruntime-extensions, onnx and ml_dtypes",
)


def parameters(name: str) -> list[str]:
    return [
        key.removeprefix("grad:") for key in np.load(FOLDER / f"{name}.npz").files if key.startswith("grad:")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gradient models, and beside them what the old runtime made of them."""
    folder = tmp_path_factory.mktemp("old_runtime")
    package = folder / "package" / "ort_ops"
    shutil.copytree(Path(ort_ops.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    library = Path(ort_ops.library_path())
    for file in {library, *library.parent.glob("libhwy*")}:
        shutil.copy(file, package)
    for name in MODELS:
        model = onnx.load(FOLDER / f"{name}.onnx")
        data = np.load(FOLDER / f"{name}.npz")
        onnx.save(build_gradient_model(model, parameters(name)), folder / f"{name}.onnx")
        feeds = {key.removeprefix("in:"): data[key] for key in data.files if key.startswith("in:")}
        np.savez(
            folder / f"{name}.inputs.npz", **feeds, **{key: tensor(model, key) for key in parameters(name)}
        )
    done = subprocess.run(
        [os.environ[VARIABLE], str(SCRIPT), str(folder)],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_agree_with_pytorch(folder: Path, name: str, level: str) -> None:
    expected, results = np.load(FOLDER / f"{name}.npz"), np.load(folder / f"{name}.{level}.npz")
    np.testing.assert_allclose(results["loss"], expected["loss"], rtol=1e-5)
    largest = max(np.abs(expected[f"grad:{parameter}"]).max() for parameter in parameters(name))
    for parameter in parameters(name):
        reference = expected[f"grad:{parameter}"]
        tolerance = 1e-3 * max(np.abs(reference).max(), 1e-3 * largest)
        np.testing.assert_allclose(
            results[f"{parameter}_grad"], reference, rtol=0, atol=tolerance, err_msg=parameter
        )
