"""Losses and their gradients equal those of torch.nn.functional, computed by PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

from ort_ops.gradient import build_gradient_model
from ort_ops.training import onnxblock
from ort_ops.training.losses import LABEL_RULE, LabelCheck, label_checks

# Float32 rounding: a loss is a sum of at most SIZE terms, each good to a few units in the last place, added
# in an order of the runtime's; the bound is relative to the sum of the terms' absolute values.
EPSILON = float(np.finfo(np.float32).eps)
TERM_ERRORS = 8

Reference = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One loss: how it is built here, and how PyTorch computes it."""

    name: str
    block: Callable[[str], onnxblock.Block]
    reference: Callable[..., torch.Tensor]
    prediction: np.ndarray
    target: np.ndarray
    target_shape: list[int | str] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def _random(*shape: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape, scale=scale).astype(np.float32)


def _labels(*shape: int, classes: int, ignored: int | None = None) -> np.ndarray:
    labels = np.random.default_rng(7).integers(0, classes, size=shape)
    if ignored is not None:
        labels.reshape(-1)[::3] = ignored
    return labels


def _extreme_logits() -> np.ndarray:
    values = np.array([-100, -20, -1, 0, 1, 17, 20, 100], np.float32)
    return np.stack([values, values])


WEIGHT = np.array([0.5, 1.0, 2.0, 0.25, 3.0], np.float32)
POS_WEIGHT = np.array([0.5, 1, 2, 3, 0.25, 1, 1, 4], np.float32)
EXTREME_TARGETS = np.array([[1] * 8, [0] * 8], np.float32)

SAME_SHAPE = [
    ("mse", onnxblock.loss.MSELoss, F.mse_loss, {}),
    ("l1", onnxblock.loss.L1Loss, F.l1_loss, {}),
    ("huber", onnxblock.loss.HuberLoss, F.huber_loss, {}),
    ("huber delta", onnxblock.loss.HuberLoss, F.huber_loss, {"delta": 0.3}),
]

CROSS_ENTROPY: list[tuple[str, tuple[int, ...], np.ndarray, dict[str, Any]]] = [
    ("(B, C)", (6, 5), _labels(6, classes=5), {}),
    ("(B, C) ignored", (6, 5), _labels(6, classes=5, ignored=-100), {}),
    ("(B, C) ignored class 2", (9, 5), _labels(9, classes=5, ignored=2), {"ignore_index": 2}),
    ("(B, C) ignored -1", (9, 5), _labels(9, classes=5, ignored=-1), {"ignore_index": -1}),
    ("(B, C) ignored 255", (9, 5), _labels(9, classes=5, ignored=255), {"ignore_index": 255}),
    ("(B, C) weight", (9, 5), _labels(9, classes=5, ignored=-100), {"weight": WEIGHT}),
    ("(B, C) smoothing", (9, 5), _labels(9, classes=5, ignored=-100), {"label_smoothing": 0.1}),
    (
        "(B, C) all",
        (9, 5),
        _labels(9, classes=5, ignored=4),
        {"weight": WEIGHT, "label_smoothing": 0.3, "ignore_index": 4},
    ),
    ("(B, T, V)", (2, 4, 5), _labels(2, 4, classes=5, ignored=-100), {}),
    ("(B, T, V) all", (2, 4, 5), _labels(2, 4, classes=5), {"weight": WEIGHT, "label_smoothing": 0.2}),
    ("(B, C, d)", (2, 5, 4), _labels(2, 4, classes=5, ignored=-100), {}),
    ("(B, C, d) all", (2, 5, 4), _labels(2, 4, classes=5), {"weight": WEIGHT, "label_smoothing": 0.2}),
    ("(N, C, H, W)", (2, 5, 3, 2), _labels(2, 3, 2, classes=5, ignored=-100), {"weight": WEIGHT}),
    ("(N, C, H, W) smoothing", (2, 5, 3, 2), _labels(2, 3, 2, classes=5), {"label_smoothing": 0.2}),
    ("only ignored", (3, 5), np.full(3, -100), {}),
]


def _torch_cross_entropy(class_axis: int, reduction: str, **arguments: Any) -> Reference:
    def compute(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        given = dict(arguments)
        if "weight" in given:
            given["weight"] = torch.tensor(given["weight"], dtype=scores.dtype)
        return F.cross_entropy(torch.movedim(scores, class_axis, 1), labels, reduction=reduction, **given)

    return compute


def _cases() -> list[Case]:
    cases = []
    for reduction in ("mean", "sum", "none"):
        for name, block, reference, arguments in SAME_SHAPE:
            cases.append(
                Case(
                    f"{name} {reduction}",
                    lambda kind, block=block, arguments=arguments: block(kind, **arguments),
                    lambda x, t, r=reduction, f=reference, a=arguments: f(x, t, reduction=r, **a),
                    _random(3, 4),
                    _random(3, 4, seed=1),
                )
            )
        for name, weights in (
            ("", {}),
            (" pos_weight", {"pos_weight": POS_WEIGHT}),
            (" weight", {"weight": POS_WEIGHT}),
        ):
            cases.append(
                Case(
                    f"bce{name} {reduction}",
                    lambda kind, weights=weights: onnxblock.loss.BCEWithLogitsLoss(reduction=kind, **weights),
                    lambda x, t, r=reduction, w=weights: F.binary_cross_entropy_with_logits(
                        x, t, reduction=r, **{k: torch.tensor(v, dtype=x.dtype) for k, v in w.items()}
                    ),
                    _extreme_logits(),
                    EXTREME_TARGETS,
                )
            )
        for name, shape, labels, arguments in CROSS_ENTROPY:
            axis = 2 if "V" in name else 1
            cases.append(
                Case(
                    f"cross entropy {name} {reduction}",
                    lambda kind, arguments=arguments: onnxblock.loss.CrossEntropyLoss(
                        reduction=kind, **arguments
                    ),
                    _torch_cross_entropy(axis, reduction, **arguments),
                    _random(*shape),
                    labels,
                    list(labels.shape),
                )
            )
    return cases


CASES = {case.name: case for case in _cases()}


def with_loss(case: Case, opset: int = 18, dtype: int = onnx.TensorProto.FLOAT) -> onnx.ModelProto:
    """A model of the loss, summed with different factors when it is not reduced, so that each element's
    gradient is its own."""
    reduction = case.name.rsplit(" ", 1)[1]
    return build(case.block(reduction), case.prediction.shape, case.target, opset, dtype)


def build(
    block: onnxblock.Block,
    shape: tuple[int, ...],
    target: np.ndarray,
    opset: int = 18,
    dtype: int = onnx.TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A model of `block` on an input x of type float, which is cast to `dtype` first, as its target is."""
    make = onnx.helper.make_tensor_value_info
    is_labels = target.dtype == np.int64
    nodes = [onnx.helper.make_node("Cast", ["x"], ["y"], to=dtype)]
    inputs = [make("x", onnx.TensorProto.FLOAT, shape)]
    if is_labels:
        inputs.append(make("labels", onnx.TensorProto.INT64, target.shape))
    else:
        inputs.append(make("t", onnx.TensorProto.FLOAT, target.shape))
        nodes.append(onnx.helper.make_node("Cast", ["t"], ["target"], to=dtype))
    graph = onnx.helper.make_graph(nodes, "g", inputs, [make("y", dtype, shape)])
    imports = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(
        graph, opset_imports=imports, ir_version=onnx.helper.find_min_ir_version_for(imports)
    )
    with onnxblock.base(model) as accessor:
        name = block("y")
        onnxblock._graph_utils.register_graph_outputs(accessor.model, name)
        return accessor.model


def loss_and_gradient(model: onnx.ModelProto, prediction: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """The loss and the gradient of its sum, weighted with 1, 2, 3 ... where it is not reduced."""
    loss = model.graph.output[0]
    if len(loss.type.tensor_type.shape.dim) > 0:
        elements = np.arange(1, 1 + int(np.prod([d.dim_value for d in loss.type.tensor_type.shape.dim])))
        shape = [d.dim_value for d in loss.type.tensor_type.shape.dim]
        factors = elements.reshape(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(factors, "factors"))
        model.graph.node.append(onnx.helper.make_node("Mul", [loss.name, "factors"], ["weighted"]))
        model.graph.node.append(onnx.helper.make_node("ReduceSum", ["weighted"], ["total"], keepdims=0))
        model.graph.output.append(onnx.helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))
    gradient_model = build_gradient_model(model, ["x"], loss=model.graph.output[-1].name)
    results = session(gradient_model).run([loss.name, "x_grad"], feeds(model, prediction, target))
    return results


def feeds(model: onnx.ModelProto, prediction: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": prediction, model.graph.input[1].name: target}


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # runs that fail on purpose would be logged
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def torch_loss_and_gradient(
    reference: Reference, prediction: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    x = torch.tensor(prediction.astype(np.float64), requires_grad=True)
    t = torch.tensor(target if target.dtype == np.int64 else target.astype(np.float64))
    loss = reference(x, t)
    factors = torch.arange(1, 1 + loss.numel()).reshape(loss.shape)
    (loss * factors).sum().backward()
    assert x.grad is not None
    return loss.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_value_and_gradient_are_pytorchs(case: Case) -> None:
    loss, gradient = loss_and_gradient(with_loss(case), case.prediction, case.target)
    expected, expected_gradient = torch_loss_and_gradient(case.reference, case.prediction, case.target)
    assert loss.shape == expected.shape
    tolerance = TERM_ERRORS * EPSILON
    np.testing.assert_allclose(loss, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    # A gradient is a difference of probabilities times a factor: its error is relative to the factor.
    scale = np.abs(expected_gradient).max()
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=tolerance * scale)


# -- opsets and types ----------------------------------------------------------------------------------------

OPSETS = [12, 13, 17, 18, 21, 23, onnx.defs.onnx_opset_version()]
ONE_OF_EACH = [
    "mse mean",
    "l1 sum",
    "huber delta mean",
    "bce pos_weight mean",
    "cross entropy (B, C) all mean",
    "cross entropy (B, T, V) all none",
    "cross entropy (B, C, d) all sum",
]


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_opset_gives_the_same_loss(name: str, opset: int) -> None:
    case = CASES[name]
    model = with_loss(case, opset)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == opset
    (loss,) = onnx.reference.ReferenceEvaluator(model).run(None, feeds(model, case.prediction, case.target))
    expected, _ = torch_loss_and_gradient(case.reference, case.prediction, case.target)
    np.testing.assert_allclose(
        loss, expected, rtol=TERM_ERRORS * EPSILON, atol=TERM_ERRORS * EPSILON * np.abs(expected).max()
    )


@pytest.mark.parametrize("dtype", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_narrow_predictions_have_a_float32_loss(name: str, dtype: int) -> None:
    """The same loss as that of the rounded predictions in float64; the gradient is rounded once."""
    case = CASES[name]
    model = with_loss(case, 18, dtype)
    assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    narrow = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    prediction = case.prediction.astype(narrow).astype(np.float32)
    target = case.target
    if target.dtype != np.int64:
        target = target.astype(narrow).astype(np.float32)
    loss, gradient = loss_and_gradient(model, prediction, target)
    expected, expected_gradient = torch_loss_and_gradient(case.reference, prediction, target)
    assert loss.dtype == np.float32
    np.testing.assert_allclose(
        loss, expected, rtol=TERM_ERRORS * EPSILON, atol=TERM_ERRORS * EPSILON * np.abs(expected).max()
    )
    np.testing.assert_array_equal(gradient, gradient.astype(narrow))
    rounding = float(ml_dtypes.finfo(narrow).eps) / 2
    scale = np.abs(expected_gradient).max()
    np.testing.assert_allclose(gradient, expected_gradient, rtol=rounding, atol=TERM_ERRORS * EPSILON * scale)


# -- labels that are none ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, axis", [((4, 5), 1), ((2, 3, 5), 2), ((2, 5, 3), 1)])
@pytest.mark.parametrize("wrong", [5, 6, -1, -5, -6, 2**40, -(2**40)])
def test_a_label_out_of_range_is_an_error(shape: tuple[int, ...], axis: int, wrong: int) -> None:
    labels = np.zeros(shape[:axis] + shape[axis + 1 :], np.int64)
    labels.reshape(-1)[-1] = wrong
    model = build(onnxblock.loss.CrossEntropyLoss(), shape, labels)
    with pytest.raises(Exception, match=LABEL_RULE):
        session(model).run(None, feeds(model, np.zeros(shape, np.float32), labels))
    (check,) = label_checks({entry.key: entry.value for entry in model.metadata_props})
    assert check == LabelCheck("labels", 5, -100)
    with pytest.raises(ValueError, match=f"'labels' must hold class indices from 0 to 4.*got {wrong} at"):
        check(labels)


def test_labels_of_another_arrangement_are_an_error() -> None:
    """(T, B) labels have as many elements as (B, T) ones."""
    model = build(onnxblock.loss.CrossEntropyLoss(), (2, 3, 5), np.zeros((2, 3), np.int64))
    labels = next(value for value in model.graph.input if value.name == "labels")
    for dim, name in zip(labels.type.tensor_type.shape.dim, "BT", strict=True):
        dim.dim_param = name
    scores = np.zeros((2, 3, 5), np.float32)
    session(model).run(None, {"x": scores, "labels": np.zeros((2, 3), np.int64)})
    with pytest.raises(Exception, match=LABEL_RULE):
        session(model).run(None, {"x": scores, "labels": np.zeros((3, 2), np.int64)})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_labels_that_are_classes_or_ignored_pass_the_check(dtype: type) -> None:
    LabelCheck("labels", 5, 4)(np.array([0, 4, 3], dtype))
    LabelCheck("labels", None, 4)(np.array([0, 100], dtype))
    LabelCheck("labels", 5, -1)(np.array([], dtype))
    if np.dtype(dtype).kind == "i":
        LabelCheck("labels", 5, -1)(np.array([-1, 0], dtype))


# -- the class axis ------------------------------------------------------------------------------------------


def scores_model(shape: list[int | str], labels: list[int | str] | None) -> onnx.ModelProto:
    make = onnx.helper.make_tensor_value_info
    inputs = [make("x", onnx.TensorProto.FLOAT, shape)]
    if labels is not None:
        inputs.append(make("labels", onnx.TensorProto.INT64, labels))
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "g",
        inputs,
        [make("y", onnx.TensorProto.FLOAT, shape)],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)


def labels_shape(model: onnx.ModelProto, **arguments: Any) -> tuple[list[int | str], int]:
    """The shape of the labels, and the axis whose size is the number of classes."""
    with onnxblock.base(model) as accessor:
        onnxblock.loss.CrossEntropyLoss(**arguments)("y")
        labels = next(value for value in accessor.model.graph.input if value.name == "labels")
        flat = any(node.op_type == "Flatten" for node in accessor.model.graph.node)
    dims = [d.dim_param or d.dim_value for d in labels.type.tensor_type.shape.dim]
    return dims, -1 if flat else 1


@pytest.mark.parametrize(
    "scores, given, arguments, expected",
    [
        (["B", 5], None, {}, (["B"], 1)),
        (["B", "T", 5], None, {}, (["B", "T"], -1)),
        (["B", 5, "T"], None, {"class_axis": 1}, (["B", "T"], 1)),
        (["B", "T", 5], None, {"class_axis": -1}, (["B", "T"], -1)),
        (["N", 5, "H", "W"], None, {}, (["N", "H", "W"], 1)),
        (["N", "H", "W", 5], None, {"class_axis": -1}, (["N", "H", "W"], -1)),
        (["B", 5, "T"], ["B", "T"], {}, (["B", "T"], 1)),
        ([2, 5, 3], [2, 3], {}, ([2, 3], 1)),
        ([2, 3, 5], [2, 3], {}, ([2, 3], -1)),
        ([2, 3, 3], [2, 3], {}, ([2, 3], -1)),
        (["B", "T", 5], ["b", "t"], {}, (["b", "t"], -1)),
    ],
)
def test_the_class_axis_is_where_the_labels_say(
    scores: list[int | str],
    given: list[int | str] | None,
    arguments: dict[str, Any],
    expected: tuple[list[int | str], int],
) -> None:
    assert labels_shape(scores_model(scores, given), **arguments) == expected


# -- wrong arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: onnxblock.loss.MSELoss("avg"),
            "MSELoss: reduction must be one of 'mean', 'sum', 'none'; got 'avg'",
        ),
        (lambda: onnxblock.loss.HuberLoss(delta=0), "HuberLoss: delta must be positive; got 0"),
        (
            lambda: onnxblock.loss.CrossEntropyLoss(label_smoothing=2),
            "label_smoothing must be from 0 to 1; got 2",
        ),
    ],
)
def test_wrong_settings_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "scores, labels, arguments, message",
    [
        ([5], None, {}, r"the scores 'y' must have an axis of rows and one of classes; got \[5\]"),
        ([], None, {}, r"the scores 'y' must have an axis of rows and one of classes; got \[\]"),
        ([2, 3, 5], [2, 4], {}, r"The scores are \[2, 3, 5\]; got \[2, 4\]"),
        ([2, 3, 4, 5], None, {"class_axis": 2}, "class_axis must be 1 or the last axis .* which is 3; got 2"),
        ([2, 5], None, {"weight": np.ones(4)}, r"weight must have the shape \[5\].*got \[4\]"),
    ],
)
def test_what_does_not_fit_the_scores_is_named(
    scores: list[int | str], labels: list[int | str] | None, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        labels_shape(scores_model(scores, labels), **arguments)
