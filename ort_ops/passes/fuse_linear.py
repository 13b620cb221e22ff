"""A product with a weight that is trained, and the bias added to it, become one Linear.

As one node it is differentiated as one node. What is recognised: a MatMul of float tensors whose second
operand is a matrix or, as exporters write a layer of PyTorch, a matrix transposed; a Gemm whose first operand
is as it is and whose factors are 1; and the vector, of one number per output, that only it is added to.

Products with weights that no gradient is wanted of are left alone: the runtime lays such weights out for its
own products once, when a session is made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ort_ops import operators

_LARGEST_RANK = 8
"""What the operator's kernel takes."""


@dataclass(frozen=True)
class _Layer:
    """What was found, and the nodes that it replaces, the last one first."""

    x: ir.Value
    w: ir.Value
    layout: str
    b: ir.Value | None
    nodes: list[ir.Node]


def fuse_linear(model: ir.Model, trainable: Collection[ir.Value]) -> bool:
    """Replace linear layers in place; returns whether there were any. Needs types and shapes.

    trainable: the values that gradients are wanted of.
    """
    fused = False
    for node in list(model.graph):
        layer = _find(node, trainable)
        if layer is not None:
            _replace(model.graph, layer)
            fused = True
    if fused:
        model.opset_imports.setdefault(operators.DOMAIN, operators.LINEAR.version)
        RemoveUnusedNodesPass()(model)
    return fused


def _find(node: ir.Node, trainable: Collection[ir.Value]) -> _Layer | None:
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    found = _of_gemm(node) if node.op_type == "Gemm" else _of_matmul(node)
    if found is None or found.w not in trainable:
        return None
    if not _is_float(found.x) or not _is_float(found.w):
        return None
    if not 2 <= _rank(found.x) <= _LARGEST_RANK or _rank(found.w) != 2:
        return None
    return found


def _of_matmul(node: ir.Node) -> _Layer | None:
    x, w = node.inputs
    assert x is not None and w is not None
    layout = "in_out"
    turned = w.producer()
    if turned is not None and turned.op_type == "Transpose" and turned.domain == "" and _rank(w) == 2:
        if list(turned.attributes.get_ints("perm", [1, 0])) == [1, 0]:
            assert turned.inputs[0] is not None
            w, layout = turned.inputs[0], "out_in"
    added = _bias_addition(node.outputs[0], w, layout)
    if added is None:
        return _Layer(x, w, layout, None, [node])
    add, b = added
    return _Layer(x, w, layout, b, [add, node])


def _of_gemm(node: ir.Node) -> _Layer | None:
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    b = node.inputs[2] if len(node.inputs) > 2 else None
    layout = "out_in" if node.attributes.get_int("transB", 0) else "in_out"
    if node.attributes.get_int("transA", 0) or node.attributes.get_float("alpha", 1.0) != 1.0:
        return None
    if b is not None and (node.attributes.get_float("beta", 1.0) != 1.0 or not _is_bias(b, w, layout)):
        return None
    return _Layer(x, w, layout, b, [node])


def _bias_addition(product: ir.Value, w: ir.Value, layout: str) -> tuple[ir.Node, ir.Value] | None:
    """The Add that alone reads `product`, and the bias that it adds."""
    uses = list(product.uses())
    if len(uses) != 1 or product.is_graph_output():
        return None
    add = uses[0].node
    if (add.op_type, add.domain) != ("Add", "") or add.graph is not product.producer().graph:  # type: ignore[union-attr]
        return None
    b = add.inputs[1 - uses[0].idx]
    assert b is not None
    return (add, b) if _is_bias(b, w, layout) else None


def _is_bias(b: ir.Value, w: ir.Value, layout: str) -> bool:
    """Whether `b` surely is a vector of one number per output of `w`."""
    if not _is_float(b) or _rank(b) != 1 or _rank(w) != 2:
        return False
    assert b.shape is not None and w.shape is not None
    size = b.shape[0]
    return isinstance(size, int) and size == w.shape[0 if layout == "out_in" else 1]


def _is_float(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT


def _rank(value: ir.Value) -> int:
    """-1 if it is not known."""
    return -1 if value.shape is None else len(value.shape)


def _replace(graph: ir.Graph, layer: _Layer) -> None:
    last, first = layer.nodes[0], layer.nodes[-1]
    result = last.outputs[0]
    made = ir.node(
        operators.LINEAR.name,
        [layer.x, layer.w, *([] if layer.b is None else [layer.b])],
        {"weight_layout": layer.layout},
        domain=operators.DOMAIN,
        name=first.name,
    )
    graph.insert_before(last, made)
    made.outputs[0].type, made.outputs[0].shape = result.type, result.shape
    ir.convenience.replace_all_uses_with(result, made.outputs[0], replace_graph_outputs=True)
    name = result.name
    graph.remove(layer.nodes, safe=True)
    made.outputs[0].name = name
