"""Derivative of Scan: a Scan backwards over the steps, whose body is the derivative of the forward body.

Two nodes are written: the forward Scan once more, which also puts out the states before each step, and a Scan
from the last step to the first, which works out each step again from those states and differentiates it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_ops import passes
from ort_ops.gradient.driver import Vjp, differentiate
from ort_ops.gradient.emitter import Emitter
from ort_ops.gradient.paths import FLOATS, captured
from ort_ops.gradient.registry import Grads, vjp

_LIMITS = "axes 0, forward direction, floating-point states; the body reads no parameter from outside"


@vjp("Scan", limits=_LIMITS)
def scan(c: Vjp) -> Grads:
    body = c.node.attributes["body"].as_graph()
    count = c.int_attr("num_scan_inputs", 0)
    states = len(c.node.inputs) - count
    _refuse_unsupported(c, body, states)

    saved = _saved_states(c, body, states)
    sequences = [c.x(states + place) for place in range(count)]
    final = [c.dy(place) for place in range(states)]
    results = [c.dy(place) for place in range(states, len(c.node.outputs))]
    wanted = [value for value in body.inputs if value.dtype in FLOATS or value.dtype is None]

    graph = _standalone(c, body, states)
    emit = Emitter(c.emit.names, c.emit.opset)
    emit.prefix = f"{c.emit.prefix}/step"
    inner = dict(zip(body.inputs, graph.inputs, strict=False))
    seeds = [_input_like(c, value) for value in graph.outputs]
    loss = _weighted_sum(c, graph, seeds)
    names = [inner[value] for value in wanted]
    gradients = differentiate(graph, dict(c.opsets), loss, names, emit, unreachable_is_zero=True)
    by_input = dict(zip(names, gradients, strict=True))

    state_inputs, scan_inputs = graph.inputs[:states], graph.inputs[states : states + count]
    step_outputs = [by_input[value] for value in state_inputs] + [
        by_input[v] for v in scan_inputs if v in by_input
    ]
    for value in list(graph.inputs[states + count :]):
        value.replace_all_uses_with(value.meta["outer"])
    _turn_into(
        graph,
        [*seeds[:states], *state_inputs, *scan_inputs, *seeds[states:]],
        step_outputs,
        f"{c.emit.prefix}_step",
    )
    reversed_inputs = [*saved, *sequences, *results]
    made = c.multi(
        "Scan", *final, *reversed_inputs, outputs=len(step_outputs), dtype=c.dtype, body=graph,
        num_scan_inputs=len(reversed_inputs), scan_input_directions=[1] * len(reversed_inputs),
        scan_output_directions=[1] * (len(step_outputs) - states),
    )  # fmt: skip
    by_sequence = iter(made[states:])
    return [*made[:states], *(next(by_sequence) if value in by_input else None for value in scan_inputs)]


def _refuse_unsupported(c: Vjp, body: ir.Graph, states: int) -> None:
    for name in ("scan_input_axes", "scan_output_axes", "scan_input_directions", "scan_output_directions"):
        if any(c.ints_attr(name) or []):
            raise c.fail(f"{name} other than zeros are not supported")
    if any(value.dtype not in FLOATS for value in c.node.inputs[:states] if value is not None):
        raise c.fail("states that are not floating-point are not supported")
    for value in captured(c.node):
        if c.carries(value):
            raise c.fail(
                f"its body reads {value.name!r}, which depends on a parameter, from outside; make it an "
                "input of the node"
            )


def _saved_states(c: Vjp, body: ir.Graph, states: int) -> list[ir.Value]:
    """The states before each step, [steps, ...] each."""
    copy = body.clone(allow_outer_scope_values=True)
    _rename(c, copy)
    for value in list(copy.inputs[:states]):
        node = ir.node("Identity", [value], name=c.emit.names.numbered(f"{c.emit.prefix}/Identity"))
        node.outputs[0].name = c.emit.names.numbered(f"{c.emit.prefix}/state")
        copy.append(node)
        copy.outputs.append(node.outputs[0])
    made = c.multi(
        "Scan", *c.node.inputs, outputs=len(copy.outputs), dtype=c.dtype, body=copy,
        num_scan_inputs=c.int_attr("num_scan_inputs", 0),
    )  # fmt: skip
    return list(made[len(made) - states :])


def _rename(c: Vjp, graph: ir.Graph) -> None:
    """Names of a copied body must differ from those of the original."""
    for value in graph.inputs:
        value.name = c.emit.names.numbered(f"{c.emit.prefix}/step_in")
    for initializer in list(graph.initializers.values()):
        initializer.name = c.emit.names.numbered(f"{c.emit.prefix}/step_const")
    for node in graph.all_nodes():
        node.name = c.emit.names.numbered(f"{c.emit.prefix}/{node.op_type}")
        for value in node.outputs:
            value.name = c.emit.names.numbered(node.name)


def _standalone(c: Vjp, body: ir.Graph, states: int) -> ir.Graph:
    """A copy of the body as a graph of its own, ready to be differentiated; what it reads from outside are
    inputs.

    Each of those inputs remembers the value outside as `meta["outer"]`.
    """
    copy = body.clone(allow_outer_scope_values=True)
    _rename(c, copy)
    own = {value for node in copy.all_nodes() for value in node.outputs}
    own |= set(copy.inputs) | set(copy.initializers.values())
    for place, value in enumerate(copy.inputs):
        outer = c.x(place)
        value.type = outer.type
        if outer.shape is not None:
            value.shape = outer.shape if place < states else ir.Shape(list(outer.shape)[1:])
    holder = ir.Node("", "Scan", [], attributes=[ir.AttrGraph("body", copy)])
    for outer in dict.fromkeys(captured(holder)):
        if outer not in own:
            alias = ir.Value(
                name=c.emit.names.numbered(f"{c.emit.prefix}/outer"), type=outer.type, shape=outer.shape
            )
            for user, index in list(outer.uses()):
                if user.graph is copy:
                    user.replace_input_with(index, alias)
            if outer.const_value is not None:
                alias.const_value = outer.const_value
                copy.initializers.add(alias)
            else:
                alias.meta["outer"] = outer
                copy.inputs.append(alias)
    model = ir.Model(copy, ir_version=10)
    copy.opset_imports.update(c.opsets)
    passes.infer_shapes(model)
    return copy


def _input_like(c: Vjp, value: ir.Value) -> ir.Value:
    return ir.Value(
        name=c.emit.names.numbered(f"{c.emit.prefix}/step_dy"), type=value.type, shape=value.shape
    )


def _weighted_sum(c: Vjp, graph: ir.Graph, seeds: Sequence[ir.Value]) -> ir.Value:
    """A scalar whose gradient by each output is that output's seed."""
    emit = Emitter(c.emit.names, c.emit.opset)
    emit.prefix = f"{c.emit.prefix}/step_loss"
    terms = [
        emit.op("ReduceSum", emit.op("Mul", value, seed), keepdims=0)
        for value, seed in zip(graph.outputs, seeds, strict=True)
        if value.dtype in FLOATS
    ]
    loss = emit.op("Sum", *terms)
    loss.shape = ir.Shape([])
    for node in emit.nodes:
        if node.op_type == "Mul":
            node.outputs[0].shape = node.inputs[0].shape  # type: ignore[union-attr]
    graph.extend(emit.nodes)
    return loss


def _turn_into(graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], name: str) -> None:
    """Give the graph other inputs and outputs, and drop the nodes and constants that the outputs do not
    need."""
    graph.outputs[:] = outputs
    graph.inputs[:] = inputs
    graph.name = name
    needed = set(outputs)
    for node in reversed(list(graph)):
        if any(value in needed for value in node.outputs):
            needed.update(value for value in node.inputs if value is not None)
            needed.update(captured(node))
        else:
            graph.remove(node, safe=True)
    for key, value in list(graph.initializers.items()):
        if value not in needed:
            graph.initializers.pop(key)
