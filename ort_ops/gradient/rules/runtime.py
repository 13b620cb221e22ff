"""Derivatives of the operators that ONNX Runtime's own optimizer writes (domain com.microsoft): people train
what they saved."""

from __future__ import annotations

import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp
from ort_ops.gradient.rules.activation import gelu_gradient, sigmoid_gate_slope
from ort_ops.gradient.rules.linalg import gemm_gradients, matmul_gradients
from ort_ops.gradient.rules.norm import fused_layer_norm_gradient, rms_norm_gradient, trailing_axes

DOMAIN = "com.microsoft"


@vjp("Gelu", domain=DOMAIN)
def gelu(c: Vjp) -> Grads:
    return (gelu_gradient(c, c.x(0), "none"),)


@vjp("QuickGelu", domain=DOMAIN)
def quick_gelu(c: Vjp) -> Grads:
    """x * sigmoid(alpha * x)."""
    return (c.op("Mul", c.dy(), sigmoid_gate_slope(c, c.x(0), c.float_attr("alpha", 1.702))),)


@vjp("BiasGelu", domain=DOMAIN)
def bias_gelu(c: Vjp) -> Grads:
    gradient = gelu_gradient(c, c.op("Add", c.x(0), c.x(1)), "none")
    return gradient, c.sum_to(gradient, c.y().shape, c.x(1))


@vjp("FastGelu", domain=DOMAIN)
def fast_gelu(c: Vjp) -> Grads:
    """The tanh form, of x or of x plus a bias."""
    if not c.has(1):
        return (gelu_gradient(c, c.x(0), "tanh"),)
    gradient = gelu_gradient(c, c.op("Add", c.x(0), c.x(1)), "tanh")
    return gradient, c.sum_to(gradient, c.y().shape, c.x(1))


@vjp("FusedMatMul", domain=DOMAIN, limits="transBatchA and transBatchB 0")
def fused_matmul(c: Vjp) -> Grads:
    """alpha * A' @ B', each with its last two axes swapped or not."""
    if c.int_attr("transBatchA", 0) or c.int_attr("transBatchB", 0):
        raise c.fail("transBatchA and transBatchB are not supported")
    alpha = c.float_attr("alpha", 1.0)
    dy = c.dy() if alpha == 1.0 else c.op("Mul", c.dy(), alpha)
    return matmul_gradients(c, dy, bool(c.int_attr("transA", 0)), bool(c.int_attr("transB", 0)))


@vjp("FusedGemm", domain=DOMAIN, limits="activation Relu, LeakyRelu, Tanh or Sigmoid")
def fused_gemm(c: Vjp) -> Grads:
    """A Gemm and an activation, whose slope follows from its result."""
    y, activation = c.y(), c.str_attr("activation", "")
    if activation == "Relu":
        slope = c.cast(c.op("Greater", y, 0.0), c.dtype)
    elif activation == "LeakyRelu":
        slope = c.op(
            "Where",
            c.op("Greater", y, 0.0),
            c.emit.scalar(1.0, c.dtype),
            c.float_attr("activation_alpha", 0.01),
        )
    elif activation == "Tanh":
        slope = c.op("Sub", 1.0, c.op("Mul", y, y))
    elif activation == "Sigmoid":
        slope = c.op("Mul", y, c.op("Sub", 1.0, y))
    else:
        raise c.fail(
            f"the activation {activation!r} is not supported; only Relu, LeakyRelu, Tanh and Sigmoid"
        )
    return gemm_gradients(c, c.op("Mul", c.dy(), slope))


@vjp("SkipLayerNormalization", domain=DOMAIN, inputs=(0, 1, 2, 3, 4))
def skip_layer_normalization(c: Vjp) -> Grads:
    """LayerNormalization of input + skip + bias over the last axis; output 3 is that sum."""
    total = _skip_sum(c, 4)
    dx, dgamma, dbeta = fused_layer_norm_gradient(c, total, c.x(2), _sum_gradient(c))
    return (
        dx,
        c.sum_to(dx, c.y().shape, c.x(1)),
        c.cast(dgamma, c.x(2).dtype),
        c.cast(dbeta, c.x(2).dtype),
        c.sum_to(dx, c.y().shape, c.x(4)) if c.wants(4) else None,
    )


@vjp("SkipSimplifiedLayerNormalization", domain=DOMAIN, inputs=(0, 1, 2, 3))
def skip_simplified_layer_normalization(c: Vjp) -> Grads:
    """RMS normalisation of input + skip + bias; output 3 is that sum."""
    dx, dgamma = rms_norm_gradient(c, _skip_sum(c, 3), c.x(2), [-1])
    residual = _sum_gradient(c)
    dx = dx if residual is None else c.op("Add", dx, residual)
    return (
        dx,
        c.sum_to(dx, c.y().shape, c.x(1)),
        dgamma,
        c.sum_to(dx, c.y().shape, c.x(3)) if c.wants(3) else None,
    )


def _skip_sum(c: Vjp, bias: int) -> ir.Value:
    _refuse_used_statistics(c)
    total = c.op("Add", c.x(0), c.x(1))
    return c.op("Add", total, c.x(bias)) if c.has(bias) else total


def _refuse_used_statistics(c: Vjp) -> None:
    if c.has_dy(1) or c.has_dy(2):
        raise c.fail("its outputs mean and inverse deviation are not supported as part of the loss")


def _sum_gradient(c: Vjp) -> ir.Value | None:
    return c.dy(3) if c.has_dy(3) else None


@vjp("SimplifiedLayerNormalization", since=1)
def simplified_layer_normalization(c: Vjp) -> Grads:
    """RMS normalisation; the runtime keeps it in the default domain."""
    _refuse_used_statistics(c)
    return rms_norm_gradient(c, c.x(0), c.x(1), trailing_axes(c, c.int_attr("axis", -1)))
