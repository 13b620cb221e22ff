"""A float32 model that computes its matrix products and convolutions in float16 or bfloat16.

Parameters stay float32: they are cast where a product reads them, so differentiating the rewritten model
gives float32 gradients for float32 master weights. Which operators run in which type follows torch.autocast:
products always in 16 bits; what is safe between them in the type of what it reads; everything else (norms,
softmax, losses, reductions, powers, exponentials) in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from ort_ops.passes.errors import PassError
from ort_ops.passes.infer_shapes import infer_shapes
from ort_ops.passes.upgrade_opset import upgrade_opset

COMPUTE_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

_RUNTIME = "com.microsoft"

_PRODUCTS = frozenset(
    {("", op) for op in ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul")}
    | {(_RUNTIME, op) for op in ("FusedGemm", "FusedMatMul")}
)
"""Computed in 16 bits whatever their inputs are; the hardware accumulates in float32."""

# Views, whose input may be a constant as well as its result.
_VIEWS = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})

_FOLLOWING = frozenset(
    {("", op) for op in _VIEWS}
    | {
        ("", op)
        for op in (
            *("Concat", "DepthToSpace", "Dropout", "Flatten", "Gather", "GatherElements", "GatherND"),
            *("MaxPool", "Pad", "Slice", "SpaceToDepth", "Split", "Tile", "Trilu", "Where"),
            *("Abs", "Add", "Clip", "Div", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max"),
            *("Min", "Mul", "Neg", "PRelu", "Relu", "Sigmoid", "Sub", "Sum", "Swish", "Tanh"),
        )
    }
    | {(_RUNTIME, op) for op in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")}
)
"""Computed in 16 bits if what they read was, constants aside."""

_ANY_TYPE = frozenset({("", op) for op in ("Cast", "Shape", "Size")})
"""Their result does not depend on the type of what they read, as it does not lose anything by the 16 bits."""

_BFLOAT16_CONVOLUTION_OPSET = 22
"""The first in which convolutions may be bfloat16."""

# Inputs whose type is not that of the output.
_OWN_TYPE = {"Dropout": (1,)}


def mixed_precision(model: ir.Model, compute_type: ir.DataType) -> ir.Model:
    """Compute in `compute_type` what may be; returns the new model (the given one is used up).

    Args:
        model: the forward model, its parameters initializers, its functions inlined. Its inputs, initializers
            and outputs keep their names and types; what is not float32 is left alone. Bodies of If, Loop and
            Scan are computed in float32. For bfloat16 convolutions the opset is raised to 22 if it is older;
            operators that the standard does not allow in bfloat16 (Einsum) stay float32.
        compute_type: FLOAT16 or BFLOAT16.

    A constant that is beyond the range of float16 (such as the -1e9 of an attention mask) keeps what reads it
    in float32: it would become infinite otherwise.

    Raises:
        PassError: another compute type, or a model whose types do not fit together.
    """
    if compute_type not in COMPUTE_TYPES:
        raise PassError(f"the compute type must be float16 or bfloat16; got {compute_type.name.lower()}")
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if compute_type is ir.DataType.BFLOAT16 and any(
        node.domain == "" and node.op_type in ("Conv", "ConvTranspose") for node in model.graph
    ):
        model = upgrade_opset(model, _BFLOAT16_CONVOLUTION_OPSET)
    infer_shapes(model)
    _Rewriter(model, compute_type).rewrite()
    return model


class _Rewriter:
    """Walks the graph once, from the inputs to the outputs."""

    def __init__(self, model: ir.Model, compute_type: ir.DataType) -> None:
        self._graph = graph = model.graph
        self._opset = model.opset_imports[""]
        self._type = compute_type
        # Values that were float32 and are computed in 16 bits now, and casts of values in both directions.
        self._narrowed: set[ir.Value] = set()
        self._narrow_copies: dict[ir.Value, ir.Value] = {}
        self._wide_copies: dict[ir.Value, ir.Value] = {}
        self._names = {value.name for value in (*graph.inputs, *graph.initializers.values())}
        self._names |= {value.name for node in graph.all_nodes() for value in node.outputs}

    def rewrite(self) -> None:
        for node in list(self._graph):
            key = (node.domain, node.op_type)
            if self._runs_narrow(node):
                self._narrow(node)
            elif key not in _ANY_TYPE:
                self._widen_inputs(node, before=node)
        self._widen_outputs()

    # -- which type --------------------------------------------------------------------------------------

    def _runs_narrow(self, node: ir.Node) -> bool:
        key = (node.domain, node.op_type)
        if key not in _PRODUCTS | _FOLLOWING or not _allows(node, self._opset, self._type):
            return False
        inputs = [value for _, value in _data_inputs(node) if value.dtype in (ir.DataType.FLOAT, self._type)]
        if any(value.dtype is self._type and value not in self._narrowed for value in inputs):
            return False  # it has been of the 16-bit type before
        if node.outputs[0].dtype is not ir.DataType.FLOAT:
            return False
        activations = [value for value in inputs if _constant(value) is None]
        if not all(self._fits(value) for value in inputs if value not in activations):
            return False
        if key in _PRODUCTS:
            return True
        return bool(activations) and all(value in self._narrowed for value in activations)

    def _fits(self, value: ir.Value) -> bool:
        """Whether a constant has no number that is finite now, but would not be in the 16-bit type."""
        tensor = _constant(value)
        assert tensor is not None
        numbers = np.abs(tensor.numpy())
        largest = float(ml_dtypes.finfo(self._type.numpy()).max)
        return not bool(np.any((numbers > largest) & np.isfinite(numbers)))

    # -- rewriting ---------------------------------------------------------------------------------------

    def _narrow(self, node: ir.Node) -> None:
        for index, value in _data_inputs(node):
            if value.dtype is ir.DataType.FLOAT:
                node.replace_input_with(index, self._narrow_copy(value, before=node))
        for output in node.outputs:
            if output.dtype is ir.DataType.FLOAT:
                # A new type: a copy of the model may share the old one.
                output.type = ir.TensorType(self._type)
                self._narrowed.add(output)

    def _narrow_copy(self, value: ir.Value, before: ir.Node) -> ir.Value:
        if value not in self._narrow_copies:
            self._narrow_copies[value] = self._cast(value, self._type, before)
        return self._narrow_copies[value]

    def _widen_inputs(self, node: ir.Node, before: ir.Node) -> None:
        """Let the node, and those in its bodies, read float32."""
        for index, value in enumerate(node.inputs):
            if value in self._narrowed:
                node.replace_input_with(index, self._wide_copy(value, before))
        for body in _bodies(node):
            for inner in body:
                self._widen_inputs(inner, before)

    def _wide_copy(self, value: ir.Value, before: ir.Node) -> ir.Value:
        if value not in self._wide_copies:
            self._wide_copies[value] = self._cast(value, ir.DataType.FLOAT, before)
        return self._wide_copies[value]

    def _cast(self, value: ir.Value, to: ir.DataType, before: ir.Node) -> ir.Value:
        cast = self._cast_node(value, to)
        self._graph.insert_before(before, cast)
        return cast.outputs[0]

    def _cast_node(self, value: ir.Value, to: ir.DataType) -> ir.Node:
        name = self._fresh(f"{value.name}_{to.name.lower()}")
        node = ir.node("Cast", [value], {"to": to}, name=f"{name}_cast")
        output = node.outputs[0]
        output.name, output.dtype, output.shape = name, to, value.shape
        return node

    def _widen_outputs(self) -> None:
        """Outputs of the graph keep name and type; the value in 16 bits gets another name."""
        for index, value in enumerate(self._graph.outputs):
            if value not in self._narrowed:
                continue
            name = value.name
            wide = self._wide_copies.get(value)
            if wide is None:
                cast = self._cast_node(value, ir.DataType.FLOAT)
                self._graph.append(cast)
                wide = cast.outputs[0]
            value.name = self._fresh(f"{name}_{self._type.name.lower()}")
            wide.name = name
            self._graph.outputs[index] = wide

    def _fresh(self, name: str) -> str:
        candidate, number = name, 0
        while candidate in self._names:
            number += 1
            candidate = f"{name}_{number}"
        self._names.add(candidate)
        return candidate


def _allows(node: ir.Node, opset: int, dtype: ir.DataType) -> bool:
    """Whether the operator may make this type by the standard. The runtime's own operators all may."""
    if node.domain != "":
        return True
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    return f"tensor({dtype.name.lower()})" in schema.outputs[0].types


def _data_inputs(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The node's floating-point inputs that have the type of its output."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype is not None and value.dtype.is_floating_point():
            if index not in _OWN_TYPE.get(node.op_type, ()):
                yield index, value


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor that `value` is, or is a view of."""
    node = value.producer()
    if node is not None and node.domain == "" and node.op_type in _VIEWS and node.inputs[0] is not None:
        return _constant(node.inputs[0])
    return value.const_value if value.is_initializer() else None


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()
