"""Which outputs of an optimizer's graph may be written over the inputs that they replace.

The run time can give output `X_updated` the memory of input X. That is right only if nobody reads X after the
node that makes `X_updated` has begun to write: every reader of X must come before that node in any order of
execution, that is, be an ancestor of it; the node itself may read X if it works element by element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx.inliner

from ort_ops.training.optimizer import UPDATED_SUFFIX

_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Where"})
"""Operators that write an element after having read the elements at the same place, and no others later."""

_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose output may lie in the memory of their input: who reads it, reads the input."""


def in_place_outputs(model: onnx.ModelProto) -> set[str]:
    """The inputs X of `model` whose new value `X_updated` may be written into the memory of X.

    X and `X_updated` must have the same type and the same, known shape. A node with a function body in the
    model counts as what its body does.
    """
    graph = onnx.inliner.inline_local_functions(model).graph if model.functions else model.graph
    order = _Order(graph.node)
    outputs = {value.name: value for value in graph.output}
    return {
        value.name
        for value in graph.input
        if value.name + UPDATED_SUFFIX in outputs
        and _same_known_type(value, outputs[value.name + UPDATED_SUFFIX])
        and _all_read_before_written(value.name, order, outputs)
    }


def _all_read_before_written(name: str, order: _Order, outputs: Mapping[str, object]) -> bool:
    writer = order.memory_writer(name + UPDATED_SUFFIX)
    if writer is None:  # the output is an input or an initializer: nothing is computed
        return False
    names = order.views(name)
    if any(view in outputs for view in names):  # a caller reads it when all is over
        return False
    readers = {reader for view in names for reader in order.readers.get(view, ())}
    if writer in readers and order.nodes[writer].op_type not in _ELEMENTWISE:
        return False
    return all(reader == writer or order.comes_before(reader, writer) for reader in readers)


class _Order:
    """Who makes and who reads the values of a graph, and which nodes need which."""

    def __init__(self, nodes: Sequence[onnx.NodeProto]) -> None:
        self.nodes = nodes
        self.writer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
        self.readers: dict[str, list[int]] = {}
        for index, node in enumerate(nodes):
            for name in _names_read(node):
                self.readers.setdefault(name, []).append(index)

    def memory_writer(self, name: str) -> int | None:
        """The node that may write the memory of `name`: the one before all views that lead there."""
        writer = self.writer.get(name)
        while writer is not None and self.nodes[writer].op_type in _VIEWS:
            writer = self.writer.get(self.nodes[writer].input[0])
        return writer

    def views(self, name: str) -> list[str]:
        """`name`, and the values that may lie in its memory."""
        names = [name]
        for each in names:
            for reader in self.readers.get(each, ()):
                node = self.nodes[reader]
                if node.op_type in _VIEWS and node.input[0] == each:
                    names.append(node.output[0])
        return names

    def comes_before(self, first: int, last: int) -> bool:
        """Whether `last` needs, directly or not, what `first` makes."""
        seen, waiting = {first}, [first]
        while waiting:
            for name in self.nodes[waiting.pop()].output:
                for reader in self.readers.get(name, ()):
                    if reader == last:
                        return True
                    if reader not in seen:
                        seen.add(reader)
                        waiting.append(reader)
        return False


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """The node's inputs, and every name that its subgraphs read (some are their own, which does no harm)."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _names_read(inner)


def _same_known_type(left: onnx.ValueInfoProto, right: onnx.ValueInfoProto) -> bool:
    one, other = left.type.tensor_type, right.type.tensor_type
    dims = [
        [dim.dim_value if dim.HasField("dim_value") else None for dim in t.shape.dim] for t in (one, other)
    ]
    return (
        one.elem_type == other.elem_type
        and one.HasField("shape")
        and other.HasField("shape")
        and dims[0] == dims[1]
        and None not in dims[0]
    )
