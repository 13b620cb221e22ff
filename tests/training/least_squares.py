"""A training of least squares whose gradient is written by hand, so that tests of the run time depend neither
on the gradient builder nor on the artifact generator.

The names are such that the order of the models' inputs differs from the alphabetical one.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.checkpoint import Checkpoint
from ort_ops.training.optimizer import AdamW, build_optimizer_model

SHAPES = {"w": (3, 2), "b": (2,)}

# loss = sum((x w + b + offset - y)^2) / 8, so its gradient by the prediction is (prediction - y) / 4.
TRAINING_MODEL = """
<ir_version: 9, opset_import: ["" : 18], metadata_props: ["ort_ops.frozen": "[\\"a_offset\\"]"]>
least_squares (float[N, 3] x, float[N, 2] y, float[3, 2] w, float[2] b, float[1] a_offset)
    => (float[] loss, float[N, 2] prediction, float[3, 2] w_grad, float[2] b_grad)
    <float quarter = {0.25}, float eighth = {0.125}, int64[1] rows = {0}>
{
    product = MatMul(x, w)
    shifted = Add(product, b)
    prediction = Add(shifted, a_offset)
    error = Sub(prediction, y)
    square = Mul(error, error)
    total = ReduceSum <keepdims = 0> (square)
    loss = Mul(total, eighth)
    error_grad = Mul(error, quarter)
    x_transposed = Transpose <perm = [1, 0]> (x)
    w_grad = MatMul(x_transposed, error_grad)
    b_grad = ReduceSum <keepdims = 0> (error_grad, rows)
}
"""

EVAL_MODEL = """
<ir_version: 9, opset_import: ["" : 18]>
least_squares (float[N, 3] x, float[N, 2] y, float[3, 2] w, float[2] b, float[1] a_offset)
    => (float[] loss, float[N, 2] prediction)
    <float eighth = {0.125}>
{
    product = MatMul(x, w)
    shifted = Add(product, b)
    prediction = Add(shifted, a_offset)
    error = Sub(prediction, y)
    square = Mul(error, error)
    total = ReduceSum <keepdims = 0> (square)
    loss = Mul(total, eighth)
}
"""

Tensors = dict[str, np.ndarray]


def training_model() -> onnx.ModelProto:
    return onnx.parser.parse_model(TRAINING_MODEL)


def eval_model() -> onnx.ModelProto:
    return onnx.parser.parse_model(EVAL_MODEL)


def optimizer_model() -> onnx.ModelProto:
    parameters = {name: (shape, onnx.TensorProto.FLOAT) for name, shape in SHAPES.items()}
    return build_optimizer_model(parameters, AdamW(weight_decay=0.1, max_gradient_norm=0.5))


def first_parameters() -> Tensors:
    generator = np.random.default_rng(0)
    return {
        "w": generator.normal(size=(3, 2)).astype(np.float32),
        "b": generator.normal(size=2).astype(np.float32),
        "a_offset": np.array([0.5], np.float32),
    }


def first_checkpoint(nominal: bool = False) -> Checkpoint:
    return Checkpoint(first_parameters(), frozen=frozenset({"a_offset"}), nominal=nominal)


def new_state() -> CheckpointState:
    return CheckpointState(first_checkpoint())


def new_module(state: CheckpointState | None = None) -> Module:
    return Module(training_model(), state or new_state(), eval_model())


def new_training(state: CheckpointState | None = None) -> tuple[Module, Optimizer]:
    module = new_module(state)
    return module, Optimizer(optimizer_model(), module)


def batch(step: int) -> Tensors:
    """Batches differ in size, as the last one of a data set does."""
    x = np.random.default_rng(step + 1).normal(size=(4 - step % 3, 3)).astype(np.float32)
    return {"x": x, "y": x[:, :2] * 2 + 1}


def train_step(module: Module, optimizer: Optimizer, step: int) -> float:
    loss = module(batch(step))
    optimizer.step()
    module.lazy_reset_grad()
    return float(loss)


def parameters(module: Module) -> Tensors:
    return {name: parameter.data for name, parameter in module.state.parameters}


def assert_same_bits(got: Tensors, expected: Tensors) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name, strict=True)
