"""Derivative of GridSample, in any number of dimensions: by the input and by the grid.

Each sample is a weighted sum of input elements, a product over the axes of a few taps: one for nearest, two
for linear, four for cubic. The input's gradient is a scatter-add of dy times the weights; the grid's is the
sum with one axis's weights replaced by their derivatives.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp

CUBIC = -0.75
"""The coefficient of the cubic kernel that the standard prescribes for GridSample."""


@dataclass(frozen=True)
class _Tap:
    """One place along one axis, [N, P] each: its index, as int64, its weight and the weight's derivative by
    the position."""

    index: ir.Value
    weight: ir.Value
    slope: ir.Value | None


@vjp("GridSample")
def grid_sample(c: Vjp) -> Grads:
    x, grid = c.x(0), c.x(1)
    dims = c.rank(x) - 2
    sizes = [c.dim(x, 2 + axis) for axis in range(dims)]
    positions, stretch = [], []
    for axis in range(dims):  # the grid's last axis is in reverse order: x, y, z
        position, slope = _position(c, grid, dims - 1 - axis, sizes[axis])
        positions.append(position)
        stretch.append(slope)
    along = [taps(c, position, size) for position, size in zip(positions, sizes, strict=True)]
    dy = flat(c, c.dy(), 2)
    values = flat(c, x, 2)
    total = c.op("ConstantOfShape", c.op("Shape", values), value=c.emit.zero(c.dtype))
    by_axis: list[ir.Value | None] = [None] * dims
    for combination in itertools.product(*along):
        index = combination[0].index
        for tap, size in zip(combination[1:], sizes[1:], strict=True):
            index = c.op("Add", c.op("Mul", index, size), tap.index)
        places = c.op("Expand", c.op("Unsqueeze", index, [1]), c.op("Shape", dy))
        weight = product(c, [tap.weight for tap in combination])
        if c.wants(0):
            updates = c.op("Mul", dy, c.op("Unsqueeze", weight, [1]))
            total = c.op("ScatterElements", total, places, updates, axis=2, reduction="add")
        if c.wants(1):
            seen = c.op("Mul", dy, c.op("GatherElements", values, places, axis=2))
            seen = c.op("ReduceSum", seen, [1], keepdims=0)
            for axis, tap in enumerate(combination):
                if tap.slope is None:
                    continue
                others = [other.weight for place, other in enumerate(combination) if place != axis]
                part = c.op("Mul", seen, product(c, [tap.slope, *others]))
                so_far = by_axis[axis]
                by_axis[axis] = part if so_far is None else c.op("Add", so_far, part)
    parts = []
    for axis in reversed(range(dims)):
        summed = by_axis[axis]
        if summed is not None:
            parts.append(c.op("Unsqueeze", c.op("Mul", summed, stretch[axis]), [2]))
    dgrid = c.like(c.op("Concat", *parts, axis=2), grid) if parts and c.wants(1) else None
    return c.like(total, x), dgrid


def flat(c: Vjp, value: ir.Value, kept: int) -> ir.Value:
    """`value` with all but its first `kept` axes joined."""
    return c.op("Reshape", value, c.join(*(c.dim(value, axis) for axis in range(kept)), [-1]))


def product(c: Vjp, factors: list[ir.Value]) -> ir.Value:
    product = factors[0]
    for factor in factors[1:]:
        product = c.op("Mul", product, factor)
    return product


def _position(c: Vjp, grid: ir.Value, column: int, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Where the samples lie along an axis, in elements, [N, P], and the derivative of that by the grid."""
    coordinate = flat(c, c.op("Gather", grid, c.emit.constant(np.array(column)), axis=-1), 1)
    length = c.cast(size, c.dtype)
    one = c.op("Add", coordinate, 1.0)
    if c.int_attr("align_corners", 0):
        stretch = c.op("Mul", c.op("Sub", length, 1.0), 0.5)
        position = c.op("Mul", one, stretch)
    else:
        stretch = c.op("Mul", length, 0.5)
        position = c.op("Sub", c.op("Mul", one, stretch), 0.5)
    padding = c.str_attr("padding_mode", "zeros")
    if padding == "zeros" or _is_cubic(c):
        return position, stretch
    if padding == "reflection":
        position, sign = _reflected(c, position, length)
        stretch = c.op("Mul", stretch, sign)
    last = c.op("Sub", length, 1.0)
    inside = c.op("And", c.op("Greater", position, 0.0), c.op("Less", position, last))
    clipped = c.op("Max", c.op("Min", position, last), 0.0)
    return clipped, c.op("Mul", stretch, c.cast(inside, c.dtype))


def _is_cubic(c: Vjp) -> bool:
    return c.str_attr("mode", "linear") in ("cubic", "bicubic")


def _reflected(c: Vjp, position: ir.Value, length: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The position reflected at the borders until it lies inside, and the sign of the reflection."""
    if c.int_attr("align_corners", 0):
        shift, span = 0.0, c.op("Sub", length, 1.0)
    else:
        shift, span = 0.5, length
    moved = c.op("Add", position, shift)
    double = c.op("Mul", span, 2.0)
    turned = c.op("Sub", moved, c.op("Mul", double, c.op("Floor", c.op("Div", moved, double))))
    beyond = c.op("Greater", turned, span)
    back = c.op("Where", beyond, c.op("Sub", double, turned), turned)
    one = c.emit.scalar(1.0, c.dtype)
    return c.op("Sub", back, shift), c.op("Where", beyond, c.op("Neg", one), one)


def taps(c: Vjp, position: ir.Value, size: ir.Value) -> list[_Tap]:
    """The places along an axis of length `size` that a sample at `position`, [N, P], is made from."""
    mode = c.str_attr("mode", "linear")
    if mode == "nearest":
        nearest = c.op("Round", position)
        ones = c.op("Add", c.op("Sub", nearest, nearest), 1.0)
        return [_placed(c, nearest, ones, None, size)]
    first = c.op("Floor", position)
    t = c.op("Sub", position, first)
    one = c.emit.scalar(1.0, c.dtype)
    if not _is_cubic(c):
        return [
            _placed(c, first, c.op("Sub", 1.0, t), c.op("Neg", one), size),
            _placed(c, c.op("Add", first, 1.0), t, one, size),
        ]
    found = []
    for offset in (-1, 0, 1, 2):
        distance = c.op("Sub", t, float(offset))
        weight, slope = _cubic(c, c.op("Abs", distance), near=offset in (0, 1))
        found.append(
            _placed(
                c, c.op("Add", first, float(offset)), weight, c.op("Mul", slope, c.op("Sign", distance)), size
            )
        )
    return found


def _cubic(c: Vjp, d: ir.Value, near: bool) -> tuple[ir.Value, ir.Value]:
    """The cubic kernel and its derivative at distance d: near is d <= 1, else 1 < d < 2. Polynomials by
    Horner's rule."""
    if near:
        coefficients = [CUBIC + 2.0, -(CUBIC + 3.0), 0.0, 1.0]
    else:
        coefficients = [CUBIC, -5.0 * CUBIC, 8.0 * CUBIC, -4.0 * CUBIC]
    slopes = [3.0 * coefficients[0], 2.0 * coefficients[1], coefficients[2]]
    return _polynomial(c, d, coefficients), _polynomial(c, d, slopes)


def _polynomial(c: Vjp, d: ir.Value, coefficients: list[float]) -> ir.Value:
    value = c.op("Mul", d, coefficients[0])
    for coefficient in coefficients[1:-1]:
        value = c.op("Mul", c.op("Add", value, coefficient), d)
    return c.op("Add", value, coefficients[-1])


def _placed(c: Vjp, place: ir.Value, weight: ir.Value, slope: ir.Value | None, size: ir.Value) -> _Tap:
    """A tap at `place`: outside the input its weight is zero, or its index is moved inside, as the padding
    says."""
    length = c.cast(size, c.dtype)
    last = c.op("Sub", length, 1.0)
    padding = c.str_attr("padding_mode", "zeros")
    if padding == "zeros":
        inside = c.op("And", c.op("GreaterOrEqual", place, 0.0), c.op("LessOrEqual", place, last))
        weight = c.op("Where", inside, weight, 0.0)
        slope = None if slope is None else c.op("Where", inside, slope, 0.0)
    elif padding == "reflection" and _is_cubic(c):
        place, _ = _reflected(c, place, length)
    index = c.cast(c.op("Max", c.op("Min", place, last), 0.0), ir.DataType.INT64)
    return _Tap(index, weight, slope)
