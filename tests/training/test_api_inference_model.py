"""Export for inference, from artifacts that the generator makes: outputs, inputs, parameters, whole files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.api import inference_model as inference_model_module
from ort_ops.training.artifacts import LossType, OptimType, generate_artifacts

UNITS = 32
FORWARD_MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
classifier (float[N, 5] x) => (float[N, 3] logits)
{
    hidden = MatMul(x, hidden_weight)
    normal, mean_after, variance_after =
        BatchNormalization <training_mode = 1, momentum = 0.75> (hidden, scale, shift, mean, variance)
    active = Relu(normal)
    logits = MatMul(active, output_weight)
}
"""


def forward_model() -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(FORWARD_MODEL)
    values = {
        "hidden_weight": generator.normal(size=(5, UNITS)),
        "scale": np.ones(UNITS),
        "shift": np.zeros(UNITS),
        "mean": np.zeros(UNITS),
        "variance": np.ones(UNITS),
        "output_weight": generator.normal(size=(UNITS, 3)),
    }
    for name, array in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def batch(step: int, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).normal(2.0, 3.0, size=(size, 5)).astype(np.float32)
    return x, np.argmax(x[:, :3], axis=1)


# The runtime joins layers whose weights are constant and packs matrices beforehand, so the exported model
# rounds otherwise than the evaluation model, whose weights are inputs: a few roundings of sums whose terms
# add up to about a hundred.
TOLERANCE = 3 * 100 * 2.0**-24


def plain_session(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifacts")
    generate_artifacts(
        forward_model(),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=path,
        additional_output_names=["logits"],
    )
    return path


@pytest.fixture(scope="module")
def trained(folder: Path) -> Module:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.05)
    losses = []
    for step in range(40):
        loss, _ = module(*batch(step))
        losses.append(float(loss))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[-1] < 0.5 * losses[0]
    return module


def test_running_statistics_follow_the_batches(folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    assert list(module.updated_parameters) == ["mean", "variance"]
    weight = state.parameters["hidden_weight"].data
    mean, variance = np.zeros(UNITS), np.ones(UNITS)
    for step in range(3):
        x, labels = batch(step)
        hidden = x.astype(np.float64) @ weight
        mean = 0.75 * mean + 0.25 * hidden.mean(axis=0)
        variance = 0.75 * variance + 0.25 * hidden.var(axis=0)
        module(x, labels)
        module.eval()
        module(x, labels)  # changes nothing
        module.train()
        # some ten float32 operations on values up to twenty times the result
        np.testing.assert_allclose(state.parameters["mean"].data, mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.parameters["variance"].data, variance, rtol=1e-5)
    assert not state.parameters["mean"].requires_grad


def test_the_exported_model_computes_what_evaluation_does(trained: Module, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "inference.onnx"
    trained.export_model_for_inferencing(path, ["logits"])
    assert os.listdir(path.parent) == [path.name]
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["x"]
    assert {tensor.name for tensor in model.graph.initializer} == {
        name for name, _ in trained.state.parameters
    }
    session = plain_session(path)
    trained.eval()
    for size in (1, 7):
        x, labels = batch(99, size)
        _, expected = trained(x, labels)
        np.testing.assert_allclose(session.run(["logits"], {"x": x})[0], expected, rtol=0, atol=TOLERANCE)


def test_values_inside_the_model_can_be_outputs(trained: Module, tmp_path: Path) -> None:
    trained.export_model_for_inferencing(str(tmp_path / "inner.onnx"), ["active", "hidden"])
    model = onnx.load(tmp_path / "inner.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [output.name for output in model.graph.output] == ["active", "hidden"]
    assert "output_weight" not in {tensor.name for tensor in model.graph.initializer}
    x, _ = batch(99)
    active, hidden = plain_session(tmp_path / "inner.onnx").run(None, {"x": x})
    weight = trained.state.parameters["hidden_weight"].data
    np.testing.assert_allclose(hidden, x @ weight, rtol=1e-5, atol=1e-5)
    assert active.shape == (16, UNITS)
    assert (active >= 0).all()


def test_the_loss_can_be_exported_with_its_labels(trained: Module, tmp_path: Path) -> None:
    trained.export_model_for_inferencing(tmp_path / "loss.onnx", trained.output_names()[:1])
    x, labels = batch(99)
    (loss,) = plain_session(tmp_path / "loss.onnx").run(None, {"x": x, "labels": labels})
    assert loss == pytest.approx(float(trained.eval()(x, labels)[0]), abs=TOLERANCE)


def test_export_does_not_touch_the_artifacts_or_the_training(
    trained: Module, folder: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    x, labels = batch(3)
    expected, _ = trained.eval()(x, labels)
    trained.export_model_for_inferencing(tmp_path / "inference.onnx", ["logits"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert trained(x, labels)[0] == expected


def test_unknown_outputs_are_refused(trained: Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got 'logit' \(did you mean 'logits'\?\)"):
        trained.export_model_for_inferencing(tmp_path / "no.onnx", ["logit"])
    with pytest.raises(ValueError, match="at least one; got none"):
        trained.export_model_for_inferencing(tmp_path / "no.onnx", [])
    assert not list(tmp_path.iterdir())


def test_a_failed_export_keeps_the_old_file(
    trained: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "inference.onnx"
    path.write_bytes(b"old")

    def full_disk(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trained.export_model_for_inferencing(path, ["logits"])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]


def test_a_large_model_has_its_tensors_in_a_file_of_their_own(
    trained: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_model_module, "_LARGEST_MESSAGE_BYTES", 100)
    path = tmp_path / "inference.onnx"
    trained.export_model_for_inferencing(path, ["logits"])
    assert sorted(os.listdir(tmp_path)) == ["inference.onnx", "inference.onnx.data"]
    x, labels = batch(99)
    session = plain_session(path)
    (logits,) = session.run(["logits"], {"x": x})
    np.testing.assert_allclose(logits, trained.eval()(x, labels)[1], rtol=0, atol=TOLERANCE)
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    assert onnx.TensorProto.EXTERNAL in {tensor.data_location for tensor in tensors}


def test_artifacts_with_external_data_are_loaded_by_path(folder: Path, tmp_path: Path) -> None:
    """A constant of the model that is in a file beside it."""
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(folder / name)
        big = onnx.numpy_helper.from_array(np.full((5,), 2.0, np.float32), "big_constant")
        model.graph.initializer.append(big)
        node = onnx.helper.make_node("Mul", ["x", "big_constant"], ["x_scaled"])
        for existing in model.graph.node:
            for index, value in enumerate(existing.input):
                if value == "x":
                    existing.input[index] = "x_scaled"
        model.graph.node.insert(0, node)
        onnx.external_data_helper.set_external_data(model.graph.initializer[-1], f"{name}.data")
        onnx.save(model, tmp_path / name)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x, labels = batch(0)
    original = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint"))
    np.testing.assert_array_equal(module(x, labels)[0], original(2 * x, labels)[0])
    module.eval().export_model_for_inferencing(tmp_path / "export" / "inference.onnx", ["logits"])
    session = plain_session(tmp_path / "export" / "inference.onnx")
    (logits,) = session.run(None, {"x": x})
    np.testing.assert_allclose(logits, module(x, labels)[1], rtol=0, atol=TOLERANCE)
