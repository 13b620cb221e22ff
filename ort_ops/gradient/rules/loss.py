"""Derivatives of the loss operators of the standard."""

from __future__ import annotations

import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp


@vjp("SoftmaxCrossEntropyLoss", inputs=(0, 2))
def softmax_cross_entropy_loss(c: Vjp) -> Grads:
    """d scores = (softmax - onehot) * g with g the weight of each label in the loss; 0 on ignored rows."""
    log_prob = c.y(1)
    row = _label_gradients(c, log_prob)
    probability = c.op("Exp", log_prob)
    spread = c.op("Mul", probability, row.gradient)
    d_scores = c.op("ScatterElements", spread, row.labels, c.op("Neg", row.gradient), axis=1, reduction="add")
    if c.has_dy(1):
        total = c.op("ReduceSum", c.dy(1), [1], keepdims=1)
        d_scores = c.op("Add", d_scores, c.op("Sub", c.dy(1), c.op("Mul", probability, total)))
    return d_scores, None, row.weight_gradient


@vjp("NegativeLogLikelihoodLoss", inputs=(0, 2))
def negative_log_likelihood_loss(c: Vjp) -> Grads:
    row = _label_gradients(c, c.x(0))
    d_input = c.op(
        "ScatterElements",
        c.zeros_like(c.x(0)),
        row.labels,
        c.op("Neg", row.gradient),
        axis=1,
        reduction="none",
    )
    return d_input, None, row.weight_gradient


class _Row:
    """Per label, with an axis of size 1 in the place of the classes: the class index, with ignored labels
    moved to class 0, and the gradient of minus the log probability, which is 0 for them."""

    def __init__(self, labels: ir.Value, gradient: ir.Value, weight_gradient: ir.Value | None) -> None:
        self.labels = labels
        self.gradient = gradient
        self.weight_gradient = weight_gradient


def _label_gradients(c: Vjp, log_prob: ir.Value) -> _Row:
    reduction = c.str_attr("reduction", "mean")
    labels = c.op("Unsqueeze", c.x(1), [1])
    ignore = c.node.attributes.get("ignore_index")
    ignored = None
    if ignore is not None:
        ignored = c.op("Equal", labels, ignore.as_int())
        labels = c.op("Where", ignored, 0, labels)
    weight = c.op("Expand", c.emit.scalar(1.0, c.dtype), c.op("Shape", labels))
    if c.has(2):
        weight = c.op("Gather", c.x(2), labels, axis=0)
    counted = weight if ignored is None else c.op("Where", ignored, 0.0, weight)
    if reduction == "none":
        dloss = c.op("Unsqueeze", c.dy(), [1])
        size = None
    else:
        dloss = c.dy()
        if reduction == "mean":
            size = c.op("ReduceSum", counted, keepdims=0)
            # every label ignored: the loss is 0 / 0, its gradient 0
            size = c.op("Where", c.op("Equal", size, 0.0), 1.0, size)
            dloss = c.op("Div", dloss, size)
        else:
            size = None
    gradient = c.op("Mul", counted, dloss)
    return _Row(
        labels, gradient, _weight_gradient(c, log_prob, labels, ignored, dloss) if c.wants(2) else None
    )


def _weight_gradient(
    c: Vjp, log_prob: ir.Value, labels: ir.Value, ignored: ir.Value | None, dloss: ir.Value
) -> ir.Value:
    """The gradient of the class weights: sum over the labels of a class of -log p, minus the mean if that is
    taken."""
    cost = c.op("Neg", c.op("GatherElements", log_prob, labels, axis=1))
    if c.str_attr("reduction", "mean") == "mean":
        cost = c.op("Sub", cost, c.y())
    cost = c.op("Mul", cost, dloss)
    if ignored is not None:
        cost = c.op("Where", ignored, 0.0, cost)
    flat, places = c.op("Reshape", cost, [-1]), c.op("Reshape", labels, [-1])
    return c.op("ScatterElements", c.zeros_like(c.x(2)), places, flat, axis=0, reduction="add")
