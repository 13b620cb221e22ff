"""The artifacts: which inputs and outputs the models have, what they compute (as PyTorch does), what is
trained by default, which files are written, what is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import onnxruntime_extensions
import pytest
import torch
import torch.nn.functional as F

from ort_ops.training import onnxblock
from ort_ops.training.artifacts import LossType, OptimType, build_artifacts, generate_artifacts
from ort_ops.training.checkpoint import load_checkpoint
from ort_ops.training.optimizer import SGD, Adam, AdamW, Lion

# Float32 rounding of sums with at most 100 terms, relative to the largest gradient of the tensor.
TOLERANCE = 1e-5

MLP = """
<ir_version: {ir}, opset_import: ["" : {opset}]>
mlp ({type}[N, 4] x) => ({type}[N, 3] y)
    <{type}[4, 8] w1 = {{{w1}}}, {type}[8] b1 = {{{b1}}}, {type}[8, 3] w2 = {{{w2}}}>
{{
    h = Gemm(x, w1, b1)
    r = Relu(h)
    y = MatMul(r, w2)
}}
"""

IR_OF_OPSET = {11: 6, 12: 7, 13: 7, 17: 8, 18: 8, 21: 10, 23: 11}


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).round(3).astype(np.float32)


def parsed(text: str, **values: np.ndarray) -> onnx.ModelProto:
    """The model of `text`, with `values` as initializers."""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in values.items()
    )
    return model


MLP_VALUES = {"w1": numbers(4, 8, seed=1), "b1": numbers(8, seed=2), "w2": numbers(8, 3, seed=3)}


def mlp(opset: int = 18, dtype: Any = np.float32) -> onnx.ModelProto:
    kind = {"float32": "float", "float64": "double"}.get(np.dtype(dtype).name, np.dtype(dtype).name)
    return parsed(
        f"""
        <ir_version: {IR_OF_OPSET.get(opset, 10)}, opset_import: ["" : {opset}]>
        mlp ({kind}[N, 4] x) => ({kind}[N, 3] y)
        {{
            h = Gemm(x, w1, b1)
            r = Relu(h)
            y = MatMul(r, w2)
        }}
        """,
        **{name: value.astype(dtype) for name, value in MLP_VALUES.items()},
    )


X = numbers(5, 4, seed=4)
LABELS = np.array([0, 1, 2, -100, 1])


def torch_mlp() -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of `mlp` with cross entropy, in float64."""
    parameters = {name: torch.tensor(value.astype(np.float64)) for name, value in MLP_VALUES.items()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    hidden = torch.relu(torch.tensor(X).double() @ parameters["w1"] + parameters["b1"])
    loss = F.cross_entropy(hidden @ parameters["w2"], torch.tensor(LABELS))
    loss.backward()
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in parameters.items()}


def inputs(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.input]


def outputs(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def run(
    model: onnx.ModelProto, parameters: Mapping[str, np.ndarray], **batch: np.ndarray
) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(outputs(model), session.run(None, {**parameters, **batch}), strict=True))


def assert_gradients(
    results: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float = TOLERANCE
) -> None:
    for name, gradient in expected.items():
        got = results[f"{name}_grad"].astype(np.float64)
        np.testing.assert_allclose(
            got, gradient, rtol=0, atol=tolerance * np.abs(gradient).max(), err_msg=name
        )


# -- what the models have and compute ------------------------------------------------------------------------


def test_inputs_and_outputs_are_in_their_order() -> None:
    made = build_artifacts(
        mlp(),
        requires_grad=["w2", "b1"],
        frozen_params=["w1"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.SGD,
        additional_output_names=("r",),
    )
    assert inputs(made.training_model) == ["x", "labels", "w1", "b1", "w2"]
    assert outputs(made.training_model) == ["loss", "r", "y", "b1_grad", "w2_grad"]
    assert inputs(made.eval_model) == ["x", "labels", "w1", "b1", "w2"]
    assert outputs(made.eval_model) == ["loss", "r", "y"]
    assert made.optimizer_model is not None
    assert {"b1", "b1_grad", "w2", "w2_grad", "learning_rate", "step"} == set(inputs(made.optimizer_model))
    for model in (made.training_model, made.eval_model):
        assert not model.graph.initializer or not {"w1", "b1", "w2"} & {
            t.name for t in model.graph.initializer
        }
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        assert json.loads(metadata["ort_ops.additional_outputs"]) == ["r"]
        assert json.loads(metadata["ort_ops.frozen"]) == ["w1"]
    assert made.checkpoint.frozen == {"w1"}
    for name, value in MLP_VALUES.items():
        np.testing.assert_array_equal(made.checkpoint.parameters[name], value)


@pytest.mark.parametrize("opset", [11, 12, 13, 17, 18, 21, 23, onnx.defs.onnx_opset_version()])
def test_every_opset_trains_as_pytorch_does(opset: int) -> None:
    model = mlp(opset)
    before = model.SerializeToString(deterministic=True)
    made = build_artifacts(model, loss=LossType.CrossEntropyLoss)
    assert model.SerializeToString(deterministic=True) == before
    assert made.training_model.opset_import[0].version == max(opset, 18)
    loss, gradients = torch_mlp()
    for artifact in (made.training_model, made.eval_model):
        results = run(artifact, made.checkpoint.parameters, x=X, labels=LABELS)
        np.testing.assert_allclose(results["loss"], loss, rtol=1e-6)
    results = run(made.training_model, made.checkpoint.parameters, x=X, labels=LABELS)
    assert_gradients(results, gradients)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_train(dtype: type) -> None:
    made = build_artifacts(mlp(dtype=dtype), loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW)
    parameters = made.checkpoint.parameters
    results = run(made.training_model, parameters, x=X.astype(dtype), labels=LABELS)
    loss, gradients = torch_mlp()
    # The logits of five rows are rounded to float16, the gradients at every product on the way back.
    tolerance = 8 * float(np.finfo(dtype).eps)
    assert results["loss"].dtype == (np.float64 if dtype is np.float64 else np.float32)
    np.testing.assert_allclose(results["loss"], loss, rtol=tolerance)
    assert all(results[f"{name}_grad"].dtype == dtype for name in parameters)
    assert_gradients(results, gradients, tolerance)


def test_bfloat16_trains_in_the_standards_reference() -> None:
    """The CPU provider has no bfloat16 products; onnx.reference computes them."""
    made = build_artifacts(mlp(dtype=ml_dtypes.bfloat16), loss=LossType.CrossEntropyLoss)
    reference = onnx.reference.ReferenceEvaluator(made.training_model)
    feeds = {**made.checkpoint.parameters, "x": X.astype(ml_dtypes.bfloat16), "labels": LABELS}
    results = dict(zip(outputs(made.training_model), reference.run(None, feeds), strict=True))
    loss, gradients = torch_mlp()
    tolerance = 8 * float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)
    assert results["loss"].dtype == np.float32
    np.testing.assert_allclose(results["loss"], loss, rtol=tolerance)
    assert_gradients(results, gradients, tolerance)


def test_the_models_own_scalar_is_a_loss() -> None:
    model = mlp()
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["y"], ["mean"], keepdims=0))
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("mean", onnx.TensorProto.FLOAT, []))
    made = build_artifacts(model)
    assert inputs(made.training_model) == ["x", "w1", "b1", "w2"]
    assert outputs(made.training_model) == ["mean", "y", "w1_grad", "b1_grad", "w2_grad"]
    results = run(made.training_model, made.checkpoint.parameters, x=X)
    hidden = np.maximum(X @ MLP_VALUES["w1"] + MLP_VALUES["b1"], 0)
    expected = np.repeat(hidden.sum(0)[:, None] / 15, 3, axis=1)
    np.testing.assert_allclose(results["w2_grad"], expected, rtol=1e-5)


OWN_LOSS = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 4] x) => (float[] loss)
{
    product = Mul(x, w)
    loss = ReduceMean <keepdims = 0> (product)
}
"""


def test_outputs_may_be_without_shape() -> None:
    model = parsed(OWN_LOSS, w=numbers(4, seed=11))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    artifacts = build_artifacts(model)
    assert outputs(artifacts.training_model) == ["loss", "w_grad"]


def test_loss_input_names_choose_what_the_loss_reads() -> None:
    """Without them the second output would be taken for the labels."""
    model = mlp()
    model.graph.output.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["N", 8]))
    made = build_artifacts(model, loss=LossType.CrossEntropyLoss, loss_input_names=["y"])
    assert outputs(made.eval_model) == ["loss", "y", "r"]
    assert inputs(made.eval_model)[:2] == ["x", "labels"]


OTHER_OPERATORS = {
    "of the runtime": "h = com.microsoft.FusedMatMul(x, w)\n y = com.microsoft.BiasGelu(h, b)",
    "added to the standard's": "h = MatMul(x, w)\n y = SimplifiedLayerNormalization(h, b)",
    "of the model": "h = MatMul(x, w)\n y = own.Twice(h)",
}
TWICE = """
<opset_import: ["" : 17], domain: "own">
Twice (a) => (r) { r = Add(a, a) }
"""


@pytest.mark.parametrize("loss_input", ["y", "h"])
@pytest.mark.parametrize("body", OTHER_OPERATORS.values(), ids=OTHER_OPERATORS.keys())
def test_a_loss_goes_on_operators_that_onnx_does_not_know(body: str, loss_input: str) -> None:
    model = parsed(
        f"""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1, "own" : 1]>
        g (float[N, 4] x) => (float[N, 4] y) {{ {body} }}
        {TWICE}
        """,
        w=numbers(4, 4, seed=22),
        b=numbers(4, seed=23),
    )
    made = build_artifacts(model, ["w"], loss=LossType.MSELoss, loss_input_names=[loss_input])
    results = []
    for artifact in (made.training_model, made.eval_model):
        session = ort.InferenceSession(artifact.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = {**made.checkpoint.parameters, "x": X, "target": X}
        results.append(session.run(["loss", "y"], feeds))
    if loss_input == "h":
        expected = np.mean((X @ numbers(4, 4, seed=22) - X) ** 2)
    else:
        expected = np.mean((results[0][1] - X) ** 2)
    for loss, _ in results:
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_tied_weight_gets_the_sum_of_its_gradients() -> None:
    table = numbers(7, 4, seed=5)
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        tied (int64[B, T] ids) => (float[B, T, 7] y)
        {
            e = Gather(table, ids)
            t = Transpose<perm = [1, 0]>(table)
            y = MatMul(e, t)
        }
        """,
        table=table,
    )
    made = build_artifacts(model, loss=LossType.CrossEntropyLoss)
    ids, labels = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[2, 3, -100], [5, 6, 0]])
    results = run(made.training_model, made.checkpoint.parameters, ids=ids, labels=labels)
    weight = torch.tensor(table.astype(np.float64), requires_grad=True)
    scores = weight[torch.tensor(ids)] @ weight.T
    F.cross_entropy(scores.reshape(-1, 7), torch.tensor(labels.reshape(-1))).backward()
    assert weight.grad is not None
    assert_gradients(results, {"table": weight.grad.numpy()})


@pytest.mark.parametrize("name", ["bert_mlm_dynamo", "vit_cls_legacy"])
def test_an_exported_transformer_trains(name: str, tmp_path: Path) -> None:
    """The gradients are those that PyTorch computed when the model was exported."""
    folder = Path(__file__).parents[1] / "data" / "gradcheck"
    expected = np.load(folder / f"{name}.npz")
    trained = [key.removeprefix("grad:") for key in expected.files if key.startswith("grad:")]
    generate_artifacts(
        folder / f"{name}.onnx", requires_grad=trained, optimizer=OptimType.AdamW, artifact_directory=tmp_path
    )
    checkpoint = load_checkpoint(tmp_path / "checkpoint")
    assert sorted(checkpoint.parameters) == sorted(trained)
    batch = {key.removeprefix("in:"): expected[key] for key in expected.files if key.startswith("in:")}
    model = onnx.load(tmp_path / "training_model.onnx")
    results = run(model, checkpoint.parameters, **batch)
    np.testing.assert_allclose(results["loss"], expected["loss"], rtol=1e-5)
    # As in the test of the gradients themselves: rounding, relative to the tensor or to the largest gradient.
    largest = max(np.abs(expected[f"grad:{key}"]).max() for key in trained)
    for key in trained:
        reference = expected[f"grad:{key}"]
        tolerance = 1e-3 * max(np.abs(reference).max(), 1e-3 * largest)
        np.testing.assert_allclose(results[f"{key}_grad"], reference, rtol=0, atol=tolerance, err_msg=key)


# -- modes ---------------------------------------------------------------------------------------------------

CNN_VALUES = {
    "conv": numbers(4, 2, 3, 3, seed=6),
    "scale": np.array([1.0, 0.5, 2.0, 1.5], np.float32),
    "bias": numbers(4, seed=7),
    "mean": numbers(4, seed=8) / 10,
    "var": np.array([1.0, 0.5, 2.0, 1.5], np.float32),
    "fc": numbers(4, 3, seed=9),
}
IMAGES = numbers(6, 2, 5, 5, seed=10)
CLASSES = np.array([0, 1, 2, 0, 1, 2])


def cnn(opset: int, training: bool) -> onnx.ModelProto:
    """A convolution with batch norm, as exporters write it in evaluation and in training mode."""
    outputs = "n, new_mean, new_var" if training and opset >= 14 else "n"
    mode = "training_mode = 1, " if training and opset >= 14 else ""
    return parsed(
        f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        cnn (float[N, 2, H, W] x) => (float[N, 3] y)
        {{
            c = Conv<pads = [1, 1, 1, 1]>(x, conv)
            {outputs} = BatchNormalization<{mode}momentum = 0.75, epsilon = 0.001>(c, scale, bias, mean, var)
            r = Relu(n)
            p = GlobalAveragePool(r)
            f = Flatten(p)
            y = MatMul(f, fc)
        }}
        """,
        **CNN_VALUES,
    )


def torch_cnn(training: bool) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loss, gradients and the running statistics after it, in float64."""
    parameters = {name: torch.tensor(value.astype(np.float64)) for name, value in CNN_VALUES.items()}
    for name in ("conv", "scale", "bias", "fc"):
        parameters[name].requires_grad_()
    hidden = F.conv2d(torch.tensor(IMAGES).double(), parameters["conv"], padding=1)
    normal = F.batch_norm(
        hidden,
        parameters["mean"],
        parameters["var"],
        parameters["scale"],
        parameters["bias"],
        training=training,
        momentum=0.25,
        eps=0.001,
    )
    loss = F.cross_entropy(torch.relu(normal).mean((2, 3)) @ parameters["fc"], torch.tensor(CLASSES))
    loss.backward()
    gradients = {name: value.grad.numpy() for name, value in parameters.items() if value.grad is not None}
    # PyTorch keeps the variance of a sample, ONNX that of the population.
    count = hidden.numel() // hidden.shape[1]
    sample_share = parameters["var"] - 0.75 * torch.tensor(CNN_VALUES["var"]).double()
    variance = parameters["var"] - sample_share / count if training else parameters["var"]
    return loss.item(), gradients, {"mean": parameters["mean"].numpy(), "var": variance.numpy()}


@pytest.mark.parametrize("opset, training", [(11, False), (13, False), (17, False), (17, True), (21, True)])
def test_batch_norm_is_trained_and_evaluated_as_in_pytorch(opset: int, training: bool) -> None:
    made = build_artifacts(cnn(opset, training), loss=LossType.CrossEntropyLoss)
    parameters = made.checkpoint.parameters
    assert made.checkpoint.frozen == {"mean", "var"}
    assert outputs(made.training_model)[2:] == [
        *(f"{name}_grad" for name in ("conv", "scale", "bias", "fc")),
        "mean_updated",
        "var_updated",
    ]
    results = run(made.training_model, parameters, x=IMAGES, labels=CLASSES)
    loss, gradients, statistics = torch_cnn(training=True)
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-6)
    assert_gradients(results, gradients)
    for name, value in statistics.items():
        np.testing.assert_allclose(results[f"{name}_updated"], value, rtol=1e-5, atol=1e-6)
    loss, _, _ = torch_cnn(training=False)
    results = run(made.eval_model, parameters, x=IMAGES, labels=CLASSES)
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_can_keep_its_statistics(training: bool) -> None:
    made = build_artifacts(cnn(17, training), loss=LossType.CrossEntropyLoss, train_batch_norm=False)
    assert made.checkpoint.frozen == {"mean", "var"}
    results = run(made.training_model, made.checkpoint.parameters, x=IMAGES, labels=CLASSES)
    assert not any(name.endswith("_updated") for name in results)
    loss, gradients, _ = torch_cnn(training=False)
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-6)
    assert_gradients(results, gradients)


def test_what_pytorchs_newer_exporter_has_merged_or_named_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Its numbers are no parameters, its transposed weights are; merged ones may be tied by intention."""
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        exported (float[N, 4] x) => (float[N, 4] y)
        {
            n = LayerNormalization(x, scale, bias)
            h = MatMul(n, val_3)
            s = Mul(h, val_12)
            y = LayerNormalization(s, scale, shift)
        }
        """,
        scale=np.ones(4, np.float32),
        bias=np.zeros(4, np.float32),
        shift=np.zeros(4, np.float32),
        val_3=numbers(4, 4, seed=19),
        val_12=np.array([0.5], np.float32),
    )
    with caplog.at_level(logging.WARNING, "ort_ops"):
        made = build_artifacts(model, loss=LossType.MSELoss)
    assert list(made.checkpoint.parameters) == ["scale", "bias", "shift", "val_3"]
    (record,) = caplog.records
    assert "several nodes read scale, whose elements are all equal" in record.getMessage()


def test_equal_parameters_that_an_exporter_stores_once_are_trained_apart() -> None:
    """PyTorch's older exporter writes those of an untrained model so; a matrix that is shared is tied."""
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        fresh (float[N, 4] x) => (float[N, 4] y)
        {
            bias = Identity(mean)
            var = Identity(scale)
            tied = Identity(w)
            n = BatchNormalization(x, scale, bias, mean, var)
            m = MatMul(n, w)
            y = MatMul(m, tied)
        }
        """,
        scale=np.ones(4, np.float32),
        mean=np.zeros(4, np.float32),
        w=numbers(4, 4, seed=19),
    )
    made = build_artifacts(model, loss=LossType.MSELoss)
    assert inputs(made.training_model) == ["x", "target", "scale", "mean", "w", "bias", "var"]
    assert outputs(made.training_model)[2:] == [
        *("scale_grad", "w_grad", "bias_grad"),
        *("mean_updated", "var_updated"),
    ]
    assert made.checkpoint.frozen == {"mean", "var"}
    results = run(made.training_model, made.checkpoint.parameters, x=X, target=X)
    np.testing.assert_allclose(results["mean_updated"], 0.1 * X.mean(0), rtol=1e-5, atol=1e-6)
    weight = torch.tensor(numbers(4, 4, seed=19), dtype=torch.float64, requires_grad=True)
    x = torch.tensor(X, dtype=torch.float64)
    F.mse_loss(F.batch_norm(x, None, None, training=True) @ weight @ weight, x).backward()
    assert weight.grad is not None
    assert_gradients(results, {"w": weight.grad.numpy()})


def test_statistics_that_are_no_parameters_are_not_updated() -> None:
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        computed (float[N, 4] x) => (float[N, 4] y)
        {
            mean = Neg(shift)
            y = BatchNormalization(x, scale, bias, mean, var)
        }
        """,
        shift=numbers(4, seed=20),
        **{name: CNN_VALUES[name] for name in ("scale", "bias", "var")},
    )
    made = build_artifacts(model, frozen_params=["shift"], loss=LossType.MSELoss)
    assert outputs(made.training_model)[2:] == ["scale_grad", "bias_grad", "var_updated"]
    results = run(made.training_model, made.checkpoint.parameters, x=X, target=X)
    x = torch.tensor(X)
    normal = F.batch_norm(
        x, None, None, torch.tensor(CNN_VALUES["scale"]), torch.tensor(CNN_VALUES["bias"]), training=True
    )
    np.testing.assert_allclose(results["y"], normal, rtol=1e-5, atol=1e-5)


def test_shared_statistics_are_updated_one_after_the_other() -> None:
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        twice (float[N, 4] a, float[N, 4] b) => (float y, float[4] new_mean)
        {
            n, new_mean, v = BatchNormalization<training_mode = 1, momentum = 0.5>(a, scale, bias, mean, var)
            m, m2, v2 = BatchNormalization<training_mode = 1, momentum = 0.5>(b, scale, bias, mean, var)
            s = Mul(n, m)
            q = Mul(s, s)
            y = ReduceMean<keepdims = 0>(q)
        }
        """,
        **{name: CNN_VALUES[name] for name in ("scale", "bias", "mean", "var")},
    )
    made = build_artifacts(model)
    a, b = numbers(8, 4, seed=11), numbers(8, 4, seed=12)
    results = run(made.training_model, made.checkpoint.parameters, a=a, b=b)
    first = 0.5 * CNN_VALUES["mean"] + 0.5 * a.mean(0)
    np.testing.assert_allclose(results["new_mean"], first, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results["mean_updated"], 0.5 * first + 0.5 * b.mean(0), rtol=1e-5, atol=1e-6)
    evaluated = run(made.eval_model, made.checkpoint.parameters, a=a, b=b)
    np.testing.assert_array_equal(evaluated["new_mean"], CNN_VALUES["mean"])


def dropout(ending: str) -> onnx.ModelProto:
    return parsed(
        f"""
        <ir_version: 8, opset_import: ["" : 17]>
        dropout (float[N, 4] x) => (float y) <float ratio = {{0.25}}, bool yes = {{1}}, bool no = {{0}}>
        {{
            h = MatMul(x, w)
            d = Dropout<seed = 3>(h, ratio{ending})
            y = ReduceMean<keepdims = 0>(d)
        }}
        """,
        w=numbers(4, 64, seed=13),
    )


@pytest.mark.parametrize("ending, active", [(", yes", True), (", no", False), ("", False)])
def test_dropout_is_active_in_training_if_the_model_says_so(ending: str, active: bool) -> None:
    made = build_artifacts(dropout(ending), additional_output_names=["h", "d"])
    parameters = made.checkpoint.parameters
    evaluated = run(made.eval_model, parameters, x=X)
    np.testing.assert_array_equal(evaluated["d"], evaluated["h"])
    trained = run(made.training_model, parameters, x=X)
    dropped = trained["d"] == 0
    kept = np.where(dropped, 0, trained["h"] / 0.75) if active else trained["h"]
    np.testing.assert_allclose(trained["d"], kept, rtol=1e-6)
    # 320 elements, of which a quarter is dropped: 80 with a deviation of 8.
    assert (40 < dropped.sum() < 120) == active
    expected = X.T @ np.where(dropped, 0, 1 / 0.75 if active else 1) / dropped.size
    np.testing.assert_allclose(trained["w_grad"], expected, rtol=1e-4, atol=1e-7)


def test_a_model_for_evaluation_can_be_given() -> None:
    """Then the other one is trained as it stands, with the updates that it states."""
    text = """
        <ir_version: 8, opset_import: ["" : 18]>
        centred (float[N, 4] x) => (float[N, 3] y{extra})
        {{
            {body}
            y = MatMul(c, w)
        }}
        """
    batch = """
            m = ReduceMean<keepdims = 0>(x, axes)
            old = Add(mean, m)
            mean_updated = Mul(old, half)
            c = Sub(x, m)"""
    values = {
        "w": numbers(4, 3, seed=14),
        "mean": numbers(4, seed=15),
        "axes": np.array([0]),
        "half": np.array(0.5, np.float32),
    }
    trained = parsed(text.format(extra=", float[4] mean_updated", body=batch), **values)
    evaluated = parsed(text.format(extra="", body="c = Sub(x, mean)"), w=values["w"], mean=values["mean"])
    made = build_artifacts(
        trained, loss=LossType.CrossEntropyLoss, evaluation_model=evaluated, loss_input_names=["y"]
    )
    assert made.checkpoint.frozen == {"mean"}
    assert outputs(made.training_model) == ["loss", "y", "w_grad", "mean_updated"]
    assert outputs(made.eval_model) == ["loss", "y"]
    assert inputs(made.training_model) == inputs(made.eval_model)
    results = run(made.training_model, made.checkpoint.parameters, x=X, labels=LABELS)
    np.testing.assert_allclose(
        results["mean_updated"], (values["mean"] + X.mean(0)) / 2, rtol=1e-5, atol=1e-6
    )
    results = run(made.eval_model, made.checkpoint.parameters, x=X, labels=LABELS)
    np.testing.assert_allclose(results["y"], (X - values["mean"]) @ values["w"], rtol=1e-5, atol=1e-6)


# -- mixed precision -----------------------------------------------------------------------------------------


def test_float16_compute_scales_the_loss() -> None:
    made = build_artifacts(
        mlp(), loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, compute_type="float16"
    )
    assert inputs(made.training_model) == ["x", "labels", "w1", "b1", "w2", "loss_scale"]
    assert inputs(made.eval_model) == ["x", "labels", "w1", "b1", "w2"]
    assert outputs(made.training_model) == ["loss", "y", "w1_grad", "b1_grad", "w2_grad"]
    assert made.optimizer_model is not None
    assert {"loss_scale_updated", "good_steps_updated", "skipped"} <= set(outputs(made.optimizer_model))
    loss, gradients = torch_mlp()
    scale = np.array(1024, np.float32)
    parameters = made.checkpoint.parameters
    results = run(made.training_model, parameters, x=X, labels=LABELS, loss_scale=scale)
    tolerance = 8 * float(np.finfo(np.float16).eps)
    np.testing.assert_allclose(results["loss"], loss, rtol=tolerance)
    assert all(results[f"{name}_grad"].dtype == np.float32 for name in parameters)
    assert_gradients(results, {name: 1024 * value for name, value in gradients.items()}, tolerance)
    kinds = {"Gemm", "MatMul", "FusedMatMul"}
    narrow = [node for node in made.training_model.graph.node if node.op_type in kinds]
    assert narrow and not any(
        node.op_type in kinds for node in made.eval_model.graph.node if "cast" in node.name
    )


@pytest.mark.parametrize(
    "compute_type, loss_scale, initial",
    [
        ("float16", None, 65536.0),
        ("float16", 128.0, 128.0),
        ("float16", 1, 1.0),
        ("bfloat16", None, None),
        ("bfloat16", "dynamic", 65536.0),
        (None, None, None),
        (None, 4.0, 4.0),
    ],
)
def test_the_loss_scale_is_chosen(compute_type: str | None, loss_scale: Any, initial: float | None) -> None:
    made = build_artifacts(
        mlp(),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        compute_type=compute_type,
        loss_scale=loss_scale,
    )
    assert made.optimizer_model is not None
    metadata = {entry.key: entry.value for entry in made.optimizer_model.metadata_props}
    found = metadata.get("ort_ops.initial_loss_scale")
    assert (None if found is None else float(found)) == initial
    assert ("loss_scale" in inputs(made.training_model)) == (initial is not None)


# -- what is trained -----------------------------------------------------------------------------------------


def choosable() -> onnx.ModelProto:
    """Everything that looks like a parameter or is one."""
    mask = np.zeros((1, 4), np.float32)
    mask[0, 3] = np.finfo(np.float32).min
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        choosable (float[N, 4] x) => (float y) <float factor = {0.5}, int64[2] shape = {-1, 4}>
        {
            in_node = Constant<value = float[4] {1, 2, 3, 4}>()
            limited = Min(x, limits)
            a = Add(limited, mask)
            s = Softmax(a)
            "/layer/Constant_3_output_0" = Constant<value = float[4] {2, 2, 2, 2}>()
            f = Mul(s, "/layer/Constant_3_output_0")
            m = Mul(f, in_node)
            h = Mul(m, factor)
            r = Reshape(h, shape)
            p = MatMul(r, w)
            q = Add(p, b)
            index = ArgMax(unreachable)
            y = ReduceMean<keepdims = 0>(q)
        }
        """,
        mask=mask,
        limits=np.array([np.inf, 1e3, 1e3, 1e3], np.float32),
        w=numbers(4, 1, seed=16),
        b=np.zeros(1, np.float32),
        unreachable=numbers(4, seed=17),
        unused=numbers(4, seed=18),
    )
    return model


@pytest.mark.parametrize(
    "requires_grad, frozen_params, trained, frozen",
    [
        (None, None, ["w", "b", "in_node"], []),
        (None, ["in_*"], ["w", "b"], ["in_node"]),
        (None, ("w", "mask"), ["b", "in_node"], ["w", "mask"]),
        (["w"], None, ["w"], []),
        (["w", "factor"], ["b"], ["factor", "w"], ["b"]),
        (["?"], ["in_node"], ["w", "b"], ["in_node"]),
        (["*"], None, ["w", "b", "in_node"], ["unreachable", "unused"]),
        (["mask", "w"], None, ["mask", "w"], []),
    ],
)
def test_what_is_trained(
    requires_grad: Sequence[str] | None,
    frozen_params: Sequence[str] | None,
    trained: list[str],
    frozen: list[str],
) -> None:
    made = build_artifacts(choosable(), requires_grad, frozen_params)
    gradients = [name for name in outputs(made.training_model) if name.endswith("_grad")]
    assert gradients == [f"{name}_grad" for name in trained]
    assert made.checkpoint.frozen == set(frozen)
    assert inputs(made.training_model)[1:] == list(made_order(made.training_model, trained, frozen))


def made_order(model: onnx.ModelProto, trained: list[str], frozen: list[str]) -> list[str]:
    """The parameters in the order of the initializers: as they were given, Constant nodes last."""
    order = ["factor", "shape", "mask", "limits", "w", "b", "unreachable", "unused", "in_node"]
    return sorted([*trained, *frozen], key=order.index)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("low", ["min", "-inf"])
def test_masks_of_every_type_are_left_alone(low: str, dtype: Any) -> None:
    model = mlp(dtype=dtype)
    mask = np.zeros(8, dtype)
    mask[0] = -np.inf if low == "-inf" else ml_dtypes.finfo(dtype).min
    model.graph.initializer.append(onnx.numpy_helper.from_array(mask, "mask"))
    model.graph.node[1].input[0] = "masked"
    model.graph.node.insert(1, onnx.helper.make_node("Add", ["h", "mask"], ["masked"]))
    made = build_artifacts(model, loss=LossType.CrossEntropyLoss)
    assert sorted(made.checkpoint.parameters) == ["b1", "w1", "w2"]


def test_a_parameter_that_the_loss_does_not_use_is_kept_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        made = build_artifacts(choosable(), requires_grad=["w", "unused"])
    assert made.checkpoint.frozen == {"unused"}
    assert "the loss does not depend on unused" in caplog.text


def test_initializers_among_the_inputs_are_parameters() -> None:
    """As models of IR version 3 have them."""
    model = mlp()
    model.ir_version = 3
    for name, value in MLP_VALUES.items():
        model.graph.input.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, value.shape)
        )
    made = build_artifacts(model, ["w1", "w2"], loss=LossType.CrossEntropyLoss)
    for artifact in (made.training_model, made.eval_model):
        assert inputs(artifact) == ["x", "labels", "w1", "w2"]
        assert "b1" in [tensor.name for tensor in artifact.graph.initializer]
        results = run(artifact, made.checkpoint.parameters, x=X, labels=LABELS)
        np.testing.assert_allclose(results["loss"], torch_mlp()[0], rtol=1e-6)
    results = run(made.training_model, made.checkpoint.parameters, x=X, labels=LABELS)
    assert_gradients(results, {name: torch_mlp()[1][name] for name in ("w1", "w2")})


# -- optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer, state",
    [
        (OptimType.AdamW, {"_first_moment", "_second_moment"}),
        (OptimType.Adam, {"_first_moment", "_second_moment"}),
        (OptimType.SGD, set()),
        (OptimType.Lion, {"_first_moment"}),
        (AdamW(weight_decay=0.1), {"_first_moment", "_second_moment"}),
        (Adam(), {"_first_moment", "_second_moment"}),
        (SGD(momentum=0.9), {"_momentum"}),
        (Lion(), {"_first_moment"}),
        (onnxblock.optim.AdamW(), {"_first_moment", "_second_moment"}),
        (onnxblock.optim.SGD(), set()),
    ],
    ids=lambda value: "_".join(sorted(value)) if isinstance(value, set) else type(value).__name__,
)
def test_optimizers_are_built(optimizer: Any, state: set[str]) -> None:
    made = build_artifacts(mlp(), loss=LossType.CrossEntropyLoss, optimizer=optimizer)
    assert made.optimizer_model is not None
    onnx.checker.check_model(made.optimizer_model, full_check=True)
    suffixes = {name.removeprefix("w1") for name in inputs(made.optimizer_model) if name.startswith("w1")}
    assert suffixes - {"", "_grad"} == {suffix for suffix in state}
    assert {f"{name}_updated" for name in MLP_VALUES} <= set(outputs(made.optimizer_model))


# -- files ---------------------------------------------------------------------------------------------------

FILES = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]


def listed(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_external_data_that_is_missing_or_cut_off_is_said(tmp_path: Path) -> None:
    path, data = tmp_path / "model.onnx", tmp_path / "weights.bin"
    onnx.save(mlp(), path, save_as_external_data=True, location=data.name, size_threshold=0)
    data.write_bytes(data.read_bytes()[:10])
    with pytest.raises(ValueError, match="external data of '.*model.onnx' cannot be read: .*'w1'"):
        build_artifacts(path, loss=LossType.CrossEntropyLoss)
    data.unlink()
    with pytest.raises(ValueError, match="external data of '.*model.onnx' cannot be read: .*weights.bin"):
        build_artifacts(path, loss=LossType.CrossEntropyLoss)


def test_an_output_without_a_written_shape_has_the_inferred_one() -> None:
    model = mlp()
    model.graph.output[0].type.tensor_type.ClearField("shape")
    made = build_artifacts(model, loss=LossType.CrossEntropyLoss).training_model
    assert made == build_artifacts(mlp(), loss=LossType.CrossEntropyLoss).training_model


@pytest.mark.parametrize("how", ["str", "path", "bytes", "proto", "external"])
def test_models_come_in_every_form(how: str, tmp_path: Path) -> None:
    path = tmp_path / "forward" / "model.onnx"
    path.parent.mkdir()
    onnx.save(mlp(), path, save_as_external_data=how == "external", location="weights.bin", size_threshold=0)
    forms: dict[str, Any] = {"str": str(path), "bytes": path.read_bytes(), "proto": mlp()}
    folder = tmp_path / "made" / "deep"
    generate_artifacts(
        forms.get(how, path),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder if how == "path" else str(folder),
    )
    assert listed(folder) == FILES
    checkpoint = load_checkpoint(folder / "checkpoint")
    results = run(onnx.load(folder / "training_model.onnx"), checkpoint.parameters, x=X, labels=LABELS)
    assert_gradients(results, torch_mlp()[1])


def test_files_have_the_prefix_and_other_forms(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generate_artifacts(
        mlp(),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        prefix="a_",
        ort_format=True,
        nominal_checkpoint=True,
    )
    models = ("eval_model", "optimizer_model", "training_model")
    expected = [
        f"a_{model}.{kind}" for model in models for kind in ("onnx", "ort", "required_operators.config")
    ]
    assert listed(tmp_path) == sorted(["a_checkpoint", "a_nominal_checkpoint", *expected])
    assert capfd.readouterr().out == ""
    nominal = load_checkpoint(tmp_path / "a_nominal_checkpoint")
    assert nominal.nominal and {n: v.shape for n, v in nominal.parameters.items()} == {
        n: v.shape for n, v in MLP_VALUES.items()
    }
    session = ort.InferenceSession(str(tmp_path / "a_training_model.ort"), providers=["CPUExecutionProvider"])
    results = session.run(["w2_grad"], {"x": X, "labels": LABELS, **MLP_VALUES})
    assert_gradients({"w2_grad": results[0]}, {"w2": torch_mlp()[1]["w2"]})


def test_custom_operators_beside_the_way_of_gradients_stay(tmp_path: Path) -> None:
    """ONNX Runtime's own format needs their library when it is written, and when it is run."""
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 17, "ai.onnx.contrib" : 1]>
        custom (float[N, 4] x) => (float[N, 3] y, float[N, 4] positive)
        {
            y = MatMul(x, w)
            negative, positive = ai.onnx.contrib.NegPos(x)
        }
        """,
        w=numbers(4, 3, seed=21),
    )
    library = onnxruntime_extensions.get_library_path()
    arguments: dict[str, Any] = {
        "loss": LossType.CrossEntropyLoss,
        "loss_input_names": ["y"],
        "ort_format": True,
    }
    with pytest.raises(RuntimeError, match=r"cannot convert training_model.onnx.*custom_op_library"):
        generate_artifacts(model, artifact_directory=tmp_path, **arguments)
    assert listed(tmp_path) == []
    generate_artifacts(model, artifact_directory=tmp_path, custom_op_library=library, **arguments)
    options = ort.SessionOptions()
    options.register_custom_ops_library(library)
    for name in ("training_model.onnx", "training_model.ort"):
        session = ort.InferenceSession(tmp_path / name, options, providers=["CPUExecutionProvider"])
        positive, gradient = session.run(
            ["positive", "w_grad"], {"x": X, "labels": LABELS, "w": numbers(4, 3, seed=21)}
        )
        np.testing.assert_array_equal(positive, np.maximum(X, 0))
        assert gradient.shape == (4, 3)


def test_without_an_optimizer_there_is_no_optimizer_model(tmp_path: Path) -> None:
    generate_artifacts(mlp(), loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    assert listed(tmp_path) == [name for name in FILES if name != "optimizer_model.onnx"]


@pytest.mark.parametrize("where", ["building", "writing"])
def test_a_failure_leaves_the_older_files_whole(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"loss": LossType.CrossEntropyLoss, "artifact_directory": tmp_path}
    generate_artifacts(mlp(), optimizer=OptimType.AdamW, **arguments)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    if where == "building":
        arguments["requires_grad"] = ["nothing"]
    else:

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr("ort_ops.training.artifact_files.save_checkpoint", fail)
    with pytest.raises((OSError, ValueError)):
        generate_artifacts(mlp(), optimizer=OptimType.SGD, **arguments)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_same_call_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        generate_artifacts(
            mlp(),
            loss=LossType.CrossEntropyLoss,
            optimizer=OptimType.AdamW,
            artifact_directory=tmp_path / name,
        )
    for file in FILES:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


# -- what is refused -----------------------------------------------------------------------------------------


def _no_rule() -> onnx.ModelProto:
    return parsed(
        """
        <ir_version: 8, opset_import: ["" : 17, "my" : 1]>
        g (float[N, 4] x) => (float[N, 3] y)
        {
            h = MatMul(x, w)
            y = my.Strange(h)
        }
        """,
        w=numbers(4, 3, seed=1),
    )


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "unknown name": (
        lambda: build_artifacts(mlp(), ["w11"], loss=LossType.CrossEntropyLoss),
        ValueError,
        r"requires_grad names 'w11', which matches no tensor that the model stores; close to it: 'w1'",
    ),
    "pattern without a match": (
        lambda: build_artifacts(mlp(), frozen_params=["z*"], loss=LossType.CrossEntropyLoss),
        ValueError,
        r"frozen_params names 'z\*', which matches no tensor.*there are 'w1', 'b1', 'w2'",
    ),
    "trained and frozen": (
        lambda: build_artifacts(mlp(), ["w*"], ["w1"], loss=LossType.CrossEntropyLoss),
        ValueError,
        "'w1' is in requires_grad and in frozen_params",
    ),
    "a running statistic": (
        lambda: build_artifacts(cnn(17, False), ["mean"], loss=LossType.CrossEntropyLoss),
        ValueError,
        "requires_grad names 'mean', a running statistic of a BatchNormalization",
    ),
    "an integer": (
        lambda: build_artifacts(choosable(), ["shape"]),
        ValueError,
        r"requires_grad names 'shape' \(int64\)",
    ),
    "not differentiable": (
        lambda: build_artifacts(_argmax(), ["w"]),
        ValueError,
        "does not depend on it through differentiable operators.*ArgMax",
    ),
    "no derivative": (
        lambda: build_artifacts(_no_rule(), loss=LossType.MSELoss),
        ValueError,
        r"no derivative rule for 1 node between.*\n  my::Strange .*blocks 'w'",
    ),
    "nothing to train": (
        lambda: build_artifacts(mlp(), frozen_params=["*"], loss=LossType.CrossEntropyLoss),
        ValueError,
        "There is nothing to train: no parameter reaches the loss 'loss'",
    ),
    "no scalar": (
        lambda: build_artifacts(mlp()),
        ValueError,
        "the loss 'y' must be a scalar",
    ),
    "loss not reduced": (
        lambda: build_artifacts(mlp(), loss=onnxblock.loss.CrossEntropyLoss(reduction="none")),
        ValueError,
        "the loss 'loss' must be a scalar",
    ),
    "loss of another kind": (
        lambda: build_artifacts(mlp(), loss="MSELoss"),  # type: ignore[arg-type]
        TypeError,
        "loss must be a LossType, an onnxblock.Block.*got 'MSELoss'",
    ),
    "optimizer of another kind": (
        lambda: build_artifacts(mlp(), loss=LossType.CrossEntropyLoss, optimizer="AdamW"),  # type: ignore[arg-type]
        TypeError,
        "optimizer must be an OptimType.*got 'AdamW'",
    ),
    "one name for a list": (
        lambda: build_artifacts(mlp(), "w1", loss=LossType.CrossEntropyLoss),
        TypeError,
        "requires_grad must be a list of names; got 'w1'",
    ),
    "unknown output": (
        lambda: build_artifacts(mlp(), loss=LossType.CrossEntropyLoss, additional_output_names=["z"]),
        ValueError,
        "The graph has no value 'z' to use as an output",
    ),
    "unknown loss input": (
        lambda: build_artifacts(mlp(), loss=LossType.CrossEntropyLoss, loss_input_names=["z"]),
        LookupError,
        "the model has no value 'z'",
    ),
    "no model": (
        lambda: build_artifacts(3),  # type: ignore[arg-type]
        TypeError,
        "model must be an onnx.ModelProto, its bytes or the path of its file; got int.",
    ),
    "no file": (
        lambda: build_artifacts("nowhere.onnx"),
        FileNotFoundError,
        "no model file at 'nowhere.onnx'",
    ),
    "other bytes": (
        lambda: build_artifacts(b"\xff\xff\xffnot onnx"),
        ValueError,
        "model must be an ONNX model; what the bytes that were given hold is none",
    ),
    "no bytes": (
        lambda: build_artifacts(b""),
        ValueError,
        "model must be an ONNX model; what the bytes that were given hold has no graph",
    ),
    "an empty message": (
        lambda: build_artifacts(onnx.ModelProto()),
        ValueError,
        "model must be an ONNX model; the ModelProto that was given has no graph",
    ),
    "an unknown operator": (
        lambda: build_artifacts(_with_operator("NoSuchOperator"), loss=LossType.CrossEntropyLoss),
        ValueError,
        "checker refuses the model with its loss: No Op registered for NoSuchOperator",
    ),
    "no outputs": (
        lambda: build_artifacts(_without_outputs(), loss=LossType.CrossEntropyLoss),
        ValueError,
        "the model must have an output for the loss to be computed from; it has none",
    ),
    "a name taken": (
        lambda: build_artifacts(_named_like_a_gradient("w_grad"), ["w"]),
        ValueError,
        "The model has a value 'w_grad', but the gradient of 'w' has that name",
    ),
    "the scale's name taken": (
        lambda: build_artifacts(_named_like_a_gradient("loss_scale"), ["w"], loss_scale="dynamic"),
        ValueError,
        "The model has a value 'loss_scale', but the input for the scale of the loss has that name",
    ),
    "batch norm in a body": (
        lambda: build_artifacts(_branches()),
        ValueError,
        r"BatchNormalization \(node 'inner'\) is in the body of another node.*train_batch_norm=False",
    ),
    "compute type": (
        lambda: build_artifacts(mlp(), loss=LossType.CrossEntropyLoss, compute_type="int8"),
        ValueError,
        "compute_type must be 'float16', 'bfloat16' or None; got 'int8'",
    ),
    "loss scale": (
        lambda: build_artifacts(mlp(), loss=LossType.CrossEntropyLoss, loss_scale="static"),
        ValueError,
        "loss_scale must be 'dynamic' or a number; got 'static'",
    ),
    "prefix": (
        lambda: generate_artifacts(mlp(), loss=LossType.CrossEntropyLoss, prefix="a/b"),
        ValueError,
        "prefix must be the beginning of a file's name, without folders; got 'a/b'",
    ),
    "no library": (
        lambda: generate_artifacts(mlp(), loss=LossType.CrossEntropyLoss, custom_op_library="nowhere.so"),
        FileNotFoundError,
        "no custom_op_library at 'nowhere.so'",
    ),
}


def _with_operator(op_type: str) -> onnx.ModelProto:
    model = mlp()
    model.graph.node[1].op_type = op_type
    return model


def _without_outputs() -> onnx.ModelProto:
    model = mlp()
    del model.graph.output[:]
    return model


def _named_like_a_gradient(name: str) -> onnx.ModelProto:
    return parsed(
        f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4] {name}) => (float y)
        {{
            h = MatMul({name}, w)
            y = ReduceMean<keepdims = 0>(h)
        }}
        """,
        w=numbers(4, 3, seed=1),
    )


def _branches() -> onnx.ModelProto:
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4] x, bool flag) => (float y)
        {
            h = MatMul(x, w)
            side = If (flag) <
                then_branch = t () => (float[N, 4] a)
                { [inner] a = BatchNormalization(x, scale, bias, mean, var) },
                else_branch = e () => (float[N, 4] b) { b = Identity(x) }
            >
            z = ReduceMean<keepdims = 0>(side)
            p = ReduceMean<keepdims = 0>(h)
            y = Add(z, p)
        }
        """,
        w=numbers(4, 4, seed=1),
        **{name: CNN_VALUES[name] for name in ("scale", "bias", "mean", "var")},
    )
    return model


def _argmax() -> onnx.ModelProto:
    return parsed(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4] x) => (float y)
        {
            h = MatMul(x, w)
            i = ArgMax(h)
            f = Cast<to = 1>(i)
            y = ReduceMean<keepdims = 0>(f)
        }
        """,
        w=numbers(4, 3, seed=1),
    )


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_said(
    case: tuple[Callable[[], object], type[Exception], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, kind, message = case
    with pytest.raises(kind, match=message):
        call()
    assert listed(tmp_path) == []
