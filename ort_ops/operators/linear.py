"""Linear and LinearGrad: a linear layer over all rows at once, and its backward pass.

As one node the layer is differentiated as one node, whose three gradients read the output's gradient in the
layout that it has: nothing is transposed, and the bias's gradient is no reduction of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Dims, Inference, agree, text
from ort_ops.operators.operator import DOMAIN, Attribute, AttributeValue, Operator, Slot

_LAYOUT = Attribute(
    "weight_layout", "in_out", "in_out: w is [in, out], as in a MatMul; out_in: [out, in], as PyTorch has it"
)


def _body(present: frozenset[str], attributes: Mapping[str, AttributeValue]) -> str:
    weight = "Transpose <perm = [1, 0]> (w)" if attributes["weight_layout"] == "out_in" else "Identity (w)"
    added = "Add (product, b)" if "b" in present else "Identity (product)"
    return f"""
        weight = {weight}
        product = MatMul (x, weight)
        y = {added}
    """


def _grad_body(_present: frozenset[str], attributes: Mapping[str, AttributeValue]) -> str:
    # The sizes of w, not -1: a Reshape cannot work that out where there are no elements.
    if attributes["weight_layout"] == "out_in":
        sizes, product, weight = (
            "out, in = Split <num_outputs = 2> (w_shape)",
            "(dy_rows, x_rows)",
            "Identity (w)",
        )
    else:
        sizes, product, weight = (
            "in, out = Split <num_outputs = 2> (w_shape)",
            "(x_rows, dy_rows)",
            "Transpose <perm = [1, 0]> (w)",
        )
    return f"""
        w_shape = Shape (w)
        {sizes}
        leading = Shape <end = -1> (x)
        rows = ReduceProd (leading)
        x_matrix = Concat <axis = 0> (rows, in)
        dy_matrix = Concat <axis = 0> (rows, out)
        x_rows = Reshape <allowzero = 1> (x, x_matrix)
        dy_rows = Reshape <allowzero = 1> (dy, dy_matrix)
        weight = {weight}
        dx = MatMul (dy, weight)
        first_axis = Constant <value_ints = [0]> ()
        db = ReduceSum <keepdims = 0> (dy_rows, first_axis)
        dw = Gemm <transA = 1> {product}
    """


def _sizes(node: Inference) -> tuple[int | str | None, int | str | None]:
    """The layer's inputs and outputs."""
    w = node.shapes.get("w")
    if w is None:
        return None, None
    if len(w) != 2:
        node.fail("w must have rank 2", text(w))
    layout = node.attribute("weight_layout")
    if layout not in (None, "in_out", "out_in"):
        node.fail("weight_layout must be in_out or out_in", str(layout))
    return (w[1], w[0]) if layout == "out_in" else (w[0], w[1])


def _check(node: Inference) -> Dims | None:
    """The shape of y, if it is known."""
    node.check_rank("x", 2)
    inputs, outputs = _sizes(node)
    x, b = node.shapes.get("x"), node.shapes.get("b")
    if x is not None and not agree(x[-1:], [inputs]):
        node.fail(f"x's last axis must be the {inputs} inputs of w", text(x))
    if b is not None and not agree(b, [outputs]):
        node.fail(f"b must be {text([outputs])}, as many as w has outputs", text(b))
    return None if x is None else [*x[:-1], outputs]


def _infer(node: Inference) -> None:
    """y is as x but for its last axis, the outputs."""
    node.set_output(0, TensorProto.FLOAT, _check(node))


def _infer_grad(node: Inference) -> None:
    """dx is as x, db [out], dw as w."""
    y, dy = _check(node), node.shapes.get("dy")
    if y is not None and dy is not None and not agree(dy, y):
        node.fail(f"dy must be {text(y)}, x's rows by w's outputs", text(dy))
    node.set_output_like(0, "x")
    node.set_output(1, TensorProto.FLOAT, [_sizes(node)[1]])
    node.set_output_like(2, "w")


class Linear(OpRun):
    """The operator for `onnx.reference`: float64 inside. x [..., in], w [in, out] or [out, in], b [out],
    y [..., out]."""

    op_domain = DOMAIN

    def _run(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, weight_layout: str = "in_out"
    ) -> tuple[np.ndarray]:
        weight = w.astype(np.float64)
        y = x.astype(np.float64) @ (weight.T if weight_layout == "out_in" else weight)
        return ((y if b is None else y + b).astype(np.float32),)


class LinearGrad(OpRun):
    """The operator for `onnx.reference`: float64 inside. dy [..., out], x and dx [..., in], w and dw
    [in, out] or [out, in], db [out]."""

    op_domain = DOMAIN

    def _run(
        self, dy: np.ndarray, x: np.ndarray, w: np.ndarray, weight_layout: str = "in_out"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weight = w.astype(np.float64)
        gradient = dy.astype(np.float64)
        rows = gradient.reshape(int(np.prod(dy.shape[:-1])), dy.shape[-1])
        inputs = x.astype(np.float64).reshape(rows.shape[0], x.shape[-1])
        is_out_in = weight_layout == "out_in"
        dx = gradient @ (weight if is_out_in else weight.T)
        dw = rows.T @ inputs if is_out_in else inputs.T @ rows
        return dx.astype(np.float32), rows.sum(axis=0).astype(np.float32), dw.astype(np.float32)


LINEAR = Operator(
    name="Linear",
    doc=(
        "A linear layer, y = x w + b, or x w^T + b with weight_layout = out_in. All axes of x and y but the "
        "last are rows. The sums' order does not depend on the number of rows or threads."
    ),
    inputs=(
        Slot("x", "tensor(float)", "[..., in]; rank 2 to 8"),
        Slot("w", "tensor(float)", "[in, out], or [out, in] with weight_layout = out_in"),
        Slot("b", "tensor(float)", "[out]: the bias; none if absent", optional=True),
    ),
    outputs=(Slot("y", "tensor(float)", "[..., out]"),),
    attributes=(_LAYOUT,),
    type_constraints=(),
    body=_body,
    infer=_infer,
    reference=Linear,
)

LINEAR_GRAD = Operator(
    name="LinearGrad",
    doc=(
        "Backward pass of Linear, over all rows r: dx = dy w^T, dw[i, o] = sum_r x[r, i] dy[r, o], "
        "db[o] = sum_r dy[r, o]; with weight_layout = out_in dx = dy w and dw[o, i] likewise. dx or db "
        "that is absent is not computed."
    ),
    inputs=(
        Slot("dy", "tensor(float)", "[..., out]: gradient of the output; rank 2 to 8"),
        Slot("x", "tensor(float)", "[..., in]: the layer's input"),
        Slot("w", "tensor(float)", "[in, out], or [out, in] with weight_layout = out_in"),
    ),
    outputs=(
        Slot("dx", "tensor(float)", "as x: gradient of x", optional=True),
        Slot("db", "tensor(float)", "[out]: gradient of the bias", optional=True),
        # Last, because it is always there: some tools drop absent outputs at a node's end, and the runtime
        # then refuses to inline the body.
        Slot("dw", "tensor(float)", "as w: gradient of w"),
    ),
    attributes=(_LAYOUT,),
    type_constraints=(),
    body=_grad_body,
    infer=_infer_grad,
    reference=LinearGrad,
    min_opset=18,  # Split with the number of its outputs
)
