"""Losses as small graphs in standard operators, equal to those of torch.nn.functional in value and gradient.

Each function writes nodes with a builder's `op` and returns the loss as a value of the graph. Predictions in
float16 or bfloat16 are cast first: a loss is computed in float32, or in float64 for such predictions. The
forms of the operators are those that mean the same from opset 12 to the newest.

Class labels are checked when the graph runs: a label that is no class makes the run fail on the CPU, at a
node that is named for the rule (`LABEL_RULE`). CUDA kernels do not look at indices; there, and for better
messages, the run time can check a batch before it runs (`label_checks`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder

REDUCTIONS = ("mean", "sum", "none")

IGNORE_INDEX = -100
"""The label that does not count, unless another is chosen; as in PyTorch."""

LABEL_RULE = "every label must be a class index from 0 or the ignore_index, one label per row of scores"
"""Name of the node that fails when a label is neither."""

LABELS_KEY = "ort_ops.labels"
"""Where a model's metadata lists its class labels (see `label_checks`)."""

FIRST_OPSET = 12
"""The oldest opset with SoftmaxCrossEntropyLoss."""

_SUM_AXES_AS_INPUT = 13
"""From this opset on ReduceSum takes its axes as an input."""

_COMPUTED_AS_IS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


# -- predictions and targets of the same shape ---------------------------------------------------------------


def mse(op: OpBuilder, prediction: ir.Value, target: ir.Value, reduction: str = "mean") -> ir.Value:
    """(prediction - target)^2, reduced; as torch.nn.functional.mse_loss."""
    difference = _difference(op, prediction, target)
    return _reduce(op, op.Mul(difference, difference), reduction)


def l1(op: OpBuilder, prediction: ir.Value, target: ir.Value, reduction: str = "mean") -> ir.Value:
    """|prediction - target|, reduced; as torch.nn.functional.l1_loss."""
    return _reduce(op, op.Abs(_difference(op, prediction, target)), reduction)


def huber(
    op: OpBuilder, prediction: ir.Value, target: ir.Value, reduction: str = "mean", delta: float = 1.0
) -> ir.Value:
    """With a = |prediction - target|: a^2 / 2 up to delta, delta * (a - delta / 2) beyond; as
    torch.nn.functional.huber_loss."""
    distance = op.Abs(_difference(op, prediction, target))
    near = op.Min(distance, delta)
    square = op.Mul(op.Mul(near, near), 0.5)
    return _reduce(op, op.Add(square, op.Mul(op.Sub(distance, near), delta)), reduction)


def bce_with_logits(
    op: OpBuilder,
    logits: ir.Value,
    target: ir.Value,
    reduction: str = "mean",
    weight: np.ndarray | None = None,
    pos_weight: np.ndarray | None = None,
) -> ir.Value:
    """Binary cross entropy of sigmoid(logits), as torch.nn.functional.binary_cross_entropy_with_logits.

    -(p * t * log(s) + (1 - t) * log(1 - s)) with s = sigmoid(x) and p = pos_weight is written as
    (1 - t) * x + (1 + (p - 1) * t) * softplus(-x), which neither overflows nor loses the gradient for any x.
    """
    logits, target = _computable(op, logits), _computable(op, target)
    softplus = op.Softplus(op.Neg(logits))
    if pos_weight is not None:
        share = op.Mul(op.Sub(_constant(op, pos_weight, logits), 1.0), target)
        softplus = op.Mul(op.Add(share, 1.0), softplus)
    loss = op.Add(op.Mul(op.Sub(1.0, target), logits), softplus)
    if weight is not None:
        loss = op.Mul(loss, _constant(op, weight, logits))
    return _reduce(op, loss, reduction)


def _difference(op: OpBuilder, prediction: ir.Value, target: ir.Value) -> ir.Value:
    return op.Sub(_computable(op, prediction), _computable(op, target))


# -- class scores and labels ---------------------------------------------------------------------------------


def cross_entropy(
    op: OpBuilder,
    scores: ir.Value,
    labels: ir.Value,
    *,
    class_axis: int,
    weight: np.ndarray | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> ir.Value:
    """Cross entropy of softmax(scores), as torch.nn.functional.cross_entropy with class indices.

    Args:
        scores: float tensor; its axis `class_axis`, 1 or the last one, counts the classes.
        labels: integers of the other axes' shape.
        class_axis: not negative.
        weight: one factor per class.
        ignore_index: rows with this label have no loss; it may be any number.
        reduction: "mean" divides by the sum of the weights of the labels that count.
        label_smoothing: share of the target that is spread over all classes evenly.

    Returns:
        float32 (float64 for such scores): a scalar, or for "none" a tensor of the labels' shape.
    """
    scores, labels = _computable(op, scores), op.Cast(labels, to=ir.DataType.INT64)
    assert scores.shape is not None
    flatten = class_axis == len(scores.shape) - 1 and class_axis > 1
    shape = op.Shape(labels)
    checked = _checked_labels(op, scores, labels, class_axis, ignore_index, compare_shapes=flatten)
    if flatten:  # the operator wants classes on axis 1; with all rows on axis 0 nothing has to be moved
        scores = op.Flatten(scores, axis=class_axis)
        checked, class_axis = op.Reshape(checked, [-1]), 1
    weights = [] if weight is None else [_constant(op, weight, scores)]
    loss, log_probability = op.SoftmaxCrossEntropyLoss(
        scores, checked, *weights, reduction=reduction, ignore_index=ignore_index, _outputs=2
    )
    if label_smoothing:
        spread = _spread_loss(op, log_probability, checked, weights, ignore_index, reduction)
        classes = op.Cast(_class_count(op, scores, class_axis), to=scores.dtype)
        spread = op.Mul(op.Div(spread, classes), label_smoothing)
        loss = op.Add(op.Mul(loss, 1.0 - label_smoothing), spread)
    if flatten and reduction == "none":
        loss = op.Reshape(loss, shape)
        loss.shape = labels.shape
    return loss


def _checked_labels(
    op: OpBuilder,
    scores: ir.Value,
    labels: ir.Value,
    class_axis: int,
    ignore_index: int,
    compare_shapes: bool,
) -> ir.Value:
    """The labels themselves, looked up in the list of classes: a Gather fails for an index outside it.

    A negative index would count from the list's end, so negative labels are moved out of the list. When the
    scores are flattened the operators after this one no longer see whose label it is; so, when labels and
    scores do not fit, the list is empty.
    """
    classes = _class_count(op, scores, class_axis)
    listed = classes
    if compare_shapes:
        rows = op.Slice(op.Shape(scores), [0], [class_axis], [0])
        fits = op.ReduceMin(op.Cast(op.Equal(op.Shape(labels), rows), to=ir.DataType.INT32), keepdims=0)
        listed = op.Mul(classes, op.Cast(fits, to=ir.DataType.INT64))
    ignored = op.Equal(labels, ignore_index)
    index = op.Where(op.Less(labels, 0), op.Sub(labels, classes), labels)
    index = op.Where(ignored, 0, index)
    found = op.Gather(op.Range(0, listed, 1), index, axis=0, _name=LABEL_RULE)
    return op.Where(ignored, ignore_index, found)


def _class_count(op: OpBuilder, scores: ir.Value, class_axis: int) -> ir.Value:
    return op.Gather(op.Shape(scores), class_axis, axis=0)


def _spread_loss(
    op: OpBuilder,
    log_probability: ir.Value,
    labels: ir.Value,
    weights: list[ir.Value],
    ignore_index: int,
    reduction: str,
) -> ir.Value:
    """The cross entropy with one unit of target on each class, reduced as that with the labels is."""
    counted = op.Not(op.Equal(labels, ignore_index))
    if weights:
        log_probability = op.Mul(log_probability, _along_axis_1(op, weights[0], log_probability))
    loss = op.Where(counted, op.Neg(_sum_of_axis_1(op, log_probability)), 0.0)
    if reduction == "none":
        return loss
    total = op.ReduceSum(loss, keepdims=0)
    if reduction == "sum":
        return total
    share: ir.Value = op.Cast(counted, to=loss.dtype)
    if weights:
        share = op.Mul(share, op.Gather(weights[0], op.Where(counted, labels, 0), axis=0))
    return op.Div(total, op.ReduceSum(share, keepdims=0))


def _along_axis_1(op: OpBuilder, vector: ir.Value, value: ir.Value) -> ir.Value:
    assert value.shape is not None
    return op.Reshape(vector, [1, -1] + [1] * (len(value.shape) - 2))


def _sum_of_axis_1(op: OpBuilder, value: ir.Value) -> ir.Value:
    assert op.version is not None
    if op.version >= _SUM_AXES_AS_INPUT:
        return op.ReduceSum(value, [1], keepdims=0)
    return op.ReduceSum(value, axes=[1], keepdims=0)


# -- common --------------------------------------------------------------------------------------------------


def _computable(op: OpBuilder, value: ir.Value) -> ir.Value:
    return value if value.dtype in _COMPUTED_AS_IS else op.Cast(value, to=ir.DataType.FLOAT)


def _constant(op: OpBuilder, array: np.ndarray, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    return op.Constant(value=ir.tensor(np.asarray(array).astype(like.dtype.numpy()), dtype=like.dtype))


def _reduce(op: OpBuilder, loss: ir.Value, reduction: str) -> ir.Value:
    if reduction == "none":
        return loss
    return op.ReduceMean(loss, keepdims=0) if reduction == "mean" else op.ReduceSum(loss, keepdims=0)


# -- labels at run time --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelCheck:
    """What the class labels of one input must be: `classes` counts the classes, None if the model does not
    say."""

    name: str
    classes: int | None
    ignore_index: int

    def __call__(self, labels: np.ndarray) -> None:
        """Raise ValueError, naming the first wrong label, unless all are class indices or ignored."""
        labels = np.asarray(labels)
        wrong = (labels < 0) | (labels >= (np.inf if self.classes is None else self.classes))
        wrong &= labels != self.ignore_index
        if wrong.any():
            place = [int(index) for index in np.argwhere(wrong)[0]]
            last = "up" if self.classes is None else str(self.classes - 1)
            raise ValueError(
                f"'{self.name}' must hold class indices from 0 to {last}, or {self.ignore_index} for what "
                f"does not count; got {labels[tuple(place)]} at {place}. Correct the labels, or choose "
                "another ignore_index."
            )


def label_checks(metadata: Mapping[str, str]) -> list[LabelCheck]:
    """The checks for the class labels among a model's inputs, from the model's metadata."""
    return [LabelCheck(**entry) for entry in json.loads(metadata.get(LABELS_KEY, "[]"))]


def note_label_check(metadata: Mapping[str, str], check: LabelCheck) -> str:
    """The value of `LABELS_KEY` in a model's metadata with `check` added to what is there."""
    return json.dumps([asdict(known) for known in [*label_checks(metadata), check]])
