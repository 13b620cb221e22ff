"""Handing a model to functions of the onnx package without its large tensors.

Those functions copy the model through a protobuf message, which cannot be larger than 2 GB and costs time and
memory below that. None of them needs the contents of weights: only small tensors (axes, shapes, scales) are
passed on as initializers, the others as graph inputs of the same type and shape.

They also refuse operators of the default domain that the standard does not know, of which ONNX Runtime has
one: it is passed on as one of another domain, which they leave alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir

SMALL_BYTES = 1024
"""Tensors up to this size keep their contents: far more than the largest list of axes or pads, far less than
a weight."""


_IN_DEFAULT_DOMAIN = "SimplifiedLayerNormalization"
"""The operator that ONNX Runtime has added to the default domain."""

ADDED_DOMAIN = "ort_ops.added_by_runtime"
"""The domain that this operator is passed on in."""


@contextmanager
def _in_added_domain(model: ir.Model) -> Iterator[None]:
    try:
        for node in model.graph.all_nodes():
            if node.op_type == _IN_DEFAULT_DOMAIN and node.domain == "":
                node.domain = ADDED_DOMAIN
                model.opset_imports[ADDED_DOMAIN] = 1
        yield
    finally:
        _back_to_default_domain(model)


def _back_to_default_domain(model: ir.Model) -> None:
    if model.opset_imports.pop(ADDED_DOMAIN, None) is not None:
        for node in model.graph.all_nodes():
            if node.domain == ADDED_DOMAIN:
                node.domain = ""


def data_free_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a protobuf message in which every large initializer is a graph input instead."""
    with _in_added_domain(model):
        return _without_large_tensors(model)


def _without_large_tensors(model: ir.Model) -> onnx.ModelProto:
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
        while len(graph.inputs) > len(inputs):
            graph.inputs.pop()  # `del` with a slice would leave the value believing that it is an input
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
    _back_to_default_domain(converted)
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
