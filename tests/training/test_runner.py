"""The training step: buffers that take turns, values equal to a plain run of the same graphs, resume bit for
bit.

The gradient model here is written by hand (least squares, whose gradient is known), so nothing depends on the
gradient builder.
"""

from __future__ import annotations

import gc

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from ort_ops.training import EvaluationRunner, TrainingRunner, build_adamw_model
from ort_ops.training.runner import initializers_to_inputs

SHAPES = {"w": (3, 2), "b": (2,)}

# loss = sum((x w + b - y)^2) / 8, so its gradient by the prediction is (prediction - y) / 4.
GRADIENT_MODEL = """
<ir_version: 9, opset_import: ["" : 18]>
least_squares (float[N, 3] x, float[N, 2] y, float[3, 2] w, float[2] b)
    => (float[] loss, float[N, 2] error, float[3, 2] w_grad, float[2] b_grad)
    <float quarter = {0.25}, float eighth = {0.125}, int64[1] rows = {0}>
{
    product = MatMul(x, w)
    prediction = Add(product, b)
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

FORWARD_MODEL = """
<ir_version: 9, opset_import: ["" : 18]>
least_squares (float[N, 3] x) => (float[N, 2] prediction)
    <float[3, 2] w = {0, 0, 0, 0, 0, 0}, float[2] b = {0, 0}>
{
    product = MatMul(x, w)
    prediction = Add(product, b)
}
"""


def gradient_model() -> onnx.ModelProto:
    return onnx.parser.parse_model(GRADIENT_MODEL)


def optimizer_model() -> onnx.ModelProto:
    return build_adamw_model(SHAPES, weight_decay=0.1, max_gradient_norm=0.5)


def first_parameters() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def batch(step: int) -> dict[str, np.ndarray]:
    """Batches differ in size, as the last one of a data set does."""
    x = np.random.default_rng(step + 1).normal(size=(4 - step % 3, 3)).astype(np.float32)
    return {"x": x, "y": x[:, :2] * 2 + 1}


def numpy_values(values: dict[str, ort.OrtValue]) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in values.items()}


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name, strict=True)


def test_steps_equal_plain_runs_of_the_two_models() -> None:
    """Nine steps, so that each buffer is written several times, against `InferenceSession.run` with NumPy
    arrays.
    """
    gradient_session = ort.InferenceSession(gradient_model().SerializeToString())
    optimizer_session = ort.InferenceSession(optimizer_model().SerializeToString())
    names = [output.name for output in optimizer_session.get_outputs()]
    parameters = first_parameters()
    state = {f"{n}_{m}_moment": np.zeros_like(v) for n, v in parameters.items() for m in ("first", "second")}
    runner = TrainingRunner(gradient_model(), optimizer_model(), parameters)
    for step in range(9):
        results = runner.train_step(batch(step), learning_rate=0.1)
        gc.collect()

        loss, error, *gradients = gradient_session.run(None, {**batch(step), **parameters})
        feeds = {"learning_rate": np.array(0.1, np.float32), "step": np.array(step, np.int64)}
        feeds |= dict(zip(["w_grad", "b_grad"], gradients, strict=True))
        outputs = dict(
            zip(names, optimizer_session.run(names, {**feeds, **parameters, **state}), strict=True)
        )
        assert_same_bits(
            results, {"loss": loss, "error": error, "gradient_norm": outputs.pop("gradient_norm")}
        )
        updated = {name.removesuffix("_updated"): value for name, value in outputs.items()}
        parameters = {name: updated[name] for name in parameters}
        state = {name: updated[name] for name in state}
        assert_same_bits(numpy_values(runner.parameters), parameters)
        assert_same_bits(numpy_values(runner.optimizer_state), state)
    assert runner.step == 9


def test_learns_and_leaves_the_callers_arrays_alone() -> None:
    parameters = first_parameters()
    runner = TrainingRunner(gradient_model(), optimizer_model(), parameters)
    losses = [float(runner.train_step(batch(step), learning_rate=0.05)["loss"]) for step in range(200)]
    assert np.mean(losses[-10:]) < 0.05 * np.mean(losses[:10])
    assert_same_bits(parameters, first_parameters())


def test_results_of_a_step_survive_the_next_one() -> None:
    runner = TrainingRunner(gradient_model(), optimizer_model(), first_parameters())
    first = runner.train_step(batch(0), learning_rate=0.1)
    kept = {name: value.copy() for name, value in first.items()}
    runner.train_step(batch(1), learning_rate=0.1)
    assert_same_bits(first, kept)


def test_the_buffers_take_turns_and_nothing_is_allocated() -> None:
    runner = TrainingRunner(gradient_model(), optimizer_model(), first_parameters())
    addresses = []
    for step in range(4):
        addresses.append({name: value.data_ptr() for name, value in runner.parameters.items()})
        runner.train_step(batch(step), learning_rate=0.1)
    assert addresses[0] == addresses[2]
    assert addresses[1] == addresses[3]
    assert not set(addresses[0].values()) & set(addresses[1].values())


@pytest.mark.parametrize("cut", [1, 4])
def test_resuming_gives_the_same_bits(cut: int) -> None:
    whole = TrainingRunner(gradient_model(), optimizer_model(), first_parameters())
    for step in range(7):
        whole.train_step(batch(step), learning_rate=0.1)
    before = TrainingRunner(gradient_model(), optimizer_model(), first_parameters())
    for step in range(cut):
        before.train_step(batch(step), learning_rate=0.1)
    after = TrainingRunner(
        gradient_model(),
        optimizer_model(),
        numpy_values(before.parameters),
        optimizer_state=numpy_values(before.optimizer_state),
        step=before.step,
    )
    for step in range(cut, 7):
        after.train_step(batch(step), learning_rate=0.1)
    assert after.step == whole.step
    assert_same_bits(numpy_values(after.parameters), numpy_values(whole.parameters))
    assert_same_bits(numpy_values(after.optimizer_state), numpy_values(whole.optimizer_state))


def test_evaluation_sees_the_parameters_of_the_moment() -> None:
    runner = TrainingRunner(gradient_model(), optimizer_model(), first_parameters())
    evaluation = EvaluationRunner(onnx.parser.parse_model(FORWARD_MODEL), runner)
    x = np.eye(3, dtype=np.float32)
    for step in range(3):
        now = numpy_values(runner.parameters)
        # A row of the identity selects a row of w: one rounding, in the addition.
        np.testing.assert_array_equal(evaluation.run({"x": x})["prediction"], now["w"] + now["b"])
        runner.train_step(batch(step), learning_rate=0.1)


def test_initializers_to_inputs_moves_only_what_is_named_and_keeps_the_original() -> None:
    model = onnx.parser.parse_model(FORWARD_MODEL)
    moved = initializers_to_inputs(model, ["w"])
    assert [value.name for value in moved.graph.input] == ["x", "w"]
    assert [tensor.name for tensor in moved.graph.initializer] == ["b"]
    assert [value.name for value in model.graph.input] == ["x"]
    onnx.checker.check_model(moved, full_check=True)

    # Old files list their initializers among the inputs as well.
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [3, 2]))
    assert [value.name for value in initializers_to_inputs(model, ["w"]).graph.input] == ["x", "w"]


def test_refuses_what_does_not_fit() -> None:
    parameters = first_parameters()
    with pytest.raises(ValueError, match="parameters must have exactly .* missing: b; unknown: c"):
        TrainingRunner(gradient_model(), optimizer_model(), {"w": parameters["w"], "c": parameters["b"]})
    with pytest.raises(ValueError, match=r"'b' in parameters must be float32 \[2\]; got float32 \[3\]"):
        TrainingRunner(gradient_model(), optimizer_model(), {**parameters, "b": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"'b' in parameters must be float32 \[2\]; got float64 \[2\]"):
        TrainingRunner(gradient_model(), optimizer_model(), {**parameters, "b": np.zeros(2)})
    with pytest.raises(ValueError, match="optimizer_state must have exactly .* missing: b_first_moment"):
        TrainingRunner(gradient_model(), optimizer_model(), parameters, optimizer_state={})
    incomplete = gradient_model()
    del incomplete.graph.output[-1]
    with pytest.raises(ValueError, match="must output the gradient of every parameter .* it lacks b_grad"):
        TrainingRunner(incomplete, optimizer_model(), parameters)
    runner = TrainingRunner(gradient_model(), optimizer_model(), parameters)
    with pytest.raises(ValueError, match=r"exactly the inputs \['x', 'y'\]; got \['x'\]"):
        runner.train_step({"x": batch(0)["x"]}, learning_rate=0.1)
    assert runner.step == 0
