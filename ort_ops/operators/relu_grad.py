"""ReluGrad: the backward pass of Relu, in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference
from ort_ops.operators.operator import DATA_TYPES, DOMAIN, AttributeValue, Operator, Slot


def _body(_present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    """In float32: the runtime compares no 16-bit numbers on every provider."""
    return """
        zero = Constant <value_float = 0.0> ()
        dy_float = Cast <to = 1> (dy)
        y_float = Cast <to = 1> (y)
        stops = LessOrEqual (y_float, zero)
        dx_float = Where (stops, zero, dy_float)
        dx = CastLike (dx_float, dy)
    """


def _infer(node: Inference) -> None:
    """dx is as dy in type and shape."""
    node.check_rank("dy")
    node.check_same_shape("y", "dy")
    node.set_output_like(0, "dy")


class ReluGrad(OpRun):
    """The operator for `onnx.reference`. dy, y and dx have one shape."""

    op_domain = DOMAIN

    def _run(self, dy: np.ndarray, y: np.ndarray) -> tuple[np.ndarray]:
        return (np.where(y.astype(np.float32) <= 0, np.zeros_like(dy), dy),)


RELU_GRAD = Operator(
    name="ReluGrad",
    doc="Backward pass of y = Relu(x), element by element: dx = 0 where y <= 0, else dy (also for y = NaN).",
    inputs=(
        Slot("dy", "T", "gradient of the Relu's output; rank 1 to 8"),
        Slot("y", "T", "as dy: the Relu's output, or its input, which gives the same"),
    ),
    outputs=(Slot("dx", "T", "as dy: gradient of x"),),
    type_constraints=(("T", DATA_TYPES, "Type of all tensors."),),
    body=_body,
    infer=_infer,
    reference=ReluGrad,
)
