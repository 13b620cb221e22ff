"""What to write in ONNX for operators of PyTorch whose meaning the exporter would lose.

Each function stands for one operator and has its parameters' names; `op` writes nodes. The exporter itself

- takes the running statistics in BatchNorm's training mode, and never updates them, nor InstanceNorm's;
- lets gradients flow through `detach` and to an embedding's padding;
- ignores the label smoothing of a cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18

from ort_ops.gradient.stop_gradient import DOMAIN, STOP_GRADIENT

op: Any = opset18  # its type hints speak of values; here they are symbols

_REDUCTIONS = ("none", "mean", "sum")
"""By the numbers that PyTorch's operators take."""


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """The running statistics are updated here: ONNX's running variance takes in the variance of the batch,
    PyTorch's the unbiased estimate from it, which is n / (n - 1) times as large.
    """
    weight = _per_channel(1.0, input) if weight is None else weight
    bias = _per_channel(0.0, input) if bias is None else bias
    if not training:
        normed = op.BatchNormalization(input, weight, bias, running_mean, running_var, epsilon=eps)
        return normed, running_mean, running_var, running_mean, running_var
    # ONNX Runtime's kernel overwrites the running statistics that it is given: it gets others.
    zeros = [op.Mul(running, _scalar(0.0, running)) for running in (running_mean, running_var)]
    normed, mean, variance = op.BatchNormalization(
        input, weight, bias, *zeros, epsilon=eps, momentum=0.0, training_mode=1
    )
    one = op.Constant(value_int=1)
    count = op.Div(op.Size(input), op.Size(running_mean))
    ratio = op.Div(op.CastLike(count, variance), op.CastLike(op.Max(op.Sub(count, one), one), variance))
    new_mean = _moved(running_mean, mean, momentum)
    new_variance = _moved(running_var, op.Mul(variance, ratio), momentum)
    # The saved statistics are for PyTorch's own backward pass, which is not exported.
    return normed, new_mean, new_variance, new_mean, new_variance


def _moved(running: Any, new: Any, momentum: float) -> Any:
    kept = op.Mul(running, _scalar(1.0 - momentum, running))
    return op.Add(kept, op.Mul(new, _scalar(momentum, new)))


def _per_channel(number: float, input: Any) -> Any:
    return op.Expand(_scalar(number, input), op.Shape(input, start=1, end=2))


def _scalar(number: float, like: Any) -> Any:
    return op.CastLike(op.Constant(value_float=number), like)


def _instance_norm(
    input: Any,
    weight: Any = None,
    bias: Any = None,
    running_mean: Any = None,
    running_var: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    weight = _per_channel(1.0, input) if weight is None else weight
    bias = _per_channel(0.0, input) if bias is None else bias
    if not use_input_stats:
        return op.BatchNormalization(input, weight, bias, running_mean, running_var, epsilon=eps)
    if running_mean is not None:
        raise NotImplementedError(
            "InstanceNorm's running statistics cannot be updated; set its "
            "track_running_stats to False, or put it in evaluation mode"
        )
    return op.InstanceNormalization(input, weight, bias, epsilon=eps)


def _detach(self: Any) -> Any:
    copy = op.Identity(self)
    node = copy.producer()
    node.domain, node.op_type, node.version = DOMAIN, STOP_GRADIENT, 1
    return copy


def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """The row `padding_idx` gets no gradient."""
    if scale_grad_by_freq:
        raise NotImplementedError("an embedding with scale_grad_by_freq=True has no form in ONNX")
    rows = op.Gather(weight, indices)
    if padding_idx < 0:
        return rows
    is_padding = op.Equal(indices, op.CastLike(op.Constant(value_int=padding_idx), indices))
    is_padding = op.Unsqueeze(is_padding, op.Constant(value_ints=[-1]))
    return op.Where(is_padding, _detach(rows), rows)


def _cross_entropy(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """With smoothing s and C classes: (1 - s) times the loss of the labels, plus s / C times the losses of
    all classes, each times its weight.
    """
    if target.dtype.is_floating_point():
        raise NotImplementedError("a cross entropy with probabilities as targets has no form in ONNX")
    kind = _REDUCTIONS[reduction]
    of_labels, _ = op.SoftmaxCrossEntropyLoss(self, target, weight, reduction=kind, ignore_index=ignore_index)
    if label_smoothing == 0.0:
        return of_labels
    losses = op.Neg(op.LogSoftmax(self, axis=1))
    counts = op.Not(op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target)))
    shares = op.CastLike(counts, self)
    if weight is not None:
        aligned = op.Constant(value_ints=[-1, *[1] * (len(self.shape) - 2)])
        losses = op.Mul(losses, op.Reshape(weight, aligned))
        labels = op.Where(counts, target, op.CastLike(op.Constant(value_int=0), target))
        shares = op.Mul(shares, op.Gather(weight, labels))
    of_all = op.ReduceSum(losses, op.Constant(value_ints=[1]), keepdims=0)
    of_all = op.Where(counts, of_all, _scalar(0.0, self))
    if kind != "none":
        of_all = op.ReduceSum(of_all, keepdims=0)
    if kind == "mean":
        of_all = op.Div(of_all, op.ReduceSum(shares, keepdims=0))
    classes = op.CastLike(op.Squeeze(op.Shape(self, start=1, end=2)), self)
    smoothing = op.Div(_scalar(label_smoothing, self), classes)
    return op.Add(op.Mul(of_labels, _scalar(1.0 - label_smoothing, self)), op.Mul(of_all, smoothing))


Translations = dict[Callable[..., Any], Callable[..., Any]]

EVALUATION: Translations = {torch.ops.aten.cross_entropy_loss.default: _cross_entropy}

TRAINING: Translations = {
    **EVALUATION,
    torch.ops.aten._native_batch_norm_legit_functional.default: _batch_norm,
    torch.ops.aten.instance_norm.default: _instance_norm,
    torch.ops.aten.detach.default: _detach,
    torch.ops.aten.embedding.default: _embedding,
}
