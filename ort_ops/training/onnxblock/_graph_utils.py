"""Small questions to the model that blocks add to, and adding a graph to it. Own blocks use some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import GraphBuilder

from ort_ops.training import tensor_free
from ort_ops.training.onnxblock import model_accessor


def generate_graph_name(token: str) -> str:
    """A new name for a node or value, `onnx::<token>::<number>`."""
    return model_accessor.current().new_name(token)


def get_output_from_output_name(onnx_model: onnx.ModelProto, output_name: str) -> onnx.ValueInfoProto:
    """The graph output of that name. Raises LookupError if there is none."""
    return _named("output", onnx_model.graph.output, output_name)


def get_input_from_input_name(onnx_model: onnx.ModelProto, input_name: str) -> onnx.ValueInfoProto:
    """The graph input of that name. Raises LookupError if there is none."""
    return _named("input", onnx_model.graph.input, input_name)


def _named(kind: str, values: Sequence[onnx.ValueInfoProto], name: str) -> onnx.ValueInfoProto:
    for value in values:
        if value.name == name:
            return value
    listed = ", ".join(repr(value.name) for value in values)
    raise LookupError(f"onnxblock: the model has no {kind} {name!r}; its {kind}s are {listed}.")


def node_arg_exists(model: onnx.ModelProto, node_arg_name: str) -> bool:
    """Whether the graph has an input, or a node reads or makes a value, of that name."""
    return any(value.name == node_arg_name for value in model.graph.input) or any(
        node_arg_name in node.input or node_arg_name in node.output for node in model.graph.node
    )


def register_graph_outputs(model: onnx.ModelProto, output_names: Sequence[str] | str) -> None:
    """Make these values the graph's outputs, and no others. Raises LookupError for one that is not there."""
    names = [output_names] if isinstance(output_names, str) else list(output_names)
    outputs = [value_info(model, name) for name in names]
    del model.graph.output[:]
    model.graph.output.extend(outputs)


def value_info(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    """Name, type and shape of a value. Raises LookupError if the model has none of that name, or its type is
    unknown."""
    kind = tensor_free.type_of(model, name)
    if kind is None:
        raise LookupError(f"onnxblock: the model has no value {name!r} of a known type; check the name.")
    return onnx.ValueInfoProto(name=name, type=kind)


def new_input(model: onnx.ModelProto, name: str, kind: onnx.TypeProto) -> str:
    """Add an input and return its name."""
    model.graph.input.append(onnx.ValueInfoProto(name=name, type=kind))
    return name


def import_domain(model: onnx.ModelProto, domain: str, version: int) -> None:
    """Import a domain of operators unless the model does so."""
    if not any(entry.domain == domain for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(domain, version))


def add_node(op_type: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
    """Add a node with one output to the model; returns the output's name."""
    accessor = model_accessor.current()
    output = accessor.new_name(f"{op_type.lower()}_output")
    accessor.model.graph.node.append(
        onnx.helper.make_node(
            op_type, inputs, [output], name=accessor.new_name(op_type), domain=domain, **attributes
        )
    )
    return output


def add_constant(token: str, value: float) -> str:
    """Add a float32 initializer of shape [1] that is not to be trained; returns its name."""
    accessor = model_accessor.current()
    name = accessor.new_name(token)
    accessor.model.graph.initializer.append(
        onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [1], [value])
    )
    accessor.constants.add(name)
    return name


def add_graph(token: str, inputs: Sequence[str], build: Callable[..., ir.Value]) -> str:
    """Add the nodes that `build(op, *values)` writes; returns the name of the value that it returns.

    inputs: names of the model's values, passed to `build` as values of known types after the builder's `op`.
    """
    accessor = model_accessor.current()
    opset = next(entry.version for entry in accessor.model.opset_import if entry.domain in ("", "ai.onnx"))
    graph = ir.Graph(name=token, inputs=[], outputs=[], nodes=[], opset_imports={"": opset})
    builder = GraphBuilder(graph)
    for name in inputs:
        value = ir.serde.deserialize_value_info_proto(value_info(accessor.model, name), None)
        builder.input(name, type=value.type, shape=value.shape)
    result = build(builder.op, *graph.inputs)
    for node in graph:
        node.metadata_props.clear()
        node.name = accessor.new_name(str(node.name))
        for value in node.outputs:
            if value is result:
                value.name = accessor.free_name(token)
            else:
                value.name = accessor.new_name(f"{token}.{node.op_type}")
            if node.op_type == "Constant":
                accessor.constants.add(value.name)
    for value in list(graph.initializers.values()):
        value.name = accessor.new_name(f"{token}.constant")
        assert value.const_value is not None
        accessor.model.graph.initializer.append(ir.serde.serialize_tensor(value.const_value))
        accessor.constants.add(value.name)
    accessor.model.graph.node.extend(ir.serde.serialize_node(node) for node in graph)
    accessor.model.graph.value_info.append(ir.serde.serialize_value(result))
    assert result.name is not None
    return result.name
