"""The two modes of a model: as it is trained, and as it is evaluated.

Dropout and BatchNormalization compute something else in each. The functions take a model of opset 18 or newer
and change it in place. For training, Dropout stays as the model has it: active where the model's own input
says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ort_ops.gradient.paths import describe
from ort_ops.training.optimizer import UPDATED_SUFFIX

_MEAN, _VARIANCE = 3, 4
"""The inputs of BatchNormalization that are its running statistics."""


def statistics(model: ir.Model) -> list[str]:
    """Names of the initializers that are running statistics of a BatchNormalization."""
    found: dict[str, None] = {}
    for node in _nodes(model, "BatchNormalization"):
        for value in (node.inputs[_MEAN], node.inputs[_VARIANCE]):
            if value is not None and value.is_initializer():
                found[str(value.name)] = None
    return list(found)


def train_batch_norm(model: ir.Model) -> list[ir.Value]:
    """BatchNormalization takes the statistics of the batch and updates the running ones.

    Raises ValueError for a node in the body of a control-flow node.

    Returns:
        For each graph input that is a running statistic, its value after the run, named `<input>_updated`:
        running * momentum + batch * (1 - momentum), where the batch's variance is the population's, as ONNX
        defines it. If several nodes share a statistic they update it one after the other.
    """
    latest: dict[ir.Value, ir.Value] = {}
    for node in _nodes(model, "BatchNormalization"):
        if node.graph is not model.graph:
            raise ValueError(
                f"{describe(node)} is in the body of another node, where it cannot update its statistics; "
                "build the artifacts with train_batch_norm=False."
            )
        node.attributes.add(ir.AttrInt64("training_mode", 1))
        node.resize_outputs(3)
        for statistic, output in ((_MEAN, 1), (_VARIANCE, 2)):
            source, updated = node.inputs[statistic], node.outputs[output]
            assert source is not None
            updated.name = updated.name or f"{node.outputs[0].name}_statistic_{output}"
            if source in latest:
                node.replace_input_with(statistic, latest[source])
            if source.is_graph_input():
                latest[source] = updated
    return [_named_output(model.graph, source, last) for source, last in latest.items()]


def stated_updates(model: ir.Model) -> list[str]:
    """The outputs `<p>_updated` that the model itself has for initializers p."""
    outputs = {value.name for value in model.graph.outputs}
    updates = [name + UPDATED_SUFFIX for name in model.graph.initializers]
    return [name for name in updates if name in outputs]


def set_evaluation_mode(model: ir.Model) -> None:
    """Dropout does nothing, BatchNormalization takes the running statistics."""
    for node in _nodes(model, "Dropout"):
        if len(node.inputs) > 2:
            node.resize_inputs(2)
    freeze_batch_norm(model)


def freeze_batch_norm(model: ir.Model) -> None:
    """BatchNormalization takes the running statistics and does not update them."""
    for node in _nodes(model, "BatchNormalization"):
        node.attributes.add(ir.AttrInt64("training_mode", 0))
        for output, statistic in ((1, _MEAN), (2, _VARIANCE)):
            if len(node.outputs) > output:
                _replace(model.graph, node.outputs[output], node.inputs[statistic])
        node.resize_outputs(1)


def _nodes(model: ir.Model, op_type: str) -> Iterator[ir.Node]:
    return (node for node in list(model.graph.all_nodes()) if node.op_type == op_type and node.domain == "")


def _named_output(graph: ir.Graph, source: ir.Value, value: ir.Value) -> ir.Value:
    """`value` under the name `<source>_updated`: a copy if it is an output of another name already."""
    value.type, value.shape = source.type, source.shape
    if value.is_graph_output():
        copy = ir.node("Identity", [value])
        graph.append(copy)
        value = copy.outputs[0]
        value.type, value.shape = source.type, source.shape
    value.name = f"{source.name}{UPDATED_SUFFIX}"
    return value


def _replace(graph: ir.Graph, value: ir.Value, by: ir.Value | None) -> None:
    """Let everyone who reads `value`, the graph's outputs too, read `by`."""
    assert by is not None
    if value.is_graph_output():
        copy = ir.node("Identity", [by])
        graph.append(copy)
        output = copy.outputs[0]
        output.name, output.type, output.shape = value.name, value.type, value.shape
        value.name = f"{value.name}_of_training"
        graph.outputs[:] = [output if old is value else old for old in graph.outputs]
    value.replace_all_uses_with(by)
