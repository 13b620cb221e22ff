"""Training graphs built by onnxruntime-training: their LayerNorm gradients become AddLayerNormGrad.

`com.microsoft::LayerNormalizationGrad (dY, X, scale, mean, inv_std_var) -> (dX, d scale, d bias)` is replaced
with what stands around it:

- after it, the Sum (or Add) of its dX with gradients that reach X by other ways, directly or through Identity
  nodes, in any order: those gradients become dsum;
- before it, the Add that makes X: its addends become x1 and x2 instead of X, where that keeps a tensor less
  alive until the backward pass.

A gradient in that Sum that itself depends on dX stays outside, or the graph would have a cycle. That is how
it is after every norm whose result is the residual stream (post-norm).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx
import onnx_ir as ir

from ort_ops import operators
from ort_ops.operators import ADD_LAYER_NORM_GRAD

PEER_DOMAIN = "com.microsoft"

Model = TypeVar("Model", onnx.ModelProto, ir.Model)

_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

_OTHER_FORMULAS = {
    "SimplifiedLayerNormalizationGrad": "RMSNorm does not subtract the mean, so its gradient is another one",
    "InvertibleLayerNormalizationGrad": "it reads the norm's output; AddLayerNormGrad reads its input",
}
"""Gradients of norms that AddLayerNormGrad cannot stand for, and why."""

_NO_BODIES = (
    f"The body of {ADD_LAYER_NORM_GRAD.name} needs opset {operators.MIN_OPSET}, and the model imports "
    "{opset}; so it carries none and runs only with the plugin registered."
)

_ACCUMULATION_PREFIX = "AccumulateGrad_"
"""What onnxruntime-training names the nodes that add the gradients of one value, all of its shape."""


@dataclass(frozen=True)
class FusedNorm:
    """A norm's gradient that became AddLayerNormGrad.

    Attributes:
        node: name of the LayerNormalizationGrad, and of the AddLayerNormGrad in its place.
        sum: name of the Sum that went into it, "" if none did.
        add: name of the Add whose addends it reads, "" if it reads the Add's result.
        why_no_sum, why_no_add: why not, in words; "" where one did.
    """

    node: str
    sum: str
    add: str
    why_no_sum: str
    why_no_add: str


@dataclass(frozen=True)
class LeftNorm:
    """A norm's gradient that stayed as it was, and why."""

    node: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What `use_add_layer_norm_grad` did.

    Attributes:
        fused: one entry for each AddLayerNormGrad written, in the graph's order.
        left: one entry for each gradient of a norm that was not replaced.
        notes: what else the caller should know.
    """

    fused: tuple[FusedNorm, ...]
    left: tuple[LeftNorm, ...]
    notes: tuple[str, ...]


def use_add_layer_norm_grad(model: Model) -> tuple[Model, Report]:
    """Replace the LayerNormalizationGrad nodes of a training graph by AddLayerNormGrad.

    Args:
        model: a training graph as onnxruntime-training builds it, also after that runtime has optimised it. A
            protobuf message is left alone and a copy rewritten; a model of onnx_ir is rewritten in place.

    Returns:
        The model and what was done. Names of outputs stay; the gradients of scale and bias keep their type;
        outputs that nobody reads are left out. A protobuf message carries the nodes' function bodies, so that
        it needs no plugin for them, if its default opset has the operators for them (15); else the report
        says so. A model of onnx_ir carries none: call `ort_ops.operators.embed_functions` once it is a
        message.
    """
    if isinstance(model, ir.Model):
        return model, _rewrite(model, notes=())
    ir_model = ir.from_proto(model)
    opset = ir_model.opset_imports.get("", 0)
    with_bodies = opset >= operators.MIN_OPSET
    report = _rewrite(ir_model, notes=() if with_bodies else (_NO_BODIES.format(opset=opset),))
    result = ir.to_proto(ir_model)
    return (operators.embed_functions(result) if with_bodies else result), report


def _rewrite(model: ir.Model, notes: tuple[str, ...]) -> Report:
    """Rewrite the model in place; `notes` are for a model in which something was replaced."""
    graph = model.graph
    fused, left = [], []
    for node in list(graph):
        if node.domain != PEER_DOMAIN:
            continue
        if node.op_type in _OTHER_FORMULAS:
            left.append(LeftNorm(_name(node), _OTHER_FORMULAS[node.op_type]))
        elif node.op_type == "LayerNormalizationGrad":
            reason = _why_not(node)
            if reason:
                left.append(LeftNorm(_name(node), reason))
            else:
                fused.append(_fuse(graph, node))
    if fused:
        graph.sort()
        model.opset_imports[operators.DOMAIN] = ADD_LAYER_NORM_GRAD.version
    return Report(tuple(fused), tuple(left), notes if fused else ())


# -- which nodes ---------------------------------------------------------------------------------------------


def _why_not(node: ir.Node) -> str:
    """Why a LayerNormalizationGrad cannot be an AddLayerNormGrad; "" if it can."""
    if len(node.inputs) != 5 or any(value is None for value in node.inputs):
        return "it must have the five inputs dY, X, scale, mean and inverse deviation"
    x, scale, mean, rstd = node.inputs[1:]
    assert x is not None and scale is not None and mean is not None and rstd is not None
    dtype = _dtype(node)
    if dtype is None:
        return f"the type of {x.name!r} is not known; add a value_info for it"
    if dtype not in _TYPES:
        return f"{x.name!r} is {dtype.name.lower()}; AddLayerNormGrad takes float, float16 and bfloat16"
    if scale.dtype is not None and scale.dtype not in (dtype, ir.DataType.FLOAT):
        return f"the scale {scale.name!r} is {scale.dtype.name.lower()}; it must be as {x.name!r}, or float"
    for value in (mean, rstd):
        if value.dtype not in (None, ir.DataType.FLOAT):
            assert value.dtype is not None
            return f"{value.name!r} is {value.dtype.name.lower()}; the statistics must be float"
    return _why_not_these_axes(node, x, scale)


def _why_not_these_axes(node: ir.Node, x: ir.Value, scale: ir.Value) -> str:
    """AddLayerNormGrad normalises over as many trailing axes as the scale has."""
    axis = node.attributes.get_int("axis", -1)
    if scale.shape is None:
        return f"the rank of the scale {scale.name!r} is not known; add a value_info for it"
    if axis >= 0 and x.shape is None:
        return f"the rank of {x.name!r} is not known; add a value_info for it"
    normalised = -axis if axis < 0 else len(x.shape or ()) - axis
    if len(scale.shape) != normalised:
        return (
            f"the scale {scale.name!r} has rank {len(scale.shape)}, and the last {normalised} axes are "
            "normalised; the two must be one number"
        )
    return ""


def _dtype(node: ir.Node) -> ir.DataType | None:
    """Type of X, of dY and of dX, which are one."""
    dy, x = node.inputs[:2]
    return next((v.dtype for v in (x, dy, node.outputs[0]) if v is not None and v.dtype is not None), None)


def _name(node: ir.Node) -> str:
    return node.name or f"the node that makes {node.outputs[0].name}"


# -- the rewrite ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Residual:
    """The Sum after a norm's gradient.

    Attributes:
        node: the Sum or Add.
        between: the Identity nodes on the way there.
        inside: its other addends that do not depend on dX.
        outside: its other addends that do.
    """

    node: ir.Node
    between: list[ir.Node]
    inside: list[ir.Value]
    outside: list[ir.Value]


def _fuse(graph: ir.Graph, node: ir.Node) -> FusedNorm:
    """Put AddLayerNormGrad in the place of `node`, with the Sum and the Add around it where they fold."""
    dy, x, scale, mean, rstd = node.inputs
    assert x is not None and scale is not None
    residual = _residual(node)
    add = _addition(node, x)
    made: list[ir.Node] = []
    dsum = None
    if isinstance(residual, _Residual):
        dsum = residual.inside[0]
        if len(residual.inside) > 1:
            rest = _node(graph, "Sum", residual.inside, residual.node.name)
            rest.outputs[0].type, rest.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
            made.append(rest)
            dsum = rest.outputs[0]
    x1, x2 = (x, None) if isinstance(add, str) else (add.inputs[0], add.inputs[1])
    fused = ir.node(
        ADD_LAYER_NORM_GRAD.name,
        [dy, x1, x2, rstd, mean, scale, dsum],
        domain=operators.DOMAIN,
        num_outputs=3,
        name=node.name,
        doc_string=node.doc_string,
    )
    made.append(fused)
    old, new = _gradient_of_x(graph, node, residual, fused, made)
    for index in (1, 2):
        if index < len(node.outputs) and _is_read(node.outputs[index]):
            old.append(node.outputs[index])
            new.append(_affine_gradient(graph, fused, index, node.outputs[index], scale, made))
        else:
            fused.outputs[index].name = ""
    removed = [node]
    if isinstance(residual, _Residual):
        removed = [residual.node, *reversed(residual.between), node]
    for before, after in zip(old, new, strict=True):
        after.name, after.type, after.shape = before.name, before.type, before.shape
    ir.convenience.replace_nodes_and_values(graph, removed[0], removed, made, old, new)
    if not isinstance(add, str):
        _write_as_sum(add)
    return FusedNorm(
        node=_name(node),
        sum=_name(residual.node) if isinstance(residual, _Residual) else "",
        add="" if isinstance(add, str) else _name(add),
        why_no_sum="" if isinstance(residual, _Residual) else residual,
        why_no_add=add if isinstance(add, str) else "",
    )


def _gradient_of_x(
    graph: ir.Graph, node: ir.Node, residual: _Residual | str, fused: ir.Node, made: list[ir.Node]
) -> tuple[list[ir.Value], list[ir.Value]]:
    """The value that is replaced by the new dx, or by its sum with what had to stay outside, and that
    value."""
    dx = node.outputs[0]
    if isinstance(residual, str):
        if not _is_read(dx):  # the first output is not optional
            fused.outputs[0].name, fused.outputs[0].type = dx.name, dx.type
            return [], []
        return [dx], [fused.outputs[0]]
    total = residual.node.outputs[0]
    if not residual.outside:
        return [total], [fused.outputs[0]]
    fused.outputs[0].name = _fresh(graph, f"{dx.name}_and_residual")
    fused.outputs[0].type, fused.outputs[0].shape = dx.type, dx.shape
    rest = _node(graph, "Sum", [fused.outputs[0], *residual.outside], f"{_name(residual.node)}_outside")
    made.append(rest)
    return [total], [rest.outputs[0]]


def _affine_gradient(
    graph: ir.Graph, fused: ir.Node, index: int, old: ir.Value, scale: ir.Value, made: list[ir.Node]
) -> ir.Value:
    """Output `index` of the new node, float, in the type of the one it replaces."""
    gradient = fused.outputs[index]
    dtype = old.dtype or scale.dtype or ir.DataType.FLOAT
    if dtype == ir.DataType.FLOAT:
        return gradient
    gradient.name = _fresh(graph, f"{old.name}_float")
    gradient.dtype, gradient.shape = ir.DataType.FLOAT, old.shape
    cast = _node(graph, "Cast", [gradient], f"{_name(fused)}/Cast", {"to": int(dtype)})
    made.append(cast)
    return cast.outputs[0]


def _node(
    graph: ir.Graph,
    op_type: str,
    inputs: Sequence[ir.Value],
    name: str | None,
    attributes: dict[str, int] | None = None,
) -> ir.Node:
    node = ir.node(op_type, inputs, attributes, name=name)
    node.outputs[0].name = _fresh(graph, f"{name or op_type}_output")
    return node


def _fresh(graph: ir.Graph, wanted: str) -> str:
    """`wanted`, with a number behind it if a value of the graph has that name."""
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    taken.update(value.name for node in graph.all_nodes() for value in node.outputs)
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


# -- the Sum after it ----------------------------------------------------------------------------------------


def _residual(node: ir.Node) -> _Residual | str:
    """The Sum that can be done inside, or why there is none."""
    between: list[ir.Node] = []
    value = node.outputs[0]
    while True:
        if value.is_graph_output():
            return f"{value.name!r} is an output of the graph"
        readers = [use.node for use in value.uses()]
        if len(readers) != 1:
            return _why_not_these_readers(node, value, readers)
        reader = readers[0]
        if reader.graph is not node.graph:
            return f"{value.name!r} is read in the body of another node"
        if reader.domain != "" or reader.op_type != "Identity":
            break
        between.append(reader)
        value = reader.outputs[0]
    if not _is_sum(reader):
        return f"{value.name!r} is read by {_name(reader)} ({reader.op_type}), which is no sum"
    others = [addend for addend in reader.inputs if addend is not None and addend is not value]
    if not others:
        return f"{_name(reader)} adds nothing to {value.name!r}"
    for addend in others:
        if not _has_shape_of(addend, node, reader):
            return f"the shape of {addend.name!r} is not surely that of {node.outputs[0].name!r}"
    outside = [addend for addend in others if _depends_on(addend.producer(), node)]
    inside = [addend for addend in others if addend not in outside]
    if not inside:
        return _cycle(reader, outside, value)
    return _Residual(reader, between, inside, outside)


def _why_not_these_readers(node: ir.Node, value: ir.Value, readers: Sequence[ir.Node]) -> str:
    if not readers:
        return f"nothing reads {value.name!r}"
    for reader, addend in _sums_behind(value):
        others = [other for other in reader.inputs if other is not None and other is not addend]
        cyclic = [other for other in others if _depends_on(other.producer(), node)]
        if cyclic:
            return _cycle(reader, cyclic, value)
    return f"{value.name!r} is read by {', '.join(_name(reader) for reader in readers)}"


def _sums_behind(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """The sums that read `value`, directly or through Identity nodes, and the value that they read."""
    for use in value.uses():
        if _is_sum(use.node):
            yield use.node, value
        elif use.node.domain == "" and use.node.op_type == "Identity":
            yield from _sums_behind(use.node.outputs[0])


def _cycle(reader: ir.Node, cyclic: Sequence[ir.Value], value: ir.Value) -> str:
    names = ", ".join(repr(addend.name) for addend in cyclic)
    return f"{_name(reader)} adds {names} to {value.name!r}, which it depends on: a cycle"


def _is_sum(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in ("Sum", "Add")


def _has_shape_of(addend: ir.Value, node: ir.Node, reader: ir.Node) -> bool:
    """Whether nothing is broadcast when `reader` adds `addend` to the gradient that `node` makes."""
    x = node.inputs[1]
    assert x is not None
    shape = x.shape if x.shape is not None else node.outputs[0].shape
    if shape is None or addend.shape is None:
        return bool(reader.name) and str(reader.name).startswith(_ACCUMULATION_PREFIX)
    return _same(addend.shape, shape)


def _same(left: ir.Shape, right: ir.Shape) -> bool:
    """Whether the shapes are the same as far as they are known; an axis of size 1 would be broadcast."""

    def same(a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> bool:
        return a == b or (a != 1 and b != 1 and not (isinstance(a, int) and isinstance(b, int)))

    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))


def _depends_on(reader: ir.Node | None, node: ir.Node) -> bool:
    """Whether `reader` is `node` or needs it; a node needs what its bodies read."""
    seen = {reader}
    stack = [reader]
    while stack:
        current = stack.pop()
        if current is node:
            return True
        for value in () if current is None else _reads(current):
            producer = value.producer()
            if producer not in seen:
                seen.add(producer)
                stack.append(producer)
    return False


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """What the node reads, in its bodies too."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            for inner in body:
                yield from _reads(inner)
            yield from body.outputs


# -- the Add before it ---------------------------------------------------------------------------------------


def _addition(node: ir.Node, x: ir.Value) -> ir.Node | str:
    """The Add whose addends are better read than its result, or why there is none.

    That is so only if both are kept until after this node anyway, and the result for this node alone.
    """
    add = x.producer()
    if add is None or not _is_sum(add) or len(add.inputs) != 2:
        return f"{x.name!r} is not made by an Add"
    if x.is_graph_output():
        return f"{x.name!r} is an output of the graph"
    late = [use.node for use in x.uses() if use.node is not node and _depends_on(use.node, node)]
    if late:
        return f"{x.name!r} is kept for {_name(late[0])} anyway"
    for addend in add.inputs:
        assert addend is not None
        if addend.shape is None or x.shape is None or not _same(addend.shape, x.shape):
            return f"the shape of {addend.name!r} is not surely that of {x.name!r}"
        if not _is_kept(addend, node):
            return f"{addend.name!r} would have to be kept in the place of {x.name!r}"
    return add


def _is_kept(value: ir.Value, node: ir.Node) -> bool:
    """Whether the value is in memory after `node`, come what may."""
    if value.is_graph_input() or value.is_initializer() or value.is_graph_output():
        return True
    return any(use.node is not node and _depends_on(use.node, node) for use in value.uses())


def _write_as_sum(add: ir.Node) -> None:
    """Write the forward addition as a Sum, which is the same.

    ONNX Runtime 1.19 replaces an Add and a LayerNormalization that alone reads it by its own node, which then
    does not compute the statistics. It knows no Sum.
    """
    add.op_type = "Sum"
