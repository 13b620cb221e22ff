"""Derivatives of normalisations."""

from __future__ import annotations

import onnx_ir as ir

from ort_ops import operators
from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp


@vjp("Softmax")
def softmax(c: Vjp) -> Grads:
    """dx = y * (dy - sum(dy * y))."""
    axis = c.int_attr("axis", -1)
    total = c.op("ReduceSum", c.op("Mul", c.dy(), c.y()), [axis], keepdims=1)
    return (c.op("Mul", c.op("Sub", c.dy(), total), c.y()),)


@vjp("LogSoftmax")
def log_softmax(c: Vjp) -> Grads:
    """dx = dy - exp(y) * sum(dy)."""
    axis = c.int_attr("axis", -1)
    total = c.op("ReduceSum", c.dy(), [axis], keepdims=1)
    return (c.op("Sub", c.dy(), c.op("Mul", c.op("Exp", c.y()), total)),)


@vjp("LayerNormalization", absorbs=True)
def layer_normalization(c: Vjp) -> Grads:
    """One AddLayerNormGrad, with the gradient of the residual branch added inside.

    Its x1 is the sum that the norm reads and x2 is absent, also where that sum is made by an Add: the sum is in memory
    anyway, so the backward reads one tensor instead of two and keeps one alive. And a sum with a second reader is left
    alone by the runtime's own Add + LayerNormalization fusion, which in ONNX Runtime 1.19 loses the statistics.
    """
    x = c.x(0)
    axis = c.int_attr("axis", -1) % c.rank(x)
    stash = ir.DataType(c.int_attr("stash_type", int(ir.DataType.FLOAT)))
    if c.dtype == ir.DataType.DOUBLE or stash != ir.DataType.FLOAT:
        return _layer_norm_in_standard_operators(c, axis)
    gamma = _normalised_shape(c, c.x(1), axis)
    mean, rstd = c.y(1, stash), c.y(2, stash)
    residual = c.absorb(0) if c.wants(0) else None
    dx, dgamma, dbeta = c.multi(
        operators.ADD_LAYER_NORM_GRAD.name,
        c.dy(), x, None, rstd, mean, gamma, residual,
        domain=operators.DOMAIN, version=operators.ADD_LAYER_NORM_GRAD.version, outputs=3,
    )  # fmt: skip
    dx.dtype, dgamma.dtype, dbeta.dtype = x.dtype, ir.DataType.FLOAT, ir.DataType.FLOAT
    return dx, _affine_gradient(c, dgamma, 1, axis), _affine_gradient(c, dbeta, 2, axis)


def _normalised_shape(c: Vjp, gamma: ir.Value, axis: int) -> ir.Value:
    """gamma in the full shape of the normalised axes, which the standard lets it be broadcast to."""
    dims = c.x(0).shape
    assert dims is not None
    normalised = list(dims)[axis:]
    if gamma.shape is not None and len(gamma.shape) == len(normalised):
        pairs = zip(gamma.shape, normalised, strict=True)
        if all(size == full or (isinstance(size, int) and size > 1) for size, full in pairs):
            return gamma
    if all(isinstance(size, int) for size in normalised):
        shape = c.emit.ints(normalised)  # type: ignore[arg-type]
    else:
        shape = c.op("Shape", c.x(0), start=axis)
    return c.op("Expand", gamma, shape)


def _affine_gradient(c: Vjp, gradient: ir.Value, index: int, axis: int) -> ir.Value | None:
    """The gradient of scale or bias, of the normalised shape, in that input's own shape and type."""
    if not c.wants(index):
        return None
    dims = c.x(0).shape
    assert dims is not None
    return c.sum_to(c.cast(gradient, c.x(index).dtype), list(dims)[axis:], c.x(index))


def _layer_norm_in_standard_operators(c: Vjp, axis: int) -> Grads:
    """For float64, which the fused operator does not take: the same formula, statistics in float64 as well."""
    x = c.x(0)
    axes = list(range(axis, c.rank(x)))
    centred = c.op("Sub", x, c.op("ReduceMean", x, axes, keepdims=1))
    variance = c.op("ReduceMean", c.op("Mul", centred, centred), axes, keepdims=1)
    rstd = c.op("Reciprocal", c.op("Sqrt", c.op("Add", variance, c.float_attr("epsilon", 1e-5))))
    xhat = c.op("Mul", centred, rstd)
    dims = c.y().shape
    g = c.op("Mul", c.dy(), c.x(1))
    along = c.op("Mul", xhat, c.op("ReduceMean", c.op("Mul", g, xhat), axes, keepdims=1))
    dx = c.op("Mul", rstd, c.op("Sub", c.op("Sub", g, c.op("ReduceMean", g, axes, keepdims=1)), along))
    dgamma = c.sum_to(c.op("Mul", c.dy(), xhat), dims, c.x(1)) if c.wants(1) else None
    dbeta = c.sum_to(c.dy(), dims, c.x(2)) if c.wants(2) else None
    return dx, dgamma, dbeta
