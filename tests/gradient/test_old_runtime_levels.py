"""Gradient models of real networks in an old ONNX Runtime, at every optimisation level.

old_runtime.py says what the interpreter needs. 1.19.2 replaces an Add before a LayerNormalization by
its own fused node if nothing else reads the sum, and that node leaves the statistics empty: the gradient
models must not let it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from old_runtime import needs_old_runtime, run_in_old_runtime
from test_exported_models import FOLDER, MODELS, tensor

from ort_ops.gradient import build_gradient_model

SCRIPT = Path(__file__).with_name("old_runtime_levels_script.py")
LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]

pytestmark = needs_old_runtime


def parameters(name: str) -> list[str]:
    return [
        key.removeprefix("grad:") for key in np.load(FOLDER / f"{name}.npz").files if key.startswith("grad:")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gradient models, and beside them what the old runtime made of them."""
    folder = tmp_path_factory.mktemp("old_runtime")
    for name in MODELS:
        model = onnx.load(FOLDER / f"{name}.onnx")
        data = np.load(FOLDER / f"{name}.npz")
        onnx.save(build_gradient_model(model, parameters(name)), folder / f"{name}.onnx")
        feeds = {key.removeprefix("in:"): data[key] for key in data.files if key.startswith("in:")}
        np.savez(
            folder / f"{name}.inputs.npz", **feeds, **{key: tensor(model, key) for key in parameters(name)}
        )
    run_in_old_runtime(SCRIPT, folder)
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
