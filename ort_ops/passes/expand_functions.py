"""Operators that the standard defines by other operators become those."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

_DOMAIN = "ort_ops.expanded"


def expand_functions(model: ir.Model, nodes: Collection[ir.Node]) -> bool:
    """Replace, in place, those of `nodes` that have a function body in the standard; returns whether any has
    one.

    The body is chosen for the model's opset and for the node's types and attributes; types must have been
    inferred.
    """
    expanded = False
    for number, node in enumerate(nodes):
        body = _body(node, model.opset_imports[""])
        if body is None:
            continue
        _keep_wanted(body, node)
        body.domain, body.overload = _DOMAIN, str(number)
        del body.opset_import[:]
        body.opset_import.append(onnx.helper.make_opsetid("", model.opset_imports[""]))
        function = ir.serde.deserialize_function(body)
        model.functions[function.identifier()] = function
        _call_instead(node, function)
        expanded = True
    if expanded:
        InlinePass(criteria=lambda function: function.domain == _DOMAIN)(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return expanded


def _call_instead(node: ir.Node, function: ir.Function) -> None:
    """Put a call of `function`, which makes the outputs that have a name, in the place of `node`."""
    wanted = [value for value in node.outputs if value.name]
    call = ir.node(
        function.name,
        node.inputs,
        node.attributes,
        domain=function.domain,
        overload=function.overload,
        num_outputs=len(wanted),
        name=node.name,
    )
    for old, new in zip(wanted, call.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [call], wanted, call.outputs)


def _body(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    schema: Any
    if node.domain != "":
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    body = onnx.FunctionProto()
    versions = [version for version in schema.function_opset_versions if version <= opset]
    if versions:
        body.ParseFromString(schema.get_function_with_opset_version(max(versions)))
        return body
    versions = [version for version in schema.context_dependent_function_opset_versions if version <= opset]
    if not versions:
        return None
    types = [_type_bytes(value) for value in node.inputs]
    made = schema.get_context_dependent_function_with_opset_version(
        max(versions), ir.serde.serialize_node(node).SerializeToString(), types
    )
    if not made:
        return None
    body.ParseFromString(made)
    return body


def _keep_wanted(body: onnx.FunctionProto, node: ir.Node) -> None:
    """Drop what the body makes for outputs that the node leaves out; it names them, but does not always make
    them."""
    outputs = [name for name, value in zip(body.output, node.outputs, strict=False) if value.name]
    needed = set(outputs)
    kept = []
    for inner in reversed(body.node):
        if needed.intersection(inner.output):
            kept.append(inner)
            needed.update(inner.input)
            needed.update(_outer_names(inner))
    nodes = kept[::-1]
    del body.node[:], body.output[:]
    body.node.extend(nodes)
    body.output.extend(outputs)


def _outer_names(node: onnx.NodeProto) -> set[str]:
    """Names that the node's own graphs read; some are their own, which does no harm."""
    graphs = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    names = {
        name for graph in graphs for inner in graph.node for name in (*inner.input, *_outer_names(inner))
    }
    return names | {value.name for graph in graphs for value in graph.output}


def _type_bytes(value: ir.Value | None) -> bytes:
    if value is None or value.type is None:
        return onnx.TypeProto().SerializeToString()
    proto = ir.serde.serialize_type(value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto.SerializeToString()
