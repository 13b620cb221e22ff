"""Artifacts of onnxruntime-training go on training in the stock runtime where they stopped: small ones written
by hand, and real ones.
"""

# ruff: noqa: E501  (models in ONNX's text format read better on one line)

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from old_runtime import needs_old_runtime
from peer_artifacts import COMPARED, LEARNING_RATE, RESUMED, TRAINED, WITH_DROPOUT, peer_artifacts
from peer_checkpoint_writer import Writer

import ort_ops
from ort_ops.operators import OPERATORS
from ort_ops.training import load_checkpoint
from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.convert import convert

# -- written by hand -----------------------------------------------------------------------------------------

TRAINING = """<ir_version: 7, opset_import: ["": 14, "com.microsoft": 1]>
    g (float[N,3] x, int64[N] labels, float[3,4] w, float[4] scale, float[4] shift,
       float[3,4] "w_grad.accumulation.buffer", float[4] "shift_grad.accumulation.buffer", bool[1] lazy_reset_grad)
    => (float loss, float[N,4] scores, bool[1] "w_grad.accumulation.out", bool[1] "shift_grad.accumulation.out")
    <float loss_grad = {1}, int64[1] rows = {0}> {
    h = MatMul(x, w)
    y, mean, rstd = LayerNormalization(h, scale, shift)
    scores = Identity(y)
    loss, log_prob = SoftmaxCrossEntropyLoss(y, labels)
    dy = com.microsoft.SoftmaxCrossEntropyLossGrad(loss_grad, log_prob, labels)
    dh, dscale, shift_grad = com.microsoft.LayerNormalizationGrad(dy, h, scale, mean, rstd)
    dw = com.microsoft.FusedMatMul<transA=1>(x, dh)
    w_grad = Identity(dw)
    "w_grad.accumulation.out" = com.microsoft.InPlaceAccumulatorV2("w_grad.accumulation.buffer", w_grad, lazy_reset_grad)
    "shift_grad.accumulation.out" = com.microsoft.InPlaceAccumulatorV2("shift_grad.accumulation.buffer", shift_grad, lazy_reset_grad)
    }"""

EVALUATION = """<ir_version: 7, opset_import: ["": 14]>
    g (float[N,3] x, int64[N] labels, float[3,4] w, float[4] scale, float[4] shift) => (float loss, float[N,4] scores) {
    h = MatMul(x, w)  y, mean, rstd = LayerNormalization(h, scale, shift)
    scores = Identity(y)  loss, log_prob = SoftmaxCrossEntropyLoss(y, labels) }"""

OPTIMIZER = """<ir_version: 10, opset_import: ["": 14, "com.microsoft": 1]>
    g (float[1] learning_rate, int64[1] step, seq(float) params, seq(float) gradients, seq(float) first_order_moments, seq(float) second_order_moments)
    => (bool[1] flag) { NODES }"""

ADAMW = "flag = com.microsoft.AdamWOptimizer<ATTRIBUTES>(learning_rate, step, params, gradients, first_order_moments, second_order_moments)"

W = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
SHIFT = np.array([0.1, -0.2, 0.3, 0.0], np.float32)
SCALE = np.array([1.0, 2.0, 0.5, 1.5], np.float32)
MOMENTS = {"momentum0": W / 10, "momentum1": W * W / 10}
SHIFT_MOMENTS = {"momentum0": SHIFT / 10, "momentum1": SHIFT * SHIFT / 10}


def checkpoint(trained: Mapping[str, np.ndarray] | None = None, with_state: bool = True) -> bytes:
    writer = Writer()
    trained = trained or {"shift": SHIFT, "w": W}
    module = writer.table(writer.tensors(trained), writer.tensors({"scale": SCALE}))
    groups = []
    if with_state:
        states = [
            writer.table(writer.text("shift"), writer.tensors(SHIFT_MOMENTS)),
            writer.table(writer.text("w"), writer.tensors(MOMENTS)),
        ]
        groups = [
            writer.table(writer.text("group0"), writer.int64(3), writer.real(0.5), writer.tables(states))
        ]
    notes = writer.tables([writer.table(writer.text("epoch"), writer.int64(2))])
    return writer.finish(2, module, groups, writer.table(notes))


def unquoted(text: str) -> onnx.ModelProto:
    """The text format has no dots in names: `a.b` in quotes is written with underscores and renamed."""
    names = {
        '"w_grad.accumulation.buffer"',
        '"shift_grad.accumulation.buffer"',
        '"w_grad.accumulation.out"',
        '"shift_grad.accumulation.out"',
    }
    plain = {name: name.strip('"').replace(".", "_") for name in names}
    for name, replacement in plain.items():
        text = text.replace(name, replacement)
    model = onnx.parser.parse_model(text)
    back = {replacement: name.strip('"') for name, replacement in plain.items()}
    for value in (*model.graph.input, *model.graph.output):
        value.name = back.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [back.get(name, name) for name in node.input]
        node.output[:] = [back.get(name, name) for name in node.output]
    return model


def source(
    folder: Path,
    training: str = TRAINING,
    nodes: str = ADAMW.replace(
        "<ATTRIBUTES>", "<adam_mode=1, alpha=0.8, beta=0.9, epsilon=0.001, weight_decay=0.1>"
    ),
    data: bytes | None = None,
) -> Path:
    folder = folder / "source"
    folder.mkdir()
    onnx.save(unquoted(training), folder / "training_model.onnx")
    onnx.save(onnx.parser.parse_model(EVALUATION), folder / "eval_model.onnx")
    onnx.save(onnx.parser.parse_model(OPTIMIZER.replace("NODES", nodes)), folder / "optimizer_model.onnx")
    (folder / "checkpoint").write_bytes(data or checkpoint())
    return folder


BATCH = {
    "x": np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32),
    "labels": np.array([0, 3, -1, 2, 1]),
}


def reference(w: np.ndarray, shift: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and gradients of w and shift in float64, labels of -1 not counted."""
    x, w = BATCH["x"].astype(np.float64), w.astype(np.float64)
    h = x @ w
    rstd = 1 / np.sqrt(h.var(axis=1, keepdims=True) + 1e-5)
    xhat = (h - h.mean(axis=1, keepdims=True)) * rstd
    y = xhat * SCALE + shift
    log_prob = y - np.log(np.exp(y).sum(axis=1, keepdims=True))
    counted = BATCH["labels"] >= 0
    onehot = np.eye(4)[np.where(counted, BATCH["labels"], 0)]
    dy = np.where(counted[:, None], np.exp(log_prob) - onehot, 0) / counted.sum()
    g = dy * SCALE
    dh = rstd * (g - g.mean(axis=1, keepdims=True) - xhat * (g * xhat).mean(axis=1, keepdims=True))
    return -(log_prob * onehot)[counted].sum() / counted.sum(), x.T @ dh, dy.sum(axis=0)


def test_the_form_of_the_artifacts(tmp_path: Path) -> None:
    convert(source(tmp_path), tmp_path / "target")
    names = {path.name for path in (tmp_path / "target").iterdir()}
    assert names == {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"}
    training = onnx.load(tmp_path / "target" / "training_model.onnx")
    onnx.checker.check_model(training, full_check=True)
    assert [value.name for value in training.graph.input] == ["x", "labels", "w", "scale", "shift"]
    assert [value.name for value in training.graph.output] == ["loss", "scores", "w_grad", "shift_grad"]
    assert {entry.domain: entry.version for entry in training.opset_import} == {
        "": 18,
        "com.microsoft": 1,
        "ai.onnx.contrib": 1,
    }
    operators = [f"{node.domain}::{node.op_type}" for node in training.graph.node]
    assert [name for name in operators if not name.startswith("::")] == [
        "ai.onnx.contrib::AddLayerNormGrad",
        "com.microsoft::FusedMatMul",
    ]
    evaluation = onnx.load(tmp_path / "target" / "eval_model.onnx")
    onnx.checker.check_model(evaluation, full_check=True)
    assert evaluation.graph.input == training.graph.input
    assert [value.name for value in evaluation.graph.output] == ["loss", "scores"]
    for model in (training, evaluation):
        metadata = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
        assert metadata["ort_ops.frozen"] == ["scale"]
        assert metadata["ort_ops.additional_outputs"] == ["scores"]
        assert metadata["ort_ops.labels"] == [{"name": "labels", "classes": 4, "ignore_index": -1}]


def test_the_checkpoint_goes_over(tmp_path: Path) -> None:
    convert(source(tmp_path), tmp_path / "target")
    found = load_checkpoint(tmp_path / "target" / "checkpoint")
    assert (found.step, found.learning_rate, found.properties) == (3, 0.5, {"epoch": 2})
    assert found.frozen == {"scale"} and not found.nominal
    for name, array in {"w": W, "shift": SHIFT, "scale": SCALE}.items():
        np.testing.assert_array_equal(found.parameters[name], array)
    np.testing.assert_array_equal(found.optimizer_state["w_second_moment"], MOMENTS["momentum1"])
    assert len(found.optimizer_state) == 5


def test_loss_and_gradients(tmp_path: Path) -> None:
    """With the plugin and without."""
    convert(source(tmp_path), tmp_path / "target")
    with_plugin = onnxruntime.SessionOptions()
    ort_ops.register(with_plugin)
    for options in (onnxruntime.SessionOptions(), with_plugin):
        session = onnxruntime.InferenceSession(tmp_path / "target" / "training_model.onnx", options)
        loss, _, dw, dshift = session.run(None, {**BATCH, "w": W, "scale": SCALE, "shift": SHIFT})
        for got, want in zip((loss, dw, dshift), reference(W, SHIFT), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def resumed(folder: Path) -> tuple[Module, Optimizer, CheckpointState]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return module, Optimizer(folder / "optimizer_model.onnx", module), state


def huggingface(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One update, number 4, with learning rate 0.5, betas 0.8 and 0.9, epsilon 0.001 and decay 0.1."""
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
    w = w - 0.5 * np.sqrt(1 - 0.9**4) / (1 - 0.8**4) * m / (np.sqrt(v) + 0.001)
    return w - 0.5 * 0.1 * w


def pytorch(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
    w = w - 0.5 * 0.1 * w
    return w - 0.5 / (1 - 0.8**4) * m / (np.sqrt(v / (1 - 0.9**4)) + 0.001)


def uncorrected(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
    w = w - 0.5 * m / (np.sqrt(v) + 0.001)
    return w - 0.5 * 0.1 * w


COMMON = "alpha=0.8, beta=0.9, epsilon=0.001, weight_decay=0.1"


@pytest.mark.parametrize(
    ("attributes", "update"),
    [
        (f"adam_mode=1, {COMMON}", huggingface),
        (f"adam_mode=0, {COMMON}", pytorch),
        (f"adam_mode=1, correct_bias=0, {COMMON}", uncorrected),
    ],
)
def test_adamw_goes_on(tmp_path: Path, attributes: str, update) -> None:  # type: ignore[no-untyped-def]
    nodes = ADAMW.replace("ATTRIBUTES", attributes)
    convert(source(tmp_path, nodes=nodes), tmp_path / "target")
    module, optimizer, state = resumed(tmp_path / "target")
    assert optimizer.get_learning_rate() == 0.5
    loss, _scores = module(*BATCH.values())
    optimizer.step()
    expected, dw, dshift = reference(W, SHIFT)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(
        state.parameters["w"].data, update(W, dw, *MOMENTS.values()), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        state.parameters["shift"].data, update(SHIFT, dshift, *SHIFT_MOMENTS.values()), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(state.parameters["scale"].data, SCALE)
    assert optimizer.step_count == 4


@pytest.mark.parametrize("clip", [None, 0.01, 100.0])
def test_sgd_goes_on(tmp_path: Path, clip: float | None) -> None:
    nodes = "flag = com.microsoft.SGDOptimizerV2(learning_rate, params, gradients)"
    if clip is not None:
        nodes = f"clipped = com.microsoft.InplaceClipGradNorm<max_norm={clip}>(gradients) " + nodes.replace(
            "params, gradients", "params, clipped"
        )
    convert(source(tmp_path, nodes=nodes), tmp_path / "target")
    module, optimizer, state = resumed(tmp_path / "target")
    module(*BATCH.values())
    optimizer.step()
    _, dw, dshift = reference(W, SHIFT)
    norm = np.sqrt((dw**2).sum() + (dshift**2).sum())
    factor = 1.0 if clip is None else min(clip / (norm + 1e-6), 1.0)
    np.testing.assert_allclose(state.parameters["w"].data, W - 0.5 * factor * dw, rtol=1e-5, atol=1e-6)
    assert set(load_checkpoint(tmp_path / "target" / "checkpoint").optimizer_state) == {"step"}


def test_accumulation_is_the_run_times(tmp_path: Path) -> None:
    convert(source(tmp_path), tmp_path / "target")
    module, _optimizer, state = resumed(tmp_path / "target")
    module(*BATCH.values())
    once = np.array(state.parameters["w"].grad)
    module(*BATCH.values())
    np.testing.assert_allclose(state.parameters["w"].grad, 2 * once, rtol=1e-6)


def test_the_trained_model_is_exported(tmp_path: Path) -> None:
    """By the name of a value inside: that runtime's artifacts no longer have the model's own outputs."""
    convert(source(tmp_path), tmp_path / "target")
    module, _optimizer, _state = resumed(tmp_path / "target")
    module.export_model_for_inferencing(tmp_path / "inference.onnx", ["h"])
    session = onnxruntime.InferenceSession(tmp_path / "inference.onnx", providers=["CPUExecutionProvider"])
    [h] = session.run(None, {"x": BATCH["x"]})
    np.testing.assert_allclose(h, BATCH["x"] @ W, rtol=1e-5, atol=1e-6)


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    """That runtime reads beyond the scores."""
    convert(source(tmp_path), tmp_path / "target")
    module, _optimizer, _state = resumed(tmp_path / "target")
    with pytest.raises(ValueError, match="class indices from 0 to 3"):
        module(BATCH["x"], np.array([0, 4, 1, 1, 1]))


def test_only_training_model_and_checkpoint(tmp_path: Path) -> None:
    folder = source(tmp_path, data=checkpoint(with_state=False))
    (folder / "eval_model.onnx").unlink()
    (folder / "optimizer_model.onnx").unlink()
    (folder / "nominal_checkpoint").write_bytes(b"")
    convert(folder, tmp_path / "target")
    names = {path.name for path in (tmp_path / "target").iterdir()}
    assert names == {"training_model.onnx", "checkpoint", "nominal_checkpoint"}
    assert load_checkpoint(tmp_path / "target" / "nominal_checkpoint").nominal
    assert load_checkpoint(tmp_path / "target" / "checkpoint").optimizer_state == {}


@pytest.mark.parametrize("file", ["training_model.onnx", "checkpoint"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    folder = source(tmp_path)
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        convert(folder, tmp_path / "target")


@pytest.mark.parametrize(
    "file", ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"]
)
def test_a_damaged_file_is_named_and_nothing_is_written(tmp_path: Path, file: str) -> None:
    folder = source(tmp_path)
    (folder / file).write_bytes(b"\xff no model")
    with pytest.raises(ValueError, match=file):
        convert(folder, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_operators_without_a_replacement_are_all_named(tmp_path: Path) -> None:
    body = TRAINING.replace(
        "w_grad = Identity(dw)",
        "[a] e = com.microsoft.SoftmaxDropoutGrad(dw) [b] w_grad = com.microsoft.PythonOpGrad(e)",
    )
    with pytest.raises(
        ValueError, match=r"SoftmaxDropoutGrad \(node 'a'\), com.microsoft::PythonOpGrad \(node 'b'\)"
    ):
        convert(source(tmp_path, training=body), tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "flag = com.microsoft.LambOptimizer(learning_rate, step)"}, "its nodes are LambOptimizer"),
        ({"data": checkpoint({"w": W, "shift": SHIFT, "other": W}, False)}, "they differ in other"),
        ({"data": checkpoint({"w": W}, False)}, "they differ in shift"),
        ({"training": EVALUATION}, "is it one of onnxruntime-training's artifacts"),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, options: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(source(tmp_path, **options), tmp_path / "target")  # type: ignore[arg-type]


# -- made by onnxruntime-training ----------------------------------------------------------------------------

STOCK_OPERATORS = {"com.microsoft::FusedMatMul", "com.microsoft::Gelu"} | {
    f"{operator.domain}::{operator.name}" for operator in OPERATORS
}


def converted(name: str, folder: Path, file: str) -> Path:
    """The artifacts of a model, with this file as the checkpoint."""
    made, copy = peer_artifacts(name), folder / "source"
    copy.mkdir()
    for model in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"):
        shutil.copy(made / model, copy)
    shutil.copy(made / file, copy / "checkpoint")
    convert(copy, folder / "target")
    return folder / "target"


@needs_old_runtime
@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_on_as_in_the_peer(name: str, tmp_path: Path) -> None:
    """20 further steps from a checkpoint with optimizer state."""
    module, optimizer, state = resumed(converted(name, tmp_path, "resumed_checkpoint"))
    optimizer.set_learning_rate(LEARNING_RATE)
    data = np.load(peer_artifacts(name) / "data.npz")
    expected = np.load(peer_artifacts(name) / "trained.npz")
    losses = []
    for step in range(RESUMED, RESUMED + COMPARED):
        losses.append(float(module(data["x"][step], data["labels"][step])))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, expected["losses"][RESUMED:], rtol=1e-5)
    for parameter, value in state.parameters:
        difference = np.abs(value.data - expected[f"final/{parameter}"]).max()
        # Adam moves by up to the learning rate a step where the gradient is nothing but rounding (biases
        # before a norm, key biases)
        assert difference <= COMPARED * LEARNING_RATE * 2e-3, f"{parameter}: {difference}"


@needs_old_runtime
@pytest.mark.parametrize("name", ["pre_norm", "convolutions"])
def test_training_from_the_start_as_in_the_peer(name: str, tmp_path: Path) -> None:
    module, optimizer, _state = resumed(converted(name, tmp_path, "checkpoint"))
    optimizer.set_learning_rate(LEARNING_RATE)
    data = np.load(peer_artifacts(name) / "data.npz")
    losses = []
    for step in range(COMPARED):
        losses.append(float(module(data["x"][step], data["labels"][step])))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(
        losses, np.load(peer_artifacts(name) / "trained.npz")["losses"][:COMPARED], rtol=1e-5
    )


@needs_old_runtime
@pytest.mark.parametrize("name", [*TRAINED, *WITH_DROPOUT])
def test_nothing_is_left_of_the_peer(name: str, tmp_path: Path) -> None:
    folder = converted(name, tmp_path, "checkpoint")
    before = Counter(
        node.op_type for node in onnx.load(peer_artifacts(name) / "training_model.onnx").graph.node
    )
    for file in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"):
        model = onnx.load(folder / file)
        onnx.checker.check_model(model, full_check=True)
        assert {
            f"{node.domain}::{node.op_type}" for node in model.graph.node if node.domain
        } <= STOCK_OPERATORS
        onnxruntime.InferenceSession(folder / file, providers=["CPUExecutionProvider"])  # without the plugin
    training = onnx.load(folder / "training_model.onnx")
    after = Counter(node.op_type for node in training.graph.node)
    assert after["AddLayerNormGrad"] == before["LayerNormalizationGrad"]
    parameters = load_checkpoint(folder / "checkpoint")
    trained = [value.name for value in training.graph.input if value.name in parameters.parameters]
    gradients = [f"{parameter}_grad" for parameter in trained if parameter not in parameters.frozen]
    statistics = [f"{parameter}_updated" for parameter in trained if ".running_" in parameter]
    assert [value.name for value in training.graph.output][1:] == [*gradients, *statistics]


@needs_old_runtime
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_drops_in_training_only(name: str, tmp_path: Path) -> None:
    module, _optimizer, _state = resumed(converted(name, tmp_path, "checkpoint"))
    batch = np.random.default_rng(0).integers(0, 13, (3, 5)), np.random.default_rng(1).integers(0, 13, 15)
    trained = {float(module(*batch)) for _ in range(4)}
    module.eval()
    evaluated = {float(module(*batch)) for _ in range(4)}
    assert len(trained) == 4 and len(evaluated) == 1
