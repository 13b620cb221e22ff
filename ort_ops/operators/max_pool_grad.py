"""MaxPoolGrad: the backward pass of a two-dimensional MaxPool; it needs no places of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference, agree, text
from ort_ops.operators.operator import DOMAIN, Attribute, AttributeValue, Operator, Slot

_KERNEL_SHAPE, _STRIDES, _PADS = (1, 1), (1, 1), (0, 0, 0, 0)


def _body(_present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    return """
        y, places = MaxPool <
            kernel_shape: ints = @kernel_shape, strides: ints = @strides, pads: ints = @pads,
            ceil_mode: int = @ceil_mode
        > (x)
        flat = Constant <value_ints = [-1]> ()
        zero = Constant <value_float = 0.0> ()
        x_shape = Shape (x)
        x_size = Size (x)
        count = Reshape (x_size, flat)
        zeros = Expand (zero, count)
        flat_places = Reshape (places, flat)
        flat_dy = Reshape (dy, flat)
        flat_dx = ScatterElements <axis = 0, reduction = "add"> (zeros, flat_places, flat_dy)
        dx = Reshape <allowzero = 1> (flat_dx, x_shape)
    """


def _infer(node: Inference) -> None:
    """dx is as x."""
    dy, x = node.shapes.get("dy"), node.shapes.get("x")
    if x is not None and len(x) != 4:
        node.fail("x must be [batch, channels, height, width]", text(x))
    if dy is not None and x is not None and (len(dy) != 4 or not agree(dy[:2], x[:2])):
        node.fail(f"dy must have the batch and the channels of x {text(x)}", text(dy))
    node.set_output(0, TensorProto.FLOAT, x)


class MaxPoolGrad(OpRun):
    """The operator for `onnx.reference`: sums in float64. x, dx [batch, channels, height, width], dy
    [batch, channels, windows in height, windows in width]."""

    op_domain = DOMAIN

    def _run(
        self,
        dy: np.ndarray,
        x: np.ndarray,
        kernel_shape: Sequence[int] = _KERNEL_SHAPE,
        strides: Sequence[int] = _STRIDES,
        pads: Sequence[int] = _PADS,
        ceil_mode: int = 0,
    ) -> tuple[np.ndarray]:
        shape = x.shape
        count, (height, width) = math.prod(shape[:2]), shape[2:]
        dx = np.zeros((count, height * width))
        x, dy = x.reshape(count, height, width), dy.reshape(count, *dy.shape[2:])
        for i, j in np.ndindex(dy.shape[1:]):
            top, left = i * strides[0] - pads[0], j * strides[1] - pads[1]
            first_row, first_col = max(top, 0), max(left, 0)
            end_row, end_col = max(top + kernel_shape[0], 0), max(left + kernel_shape[1], 0)
            seen = x[:, first_row:end_row, first_col:end_col]
            if seen.size == 0:
                continue
            flat = seen.reshape(count, -1)
            last_nan = flat.shape[1] - 1 - np.isnan(flat)[:, ::-1].argmax(axis=1)
            places = np.where(np.isnan(flat).any(axis=1), last_nan, flat.argmax(axis=1))
            rows, cols = np.divmod(places, seen.shape[2])
            dx[np.arange(count), (first_row + rows) * width + first_col + cols] += dy[:, i, j]
        return (dx.reshape(shape).astype(np.float32),)


MAX_POOL_GRAD = Operator(
    name="MaxPoolGrad",
    doc=(
        "Backward pass of y = MaxPool(x) over two axes, without dilations: each window's dy is added to the "
        "place of its maximum, of equal ones the first by rows; NaN count as the largest, the last of them. "
        "The attributes are MaxPool's."
    ),
    inputs=(
        Slot("dy", "tensor(float)", "[batch, channels, windows in height, windows in width]"),
        Slot("x", "tensor(float)", "[batch, channels, height, width]: what was pooled"),
    ),
    outputs=(Slot("dx", "tensor(float)", "as x: its gradient"),),
    attributes=(
        Attribute("kernel_shape", _KERNEL_SHAPE, "height and width of a window"),
        Attribute("strides", _STRIDES, "from one window to the next, in height and width"),
        Attribute("pads", _PADS, "top, left, bottom, right"),
        Attribute("ceil_mode", 0, "whether a last window that is not whole counts"),
    ),
    type_constraints=(),
    body=_body,
    infer=_infer,
    reference=MaxPoolGrad,
    min_opset=16,  # ScatterElements' reduction
)
