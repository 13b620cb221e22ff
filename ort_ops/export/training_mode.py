"""What PyTorch's exporter leaves out of a module in training mode: BatchNorm's batch statistics and the
update of the running ones, and the dropout inside attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18

op: Any = opset18  # its type hints speak of values; here they are symbols


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
    """`aten::_native_batch_norm_legit_functional`, whose parameters have these names.

    ONNX's running variance takes in the variance of the batch, PyTorch's the unbiased estimate from it, which
    is n / (n - 1) times as large.
    """
    weight = _per_channel(1.0, input) if weight is None else weight
    bias = _per_channel(0.0, input) if bias is None else bias
    if not training:
        normed = op.BatchNormalization(input, weight, bias, running_mean, running_var, epsilon=eps)
        return normed, running_mean, running_var, running_mean, running_var
    normed, new_mean, biased_variance = op.BatchNormalization(
        input, weight, bias, running_mean, running_var, epsilon=eps, momentum=1.0 - momentum, training_mode=1
    )
    one = op.Constant(value_int=1)
    count = op.Div(op.Size(input), op.Size(running_mean))
    ratio = op.Div(op.CastLike(count, running_var), op.CastLike(op.Max(op.Sub(count, one), one), running_var))
    kept = op.Mul(running_var, op.CastLike(op.Constant(value_float=1.0 - momentum), running_var))
    new_variance = op.Add(kept, op.Mul(op.Sub(biased_variance, kept), ratio))
    # The saved statistics are for PyTorch's own backward pass, which is not exported.
    return normed, new_mean, new_variance, new_mean, new_variance


def _per_channel(number: float, input: Any) -> Any:
    return op.Expand(op.CastLike(op.Constant(value_floats=[number]), input), op.Shape(input, start=1, end=2))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten._native_batch_norm_legit_functional.default: _batch_norm
}
"""What to write for operators of PyTorch instead of what the exporter would write."""


def switch_dropout_on(graph: ir.Graph) -> None:
    """Set the training mode of every Dropout that has none: so the exporter writes that of
    `scaled_dot_product_attention`, and it would do nothing.
    """
    for node in list(graph.all_nodes()):
        if node.domain != "" or node.op_type != "Dropout" or len(node.inputs) > 2:
            continue
        training_mode = ir.node("Constant", [], attributes={"value": ir.tensor(True)})
        training_mode.outputs[0].dtype = ir.DataType.BOOL
        training_mode.outputs[0].shape = ir.Shape([])
        assert node.graph is not None
        node.graph.insert_before(node, training_mode)
        node.resize_inputs(3)
        node.replace_input_with(2, training_mode.outputs[0])
