"""Quantisation: integers have no gradient, but the scale that turns them into numbers has."""

from __future__ import annotations

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, non_differentiable, vjp

non_differentiable("QuantizeLinear", "DynamicQuantizeLinear")


@vjp("DequantizeLinear", inputs=(1,), limits="one scale, or one per element of an axis; no blocks")
def dequantize_linear(c: Vjp) -> Grads:
    """y = (x - zero_point) * scale."""
    if c.int_attr("block_size", 0):
        raise c.fail("block_size is not supported")
    scale, rank = c.x(1), c.rank(c.x(0))
    level = c.cast(c.x(0), scale.dtype)
    axis = c.int_attr("axis", 1) % max(rank, 1)
    along = [place for place in range(rank) if place != axis]
    per_axis = c.rank(scale) == 1 and rank > 1
    if c.has(2):
        zero_point = c.cast(c.x(2), scale.dtype)
        level = c.op("Sub", level, c.op("Unsqueeze", zero_point, along) if per_axis else zero_point)
    product = c.op("Mul", c.cast(c.dy(), scale.dtype), level)
    if per_axis:
        return None, c.op("ReduceSum", product, along, keepdims=0)
    return None, c.like(c.op("ReduceSum", product, keepdims=0), scale)
