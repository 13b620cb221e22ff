"""Derivative of DeformConv: a convolution whose kernel reads the input at places that the offsets shift.

What the kernel reads is written out as columns, each a sum of a few input elements as in GridSample; the
convolution is a product of the weights with them. Shapes in comments: N batch, D offset groups, G groups, C
input channels, K kernel elements, O output places, all spatial axes joined.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp
from ort_ops.gradient.rules.conv import bias_gradient
from ort_ops.gradient.rules.grid_sample import flat, product, taps


@vjp("DeformConv", since=19, limits="the weight's shape, the channels and the output's size must be known")
def deform_conv(c: Vjp) -> Grads:
    x, weight = c.x(0), c.x(1)
    kernel, places, channels = _known_sizes(c)
    dims, count = len(kernel), int(np.prod(kernel))
    groups, offset_groups = c.int_attr("group", 1), c.int_attr("offset_group", 1)
    batch = c.dim(x, 0)
    images = c.mul(batch, [offset_groups])
    per_group = [channels // offset_groups]

    by_axis = c.op("Reshape", c.x(2), c.join(images, [count, dims, -1]))
    along = [taps(c, _position(c, by_axis, axis, kernel, places), c.dim(x, 2 + axis)) for axis in range(dims)]
    values = c.op("Reshape", x, c.join(images, per_group, [-1]))  # [N*D, C/D, inputs]
    into = c.join(images, per_group, [count * int(np.prod(places))])
    reads = []  # of every combination of taps: the tap of each axis, the indices and what is there
    for combination in itertools.product(*along):
        index = combination[0].index
        for axis, tap in enumerate(combination[1:], 1):
            index = c.op("Add", c.op("Mul", index, c.dim(x, 2 + axis)), tap.index)
        index = c.op("Expand", c.op("Unsqueeze", index, [1]), into)
        reads.append((combination, index, c.op("GatherElements", values, index, axis=2)))
    weights = [c.op("Unsqueeze", product(c, [tap.weight for tap in read[0]]), [1]) for read in reads]
    sampled = c.op("Sum", *(c.op("Mul", read[2], w) for read, w in zip(reads, weights, strict=True)))
    mask = c.op("Reshape", c.x(4), c.join(images, [1, -1])) if c.has(4) else None
    columns = sampled if mask is None else c.op("Mul", sampled, mask)

    rows = channels // groups * count
    dy = c.op("Reshape", c.dy(), c.join(batch, [groups, -1, int(np.prod(places))]))  # [N, G, filters/G, O]
    columns = c.op("Reshape", columns, c.join(batch, [groups, rows, int(np.prod(places))]))
    d_weight = c.op("MatMul", dy, c.op("Transpose", columns, perm=[0, 1, 3, 2]))
    d_weight = c.like(c.op("ReduceSum", d_weight, [0], keepdims=0), weight)
    transposed = c.op("Transpose", c.op("Reshape", weight, [groups, -1, rows]), perm=[0, 2, 1])
    d_columns = c.op("Reshape", c.op("MatMul", transposed, dy), into)

    d_sampled = d_columns if mask is None else c.op("Mul", d_columns, mask)
    d_values = c.zeros_like(values)
    d_places: list[list[ir.Value]] = [[] for _ in range(dims)]
    for (combination, index, seen), w in zip(reads, weights, strict=True):
        updates = c.op("Mul", d_sampled, w)
        d_values = c.op("ScatterElements", d_values, index, updates, axis=2, reduction="add")
        through = c.op("ReduceSum", c.op("Mul", d_sampled, seen), [1], keepdims=0)
        for axis, tap in enumerate(combination):
            others = [other.weight for place, other in enumerate(combination) if place != axis]
            assert tap.slope is not None
            d_places[axis].append(c.op("Mul", through, product(c, [tap.slope, *others])))
    d_offset = [c.op("Reshape", c.op("Sum", *parts), c.join(images, [count, 1, -1])) for parts in d_places]
    return (
        c.like(d_values, x),
        d_weight,
        c.like(c.op("Concat", *d_offset, axis=2), c.x(2)),
        bias_gradient(c, c.dy(), dims) if c.wants(3) else None,
        c.like(c.op("ReduceSum", c.op("Mul", d_columns, sampled), [1]), c.x(4)) if c.wants(4) else None,
    )


def _known_sizes(c: Vjp) -> tuple[list[int], list[int], int]:
    """Sizes of the kernel and of the output's spatial axes, and the number of input channels."""
    weight, output = c.static_shape(c.x(1)), c.y().shape
    if weight is None or output is None:
        raise c.fail("the weight's shape and the output's rank must be known")
    places = [size for size in output[2:] if isinstance(size, int)]
    if len(places) != len(weight) - 2:
        raise c.fail("the output's spatial size must be known; give the input a fixed size")
    return list(weight[2:]), places, weight[1] * c.int_attr("group", 1)


def _position(c: Vjp, offsets: ir.Value, axis: int, kernel: Sequence[int], places: Sequence[int]) -> ir.Value:
    """Where along `axis` each kernel element of each output place reads: [N*D, K*O], in input elements."""
    dims = len(kernel)
    stride, dilation = ((c.ints_attr(name) or [1] * dims)[axis] for name in ("strides", "dilations"))
    pad = (c.ints_attr("pads") or [0] * dims)[axis]
    elements = np.indices(kernel).reshape(dims, -1, 1)[axis] * dilation
    regular = np.indices(places).reshape(dims, 1, -1)[axis] * stride - pad + elements
    shift = c.op("Gather", offsets, c.emit.constant(np.array(axis)), axis=2)
    return flat(c, c.op("Add", shift, c.emit.constant(regular.astype(c.dtype.numpy()), c.dtype)), 1)
