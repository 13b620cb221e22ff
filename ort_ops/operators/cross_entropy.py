"""CrossEntropy and CrossEntropyGrad: the cross entropy of scores and labels by rows, and its backward pass.

One number per row, the logarithm of the sum of exponentials, is kept for the backward pass instead of a table
of probabilities. How rows are weighed and added up to one loss is for the graph around them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference, agree, text
from ort_ops.operators.operator import DOMAIN, Attribute, AttributeValue, Operator, Slot

_IGNORE_INDEX = -100
_MIN_OPSET = 18  # ReduceLogSumExp with its axes as an input

# The labels as classes, 0 where they are ignored.
_LABELS = """
        last = Constant <value_ints = [-1]> ()
        zero = Constant <value_float = 0.0> ()
        first_class = Constant <value_int = 0> ()
        ignore_index = Constant <value_int: int = @ignore_index> ()
        long_labels = Cast <to = 7> (labels)
        ignored = Equal (long_labels, ignore_index)
        classes = Where (ignored, first_class, long_labels)
        class_count = Shape <start = -1> (scores)
"""


def _forward_body(_present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    return f"""
        {_LABELS}
        log_sum_exp = ReduceLogSumExp <keepdims = 0> (scores, last)
        log_probabilities = LogSoftmax <axis = -1> (scores)
        table_shape = Concat <axis = 0> (last, class_count)
        table = Reshape (log_probabilities, table_shape)
        column_shape = Constant <value_ints = [-1, 1]> ()
        class_column = Reshape (classes, column_shape)
        at_label_column = GatherElements <axis = 1> (table, class_column)
        labels_shape = Shape (labels)
        at_label = Reshape <allowzero = 1> (at_label_column, labels_shape)
        loss = Neg (at_label)
        row_loss = Where (ignored, zero, loss)
    """


def _backward_body(_present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    return f"""
        {_LABELS}
        no_and_yes = Constant <value_floats = [0.0, 1.0]> ()
        depth = Squeeze (class_count)
        is_label = OneHot <axis = -1> (classes, depth, no_and_yes)
        log_sum_exp_column = Unsqueeze (log_sum_exp, last)
        log_probabilities = Sub (scores, log_sum_exp_column)
        probabilities = Exp (log_probabilities)
        residue = Sub (probabilities, is_label)
        drow_loss_column = Unsqueeze (drow_loss, last)
        scaled = Mul (residue, drow_loss_column)
        ignored_column = Unsqueeze (ignored, last)
        dscores = Where (ignored_column, zero, scaled)
    """


def _check(node: Inference, per_row: tuple[str, ...]) -> None:
    node.check_rank("scores")
    scores, labels = node.shapes.get("scores"), node.shapes.get("labels")
    if scores is not None:
        if scores[-1] == 0:
            node.fail("scores must have at least one class, its last axis", text(scores))
        if labels is not None and not agree(labels, scores[:-1]):
            node.fail(f"labels must be {text(scores[:-1])}, scores without the last axis", text(labels))
    for name in per_row:
        node.check_same_shape(name, "labels")


def _infer_forward(node: Inference) -> None:
    """The results are float, as labels in shape."""
    _check(node, ())
    for index in range(2):
        node.set_output(index, TensorProto.FLOAT, node.shapes.get("labels"))


def _infer_backward(node: Inference) -> None:
    """dscores is as scores."""
    _check(node, ("drow_loss", "log_sum_exp"))
    node.set_output_like(0, "scores")


def _at_labels(table: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.take_along_axis(table, labels.astype(np.int64)[..., np.newaxis], axis=-1)[..., 0]


class CrossEntropy(OpRun):
    """The operator for `onnx.reference`: float64 inside. scores [..., classes], all else [...]."""

    op_domain = DOMAIN

    def _run(
        self, scores: np.ndarray, labels: np.ndarray, ignore_index: int = _IGNORE_INDEX
    ) -> tuple[np.ndarray, np.ndarray]:
        wide = scores.astype(np.float64)
        largest = wide.max(axis=-1, keepdims=True)
        log_sum_exp = np.log(np.exp(wide - largest).sum(axis=-1)) + largest[..., 0]
        ignored = labels == ignore_index
        loss = log_sum_exp - _at_labels(wide, np.where(ignored, 0, labels))
        return np.where(ignored, 0, loss).astype(np.float32), log_sum_exp.astype(np.float32)


class CrossEntropyGrad(OpRun):
    """The operator for `onnx.reference`: float64 inside. scores, dscores [..., classes], all else [...]."""

    op_domain = DOMAIN

    def _run(
        self,
        drow_loss: np.ndarray,
        scores: np.ndarray,
        labels: np.ndarray,
        log_sum_exp: np.ndarray,
        ignore_index: int = _IGNORE_INDEX,
    ) -> tuple[np.ndarray]:
        probabilities = np.exp(scores.astype(np.float64) - log_sum_exp[..., np.newaxis])
        is_label = np.arange(scores.shape[-1]) == labels[..., np.newaxis]
        dscores = (probabilities - is_label) * drow_loss[..., np.newaxis]
        ignored = (labels == ignore_index)[..., np.newaxis]
        return (np.where(ignored, 0, dscores).astype(np.float32),)


_SCORES = Slot("scores", "tensor(float)", "[..., classes]: unnormalised logarithms of probabilities")
_LABELS_SLOT = Slot("labels", "I", "[...]: the right class of each row, or ignore_index")
_ATTRIBUTES = (
    Attribute("ignore_index", _IGNORE_INDEX, "rows with this label have no loss, and no gradient"),
)
_TYPES = (("I", ("tensor(int32)", "tensor(int64)"), "Type of the labels."),)

CROSS_ENTROPY = Operator(
    name="CrossEntropy",
    doc=(
        "Cross entropy row by row: log_sum_exp = log(sum over classes of exp(scores)), "
        "row_loss = log_sum_exp - scores[label], or 0 where the label is ignore_index."
    ),
    inputs=(_SCORES, _LABELS_SLOT),
    outputs=(
        Slot("row_loss", "tensor(float)", "[...]: each row's loss"),
        Slot("log_sum_exp", "tensor(float)", "[...]: what the backward pass needs"),
    ),
    attributes=_ATTRIBUTES,
    type_constraints=_TYPES,
    body=_forward_body,
    infer=_infer_forward,
    reference=CrossEntropy,
    min_opset=_MIN_OPSET,
)

CROSS_ENTROPY_GRAD = Operator(
    name="CrossEntropyGrad",
    doc=(
        "Backward pass of CrossEntropy: dscores[c] = drow_loss * (exp(scores[c] - log_sum_exp) - "
        "(1 if c is the label, else 0)), or 0 where the label is ignore_index."
    ),
    inputs=(
        Slot("drow_loss", "tensor(float)", "[...]: gradient of each row's loss"),
        _SCORES,
        _LABELS_SLOT,
        Slot("log_sum_exp", "tensor(float)", "[...]: from the forward pass"),
    ),
    outputs=(Slot("dscores", "tensor(float)", "as scores: their gradient"),),
    attributes=_ATTRIBUTES,
    type_constraints=_TYPES,
    body=_backward_body,
    infer=_infer_backward,
    reference=CrossEntropyGrad,
    min_opset=_MIN_OPSET,
)
