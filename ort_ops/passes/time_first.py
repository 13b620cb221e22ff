"""Recurrent nodes in layout 1, whose tensors have the batch first, become nodes in layout 0 between
Transposes.

ONNX Runtime has kernels for layout 0 only, so this also makes such models run.
"""

from __future__ import annotations

import onnx_ir as ir

_RECURRENT = ("LSTM", "GRU", "RNN")
_BATCH_FIRST_INPUTS = (0, 5, 6)
"""X and the initial states: [N, A, B] for [A, N, B]."""


def time_first(model: ir.Model) -> bool:
    """Rewrite every LSTM, GRU and RNN with layout 1, in place; returns whether there is one."""
    nodes = [
        node
        for node in model.graph.all_nodes()
        if node.domain == "" and node.op_type in _RECURRENT and node.attributes.get_int("layout")
    ]
    for node in nodes:
        _rewrite(node)
    return bool(nodes)


def _rewrite(node: ir.Node) -> None:
    before = {
        index: _transpose(value, [1, 0, 2])
        for index, value in enumerate(node.inputs)
        if value is not None and index in _BATCH_FIRST_INPUTS
    }
    inputs = [before[i].outputs[0] if i in before else value for i, value in enumerate(node.inputs)]
    attributes = {name: value for name, value in node.attributes.items() if name != "layout"}
    inner = ir.node(
        node.op_type, inputs, attributes, num_outputs=len(node.outputs), name=node.name, version=node.version
    )
    wanted, after = [], []
    for index, (old, new) in enumerate(zip(node.outputs, inner.outputs, strict=True)):
        if not old.name:
            new.name = ""
            continue
        new.name = f"{old.name}_time_first"
        back = _transpose(new, [2, 0, 1, 3] if index == 0 else [1, 0, 2])
        result = back.outputs[0]
        result.name, result.type, result.shape = old.name, old.type, old.shape
        wanted.append(old)
        after.append(back)
    made = [*before.values(), inner, *after]
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], made, wanted, [back.outputs[0] for back in after]
    )


def _transpose(value: ir.Value, perm: list[int]) -> ir.Node:
    node = ir.node("Transpose", [value], {"perm": perm})
    node.outputs[0].name = f"{value.name}_transposed"
    return node
