"""Gives the tensors, outputs and axes of an exported graph the names that they have in PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from torch import nn

from ort_ops.training.optimizer import UPDATED_SUFFIX

PREFIX = "module."
"""Before the name of everything in the attribute `module` of what was traced."""


def first_names(module: nn.Module) -> dict[str, str]:
    """For each name of a parameter or buffer the first one that the same tensor has in the module."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    }


def name_initializers(graph: ir.Graph, module: nn.Module) -> None:
    """Call the module's tensors what the module calls them, a tied one by its first name."""
    first = first_names(module)
    for value in list(graph.initializers.values()):
        name = str(value.name).removeprefix(PREFIX)
        _rename(graph, value, first.get(name, name))


def name_outputs(graph: ir.Graph, names: Sequence[str], buffers: Sequence[str]) -> None:
    """Name the first outputs `names`, with `_output` behind one that an input or initializer has. The others
    are the last values of `buffers`: those that the forward pass changes become `<buffer>_updated`, the rest
    are dropped.
    """
    outputs = list(graph.outputs)
    graph.outputs.clear()
    own, last_values = outputs[: len(names)], outputs[len(names) :]
    taken = {*graph.initializers, *(value.name for value in graph.inputs)}
    for name, value in zip(names, own, strict=True):
        _add_output(graph, value, f"{name}_output" if name in taken else name)
    for buffer, value in zip(buffers, last_values, strict=True):
        if not _is_initializer(value):
            _add_output(graph, value, buffer + UPDATED_SUFFIX)


def _is_initializer(value: ir.Value) -> bool:
    """Whether `value` is an initializer or a copy of one."""
    node = value.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value.is_initializer()


def _add_output(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Make `value` the output `name`; a copy of it if it has a name that it must keep."""
    if value in graph.outputs or value.is_graph_input() or value.is_initializer():
        copied = ir.node("Identity", [value])
        copied.outputs[0].type, copied.outputs[0].shape = value.type, value.shape
        graph.append(copied)
        value = copied.outputs[0]
    _rename(graph, value, name)
    graph.outputs.append(value)


def _rename(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Give `value` the name, and another one to what has it now."""
    if value.name == name:
        return
    taken = {str(other.name): other for other in _values(graph)}
    if name in taken:
        number = 1
        while f"{name}_{number}" in taken:
            number += 1
        taken[name].name = f"{name}_{number}"
    value.name = name


def name_dimensions(graph: ir.Graph, axes: Sequence[Mapping[int, Any]]) -> None:
    """Replace the exporter's symbols by the names of the inputs' axes, given for each input."""
    names: dict[str, str] = {}
    for value, of_input in zip(graph.inputs, axes, strict=True):
        for axis, name in of_input.items():
            dimension = value.shape[axis] if value.shape is not None else None
            if isinstance(name, str) and isinstance(dimension, ir.SymbolicDim) and dimension.value:
                names.setdefault(dimension.value, name)
    if not names:
        return
    symbols = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in names))
    for value in _values(graph):
        if value.shape is None:
            continue
        value.shape = ir.Shape(
            symbols.sub(lambda match: names[match[0]], dimension.value)
            if isinstance(dimension, ir.SymbolicDim) and dimension.value is not None
            else dimension
            for dimension in value.shape
        )


def forget_origin(model: ir.Model) -> None:
    """Drop what the exporter notes about each node: lines of source code and paths of this machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
    for value in _values(model.graph):
        value.metadata_props.clear()


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
