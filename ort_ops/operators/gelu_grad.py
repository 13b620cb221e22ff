"""GeluGrad: the backward pass of ONNX's Gelu, in one pass over memory.

Source of the formulas: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference
from ort_ops.operators.operator import DATA_TYPES, DOMAIN, Attribute, AttributeValue, Operator, Slot

_CUBIC = 0.044715
_SLOPE = math.sqrt(2 / math.pi)


def _body(_present: frozenset[str], attributes: Mapping[str, AttributeValue]) -> str:
    """The formula in float32, rounded to T once."""
    derivative = _TANH_DERIVATIVE if attributes["approximate"] == "tanh" else _EXACT_DERIVATIVE
    return f"""
        half = Constant <value_float = 0.5> ()
        one = Constant <value_float = 1.0> ()
        dy_float = Cast <to = 1> (dy)
        x_float = Cast <to = 1> (x)
        square = Mul (x_float, x_float)
{derivative}
        dx_float = Mul (dy_float, derivative)
        dx = CastLike (dx_float, dy)
    """


_EXACT_DERIVATIVE = f"""
        inverse_root_two = Constant <value_float = {math.sqrt(0.5)}> ()
        inverse_root_two_pi = Constant <value_float = {1 / math.sqrt(2 * math.pi)}> ()
        scaled_x = Mul (x_float, inverse_root_two)
        erf = Erf (scaled_x)
        one_plus_erf = Add (one, erf)
        distribution = Mul (half, one_plus_erf)
        half_square = Mul (half, square)
        exponent = Neg (half_square)
        bell = Exp (exponent)
        density = Mul (bell, inverse_root_two_pi)
        x_density = Mul (x_float, density)
        derivative = Add (distribution, x_density)
"""

# u = _SLOPE * (x + _CUBIC * x^3); derivative = (1 + tanh(u)) / 2 + x / 2 * (1 - tanh(u)^2) * du/dx.
_TANH_DERIVATIVE = f"""
        slope = Constant <value_float = {_SLOPE}> ()
        cubic_slope = Constant <value_float = {_SLOPE * _CUBIC}> ()
        three_cubic_slope = Constant <value_float = {3 * _SLOPE * _CUBIC}> ()
        cubic_term = Mul (square, cubic_slope)
        factor = Add (slope, cubic_term)
        u = Mul (x_float, factor)
        tanh = Tanh (u)
        one_plus_tanh = Add (one, tanh)
        logistic = Mul (half, one_plus_tanh)
        one_minus_tanh = Sub (one, tanh)
        tails = Mul (one_plus_tanh, one_minus_tanh)
        square_term = Mul (square, three_cubic_slope)
        du = Add (slope, square_term)
        half_x = Mul (half, x_float)
        x_tails = Mul (half_x, tails)
        along_u = Mul (x_tails, du)
        derivative = Add (logistic, along_u)
"""


def _infer(node: Inference) -> None:
    """dx is as dy in type and shape."""
    node.check_rank("dy")
    node.check_same_shape("x", "dy")
    approximate = node.attribute("approximate")
    if approximate not in (None, "none", "tanh"):
        node.fail("approximate must be none or tanh", str(approximate))
    node.set_output_like(0, "dy")


class GeluGrad(OpRun):
    """The operator for `onnx.reference`: float64 inside, rounded once. dy, x and dx have one shape."""

    op_domain = DOMAIN

    def _run(self, dy: np.ndarray, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        wide = x.astype(np.float64)
        if approximate == "tanh":
            tanh = np.tanh(_SLOPE * wide * (1 + _CUBIC * wide**2))
            slope = _SLOPE * (1 + 3 * _CUBIC * wide**2)
            derivative = (1 + tanh) / 2 + wide / 2 * (1 + tanh) * (1 - tanh) * slope
        else:
            erf = np.vectorize(math.erf, otypes=[np.float64])(wide / math.sqrt(2))
            derivative = (1 + erf) / 2 + wide * np.exp(-(wide**2) / 2) / math.sqrt(2 * math.pi)
        return ((dy.astype(np.float64) * derivative).astype(dy.dtype),)


GELU_GRAD = Operator(
    name="GeluGrad",
    doc=(
        "Backward pass of y = Gelu(x), element by element. approximate = none: "
        "dx = dy * (Phi(x) + x * phi(x)) with the standard normal distribution Phi and its density phi. "
        "approximate = tanh: dx = dy * d/dx (0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3)))). "
        "Computed in float, rounded to T once."
    ),
    inputs=(
        Slot("dy", "T", "gradient of the Gelu's output; rank 1 to 8"),
        Slot("x", "T", "as dy: the Gelu's input"),
    ),
    outputs=(Slot("dx", "T", "as dy: gradient of x"),),
    attributes=(Attribute("approximate", "none", "which Gelu it is the gradient of: none or tanh"),),
    type_constraints=(("T", DATA_TYPES, "Type of all tensors."),),
    body=_body,
    infer=_infer,
    reference=GeluGrad,
)
