"""Dropout that draws must not be optimized away.

ONNX Runtime removes every Dropout whose mask nobody reads, as if models were only for inference, even if its
training mode is on. A backward pass reads the mask; where no gradient passes, below frozen layers, nobody
does.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def keep_dropout(graph: ir.Graph) -> None:
    """Give the mask of every Dropout that may draw a reader, in place: the result is selected by it, which
    does not change it. Types are inferred.
    """
    for node in list(graph.all_nodes()):
        if node.op_type == "Dropout" and node.domain == "" and _may_draw(node) and not _mask_is_read(node):
            _select_by_mask(node)


def _may_draw(node: ir.Node) -> bool:
    training_mode = node.inputs[2] if len(node.inputs) > 2 else None
    if training_mode is None:
        return False
    known = ir.convenience.get_const_tensor(training_mode)
    return known is None or bool(known.numpy())


def _mask_is_read(node: ir.Node) -> bool:
    return len(node.outputs) > 1 and bool(node.outputs[1].uses() or node.outputs[1].is_graph_output())


def _select_by_mask(node: ir.Node) -> None:
    graph, dropped = node.graph, node.outputs[0]
    assert isinstance(graph, ir.Graph) and dropped.dtype is not None
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    mask = node.outputs[1]
    mask.name = mask.name or f"{dropped.name}_kept"
    mask.dtype, mask.shape = ir.DataType.BOOL, dropped.shape
    nothing = ir.node("Constant", [], attributes={"value": ir.tensor(np.zeros((), dropped.dtype.numpy()))})
    nothing.outputs[0].dtype, nothing.outputs[0].shape = dropped.dtype, ir.Shape([])
    selected = ir.node("Where", [mask, dropped, nothing.outputs[0]])
    result = selected.outputs[0]
    result.type, result.shape = dropped.type, dropped.shape
    result.name, dropped.name = dropped.name, f"{dropped.name}_dropped"
    graph.outputs[:] = [result if value is dropped else value for value in graph.outputs]
    dropped.replace_all_uses_with(result)
    selected.replace_input_with(1, dropped)
    graph.insert_after(node, [nothing, selected])
