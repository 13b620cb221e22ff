"""Lets a model with float16 and bfloat16 tensors run on ONNX Runtime's CPU provider as it does on a GPU.

The provider has 16-bit kernels for operators that move data, but hardly any that compute. It refuses others
in bfloat16; in float16 it computes them in float32 and removes most of the casts in between, so that nothing
is rounded and nothing overflows. Here every such node gets casts: it computes in float32, and its results are
rounded to its 16-bit type at once, as those of a 16-bit kernel that accumulates in float32.
"""

from __future__ import annotations

import onnx_ir as ir

from ort_ops.passes.infer_shapes import infer_shapes

_HAVE_KERNELS = frozenset(
    (
        *("Cast", "CastLike", "Concat", "Constant", "ConstantOfShape", "Flatten", "Gather", "GatherElements"),
        *("GatherND", "Identity", "If", "Loop", "Reshape", "Scan", "Shape", "Slice", "Split", "Squeeze"),
        *("Transpose", "Unsqueeze"),
    )
)
"""Operators of the default domain with 16-bit kernels in all supported versions of the runtime."""

_PLUGIN_DOMAIN = "ai.onnx.contrib"
"""The plugin's operators have 16-bit kernels, and bodies that compute in float32."""

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def round_on_cpu(model: ir.Model) -> bool:
    """Put casts, in place, around the nodes that have no 16-bit kernel on the CPU; returns whether any is
    there.

    Inputs and outputs of the graph keep their names and types. Functions of the model, but for those of the
    plugin's operators, must have been inlined.

    Raises:
        PassError: types that do not fit together.
    """
    if not has_16_bit_tensors(model):
        return False
    infer_shapes(model)
    nodes = [node for node in model.graph.all_nodes() if _lacks_kernel(node)]
    names = _Names(model)
    wide: dict[tuple[ir.Graph, ir.Value], ir.Value] = {}
    for node in nodes:
        _widen_inputs(node, wide, names)
        _round_outputs(node, names)
    return bool(nodes)


def has_16_bit_tensors(model: ir.Model) -> bool:
    """Whether the model has float16 or bfloat16 tensors. Needs no types but those that every model states."""
    values = (*model.graph.inputs, *model.graph.initializers.values())
    return any(value.dtype in _NARROW for value in values) or any(
        _states_narrow_type(attribute)
        for node in model.graph.all_nodes()
        for attribute in node.attributes.values()
    )


def _states_narrow_type(attribute: ir.Attr) -> bool:
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor().dtype in _NARROW
    return attribute.name in ("dtype", "to") and attribute.value in _NARROW


def _lacks_kernel(node: ir.Node) -> bool:
    if node.domain == _PLUGIN_DOMAIN or (node.domain == "" and node.op_type in _HAVE_KERNELS):
        return False
    values = (*node.inputs, *node.outputs)
    return any(value is not None and value.dtype in _NARROW for value in values)


def _widen_inputs(node: ir.Node, wide: dict[tuple[ir.Graph, ir.Value], ir.Value], names: _Names) -> None:
    """Let the node read float32; a value is cast once in each graph."""
    graph = _graph_of(node)
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype not in _NARROW:
            continue
        if (graph, value) not in wide:
            cast = _cast(value, ir.DataType.FLOAT, names)
            graph.insert_before(node, cast)
            wide[graph, value] = cast.outputs[0]
        node.replace_input_with(index, wide[graph, value])


def _round_outputs(node: ir.Node, names: _Names) -> None:
    """Let the node make float32, which is rounded to a value of the old name and type."""
    graph = _graph_of(node)
    last = node
    for output in node.outputs:
        if output.dtype is None or output.dtype not in _NARROW:
            continue
        cast = _cast(output, output.dtype, names)
        rounded = cast.outputs[0]
        output.replace_all_uses_with(rounded, replace_graph_outputs=True)
        cast.replace_input_with(0, output)
        rounded.name, output.name = output.name, rounded.name
        output.type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_after(last, cast)
        last = cast
    if node.attributes.get_int("dtype", 0) in _NARROW:
        node.attributes.add(ir.AttrInt64("dtype", int(ir.DataType.FLOAT)))


def _cast(value: ir.Value, to: ir.DataType, names: _Names) -> ir.Node:
    name = names.fresh(value)
    node = ir.node("Cast", [value], {"to": to}, name=name)
    output = node.outputs[0]
    output.name, output.dtype, output.shape = name, to, value.shape
    return node


def _graph_of(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph


class _Names:
    """Names that no value of the model has."""

    def __init__(self, model: ir.Model) -> None:
        self._taken = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
        for node in model.graph.all_nodes():
            self._taken.update(value.name for value in (*node.inputs, *node.outputs) if value is not None)

    def fresh(self, value: ir.Value) -> str:
        candidate, number = f"{value.name}_float", 0
        while candidate in self._taken:
            number += 1
            candidate = f"{value.name}_float_{number}"
        self._taken.add(candidate)
        return candidate
