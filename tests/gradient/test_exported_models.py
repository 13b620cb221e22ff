"""Whole exported models: every gradient agrees with the one that PyTorch computed when the model was
exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from ort_ops.gradient import build_gradient_model

FOLDER = Path(__file__).parents[1] / "data" / "gradcheck"
MODELS = sorted(path.stem for path in FOLDER.glob("*.onnx"))
LARGEST_GROWTH = 3.2
"""The training graph has at most so many times the nodes of the forward graph."""


def tensor(model: onnx.ModelProto, name: str) -> np.ndarray:
    for initializer in model.graph.initializer:
        if initializer.name == name:
            return onnx.numpy_helper.to_array(initializer)
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] == name:
            return onnx.numpy_helper.to_array(node.attribute[0].t)
    raise KeyError(name)


def test_the_models_are_there() -> None:
    assert len(MODELS) == 10


@pytest.mark.parametrize("name", MODELS)
def test_gradients_agree_with_pytorch(name: str) -> None:
    model = onnx.load(FOLDER / f"{name}.onnx")
    before = model.SerializeToString(deterministic=True)
    expected = np.load(FOLDER / f"{name}.npz")
    parameters = [key.removeprefix("grad:") for key in expected.files if key.startswith("grad:")]

    training = build_gradient_model(model, parameters)

    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(training, full_check=True)
    assert [output.name for output in training.graph.output] == [
        "loss",
        *(f"{name}_grad" for name in parameters),
    ]
    assert len(training.graph.node) <= LARGEST_GROWTH * len(model.graph.node)
    operators = [node.op_type for node in training.graph.node]
    assert operators.count("AddLayerNormGrad") == sum(
        op in ("LayerNormalization", "AddLayerNorm") for op in operators
    )

    session = onnxruntime.InferenceSession(training.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {key.removeprefix("in:"): expected[key] for key in expected.files if key.startswith("in:")}
    feeds |= {parameter: tensor(model, parameter) for parameter in parameters}
    loss, *gradients = session.run(None, feeds)

    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    # float32 rounding of the whole backward pass, relative to the tensor, or to the model's largest gradient
    # for tensors whose gradient is nothing but rounding (key biases of an attention)
    largest = max(np.abs(expected[f"grad:{parameter}"]).max() for parameter in parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        reference = expected[f"grad:{parameter}"]
        assert gradient.dtype == reference.dtype
        tolerance = 1e-3 * max(np.abs(reference).max(), 1e-3 * largest)
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=tolerance, err_msg=parameter)
