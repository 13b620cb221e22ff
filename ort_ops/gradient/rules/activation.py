"""Derivatives of activation functions."""

from __future__ import annotations

import math

import onnx_ir as ir

from ort_ops import operators
from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp
from ort_ops.gradient.rules.elementwise import one_minus_square

SELU_ALPHA = 1.67326319217681884765625
SELU_GAMMA = 1.05070102214813232421875
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
TANH_GELU_CUBIC = 0.044715


@vjp("Relu")
def relu(c: Vjp) -> Grads:
    """One ReluGrad, or the formula."""
    if not _fits_fused_operators(c):
        return (c.op("Where", c.op("Greater", c.y(), 0.0), c.dy(), 0.0),)
    operator = operators.RELU_GRAD
    return (c.op(operator.name, c.dy(), c.y(), domain=operator.domain, version=operator.version),)


@vjp("LeakyRelu")
def leaky_relu(c: Vjp) -> Grads:
    return (_where_positive(c, c.dy(), c.op("Mul", c.dy(), c.float_attr("alpha", 0.01))),)


@vjp("PRelu", broadcasts=True)
def prelu(c: Vjp) -> Grads:
    x, slope = c.x(0), c.x(1)
    negative = c.op("Less", x, 0.0)
    return (
        c.op("Where", negative, c.op("Mul", c.dy(), slope), c.dy()),
        c.op("Where", negative, c.op("Mul", c.dy(), x), 0.0),
    )


@vjp("ThresholdedRelu")
def thresholded_relu(c: Vjp) -> Grads:
    return (c.op("Where", c.op("Greater", c.x(0), c.float_attr("alpha", 1.0)), c.dy(), 0.0),)


@vjp("Shrink")
def shrink(c: Vjp) -> Grads:
    outside = c.op("Greater", c.op("Abs", c.x(0)), c.float_attr("lambd", 0.5))
    return (c.op("Where", outside, c.dy(), 0.0),)


@vjp("Elu")
def elu(c: Vjp) -> Grads:
    alpha = c.float_attr("alpha", 1.0)
    return (_where_positive(c, c.dy(), c.op("Mul", c.dy(), c.op("Add", c.y(), alpha))),)


@vjp("Celu")
def celu(c: Vjp) -> Grads:
    scaled = c.op("Exp", c.op("Div", c.x(0), c.float_attr("alpha", 1.0)))
    return (_where_positive(c, c.dy(), c.op("Mul", c.dy(), scaled)),)


@vjp("Selu")
def selu(c: Vjp) -> Grads:
    alpha, gamma = c.float_attr("alpha", SELU_ALPHA), c.float_attr("gamma", SELU_GAMMA)
    negative = c.op("Mul", c.dy(), c.op("Add", c.y(), alpha * gamma))
    return (_where_positive(c, c.op("Mul", c.dy(), gamma), negative),)


@vjp("Softplus")
def softplus(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), c.op("Sigmoid", c.x(0))),)


@vjp("Softsign")
def softsign(c: Vjp) -> Grads:
    base = c.op("Add", c.op("Abs", c.x(0)), 1.0)
    return (c.op("Div", c.dy(), c.op("Mul", base, base)),)


@vjp("HardSigmoid")
def hard_sigmoid(c: Vjp) -> Grads:
    slope = c.op("Mul", c.dy(), c.float_attr("alpha", 0.2))
    return (c.op("Where", _strictly_inside(c, c.y(), 0.0, 1.0), slope, 0.0),)


@vjp("HardSwish")
def hard_swish(c: Vjp) -> Grads:
    """x * clip(x / 6 + 1 / 2, 0, 1)."""
    x = c.x(0)
    slope = c.op("Where", c.op("Greater", x, 3.0), 1.0, c.op("Add", c.op("Div", x, 3.0), 0.5))
    return (c.op("Mul", c.dy(), c.op("Where", c.op("Less", x, -3.0), 0.0, slope)),)


@vjp("Mish")
def mish(c: Vjp) -> Grads:
    """x * tanh(softplus(x))."""
    gate = c.op("Tanh", c.op("Softplus", c.x(0)))
    bend = c.op("Mul", c.op("Mul", c.x(0), c.op("Sigmoid", c.x(0))), one_minus_square(c, gate))
    return (c.op("Mul", c.dy(), c.op("Add", gate, bend)),)


@vjp("Swish")
def swish(c: Vjp) -> Grads:
    """x * sigmoid(alpha * x)."""
    return (c.op("Mul", c.dy(), sigmoid_gate_slope(c, c.x(0), c.float_attr("alpha", 1.0))),)


@vjp("Gelu")
def gelu(c: Vjp) -> Grads:
    return (gelu_gradient(c, c.x(0), c.str_attr("approximate", "none")),)


def _fits_fused_operators(c: Vjp) -> bool:
    """They take neither float64 nor scalars."""
    shape = c.y().shape
    return c.dtype != ir.DataType.DOUBLE and shape is not None and len(shape) > 0


def gelu_gradient(c: Vjp, x: ir.Value, approximate: str) -> ir.Value:
    """One GeluGrad, or the formula."""
    if not _fits_fused_operators(c):
        slope = tanh_gelu_slope if approximate == "tanh" else erf_gelu_slope
        return c.op("Mul", c.dy(), slope(c, x))
    return c.op(
        operators.GELU_GRAD.name, c.dy(), x,
        domain=operators.DOMAIN, version=operators.GELU_GRAD.version, approximate=approximate,
    )  # fmt: skip


def sigmoid_gate_slope(c: Vjp, x: ir.Value, alpha: float) -> ir.Value:
    """Derivative of x * s with s = sigmoid(alpha * x): s + alpha * x * s * (1 - s)."""
    scaled = x if alpha == 1.0 else c.op("Mul", x, alpha)
    gate = c.op("Sigmoid", scaled)
    return c.op("Mul", gate, c.op("Add", c.op("Mul", scaled, c.op("Sub", 1.0, gate)), 1.0))


def erf_gelu_slope(c: Vjp, x: ir.Value) -> ir.Value:
    """Derivative of x * Phi(x): Phi(x) + x * phi(x), the normal distribution and its density."""
    distribution = c.op("Mul", c.op("Add", c.op("Erf", c.op("Mul", x, math.sqrt(0.5))), 1.0), 0.5)
    density = c.op("Mul", c.op("Exp", c.op("Mul", c.op("Mul", x, x), -0.5)), 1.0 / math.sqrt(2.0 * math.pi))
    return c.op("Add", distribution, c.op("Mul", x, density))


def tanh_gelu_slope(c: Vjp, x: ir.Value) -> ir.Value:
    """Derivative of x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    square = c.op("Mul", x, x)
    bend = c.op("Add", c.op("Mul", square, SQRT_2_OVER_PI * TANH_GELU_CUBIC), SQRT_2_OVER_PI)
    tanh = c.op("Tanh", c.op("Mul", x, bend))
    du = c.op("Add", c.op("Mul", square, 3.0 * SQRT_2_OVER_PI * TANH_GELU_CUBIC), SQRT_2_OVER_PI)
    outer = c.op("Mul", c.op("Mul", x, du), one_minus_square(c, tanh))
    return c.op("Mul", c.op("Add", c.op("Add", tanh, 1.0), outer), 0.5)


def _where_positive(c: Vjp, positive: ir.Value, negative: ir.Value) -> ir.Value:
    return c.op("Where", c.op("Greater", c.x(0), 0.0), positive, negative)


def _strictly_inside(c: Vjp, value: ir.Value, low: float, high: float) -> ir.Value:
    return c.op("And", c.op("Greater", value, low), c.op("Less", value, high))
