"""SoftmaxCrossEntropyLoss of a table of scores becomes CrossEntropy and the reduction of its rows.

CrossEntropy keeps one number per row for the backward pass, where the loss operator keeps a table of log
probabilities. Left alone are scores of more than two axes (whose classes are not the last), class weights,
types other than float, and nodes whose log probabilities anyone reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from ort_ops import operators

_NO_LABEL = np.iinfo(np.int64).min
"""What `ignore_index` is where nothing is to be ignored."""


def fuse_cross_entropy(model: ir.Model) -> bool:
    """Replace loss operators in place; returns whether there were any."""
    fused = False
    for node in list(model.graph):
        if _fits(node):
            _replace(model.graph, node)
            fused = True
    if fused:
        model.opset_imports.setdefault(operators.DOMAIN, operators.CROSS_ENTROPY.version)
    return fused


def _fits(node: ir.Node) -> bool:
    if node.op_type != "SoftmaxCrossEntropyLoss" or node.domain != "":
        return False
    scores = node.inputs[0]
    has_weights = len(node.inputs) > 2 and node.inputs[2] is not None
    reads_probabilities = len(node.outputs) > 1 and (
        bool(node.outputs[1].uses()) or node.outputs[1].is_graph_output()
    )
    assert scores is not None
    is_table = scores.dtype == ir.DataType.FLOAT and scores.shape is not None and len(scores.shape) == 2
    return is_table and not has_weights and not reads_probabilities


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    scores, labels = node.inputs[0], node.inputs[1]
    old, ignore = node.outputs[0], node.attributes.get("ignore_index")
    op = tape.Tape()
    rows, log_sum_exp = op.op_multi_out(
        operators.CROSS_ENTROPY.name,
        [scores, labels],
        {"ignore_index": ignore.as_int() if ignore is not None else _NO_LABEL},
        num_outputs=2,
        domain=operators.DOMAIN,
        name=node.name,
    )
    reduction = node.attributes.get_string("reduction", "mean")
    loss = rows
    if reduction == "mean" and ignore is None:
        loss = op.op("ReduceMean", [rows], {"keepdims": 0})
    elif reduction != "none":
        loss = op.op("ReduceSum", [rows], {"keepdims": 0})
        if reduction == "mean":
            assert ignore is not None and labels is not None
            wanted = op.op("Equal", [labels, _constant(graph, old, ignore.as_int(), labels.dtype)])
            counted = op.op("Cast", [op.op("Not", [wanted])], {"to": int(ir.DataType.FLOAT)})
            loss = op.op("Div", [loss, op.op("ReduceSum", [counted], {"keepdims": 0})])
    name = str(old.name)
    for number, made in enumerate(op.nodes):
        for value in made.outputs:
            value.name = f"{name}_of_rows_{number}"
    log_sum_exp.name = f"{name}_log_sum_exp"
    _describe(op.nodes, rows, log_sum_exp, labels)
    loss.type, loss.shape = old.type, old.shape
    graph.insert_before(node, op.nodes)
    ir.convenience.replace_all_uses_with(old, loss, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    loss.name = name


def _constant(graph: ir.Graph, loss: ir.Value, number: int, dtype: ir.DataType | None) -> ir.Value:
    assert dtype is not None
    name = f"{loss.name}_ignore_index"
    value = ir.Value(name=name, const_value=ir.tensor(np.array(number, dtype.numpy()), name=name))
    value.dtype, value.shape = dtype, ir.Shape([])
    graph.register_initializer(value)
    return value


def _describe(
    nodes: Sequence[ir.Node], rows: ir.Value, log_sum_exp: ir.Value, labels: ir.Value | None
) -> None:
    """Types and shapes, which differentiation reads: of each label, or a scalar."""
    assert labels is not None
    for node in nodes:
        for value in node.outputs:
            is_bool = node.op_type in ("Equal", "Not")
            value.type = ir.TensorType(ir.DataType.BOOL if is_bool else ir.DataType.FLOAT)
            value.shape = ir.Shape([]) if node.op_type in ("ReduceSum", "ReduceMean", "Div") else labels.shape
    rows.shape = log_sum_exp.shape = labels.shape
