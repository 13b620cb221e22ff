"""Handing a model to functions of the onnx package without its large tensors.

Those functions copy the model through a protobuf message, which cannot be larger than 2 GB and costs time and
memory below that. None of them needs the contents of weights: only small tensors (axes, shapes, scales) are
passed on as initializers, the others as graph inputs of the same type and shape.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

SMALL_BYTES = 1024
"""Tensors up to this size keep their contents: far more than the largest list of axes or pads, far less than
a weight."""


def data_free_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a protobuf message in which every large initializer is a graph input instead."""
    graph = model.graph
    initializers = dict(graph.initializers)
    inputs = list(graph.inputs)
    known = set(inputs)
    try:
        for name, value in initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.nbytes > SMALL_BYTES or isinstance(tensor, ir.ExternalTensor):
                value.const_value = None
                graph.initializers.pop(name)
            if value not in known:
                graph.inputs.append(value)
            value.meta["data"] = tensor
        return ir.to_proto(model)
    finally:
        del graph.inputs[len(inputs) :]
        for value in initializers.values():
            value.const_value = value.meta.pop("data")
            if value.name not in graph.initializers:
                graph.initializers.add(value)


def without_data(model: ir.Model, convert: Callable[[onnx.ModelProto], onnx.ModelProto]) -> ir.Model:
    """`convert(model)`, called without the large tensors, which are put back after it.

    `convert` must keep the names of inputs and initializers.
    """
    initializers = dict(model.graph.initializers)
    inputs = {value.name for value in model.graph.inputs}
    converted = ir.from_proto(convert(data_free_proto(model)))
    graph = converted.graph
    by_name = {value.name: value for value in graph.inputs}
    by_name.update(graph.initializers)
    for name, original in initializers.items():
        value = by_name[name]
        if name not in inputs and value in graph.inputs:
            graph.inputs.remove(value)
        value.const_value = original.const_value
        value.type, value.shape = original.type, original.shape
        if name not in graph.initializers:
            graph.initializers.add(value)
    return converted
