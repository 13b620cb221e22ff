"""`ai.onnx.contrib::StopGradient(x) -> x`: a value that counts as a constant when gradients are built.

A forward model may contain it; it carries the body, an Identity, as a function and so runs anywhere. In a
gradient model the nodes are Identity.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ort_ops.operators import DOMAIN

STOP_GRADIENT = "StopGradient"


def stop_gradient_function(opset: int) -> onnx.FunctionProto:
    """The body, for a model of this opset."""
    return onnx.helper.make_function(
        DOMAIN,
        STOP_GRADIENT,
        ["x"],
        ["y"],
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        [onnx.helper.make_opsetid("", opset)],
    )


def become_copies(graph: ir.Graph) -> None:
    """Replace every StopGradient by Identity, in place: the gradients are built."""
    for node in graph.all_nodes():
        if (node.domain, node.op_type) == (DOMAIN, STOP_GRADIENT):
            node.domain, node.op_type = "", "Identity"
