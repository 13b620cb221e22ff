"""Operators that the standard defines by other operators become those."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

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
        _drop_unmade_outputs(body, len(node.outputs))
        body.domain, body.overload = _DOMAIN, str(number)
        del body.opset_import[:]
        body.opset_import.append(onnx.helper.make_opsetid("", model.opset_imports[""]))
        function = ir.serde.deserialize_function(body)
        model.functions[function.identifier()] = function
        node.domain, node.overload = _DOMAIN, str(number)
        expanded = True
    if expanded:
        InlinePass(criteria=lambda function: function.domain == _DOMAIN)(model)
    return expanded


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


def _drop_unmade_outputs(body: onnx.FunctionProto, count: int) -> None:
    """Outputs that the node leaves out are named by the body all the same, but not always made, or made
    without a name."""
    nodes = [inner for inner in body.node if any(inner.output)]
    del body.node[:]
    body.node.extend(nodes)
    made = {name for inner in body.node for name in inner.output} | set(body.input)
    outputs = [name if name in made else body.output[0] for name in body.output[:count]]
    del body.output[:]
    body.output.extend(outputs)


def _type_bytes(value: ir.Value | None) -> bytes:
    if value is None or value.type is None:
        return onnx.TypeProto().SerializeToString()
    proto = ir.serde.serialize_type(value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto.SerializeToString()
