"""Derivatives of reductions: the gradient is spread back over the axes that were summed."""

from __future__ import annotations

import math

import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp

ALL = "all"


def _reduced_axes(c: Vjp) -> list[int] | str | None:
    """The axes that the node reduces, ALL, or None if they are known only when the model runs; [] if it
    reduces nothing."""
    axes = c.known(1)
    if c.has(1) and axes is None:
        return None
    given = [] if axes is None else [int(axis) for axis in axes.reshape(-1)]
    return ALL if not given and not c.int_attr("noop_with_empty_axes", 0) else given


def _with_kept_axes(c: Vjp, value: ir.Value) -> ir.Value:
    """`value`, shaped as the node's output, shaped as if the node had kept the reduced axes with size 1."""
    if c.int_attr("keepdims", 1):
        return value
    axes = _reduced_axes(c)
    if axes == ALL or axes == []:
        return value  # a scalar broadcasts as it is
    if isinstance(axes, list):
        return c.op("Unsqueeze", value, axes)
    sizes = c.op("Shape", c.x(0))
    ones = c.op("Expand", [1], c.op("Shape", c.x(1)))
    return c.op("Reshape", value, c.op("ScatterElements", sizes, c.x(1), ones, axis=0), allowzero=1)


def _spread(c: Vjp, value: ir.Value) -> ir.Value:
    """`value`, shaped as the node's output, repeated over the reduced axes."""
    if _reduced_axes(c) == []:
        return value
    return c.op("Expand", _with_kept_axes(c, value), c.shape(c.x(0)))


def _group_size(c: Vjp) -> ir.Value | float:
    """How many elements of the input make one element of the output."""
    shape, axes = c.x(0).shape, _reduced_axes(c)
    if shape is not None and axes is not None:
        sizes = list(shape) if axes == ALL else [shape[int(axis)] for axis in axes]
        if all(isinstance(size, int) for size in sizes):
            return float(math.prod(sizes))  # type: ignore[arg-type]
    return c.cast(c.op("Div", c.op("Size", c.x(0)), c.op("Size", c.y())), c.dtype)


def _reduce_like(c: Vjp, op_type: str, value: ir.Value) -> ir.Value:
    """Reduce `value`, shaped as the node's input, over the node's axes, which are kept."""
    noop = c.int_attr("noop_with_empty_axes", 0) or None
    return c.op(op_type, value, c.optional(1), keepdims=1, noop_with_empty_axes=noop)


@vjp("ReduceSum", inputs=(0,))
def reduce_sum(c: Vjp) -> Grads:
    return (_spread(c, c.dy()),)


@vjp("ReduceMean", inputs=(0,))
def reduce_mean(c: Vjp) -> Grads:
    if _reduced_axes(c) == []:
        return (c.dy(),)
    return (_spread(c, c.op("Div", c.dy(), _group_size(c))),)


@vjp("ReduceMax", "ReduceMin", inputs=(0,))
def reduce_extremum(c: Vjp) -> Grads:
    """Elements that are all the extremum share the gradient evenly."""
    hits = c.cast(c.op("Equal", c.x(0), _with_kept_axes(c, c.y())), c.dtype)
    share = c.op("Div", _with_kept_axes(c, c.dy()), _reduce_like(c, "ReduceSum", hits))
    return (c.op("Mul", hits, share),)


@vjp("ReduceProd", inputs=(0,))
def reduce_prod(c: Vjp) -> Grads:
    """The product of the others: product / x, but where one factor is zero only that factor has a
    gradient."""
    x = c.x(0)
    is_zero = c.op("Equal", x, 0.0)
    others = _reduce_like(c, "ReduceProd", c.op("Where", is_zero, 1.0, x))
    zeros = _reduce_like(c, "ReduceSum", c.cast(is_zero, c.dtype))
    nonzero_slope = c.op("Where", c.op("Equal", zeros, 0.0), c.op("Div", others, x), 0.0)
    zero_slope = c.op("Where", c.op("Equal", zeros, 1.0), others, 0.0)
    return (c.op("Mul", _with_kept_axes(c, c.dy()), c.op("Where", is_zero, zero_slope, nonzero_slope)),)


@vjp("ReduceL1", inputs=(0,))
def reduce_l1(c: Vjp) -> Grads:
    return (c.op("Mul", c.op("Sign", c.x(0)), _with_kept_axes(c, c.dy())),)


@vjp("ReduceL2", inputs=(0,))
def reduce_l2(c: Vjp) -> Grads:
    """x / ||x||, and zero where the norm is zero."""
    norm = _with_kept_axes(c, c.y())
    safe = c.op("Where", c.op("Equal", norm, 0.0), 1.0, norm)
    return (c.op("Mul", c.x(0), c.op("Div", _with_kept_axes(c, c.dy()), safe)),)


@vjp("ReduceSumSquare", inputs=(0,))
def reduce_sum_square(c: Vjp) -> Grads:
    return (c.op("Mul", c.op("Mul", c.x(0), 2.0), _with_kept_axes(c, c.dy())),)


@vjp("ReduceLogSum", inputs=(0,))
def reduce_log_sum(c: Vjp) -> Grads:
    return (_spread(c, c.op("Div", c.dy(), c.op("Exp", c.y()))),)


@vjp("ReduceLogSumExp", inputs=(0,))
def reduce_log_sum_exp(c: Vjp) -> Grads:
    weights = c.op("Exp", c.op("Sub", c.x(0), _with_kept_axes(c, c.y())))
    return (c.op("Mul", weights, _with_kept_axes(c, c.dy())),)


@vjp("CumSum", inputs=(0,))
def cumsum(c: Vjp) -> Grads:
    reverse = 1 - c.int_attr("reverse", 0)
    return (c.op("CumSum", c.dy(), c.x(1), exclusive=c.int_attr("exclusive", 0), reverse=reverse),)


@vjp("CumProd", inputs=(0,), limits="elements other than zero")
def cumprod(c: Vjp) -> Grads:
    """dx = (sum of dy * y over the outputs that x is a factor of) / x."""
    products = c.op("Mul", c.dy(), c.y())
    reverse = 1 - c.int_attr("reverse", 0)
    sums = c.op("CumSum", products, c.x(1), exclusive=c.int_attr("exclusive", 0), reverse=reverse)
    return (c.op("Div", sums, c.x(0)),)
