"""Derivatives of operators that make or use a grid of sampling points: Resize, RoiAlign, AffineGrid,
Col2Im."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp

_RESIZE_ATTRIBUTES = (
    "antialias",
    "coordinate_transformation_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "mode",
    "nearest_mode",
)


@vjp(
    "Resize",
    inputs=(0,),
    limits="not through roi, scales or sizes; a keep_aspect_ratio_policy but stretch only with half_pixel or "
    "asymmetric coordinates, without antialias and exclude_outside",
)
def resize(c: Vjp) -> Grads:
    """Each axis is a product with a matrix, which is what the same Resize makes of the identity: apply its
    transpose.

    So every mode is differentiated exactly as the runtime itself rounds and interpolates.
    """
    x, rank = c.x(0), c.rank(c.x(0))
    axes = [axis % rank for axis in c.ints_attr("axes") or range(rank)]
    scale = _common_scale(c, axes)
    gradient = c.dy()
    for place, axis in enumerate(axes):
        size, wanted = c.dim(x, axis), c.dim(c.y(), axis)
        if _stays(c, x, axis, place):
            continue
        if scale is None:
            matrix = _resize_matrix(c, place, len(axes), size, wanted)
        else:
            matrix = _scaled_matrix(c, scale, size, wanted)
        last = [*(other for other in range(rank) if other != axis), axis]
        back = [int(where) for where in np.argsort(last)]
        moved = c.op("MatMul", c.op("Transpose", gradient, perm=last), c.op("Transpose", matrix, perm=[1, 0]))
        gradient = c.op("Transpose", moved, perm=back)
    return (gradient,)


def _stays(c: Vjp, x: ir.Value, axis: int, place: int) -> bool:
    """Whether an axis is surely left as it is."""
    if c.str_attr("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize" or not _stretches(
        c
    ):
        return False
    scales = c.known(2) if c.has(2) else None
    if scales is not None and scales.size:
        return bool(scales[place] == 1)
    assert x.shape is not None
    shape = c.y().shape
    return shape is not None and isinstance(shape[axis], int) and shape[axis] == x.shape[axis]


def _stretches(c: Vjp) -> bool:
    return not c.has(3) or c.str_attr("keep_aspect_ratio_policy", "stretch") == "stretch"


def _common_scale(c: Vjp, axes: list[int]) -> ir.Value | None:
    """The scale, [1], that a keep_aspect_ratio_policy chooses for all axes; None if each has its own."""
    if _stretches(c):
        return None
    if (
        c.str_attr("coordinate_transformation_mode", "half_pixel") not in ("half_pixel", "asymmetric")
        or c.int_attr("antialias", 0)
        or c.int_attr("exclude_outside", 0)
    ):
        raise c.fail(
            "with a keep_aspect_ratio_policy other than 'stretch', coordinate_transformation_mode must be "
            "'half_pixel' or 'asymmetric', antialias and exclude_outside 0; give the sizes that it leads to"
        )
    sizes = c.op("Gather", c.shape(c.x(0)), axes, axis=0)
    scales = c.op("Div", c.cast(c.x(3), ir.DataType.FLOAT), c.cast(sizes, ir.DataType.FLOAT))
    smallest = c.str_attr("keep_aspect_ratio_policy", "stretch") == "not_larger"
    return c.op("ReduceMin" if smallest else "ReduceMax", scales, keepdims=1)


def _identity(c: Vjp, size: ir.Value) -> ir.Value:
    return c.op("EyeLike", c.op("ConstantOfShape", c.join(size, size), value=c.emit.zero(c.dtype)))


def _resize_attributes(c: Vjp) -> dict[str, Any]:
    return {name: c.node.attributes[name].value for name in _RESIZE_ATTRIBUTES if name in c.node.attributes}


def _scaled_matrix(c: Vjp, scale: ir.Value, size: ir.Value, wanted: ir.Value) -> ir.Value:
    """[size, wanted]: the identity of this axis's size, resized along its last axis by `scale`.

    The policy rounds the wanted size up or down, a Resize by scales always down: so the identity's last
    column is repeated, as what lies behind the end counts in any case, until there are enough.
    """
    repeated = c.op("Pad", _identity(c, size), c.join([0], size), None, [1], mode="edge")
    scales = c.op("Concat", c.emit.constant(np.ones(1, np.float32)), scale, axis=0)
    resized = c.op("Resize", repeated, None, scales, **_resize_attributes(c))
    return c.op("Slice", resized, [0], wanted, [1])


def _resize_matrix(c: Vjp, place: int, count: int, size: ir.Value, wanted: ir.Value) -> ir.Value:
    """[size, wanted]: the identity of this axis's size, resized along its last axis as the node does this
    axis."""
    identity, attributes = _identity(c, size), _resize_attributes(c)
    roi = None
    if c.str_attr("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        picked = c.op("Gather", c.x(1), [place, place + count], axis=0)
        starts, ends = c.multi("Split", picked, num_outputs=2, axis=0, outputs=2)
        assert starts.dtype is not None
        zero, one = c.emit.scalar(0.0, starts.dtype), c.emit.scalar(1.0, starts.dtype)
        zero, one = c.op("Reshape", zero, [1]), c.op("Reshape", one, [1])
        roi = c.op("Concat", zero, starts, one, ends, axis=0)
    if c.has(2) and not (c.known(2) is not None and c.known(2).size == 0):  # type: ignore[union-attr]
        scale = c.op("Gather", c.x(2), [place], axis=0)
        scales = c.op("Concat", c.emit.constant(np.ones(1, np.float32)), scale, axis=0)
        return c.op("Resize", identity, roi, scales, **attributes)
    return c.op("Resize", identity, roi, None, c.join(size, wanted), **attributes)


@vjp("RoiAlign", inputs=(0,), limits="mode avg; not through rois")
def roi_align(c: Vjp) -> Grads:
    """The mean over a grid of points is a product with one matrix for each region along either axis: apply
    their transposes, and add up what the regions of one image give."""
    if c.str_attr("mode", "avg") != "avg":
        raise c.fail("mode must be 'avg'")
    x, dy = c.x(0), c.dy()
    rows = c.op("Unsqueeze", _roi_matrix(c, 2, "output_height"), [1])
    columns = c.op("Unsqueeze", _roi_matrix(c, 3, "output_width"), [1])
    by_region = c.op("MatMul", c.op("MatMul", rows, dy), c.op("Transpose", columns, perm=[0, 1, 3, 2]))
    images = c.op("Unsqueeze", c.x(2), [1])
    return (c.op("ScatterND", c.zeros_like(x), images, by_region, reduction="add"),)


def _roi_matrix(c: Vjp, axis: int, output_size: str) -> ir.Value:
    """[regions, size, output size]: what the node makes, along one axis, of the identity of this axis's size.

    The image has the identity's rows as channels, and one element along the other axis, on which half an
    element of every region lies.
    """
    size = c.dim(c.x(0), axis)
    image = c.op("Unsqueeze", _identity(c, size), [0, 5 - axis])
    x1, y1, x2, y2 = c.multi("Split", c.x(1), num_outputs=4, axis=1, outputs=4)
    start = c.zeros_like(x1)
    end = c.op("Add", start, 0.5 / c.float_attr("spatial_scale", 1.0))
    regions = (start, y1, end, y2) if axis == 2 else (x1, start, x2, end)
    first_image = c.op("Sub", c.x(2), c.x(2))
    attributes: dict[str, Any] = {
        "coordinate_transformation_mode": c.str_attr("coordinate_transformation_mode", "half_pixel"),
        "sampling_ratio": c.int_attr("sampling_ratio", 0),
        "spatial_scale": c.float_attr("spatial_scale", 1.0),
        output_size: c.int_attr(output_size, 1),
    }
    sampled = c.op("RoiAlign", image, c.op("Concat", *regions, axis=1), first_image, **attributes)
    return c.op("Squeeze", sampled, [5 - axis])


@vjp("Col2Im", inputs=(0,), limits="image and block shape must be known")
def col2im(c: Vjp) -> Grads:
    """Each column is a window of the image: read it out again, from the windows' places in a numbered
    image."""
    image, block = c.known(1), c.known(2)
    if image is None or block is None:
        raise c.fail("the shapes of image and blocks must be constants")
    rank = len(image)
    strides, dilations = c.ints_attr("strides") or [1] * rank, c.ints_attr("dilations") or [1] * rank
    pads = c.ints_attr("pads") or [0] * (2 * rank)
    padded = [int(size) + pads[axis] + pads[axis + rank] for axis, size in enumerate(image)]
    counts = [(padded[a] - (int(block[a]) - 1) * dilations[a] - 1) // strides[a] + 1 for a in range(rank)]
    places = np.zeros([*(int(size) for size in block), *counts], dtype=np.int64)
    for axis in range(rank):
        along = (
            np.arange(int(block[axis]))[:, None] * dilations[axis]
            + np.arange(counts[axis])[None, :] * strides[axis]
        )
        shape = [1] * (2 * rank)
        shape[axis], shape[axis + rank] = along.shape
        places = places * padded[axis] + along.reshape(shape)
    wide = c.op("Pad", c.dy(), pads, None, list(range(2, 2 + rank)))
    flat = c.op("Reshape", wide, c.join(c.dim(c.dy(), 0), c.dim(c.y(), 1), [-1]))
    taken = c.op("Gather", flat, places.reshape(int(np.prod(block)), -1), axis=2)
    return (c.like(taken, c.x(0)),)


@vjp("AffineGrid", inputs=(0,), limits="the second dim of theta must be known")
def affine_grid(c: Vjp) -> Grads:
    """grid = theta applied to the points of a regular grid, which is what the identity makes: dtheta = dgrid'
    (points, 1)."""
    theta = c.x(0)
    dims = theta.shape[1] if theta.shape is not None else None
    if not isinstance(dims, int):
        raise c.fail("the second dim of theta must be known: 2 for images, 3 for volumes")
    identity = c.emit.constant(np.eye(dims, dims + 1, dtype=c.dtype.numpy())[None], c.dtype)
    one_image = c.join([1], c.op("Slice", c.x(1), [1], [dims + 2], [0]))
    points = c.op("AffineGrid", identity, one_image, align_corners=c.int_attr("align_corners", 0))
    points = c.op("Reshape", points, [-1, dims])
    by_point = c.op("Reshape", c.dy(), c.join(c.dim(theta, 0), [-1, dims]))
    linear = c.op("MatMul", c.op("Transpose", by_point, perm=[0, 2, 1]), points)
    shift = c.op("Unsqueeze", c.op("ReduceSum", by_point, [1], keepdims=0), [2])
    return (c.op("Concat", linear, shift, axis=2),)
