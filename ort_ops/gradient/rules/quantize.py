"""Quantisation: integers have no gradient, but the scale that turns them into numbers has."""

from __future__ import annotations

import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, non_differentiable, vjp

non_differentiable("QuantizeLinear", "DynamicQuantizeLinear")


@vjp("DequantizeLinear", inputs=(1,))
def dequantize_linear(c: Vjp) -> Grads:
    """y = (x - zero_point) * scale."""
    scale, rank = c.x(1), c.rank(c.x(0))
    level = c.cast(c.x(0), scale.dtype)
    axis = c.int_attr("axis", 1) % max(rank, 1)
    block = c.int_attr("block_size", 0)
    if block:
        return None, _sum_of_blocks(c, level, scale, axis, block)
    along = [place for place in range(rank) if place != axis]
    per_axis = c.rank(scale) == 1 and rank > 1
    if c.has(2):
        zero_point = c.cast(c.x(2), scale.dtype)
        level = c.op("Sub", level, c.op("Unsqueeze", zero_point, along) if per_axis else zero_point)
    product = c.op("Mul", c.cast(c.dy(), scale.dtype), level)
    if per_axis:
        return None, c.op("ReduceSum", product, along, keepdims=0)
    return None, c.like(c.op("ReduceSum", product, keepdims=0), scale)


def _sum_of_blocks(c: Vjp, level: ir.Value, scale: ir.Value, axis: int, block: int) -> ir.Value:
    """One scale, and zero point, for every `block` elements along the axis; the last block may be shorter."""
    rank = c.rank(c.x(0))
    padding = c.sub(c.mul(c.dim(scale, axis), [block]), c.dim(c.x(0), axis))
    shape = c.join(
        *(c.dim(scale, place) for place in range(axis + 1)),
        [block],
        *(c.dim(scale, place) for place in range(axis + 1, rank)),
    )

    def blocks(value: ir.Value) -> ir.Value:
        return c.op("Reshape", c.op("Pad", value, c.join([0], padding), None, [axis]), shape)

    level = blocks(level)
    if c.has(2):
        level = c.op("Sub", level, c.op("Unsqueeze", c.cast(c.x(2), scale.dtype), [axis + 1]))
    product = c.op("Mul", blocks(c.cast(c.dy(), scale.dtype)), level)
    return c.op("ReduceSum", product, [axis + 1], keepdims=0)
