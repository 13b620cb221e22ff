"""ConvGrad: the backward pass of a convolution, all of it or without the gradient of its input or bias."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference, agree, text
from ort_ops.operators.operator import DOMAIN, Attribute, AttributeValue, Operator, Slot

_STRIDES, _DILATIONS, _PADS, _GROUP = (1, 1), (1, 1), (0, 0, 0, 0), 1


def _body(_present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    """dx is the transposed convolution of dy, filled up and cut to the size of x. dw is a convolution of x
    with dy, batch and channels exchanged: w[f, c, k] meets x[n, c, o * stride + k * dilation] at each
    position o, so stride and dilation change places, too. Spatial axes are joined where others are exchanged,
    so that one text serves any number of them."""
    return """
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        no_pads = Constant <value_ints = [0, 0]> ()
        group = Constant <value_int: int = @group> ()
        groups = Reshape (group, one)
        strides = Constant <value_ints: ints = @strides> ()
        dilations = Constant <value_ints: ints = @dilations> ()
        pads = Constant <value_ints: ints = @pads> ()
        axes = Shape (strides)
        begin = Slice (pads, zero, axes)
        batch = Shape <start = 0, end = 1> (x)
        filters = Shape <start = 0, end = 1> (w)
        channels = Shape <start = 1, end = 2> (w)
        size = Shape <start = 2> (x)
        kernel = Shape <start = 2> (w)
        positions = Shape <start = 2> (dy)
        last_position = Sub (positions, one)
        last_element = Sub (kernel, one)
        last_start = Mul (last_position, strides)
        reach = Mul (last_element, dilations)
        last_seen = Add (last_start, reach)
        seen = Add (last_seen, one)
        end = Add (size, begin)
        unseen = Sub (end, seen)
        unpadded = Neg (unseen)
        no_size = Mul (size, zero)
        unseen_behind = Max (unseen, no_size)
        pads_behind = Max (unpadded, no_size)

        transposed = ConvTranspose <
            group: int = @group, strides: ints = @strides, dilations: ints = @dilations
        > (dy, w)
        dx_pads = Concat <axis = 0> (no_pads, no_size, no_pads, unseen_behind)
        dx_padded = Pad (transposed, dx_pads)
        dx_first = Concat <axis = 0> (no_pads, begin)
        x_channels = Shape <start = 1, end = 2> (x)
        dx_end = Concat <axis = 0> (batch, x_channels, end)
        dx = Slice (dx_padded, dx_first, dx_end)

        x_length = ReduceProd <keepdims = 1> (size)
        x_parts = Concat <axis = 0> (batch, groups, channels, x_length)
        x_apart = Reshape <allowzero = 1> (x, x_parts)
        x_exchanged = Transpose <perm = [2, 1, 0, 3]> (x_apart)
        images = Mul (batch, groups)
        x_exchanged_shape = Concat <axis = 0> (channels, images, size)
        x_swapped = Reshape <allowzero = 1> (x_exchanged, x_exchanged_shape)
        x_pads = Concat <axis = 0> (no_pads, begin, no_pads, pads_behind)
        x_padded = Pad (x_swapped, x_pads)
        dy_length = ReduceProd <keepdims = 1> (positions)
        dy_parts = Concat <axis = 0> (batch, filters, dy_length)
        dy_flat = Reshape <allowzero = 1> (dy, dy_parts)
        dy_exchanged = Transpose <perm = [1, 0, 2]> (dy_flat)
        dy_exchanged_shape = Concat <axis = 0> (filters, batch, positions)
        dy_swapped = Reshape <allowzero = 1> (dy_exchanged, dy_exchanged_shape)
        products = Conv <
            group: int = @group, strides: ints = @dilations, dilations: ints = @strides
        > (x_padded, dy_swapped)
        dw_first = Concat <axis = 0> (no_pads, no_size)
        dw_end = Concat <axis = 0> (channels, filters, kernel)
        dw_swapped = Slice (products, dw_first, dw_end)
        dw_length = ReduceProd <keepdims = 1> (kernel)
        dw_parts = Concat <axis = 0> (channels, filters, dw_length)
        dw_flat = Reshape (dw_swapped, dw_parts)
        dw_exchanged = Transpose <perm = [1, 0, 2]> (dw_flat)
        w_shape = Shape (w)
        dw = Reshape (dw_exchanged, w_shape)

        db_axes = Constant <value_ints = [0, 2]> ()
        db = ReduceSum <keepdims = 0> (dy_flat, db_axes)
    """


def _infer(node: Inference) -> None:
    """dx is as x, db has the filters of w, dw is as w."""
    dy, x, w = (node.shapes.get(name) for name in ("dy", "x", "w"))
    for name, shape in (("x", x), ("w", w), ("dy", dy)):
        if shape is not None and not 3 <= len(shape) <= 5:
            node.fail(f"{name} must have rank 3 to 5", f"rank {len(shape)}")
    if w is not None and dy is not None and not (len(w) == len(dy) and agree(dy[1:2], w[:1])):
        node.fail(f"dy must have rank {len(w)} and the filters of w {text(w)}", text(dy))
    if x is not None and dy is not None and not (len(x) == len(dy) and agree(dy[:1], x[:1])):
        node.fail(f"dy must have rank {len(x)} and the batch of x {text(x)}", text(dy))
    node.set_output(0, TensorProto.FLOAT, x)
    node.set_output(1, TensorProto.FLOAT, None if w is None else w[:1])
    node.set_output(2, TensorProto.FLOAT, w)


class ConvGrad(OpRun):
    """The operator for `onnx.reference`: float64 inside. dy [batch, filters, positions...], x and dx [batch,
    channels, size...], w and dw [filters, channels / group, kernel...], db [filters]."""

    op_domain = DOMAIN

    def _run(
        self,
        dy: np.ndarray,
        x: np.ndarray,
        w: np.ndarray,
        strides: Sequence[int] = _STRIDES,
        dilations: Sequence[int] = _DILATIONS,
        pads: Sequence[int] = _PADS,
        group: int = _GROUP,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        wide_x, wide_w, wide_dy = (array.astype(np.float64) for array in (x, w, dy))
        begin, end = pads[: len(strides)], pads[len(strides) :]
        padded = np.pad(wide_x, [(0, 0), (0, 0), *zip(begin, end, strict=True)])
        dpadded, dw = np.zeros_like(padded), np.zeros_like(wide_w)
        channels, filters = w.shape[1], w.shape[0] // group
        summed = (0, *range(2, dy.ndim))
        for number, element in itertools.product(range(group), np.ndindex(w.shape[2:])):
            of_x = slice(number * channels, (number + 1) * channels)
            of_y = slice(number * filters, (number + 1) * filters)
            window = zip(element, strides, dilations, dy.shape[2:], strict=True)
            places = (slice(k * d, k * d + (count - 1) * s + 1, s) for k, s, d, count in window)
            seen, weights = (slice(None), of_x, *places), (of_y, slice(None), *element)
            gradient = wide_dy[:, of_y]
            dw[weights] = np.tensordot(gradient, padded[seen], (summed, summed))
            dpadded[seen] += np.moveaxis(np.tensordot(gradient, wide_w[weights], (1, 0)), -1, 1)
        sizes = zip(begin, x.shape[2:], strict=True)
        inside = (slice(None), slice(None), *(slice(first, first + count) for first, count in sizes))
        dx = dpadded[inside]
        db = wide_dy.sum(summed)
        return dx.astype(np.float32), db.astype(np.float32), dw.astype(np.float32)


CONV_GRAD = Operator(
    name="ConvGrad",
    doc=(
        "Backward pass of y = Conv(x, w, b) over one to three axes: with o the positions, k the kernel's "
        "elements, dw[f, c, k] = sum over n, o of dy[n, f, o] * x[n, c, o * strides + k * dilations - pads], "
        "db[f] = sum over n, o of dy[n, f, o], dx[n, c, i] = sum over f and all o, k with "
        "i = o * strides + k * dilations - pads of w[f, c, k] * dy[n, f, o]. The attributes are "
        "Conv's; there is one number for each axis, and pads has first those before all axes."
    ),
    inputs=(
        Slot("dy", "tensor(float)", "[batch, filters, positions...]"),
        Slot("x", "tensor(float)", "[batch, channels, size...]"),
        Slot("w", "tensor(float)", "[filters, channels / group, kernel...]"),
    ),
    outputs=(
        Slot("dx", "tensor(float)", "as x: its gradient", optional=True),
        Slot("db", "tensor(float)", "[filters]: gradient of the bias", optional=True),
        # Last, because it is always there: some tools drop absent outputs at a node's end, and the runtime
        # then refuses to inline the body.
        Slot("dw", "tensor(float)", "as w: its gradient"),
    ),
    attributes=(
        Attribute("strides", _STRIDES, "from one position to the next"),
        Attribute("dilations", _DILATIONS, "from one element of the kernel to the next"),
        Attribute("pads", _PADS, "zeros before x on each axis, then those behind"),
        Attribute("group", _GROUP, "parts of the channels that are convolved on their own"),
    ),
    type_constraints=(),
    body=_body,
    infer=_infer,
    reference=ConvGrad,
    min_opset=18,  # ReduceSum and Pad as the body writes them
)
