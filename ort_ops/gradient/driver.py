"""Reverse-mode differentiation of one ONNX graph: what every operator needs is here, once, so that rules need
not.

In order: find the nodes between the parameters and the loss; refuse if one of them has no rule, naming all of
them; walk them backwards, each after all its readers; sum what reaches each value, once; call the node's
rule; sum away the axes along which an input was broadcast; at the end drop every new node that nobody reads.

The gradient of a value always has that value's shape and type.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ort_ops.gradient.emitter import Emitter
from ort_ops.gradient.errors import GradientError
from ort_ops.gradient.paths import FLOATS, Paths, captured, describe

Sizes = ir.Value | Sequence[int]
"""An int64 vector: a value of the graph or its contents."""

Dims = ir.Shape | Sequence[int | ir.SymbolicDim]
"""A shape, or part of one."""


class Vjp:
    """One forward node as its rule sees it: its inputs and outputs, the gradients that reached it, and a pen.

    Attributes:
        node: the forward node.
        emit: writes backward nodes.
        opset: version of the node's domain.
    """

    def __init__(self, walk: _Walk, node: ir.Node, opset: int) -> None:
        self.node = node
        self.emit = walk.emit
        self.op = walk.emit.op
        self.multi = walk.emit.multi
        self.opset = opset
        self._walk = walk

    def has(self, index: int) -> bool:
        """Whether the node has an input at `index`."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def x(self, index: int) -> ir.Value:
        """Input `index`, which must be there."""
        value = self.node.inputs[index]
        assert value is not None, f"{self.node.op_type}: input {index} is absent"
        return value

    def optional(self, index: int) -> ir.Value | None:
        """Input `index`, or None if it is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def y(self, index: int = 0, dtype: ir.DataType | None = None) -> ir.Value:
        """Output `index`; an optional output that the model left out is added to the node, with type
        `dtype`."""
        if index >= len(self.node.outputs):
            self.node.resize_outputs(index + 1)
        value = self.node.outputs[index]
        if not value.name:
            value.name = self.emit.names.numbered(f"{self.node.outputs[0].name}_{self.node.op_type}_{index}")
        if value.dtype is None:
            value.dtype = dtype or self.dtype
        return value

    def has_dy(self, index: int = 0) -> bool:
        """Whether a gradient reached output `index`; if not, it counts as zero."""
        return index < len(self.node.outputs) and self._walk.reached(self.node.outputs[index])

    def dy(self, index: int = 0) -> ir.Value:
        """The gradient of output `index`, zeros if none reached it."""
        value = self.node.outputs[index]
        if not self._walk.reached(value):
            return self.zeros_like(self.y(index))
        return self._walk.total(value)

    def wants(self, index: int) -> bool:
        """Whether a parameter depends on the gradient of input `index`."""
        value = self.optional(index)
        return value is not None and value in self._walk.paths.carries

    def carries(self, value: ir.Value) -> bool:
        """Whether any value of the graph depends on a parameter."""
        return value in self._walk.paths.carries

    @property
    def opsets(self) -> dict[str, int]:
        """Version of every domain that the graph uses."""
        return self._walk.paths.opsets

    def absorb(self, index: int) -> ir.Value | None:
        """Take over the gradient that reached input `index` so far, if any: the rule adds it into what it
        returns."""
        return self._walk.take(self.x(index))

    @property
    def dtype(self) -> ir.DataType:
        """Element type of the first output, or of the first input if shape inference could not tell it."""
        for value in (self.node.outputs[0], *self.node.inputs):
            if value is not None and value.dtype in FLOATS:
                return value.dtype
        raise self.fail(f"the type of {self.node.outputs[0].name!r} is not known; add a value_info for it")

    def int_attr(self, name: str, default: int) -> int:
        """The integer attribute `name`."""
        return self.node.attributes.get_int(name, default)

    def float_attr(self, name: str, default: float) -> float:
        """The float attribute `name`."""
        return self.node.attributes.get_float(name, default)

    def str_attr(self, name: str, default: str) -> str:
        """The string attribute `name`."""
        return self.node.attributes.get_string(name, default)

    def ints_attr(self, name: str) -> list[int] | None:
        """The list-of-integers attribute `name`, None if it is not given."""
        found = self.node.attributes.get_ints(name, None)
        return None if found is None else list(found)

    def rank(self, value: ir.Value) -> int:
        """Rank of `value`; a GradientError if shape inference could not tell it."""
        if value.shape is None:
            raise GradientError(
                f"{describe(self.node)}: the rank of {value.name!r} must be known to differentiate this "
                "node, and shape inference could not tell it; give the model's inputs shapes, or add a "
                "value_info for it"
            )
        return len(value.shape)

    def static_shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """The shape of `value` if every dim is known now, else None."""
        return static_shape(value)

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape of `value` as an int64 vector: a constant if it is known now."""
        return self._walk.shape(value)

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """Size of one axis as an int64 vector of one element."""
        known = value.shape[axis] if value.shape is not None else None
        if isinstance(known, int):
            return self.emit.ints([known])
        return self.op("Gather", self.op("Shape", value), [axis], axis=0)

    def add(self, left: Sizes, right: Sizes) -> ir.Value:
        """Sum of two int64 vectors; a constant if both are."""
        return self._arithmetic("Add", np.add, left, right)

    def sub(self, left: Sizes, right: Sizes) -> ir.Value:
        """Difference of two int64 vectors; a constant if both are."""
        return self._arithmetic("Sub", np.subtract, left, right)

    def mul(self, left: Sizes, right: Sizes) -> ir.Value:
        """Product of two int64 vectors, element by element; a constant if both are."""
        return self._arithmetic("Mul", np.multiply, left, right)

    def maximum(self, left: Sizes, right: Sizes) -> ir.Value:
        """Maximum of two int64 vectors; a constant if both are."""
        return self._arithmetic("Max", np.maximum, left, right)

    def minimum(self, left: Sizes, right: Sizes) -> ir.Value:
        """Minimum of two int64 vectors; a constant if both are."""
        return self._arithmetic("Min", np.minimum, left, right)

    def join(self, *parts: Sizes) -> ir.Value:
        """Several int64 vectors as one; a constant if all are."""
        known = [_numbers(part) for part in parts]
        if all(numbers is not None for numbers in known):
            return self.emit.ints(
                np.concatenate([numbers for numbers in known if numbers is not None]).tolist()
            )
        return self.op("Concat", *parts, axis=0)

    def _arithmetic(self, op_type: str, function: np.ufunc, left: Sizes, right: Sizes) -> ir.Value:
        known = _numbers(left), _numbers(right)
        if known[0] is not None and known[1] is not None:
            return self.emit.ints(function(*known).tolist())
        return self.op(op_type, left, right)

    def sum_to(
        self, gradient: ir.Value, source: Dims | None, target: ir.Value, full: ir.Value | None = None
    ) -> ir.Value:
        """`gradient`, of shape `source`, summed to the shape of `target`; for rules that broadcast only in
        part.

        `full`: the shape of `gradient` as a value, if it can be told from forward values.
        """
        return self._walk.sum_to(gradient, source, target, full)

    def like(self, gradient: ir.Value, value: ir.Value) -> ir.Value:
        """`gradient` reshaped to the shape of `value`, which has as many elements."""
        dims = value.shape
        if dims is None:
            return self.op("Reshape", gradient, self.shape(value), allowzero=1)
        unknown = [axis for axis, size in enumerate(dims) if not isinstance(size, int)]
        if len(unknown) > 1 or (unknown and 0 in dims):
            return self.op("Reshape", gradient, self.shape(value), allowzero=1)
        sizes = [size if isinstance(size, int) else -1 for size in dims]
        return self.op("Reshape", gradient, self.emit.ints(sizes), allowzero=1 if 0 in sizes else None)

    def zeros_like(self, value: ir.Value) -> ir.Value:
        """Zeros of the shape and type of `value`."""
        return self._walk.zeros_like(value)

    def known(self, index: int) -> np.ndarray | None:
        """Contents of input `index` if it is a constant, else None."""
        value = self.optional(index)
        return None if value is None or value.const_value is None else value.const_value.numpy()

    def cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """`value` as `dtype`; `value` itself if it has that type."""
        if dtype is None or value.dtype == dtype:
            return value
        return self.op("Cast", value, to=int(dtype))

    def fail(self, why: str) -> GradientError:
        """An error about this node, for the rule to raise."""
        return GradientError(f"{describe(self.node)}: {why}")


def _numbers(sizes: Sizes) -> np.ndarray | None:
    """The contents of an int64 vector if they are known."""
    if not isinstance(sizes, ir.Value):
        return np.array(sizes, dtype=np.int64)
    return None if sizes.const_value is None else sizes.const_value.numpy()


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """The shape of `value` if every dim is known, else None."""
    if value.shape is None or not value.shape.is_static():
        return None
    return tuple(value.shape.numpy())


def differentiate(
    graph: ir.Graph,
    opsets: dict[str, int],
    loss: ir.Value,
    parameters: Sequence[ir.Value],
    emit: Emitter,
    unreachable_is_zero: bool = False,
) -> list[ir.Value]:
    """Write the gradients of `loss` with respect to `parameters` and return them, in order.

    Args:
        graph: the forward graph, sorted, with types and shapes inferred. Gets the new nodes and constants;
            forward nodes may get optional outputs that their rule needs.
        opsets: version of each domain.
        loss: a value of the graph with one element.
        parameters: floating-point values that no node produces.
        emit: a fresh emitter.
        unreachable_is_zero: parameters that do not reach the loss have gradients of zeros; else they are an
            error.

    Raises:
        GradientError: a node in between has no rule, or a parameter does not reach the loss.
    """
    paths = Paths(graph, opsets, loss, parameters)
    if not unreachable_is_zero:
        paths.refuse_unreachable()
    paths.refuse_missing_rules()
    walk = _Walk(paths, emit)
    walk.run()
    gradients = walk.name_gradients()
    _keep_read(emit, gradients)
    for constant in emit.constants:
        graph.register_initializer(constant)
    graph.extend(emit.nodes)
    return gradients


class _Walk:
    """State of one differentiation."""

    def __init__(self, paths: Paths, emit: Emitter) -> None:
        self.emit = emit
        self.paths = paths
        self._contributions: dict[ir.Value, list[ir.Value]] = {}
        self._totals: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        self._contributions[self.paths.loss] = [self._one_like_loss()]
        position = {node: index for index, node in enumerate(self.paths.active)}
        readers = dict.fromkeys(self.paths.active, 0)
        producers: dict[ir.Node, list[ir.Node]] = {}
        for node in self.paths.active:
            behind = {value.producer() for value in self.paths.gradient_inputs(node)} & readers.keys()
            producers[node] = [producer for producer in behind if producer is not None]
            for producer in producers[node]:
                readers[producer] += 1

        # Nodes that absorb the gradient of another path come last among those that are ready, so that it is
        # there.
        def priority(node: ir.Node) -> tuple[bool, int]:
            rule = self.paths.rules[node]
            return (rule is not None and rule.absorbs, -position[node])

        ready = [(*priority(node), node) for node, count in readers.items() if count == 0]
        heapq.heapify(ready)
        while ready:
            node = heapq.heappop(ready)[-1]
            self._step(node)
            for producer in producers[node]:
                readers[producer] -= 1
                if readers[producer] == 0:
                    heapq.heappush(ready, (*priority(producer), producer))

    def _one_like_loss(self) -> ir.Value:
        shape = static_shape(self.paths.loss)
        assert shape is not None and self.paths.loss.dtype is not None
        return self.emit.constant(np.ones(shape, dtype=self.paths.loss.dtype.numpy()), self.paths.loss.dtype)

    def _step(self, node: ir.Node) -> None:
        rule = self.paths.rules[node]
        assert rule is not None
        targets = [
            (index, value)
            for index, value in enumerate(node.inputs)
            if value is not None
            and value in self.paths.carries
            and (rule.inputs is None or index in rule.inputs)
        ]
        if rule.kind == "zero" or not any(self.reached(value) for value in node.outputs):
            return  # a value that nothing reaches has a gradient of zeros
        assert rule.function is not None
        self.emit.prefix = f"{node.name or node.op_type}_grad"
        gradients = rule.function(Vjp(self, node, self.paths.opsets.get(node.domain, 1)))
        surplus = gradients[len(node.inputs) :]
        assert not any(surplus), (
            f"the rule of {node.op_type} returned a gradient for an input that is not there"
        )
        for index, value in targets:
            gradient = gradients[index] if index < len(gradients) else None
            if gradient is None:
                continue
            if rule.broadcasts:
                gradient = self.sum_to(
                    gradient, node.outputs[0].shape, value, self.emit.op("Shape", node.outputs[0])
                )
            self._contributions.setdefault(value, []).append(gradient)

    # -- gradients of values
    # -----------------------------------------------------------------------------------------

    def reached(self, value: ir.Value) -> bool:
        return value in self._contributions

    def total(self, value: ir.Value) -> ir.Value:
        """The sum of all gradients that reached `value`, written once."""
        if value not in self._totals:
            self._totals[value] = self._sum(self._contributions[value])
        return self._totals[value]

    def take(self, value: ir.Value) -> ir.Value | None:
        parts = self._contributions.pop(value, None)
        return None if parts is None else self._sum(parts)

    def _sum(self, parts: Sequence[ir.Value]) -> ir.Value:
        if len(parts) == 1:
            return parts[0]
        return self.emit.op("Add" if len(parts) == 2 else "Sum", *parts)

    def shape(self, value: ir.Value) -> ir.Value:
        known = static_shape(value)
        return self.emit.ints(known) if known is not None else self.emit.op("Shape", value)

    def zeros_like(self, value: ir.Value) -> ir.Value:
        return self.emit.op("ConstantOfShape", self.shape(value), value=self.emit.zero(value.dtype))

    def sum_to(
        self, gradient: ir.Value, source: Dims | None, target: ir.Value, full: ir.Value | None = None
    ) -> ir.Value:
        """Sum `gradient`, of shape `source`, to the shape of `target` that was broadcast to it.

        `full`: the shape of `gradient` as a value made from forward values, if there is one. It is preferred
        to asking the gradient itself, because a runtime knows more of it, and because ONNX Runtime takes
        unknown dims that a custom operator infers for -1.

        The axes are worked out here if the shapes say enough, else when the model runs.
        """
        if target.shape is None or source is None:
            return self._sum_to_at_run_time(gradient, target, full)
        leading = len(source) - len(target.shape)
        inner = []
        for axis, size in enumerate(target.shape):
            wide = source[leading + axis]
            if size == wide and (isinstance(size, int) or size.value is not None):
                continue
            if size == 1:
                inner.append(leading + axis)
            elif not isinstance(size, int) and wide != 1:
                return self._sum_to_at_run_time(gradient, target, full)
        if leading and not inner:
            return self.emit.op("ReduceSum", gradient, list(range(leading)), keepdims=0)
        if inner:
            gradient = self.emit.op("ReduceSum", gradient, [*range(leading), *inner], keepdims=1)
            if leading:
                gradient = self.emit.op("Squeeze", gradient, list(range(leading)))
        return gradient

    def _sum_to_at_run_time(self, gradient: ir.Value, target: ir.Value, full: ir.Value | None) -> ir.Value:
        """Sum over the axes where the shape of `target`, with ones put before it, differs from that of
        `gradient`."""
        op = self.emit.op
        shape = op("Shape", target)
        full = full or op("Shape", gradient)
        missing = op("Sub", op("Shape", full), op("Shape", shape))
        padded = op("Concat", op("Expand", [1], missing), shape, axis=0)
        differs = op("Not", op("Equal", padded, full))
        axes = op("Reshape", op("NonZero", differs), [-1])
        summed = op("ReduceSum", gradient, axes, keepdims=1, noop_with_empty_axes=1)
        return op("Reshape", summed, shape, allowzero=1)

    def name_gradients(self) -> list[ir.Value]:
        """The parameters' gradients; every gradient gets the name `<value>_grad`."""
        taken = set(self.paths.parameters)
        results = []
        for parameter in self.paths.parameters:
            gradient = self.total(parameter) if self.reached(parameter) else self.zeros_like(parameter)
            if gradient.producer() not in self.emit or gradient in taken:
                gradient = self.emit.fresh_copy(gradient)
            taken.add(gradient)
            gradient.name = self.emit.names.fresh(f"{parameter.name}_grad")
            gradient.type = parameter.type
            gradient.shape = parameter.shape
            results.append(gradient)
        for value, gradient in self._totals.items():
            if gradient not in taken and gradient.producer() in self.emit:
                taken.add(gradient)
                gradient.name = self.emit.names.fresh(f"{value.name}_grad")
        return results


def _keep_read(emit: Emitter, results: Sequence[ir.Value]) -> None:
    """Drop the new nodes and constants that no result needs."""
    needed: set[ir.Value] = set(results)
    kept = []
    for node in reversed(emit.nodes):
        if any(output in needed for output in node.outputs):
            kept.append(node)
            needed.update(value for value in node.inputs if value is not None)
            needed.update(captured(node))
        else:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
    emit.nodes = kept[::-1]
    emit.constants = [value for value in emit.constants if value in needed]
