"""Dynamic loss scaling: settings, and the nodes that follow them in the optimizer's graph.

float16 gradients below 6e-8 become zero. So the loss is multiplied by a scale before it is differentiated,
and the gradients are divided by it before they are used. A step whose gradients are not finite is skipped and
the scale made smaller; after many good steps it is made larger again. Source: Micikevicius et al. 2018,
section 3.2, with the rule of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder

LARGEST_SCALE = 2.0**126
"""The largest power of two whose inverse is a normal float32 number."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the scale moves.

    initial_scale: the scale of the first step.
    growth_interval: after so many steps without a skip the scale is multiplied by `growth_factor`.
    backoff_factor: a skipped step multiplies the scale by it.
    minimum_scale: the scale never gets smaller.
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    minimum_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.minimum_scale <= self.initial_scale <= LARGEST_SCALE:
            raise ValueError(
                f"LossScaling: 0 < minimum_scale <= initial_scale <= 2^126 must hold; got minimum_scale "
                f"{self.minimum_scale} and initial_scale {self.initial_scale}."
            )
        if not 1.0 <= self.growth_factor < float("inf"):
            raise ValueError(f"LossScaling: growth_factor must be 1 or more; got {self.growth_factor}.")
        if not 0.0 < self.backoff_factor <= 1.0:
            raise ValueError(f"LossScaling: backoff_factor must be in (0, 1]; got {self.backoff_factor}.")
        if self.growth_interval < 1:
            raise ValueError(f"LossScaling: growth_interval must be 1 or more; got {self.growth_interval}.")


def all_finite(op: OpBuilder, gradients: Sequence[ir.Value], inverse_scale: ir.Value) -> ir.Value:
    """Whether every element of every gradient is finite, BOOL [].

    gradients: FLOAT or DOUBLE, of any shape. The result depends on `inverse_scale` too (which is always
    finite), so that whatever is computed from it comes after the last reader of the old scale.
    """
    # x * 0 is 0, but NaN for an infinite or NaN x: exact where a sum of squares could overflow, and a
    # reduction to a maximum could lose a NaN.
    sums = []
    for gradient in gradients:
        zero = op.Constant(value=ir.tensor(0.0, dtype=gradient.dtype))
        total = op.ReduceSum(op.Mul(gradient, zero), keepdims=0)
        sums.append(total if gradient.dtype is ir.DataType.FLOAT else op.Cast(total, to=ir.DataType.FLOAT))
    zero = op.Constant(value=ir.tensor(0.0, dtype=ir.DataType.FLOAT))
    return op.Equal(op.Mul(op.Sum(*sums), inverse_scale), zero)


def next_scale(
    op: OpBuilder, settings: LossScaling, scale: ir.Value, good_steps: ir.Value, finite: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The scale (FLOAT []) and the number of good steps since its last change (INT64 []) after this step."""

    def number(value: float) -> ir.Value:
        return op.Constant(value=ir.tensor(value, dtype=ir.DataType.FLOAT))

    def count(value: int) -> ir.Value:
        return op.Constant(value=ir.tensor(value, dtype=ir.DataType.INT64))

    good = op.Add(good_steps, count(1))
    grows = op.GreaterOrEqual(good, count(settings.growth_interval))
    grown = op.Min(op.Mul(scale, number(settings.growth_factor)), number(LARGEST_SCALE))
    smaller = op.Max(op.Mul(scale, number(settings.backoff_factor)), number(settings.minimum_scale))
    new_scale = op.Where(finite, op.Where(grows, grown, scale), smaller)
    starts_over = op.Or(grows, op.Not(finite))
    return new_scale, op.Where(starts_over, count(0), good)
