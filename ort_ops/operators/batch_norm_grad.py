"""BatchNormGrad: the backward pass of BatchNormalization with the batch's own statistics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference, agree, text
from ort_ops.operators.operator import DOMAIN, Attribute, AttributeValue, Operator, Slot

_EPSILON = 1e-5


def _body(_present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    return """
        x_shape = Shape (x)
        rank = Size (x_shape)
        first_spatial = Constant <value_int = 2> ()
        step = Constant <value_int = 1> ()
        spatial_axes = Range (first_spatial, rank, step)
        batch_axis = Constant <value_ints = [0]> ()
        axes = Concat <axis = 0> (batch_axis, spatial_axes)
        mean = ReduceMean <keepdims = 1> (x, axes)
        centred = Sub (x, mean)
        square = Mul (centred, centred)
        variance = ReduceMean <keepdims = 1> (square, axes)
        epsilon = Constant <value_float: float = @epsilon> ()
        shifted = Add (variance, epsilon)
        deviation = Sqrt (shifted)
        xhat = Div (centred, deviation)
        product = Mul (dy, xhat)
        dscale = ReduceSum <keepdims = 0> (product, axes)
        dbias = ReduceSum <keepdims = 0> (dy, axes)
        mean_dy = ReduceMean <keepdims = 1> (dy, axes)
        mean_product = ReduceMean <keepdims = 1> (product, axes)
        rest = Sub (dy, mean_dy)
        along = Mul (xhat, mean_product)
        across = Sub (rest, along)
        per_channel = Shape (mean)
        scales = Reshape <allowzero = 1> (scale, per_channel)
        slope = Div (scales, deviation)
        dx = Mul (across, slope)
    """


def _infer(node: Inference) -> None:
    """dx is as dy, dscale and dbias are as scale."""
    node.check_rank("dy", 2)
    node.check_same_shape("x", "dy")
    dy, scale = node.shapes.get("dy"), node.shapes.get("scale")
    if dy is not None and scale is not None and not agree(scale, dy[1:2]):
        node.fail(f"scale must be {text(dy[1:2])}, the channels of dy {text(dy)}", text(scale))
    node.set_output(0, TensorProto.FLOAT, dy)
    for index in (1, 2):
        node.set_output(index, TensorProto.FLOAT, scale)


class BatchNormGrad(OpRun):
    """The operator for `onnx.reference`: float64 inside. dy, x, dx [batch, channels, ...], all else
    [channels]."""

    op_domain = DOMAIN

    def _run(
        self, dy: np.ndarray, x: np.ndarray, scale: np.ndarray, epsilon: float = _EPSILON
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        axes = (0, *range(2, x.ndim))
        count = max(x.size // max(x.shape[1], 1), 1)
        column = (-1, *[1] * (x.ndim - 2))
        wide, gradient = x.astype(np.float64), dy.astype(np.float64)
        centred = wide - wide.sum(axes, keepdims=True) / count
        rstd = 1 / np.sqrt((centred**2).sum(axes, keepdims=True) / count + epsilon)
        xhat = centred * rstd
        dscale, dbias = (gradient * xhat).sum(axes), gradient.sum(axes)
        across = gradient - (dbias.reshape(column) + xhat * dscale.reshape(column)) / count
        dx = scale.astype(np.float64).reshape(column) * rstd * across
        return dx.astype(np.float32), dscale.astype(np.float32), dbias.astype(np.float32)


BATCH_NORM_GRAD = Operator(
    name="BatchNormGrad",
    doc=(
        "Backward pass of BatchNormalization in training mode. For each channel, over the batch and all axes "
        "behind the channels (n elements): xhat = (x - mean(x)) / sqrt(var(x) + epsilon), "
        "dscale = sum(dy * xhat), dbias = sum(dy), "
        "dx = scale / sqrt(var(x) + epsilon) * (dy - dbias / n - xhat * dscale / n)."
    ),
    inputs=(
        Slot("dy", "tensor(float)", "[batch, channels, ...]: gradient of the output; rank 2 to 8"),
        Slot("x", "tensor(float)", "as dy: what was normalised"),
        Slot("scale", "tensor(float)", "[channels]"),
    ),
    outputs=(
        Slot("dx", "tensor(float)", "as dy: gradient of x"),
        Slot("dscale", "tensor(float)", "[channels]: gradient of scale"),
        Slot("dbias", "tensor(float)", "[channels]: gradient of the bias"),
    ),
    attributes=(Attribute("epsilon", _EPSILON, "added to the variance"),),
    type_constraints=(),
    body=_body,
    infer=_infer,
    reference=BatchNormGrad,
    min_opset=18,  # ReduceMean with its axes as an input
)
