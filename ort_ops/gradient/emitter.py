"""Writes the nodes of the backward graph: fresh names, constants shared, the same computation never written
twice.

Nodes are collected here and put into the graph by the driver at the end, when those that nobody reads have
been dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

Operand = ir.Value | float | int | Sequence[int] | np.ndarray | None
"""What `Emitter.op` accepts as an input: a value, nothing (an absent input), a number (a scalar constant of
the type of the first value that is not boolean), or a sequence of integers (an int64 constant: axes, shapes,
pads)."""

_BOOL_OUTPUT = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual Not And Or Xor IsNaN IsInf".split())
_INT64_OUTPUT = frozenset("Shape Size NonZero ArgMax ArgMin".split())
_TYPE_OF_INPUT = {"Where": 1, "OneHot": 2}


class NameScope:
    """Hands out value and node names that occur nowhere else in the model."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = taken
        self._next: dict[str, int] = {}

    def fresh(self, wanted: str) -> str:
        """`wanted` itself if it is free, else `wanted` with the lowest free number behind it."""
        name = wanted
        while name in self._taken:
            number = self._next.get(wanted, 0) + 1
            self._next[wanted] = number
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name

    def numbered(self, stem: str) -> str:
        """The next free name `stem_1`, `stem_2`, ..."""
        self._taken.add(stem)
        return self.fresh(stem)

    def release(self, names: set[str]) -> None:
        """Make names free to be handed out."""
        self._taken -= names


class Emitter:
    """Collects new nodes and constants for one graph.

    Attributes:
        nodes: what has been written so far, in a valid order of execution.
        constants: the constants made, as values that are not yet initializers of a graph.
        opset: version of the default domain that the nodes are written for.
        domains: other domains used, with their versions.
    """

    def __init__(self, names: NameScope, opset: int) -> None:
        self.names = names
        self.opset = opset
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []
        self.domains: dict[str, int] = {}
        self.prefix = "grad"
        self._written: dict[tuple[object, ...], tuple[ir.Value, ...]] = {}
        self._own_nodes: set[ir.Node] = set()
        self._constants: dict[tuple[object, ...], ir.Value] = {}

    def constant(self, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant with the contents of `array`, the same value for the same contents."""
        tensor = ir.tensor(array, dtype=dtype)
        key = (tensor.dtype, tuple(array.shape), array.tobytes())
        if key not in self._constants:
            tensor.name = self.names.numbered("grad_const")
            value = ir.Value(
                name=tensor.name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(array.shape),
                const_value=tensor,
            )
            self._constants[key] = value
            self.constants.append(value)
        return self._constants[key]

    def scalar(self, number: float, dtype: ir.DataType) -> ir.Value:
        """A rank-0 constant of type `dtype`."""
        return self.constant(np.array(number, dtype=dtype.numpy()), dtype)

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """An int64 constant of rank 1."""
        return self.constant(np.array(numbers, dtype=np.int64))

    def zero(self, dtype: ir.DataType | None) -> ir.TensorProtocol:
        """A zero, as the attribute of ConstantOfShape."""
        assert dtype is not None
        return ir.tensor(np.zeros(1, dtype=dtype.numpy()), dtype=dtype)

    def op(
        self,
        op_type: str,
        *operands: Operand,
        domain: str = "",
        version: int = 1,
        outputs: int = 1,
        dtype: ir.DataType | None = None,
        **attributes: object,
    ) -> ir.Value:
        """Write a node with one output that matters and return that output (see `multi` for the others)."""
        return self.multi(
            op_type, *operands, domain=domain, version=version, outputs=outputs, dtype=dtype, **attributes
        )[0]

    def multi(
        self,
        op_type: str,
        *operands: Operand,
        domain: str = "",
        version: int = 1,
        outputs: int = 1,
        dtype: ir.DataType | None = None,
        **attributes: object,
    ) -> tuple[ir.Value, ...]:
        """Write a node and return its outputs.

        Args:
            operands: the inputs, see `Operand`.
            domain, version: the operator's domain and the version to import if it is not the default one.
            outputs: number of outputs.
            dtype: element type of the outputs; by default what the operator's type constraint says.
            attributes: the node's attributes; None values are left out.
        """
        first = next(
            (
                v.dtype
                for v in operands
                if isinstance(v, ir.Value) and v.dtype not in (None, ir.DataType.BOOL)
            ),
            None,
        )
        inputs = [self._value(operand, first) for operand in operands]
        while inputs and inputs[-1] is None:
            inputs.pop()
        given = {name: value for name, value in attributes.items() if value is not None}
        if domain == "" and op_type == "Transpose":
            shortcut = self._transpose(inputs[0], given["perm"])  # type: ignore[arg-type]
            if shortcut is not None:
                return (shortcut,)
        key = (
            domain,
            op_type,
            outputs,
            *map(id, inputs),
            *sorted((n, _hashable(v)) for n, v in given.items()),
        )
        if key in self._written:
            return self._written[key]
        node = ir.node(op_type, inputs, given, domain=domain, num_outputs=outputs)  # type: ignore[arg-type]
        node.name = self.names.numbered(f"{self.prefix}/{op_type}")
        if domain:
            self.domains[domain] = version
        output_type = dtype or self._output_type(op_type, inputs, given)
        for output in node.outputs:
            output.name = self.names.numbered(node.name)
            if output_type is not None:
                output.dtype = output_type
        self.nodes.append(node)
        self._own_nodes.add(node)
        self._written[key] = tuple(node.outputs)
        return self._written[key]

    def __contains__(self, node: object) -> bool:
        """Whether this emitter wrote the node."""
        return node in self._own_nodes

    def fresh_copy(self, value: ir.Value) -> ir.Value:
        """An Identity of `value` that shares nothing with other copies of it."""
        copy = self.op("Identity", value)
        del self._written[("", "Identity", 1, id(value))]
        return copy

    def _value(self, operand: Operand, first: ir.DataType | None) -> ir.Value | None:
        if operand is None or isinstance(operand, ir.Value):
            return operand
        if isinstance(operand, np.ndarray):
            return self.constant(operand)
        if isinstance(operand, (int, float)):
            assert first is not None, "a number takes the type of the node's first value, which must be known"
            return self.scalar(operand, first)
        return self.ints(operand)

    def _output_type(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, object]
    ) -> ir.DataType | None:
        if op_type in _BOOL_OUTPUT:
            return ir.DataType.BOOL
        if op_type in _INT64_OUTPUT:
            return ir.DataType.INT64
        if op_type == "Cast":
            return ir.DataType(attributes["to"])  # type: ignore[arg-type]
        if op_type == "ConstantOfShape":
            return attributes["value"].dtype  # type: ignore[attr-defined]
        source = inputs[_TYPE_OF_INPUT.get(op_type, 0)] if inputs else None
        return None if source is None else source.dtype

    def _transpose(self, value: ir.Value | None, perm: Sequence[int]) -> ir.Value | None:
        """A value that already holds the transposed `value`, if one is known without a further Transpose.

        Exporters write a linear layer's weight as Transpose(W): its gradient would transpose back and forth.
        Two transposes in a row become one or none, and the transpose of a Gemm is the Gemm of the swapped
        operands.
        """
        assert value is not None
        if list(perm) == list(range(len(perm))):
            return value
        producer = value.producer()
        if producer is None or producer.domain != "":
            return None
        if (
            producer.op_type == "Transpose"
            and "perm" in producer.attributes
            and producer.inputs[0] is not None
        ):
            inner = producer.attributes["perm"].as_ints()
            return self.op("Transpose", producer.inputs[0], perm=[inner[axis] for axis in perm])
        if producer.op_type == "Gemm" and len(producer.inputs) == 2 and producer in self._own_nodes:
            a, b = producer.inputs
            trans_a, trans_b = (producer.attributes.get_int(name, 0) for name in ("transA", "transB"))
            return self.op("Gemm", b, a, transA=1 - trans_b, transB=1 - trans_a)
        return None


def _hashable(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if isinstance(value, ir.TensorProtocol):
        return (value.dtype, tuple(value.shape), value.tobytes())
    return value
