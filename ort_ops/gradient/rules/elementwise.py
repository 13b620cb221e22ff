"""Derivatives of operators that work element by element, with or without broadcasting."""

from __future__ import annotations

import math

import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp, zero_gradient

zero_gradient("Floor", "Ceil", "Round", "Sign", "Hardmax")

# -- arithmetic ----------------------------------------------------------------------------------------------


@vjp("Add", broadcasts=True)
def add(c: Vjp) -> Grads:
    return c.dy(), c.dy()


@vjp("Sub", broadcasts=True)
def sub(c: Vjp) -> Grads:
    return c.dy(), c.op("Neg", c.dy())


@vjp("Mul", broadcasts=True)
def mul(c: Vjp) -> Grads:
    return c.op("Mul", c.dy(), c.x(1)), c.op("Mul", c.dy(), c.x(0))


@vjp("Div", broadcasts=True)
def div(c: Vjp) -> Grads:
    da = c.op("Div", c.dy(), c.x(1))
    return da, c.op("Neg", c.op("Mul", da, c.y()))


@vjp("Neg")
def neg(c: Vjp) -> Grads:
    return (c.op("Neg", c.dy()),)


@vjp("Sum", broadcasts=True)
def variadic_sum(c: Vjp) -> Grads:
    return [c.dy()] * len(c.node.inputs)


@vjp("Mean", broadcasts=True)
def variadic_mean(c: Vjp) -> Grads:
    return [c.op("Div", c.dy(), len(c.node.inputs))] * len(c.node.inputs)


@vjp("Max", "Min", broadcasts=True)
def extremum(c: Vjp) -> Grads:
    """Where several inputs are the extremum, they share the gradient evenly."""
    if len(c.node.inputs) == 1:
        return (c.dy(),)
    hits = [c.cast(c.op("Equal", c.x(index), c.y()), c.dtype) for index in range(len(c.node.inputs))]
    share = c.op("Div", c.dy(), c.op("Sum", *hits))
    return [c.op("Mul", share, hit) for hit in hits]


@vjp("Mod", broadcasts=True)
def mod(c: Vjp) -> Grads:
    """fmod(a, b) = a - b * trunc(a / b)."""
    quotient = c.op("Div", c.op("Sub", c.x(0), c.y()), c.x(1))
    return c.dy(), c.op("Neg", c.op("Mul", c.dy(), c.op("Round", quotient)))


@vjp("Pow", broadcasts=True)
def power(c: Vjp) -> Grads:
    base, exponent = c.x(0), c.cast(c.x(1), c.x(0).dtype)
    known = c.known(1)
    d_base: ir.Value
    if known is not None and known.size == 1 and float(known.item()) in (1.0, 2.0, 3.0):
        number = float(known.item())
        slope = {1.0: None, 2.0: base, 3.0: c.op("Mul", base, base)}[number]
        d_base = c.dy() if slope is None else c.op("Mul", c.dy(), c.op("Mul", slope, number))
    else:
        # x^0 is 1 everywhere: an exponent of -1 times a factor of 0 would make NaN of it at x = 0
        lowered = c.op("Where", c.op("Equal", exponent, 0.0), 1.0, c.op("Sub", exponent, 1.0))
        d_base = c.op("Mul", c.dy(), c.op("Mul", exponent, c.op("Pow", base, lowered)))
    if not c.wants(1):
        return d_base, None
    growth = c.op("Mul", c.y(), c.op("Log", base))
    flat = c.op("And", c.op("Equal", base, 0.0), c.op("GreaterOrEqual", exponent, 0.0))
    d_exponent = c.op("Mul", c.dy(), c.op("Where", flat, 0.0, growth))
    return d_base, c.cast(d_exponent, c.x(1).dtype)


@vjp("Where", inputs=(1, 2), broadcasts=True)
def where(c: Vjp) -> Grads:
    return None, c.op("Where", c.x(0), c.dy(), 0.0), c.op("Where", c.x(0), 0.0, c.dy())


@vjp("Clip", broadcasts=True)
def clip(c: Vjp) -> Grads:
    """At a bound the gradient goes to x, as in PyTorch; where the bounds cross, the upper one wins, as in the
    forward."""
    x, low, high = c.x(0), c.optional(1), c.optional(2)
    below = None if low is None else c.op("Less", x, low)
    above = None if high is None else c.op("Greater", x, high)
    if above is not None and low is not None:
        above = c.op("Or", above, c.op("Less", high, low))
    if below is not None and above is not None:
        below = c.op("And", below, c.op("Not", above))
    inside = c.dy()
    for outside in (below, above):
        inside = inside if outside is None else c.op("Where", outside, 0.0, inside)
    return (
        inside,
        None if below is None else c.op("Where", below, c.dy(), 0.0),
        None if above is None else c.op("Where", above, c.dy(), 0.0),
    )


# -- types and copies ----------------------------------------------------------------------------------------


@vjp("Identity", "OptionalGetElement", limits="OptionalGetElement of a tensor")
def identity(c: Vjp) -> Grads:
    return (c.dy(),)


@vjp("Cast", "CastLike", inputs=(0,))
def cast(c: Vjp) -> Grads:
    return (c.cast(c.dy(), c.x(0).dtype),)


@vjp("Expand", inputs=(0,), broadcasts=True)
def expand(c: Vjp) -> Grads:
    return (c.dy(),)


@vjp("Dropout", inputs=(0,))
def dropout(c: Vjp) -> Grads:
    """Uses the mask that the same run of the forward node drew."""
    training = c.known(2)
    if not c.has(2) or (training is not None and not training.item()):
        return (c.dy(),)
    kept = c.op("Where", c.y(1, ir.DataType.BOOL), c.dy(), 0.0)
    known = c.known(1) if c.has(1) else 0.5
    if training is not None and known is not None:
        return (c.op("Mul", kept, 1.0 / (1.0 - float(known))),)
    ratio = c.x(1) if c.has(1) else c.emit.scalar(0.5, ir.DataType.FLOAT)
    scale = c.op("Reciprocal", c.op("Sub", 1.0, ratio))
    if training is None:
        scale = c.op("Where", c.x(2), scale, 1.0)
    return (c.op("Mul", kept, c.cast(scale, c.dtype)),)


# -- functions of one variable -------------------------------------------------------------------------------


@vjp("Abs")
def absolute(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), c.op("Sign", c.x(0))),)


@vjp("Sqrt")
def sqrt(c: Vjp) -> Grads:
    return (c.op("Div", c.op("Mul", c.dy(), 0.5), c.y()),)


@vjp("Reciprocal")
def reciprocal(c: Vjp) -> Grads:
    return (c.op("Neg", c.op("Mul", c.dy(), c.op("Mul", c.y(), c.y()))),)


@vjp("Exp")
def exp(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), c.y()),)


@vjp("Log")
def log(c: Vjp) -> Grads:
    return (c.op("Div", c.dy(), c.x(0)),)


@vjp("Erf")
def erf(c: Vjp) -> Grads:
    bell = c.op("Exp", c.op("Neg", c.op("Mul", c.x(0), c.x(0))))
    return (c.op("Mul", c.dy(), c.op("Mul", bell, 2.0 / math.sqrt(math.pi))),)


@vjp("Tanh")
def tanh(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), one_minus_square(c, c.y())),)


@vjp("Sigmoid")
def sigmoid(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), c.op("Mul", c.y(), c.op("Sub", 1.0, c.y()))),)


@vjp("Sin")
def sin(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), c.op("Cos", c.x(0))),)


@vjp("Cos")
def cos(c: Vjp) -> Grads:
    return (c.op("Neg", c.op("Mul", c.dy(), c.op("Sin", c.x(0)))),)


@vjp("Tan")
def tan(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), one_plus_square(c, c.y())),)


@vjp("Asin")
def asin(c: Vjp) -> Grads:
    return (c.op("Div", c.dy(), c.op("Sqrt", one_minus_square(c, c.x(0)))),)


@vjp("Acos")
def acos(c: Vjp) -> Grads:
    return (c.op("Neg", c.op("Div", c.dy(), c.op("Sqrt", one_minus_square(c, c.x(0))))),)


@vjp("Atan")
def atan(c: Vjp) -> Grads:
    return (c.op("Div", c.dy(), one_plus_square(c, c.x(0))),)


@vjp("Sinh")
def sinh(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), c.op("Cosh", c.x(0))),)


@vjp("Cosh")
def cosh(c: Vjp) -> Grads:
    return (c.op("Mul", c.dy(), c.op("Sinh", c.x(0))),)


@vjp("Asinh")
def asinh(c: Vjp) -> Grads:
    return (c.op("Div", c.dy(), c.op("Sqrt", one_plus_square(c, c.x(0)))),)


@vjp("Acosh")
def acosh(c: Vjp) -> Grads:
    return (c.op("Div", c.dy(), c.op("Sqrt", c.op("Sub", c.op("Mul", c.x(0), c.x(0)), 1.0))),)


@vjp("Atanh")
def atanh(c: Vjp) -> Grads:
    return (c.op("Div", c.dy(), one_minus_square(c, c.x(0))),)


def one_minus_square(c: Vjp, value: ir.Value) -> ir.Value:
    return c.op("Sub", 1.0, c.op("Mul", value, value))


def one_plus_square(c: Vjp, value: ir.Value) -> ir.Value:
    return c.op("Add", c.op("Mul", value, value), 1.0)
