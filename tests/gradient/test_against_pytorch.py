"""Operators that PyTorch has in the same form, where central differences are too coarse: against its float64
gradients."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import ort_ops
from ort_ops.gradient import build_gradient_model

TORCH_MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}


def gradients(text: str, feeds: dict[str, np.ndarray], names: list[str]) -> list[np.ndarray]:
    training = build_gradient_model(onnx.parser.parse_model(text), names)
    onnx.checker.check_model(training, full_check=True)
    session = onnxruntime.InferenceSession(training.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[1:]


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("linear", (4, 3)),
        ("nearest", (4, 3)),
        ("cubic", (5, 4)),
        ("linear", (3, 4, 2)),
        ("nearest", (3, 2, 4)),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_grid_sample(mode: str, size: tuple[int, ...], padding: str, align: int, dynamic: bool) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 3, *size)).astype(np.float32)
    grid = generator.uniform(-1.3, 1.3, (2, *(3,) * len(size), len(size))).astype(np.float32)
    shapes = {"x": x.shape, "grid": grid.shape}
    dims = {
        name: ",".join(f"{name}{axis}" if dynamic else str(n) for axis, n in enumerate(shape))
        for name, shape in shapes.items()
    }
    text = f"""<ir_version: 8, opset_import: ["": 20]> g (float[{dims["x"]}] x, float[{dims["grid"]}] grid) => (float loss) {{
        y = GridSample<mode="{mode}", padding_mode="{padding}", align_corners={align}>(x, grid)
        z = Mul(y, y)  loss = ReduceSum<keepdims=0>(z) }}"""
    dx, dgrid = gradients(text, {"x": x, "grid": grid}, ["x", "grid"])
    tensors = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (x, grid)]
    y = torch.nn.functional.grid_sample(
        *tensors, mode=TORCH_MODES[mode], padding_mode=padding, align_corners=bool(align)
    )
    (y * y).sum().backward()
    for gradient, tensor in ((dx, tensors[0]), (dgrid, tensors[1])):
        expected = tensor.grad.numpy()
        # sums of some twenty float32 products
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * max(np.abs(expected).max(), 1))


@pytest.mark.parametrize("values", ["ties", "NaN", "infinite"])
@pytest.mark.parametrize(
    ("kernel", "strides", "pad", "ceil"),
    [
        ((2, 2), (2, 2), (0, 0), 0),
        ((2, 2), (2, 2), (0, 0), 1),
        ((3, 3), (1, 1), (1, 1), 0),
        ((3, 2), (2, 3), (1, 1), 1),
        ((2, 1), (3, 4), (0, 0), 0),
    ],
)
def test_max_pool_grad(kernel: tuple, strides: tuple, pad: tuple, ceil: int, values: str) -> None:
    """Which of several maxima has the gradient, in the kernel; of infinity and NaN as well. Not through a model:
    the runtime's MaxPool itself knows neither."""
    generator = np.random.default_rng(0)
    x = generator.integers(-8, 8, (2, 3, 9, 8)).astype(np.float32) / 4
    if values == "NaN":
        x[generator.random(x.shape) < 0.3] = np.nan
    elif values == "infinite":
        x[:, 0], x[:, 1] = -np.inf, np.inf
    variable = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.max_pool2d(variable, kernel, strides, pad, ceil_mode=bool(ceil))
    dy = generator.integers(-8, 8, tuple(y.shape)).astype(np.float32) / 4
    y.backward(torch.tensor(dy))
    dims = [",".join(map(str, value.shape)) for value in (dy, x)]
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18, "ai.onnx.contrib": 1]>
        g (float[{dims[0]}] dy, float[{dims[1]}] x) => (float[{dims[1]}] dx) {{
        dx = ai.onnx.contrib.MaxPoolGrad<kernel_shape={list(kernel)}, strides={list(strides)}, pads={[*pad, *pad]}, ceil_mode={ceil}>(dy, x) }}""")
    options = onnxruntime.SessionOptions()
    ort_ops.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    (dx,) = session.run(None, {"dy": dy, "x": x})
    np.testing.assert_array_equal(dx, variable.grad.numpy())
