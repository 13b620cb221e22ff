"""Derivatives of operators that move elements about: reshaping, slicing, joining, gathering and scattering.

Scatter-adds are written with ScatterElements, never with ScatterND: in ONNX Runtime's CPU provider (1.19 to
1.32) ScatterND with reduction "add" runs its updates on several threads without protecting the sums, so that
repeated indices lose terms (errors of the size of the values, other ones in each run); ScatterElements adds
in order, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ort_ops import operators
from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp

Put = Callable[[ir.Value, ir.Value, str], ir.Value]
"""Writes updates into a tensor with a reduction: of (tensor, updates, reduction)."""

# -- the same elements in another shape ----------------------------------------------------------------------


@vjp("Reshape", "Squeeze", "Unsqueeze", inputs=(0,))
@vjp("Flatten")
def reshape(c: Vjp) -> Grads:
    return (c.like(c.dy(), c.x(0)),)


@vjp("Transpose")
def transpose(c: Vjp) -> Grads:
    perm = c.ints_attr("perm") or list(reversed(range(c.rank(c.x(0)))))
    return (c.op("Transpose", c.dy(), perm=[int(axis) for axis in np.argsort(perm)]),)


@vjp("DepthToSpace")
def depth_to_space(c: Vjp) -> Grads:
    block = c.int_attr("blocksize", 1)
    if c.str_attr("mode", "DCR") == "DCR":
        return (c.op("SpaceToDepth", c.dy(), blocksize=block),)
    # [N, C, H, b, W, b] back to [N, C, b, b, H, W]
    split = _blocks(c, c.dy(), c.x(0), block)
    return (c.like(c.op("Transpose", split, perm=[0, 1, 3, 5, 2, 4]), c.x(0)),)


def _blocks(c: Vjp, value: ir.Value, packed: ir.Value, block: int) -> ir.Value:
    """`value`, [N, C, H*b, W*b], as [N, C, H, b, W, b], given the packed tensor [N, C*b*b, H, W]."""
    return c.op(
        "Reshape", value, c.join(c.dim(value, 0), [-1], c.dim(packed, 2), [block], c.dim(packed, 3), [block])
    )


@vjp("SpaceToDepth")
def space_to_depth(c: Vjp) -> Grads:
    return (
        c.op("DepthToSpace", c.dy(), blocksize=c.int_attr("blocksize", 1), mode=c.str_attr("mode", "DCR")),
    )


# -- parts and joins -----------------------------------------------------------------------------------------


@vjp("Concat")
def concat(c: Vjp) -> Grads:
    axis = c.int_attr("axis", 0)
    count = len(c.node.inputs)
    if count == 1:
        return (c.dy(),)
    sizes = c.join(*(c.dim(c.x(index), axis) for index in range(count)))
    return c.multi("Split", c.dy(), sizes, outputs=count, axis=axis)


@vjp("Split", inputs=(0,))
def split(c: Vjp) -> Grads:
    """Parts that no one reads have a gradient of zeros."""
    parts = [c.dy(index) for index in range(len(c.node.outputs))]
    return (c.op("Concat", *parts, axis=c.int_attr("axis", 0)) if len(parts) > 1 else parts[0],)


@vjp("Slice", inputs=(0,))
def slice_(c: Vjp) -> Grads:
    """Zeros around the gradient; for steps other than one, the gradient scattered to where the elements came
    from."""
    steps = c.known(4)
    if c.has(4) and (steps is None or not np.all(steps == 1)):
        return (_scatter_to_source(c, lambda positions: c.op("Slice", positions, *c.node.inputs[1:])),)
    rank = c.rank(c.x(0))
    axes = c.known(3)
    starts = c.known(1)
    if c.has(3) and axes is None or starts is None:
        return (_scatter_to_source(c, lambda positions: c.op("Slice", positions, *c.node.inputs[1:])),)
    touched = [int(axis) % rank for axis in (range(len(starts)) if axes is None else axes.reshape(-1))]
    before = [
        _slice_start(c, axis, int(start)) for axis, start in zip(touched, starts.reshape(-1), strict=True)
    ]
    after = [
        c.sub(c.sub(c.dim(c.x(0), axis), c.dim(c.y(), axis)), front)
        for axis, front in zip(touched, before, strict=True)
    ]
    return (_pad_axes(c, c.dy(), touched, before, after),)


def _slice_start(c: Vjp, axis: int, start: int) -> ir.Value:
    """Where a slice from `start` begins on `axis`, at least 0 and at most the axis's size."""
    size = c.dim(c.x(0), axis)
    if start == 0:
        return c.emit.ints([0])
    return c.minimum(size, [start]) if start > 0 else c.maximum(c.add(size, [start]), [0])


def _pad_axes(
    c: Vjp, value: ir.Value, axes: list[int], before: list[ir.Value], after: list[ir.Value]
) -> ir.Value:
    return c.op("Pad", value, c.join(*before, *after), None, axes)


def _scatter_to_source(c: Vjp, select: Callable[[ir.Value], ir.Value], add: bool = False) -> ir.Value:
    """The gradient, each element added to the element of input 0 that it came from.

    `select` is the forward operator on another tensor of the input's shape: applied to a tensor that numbers
    the elements, it says where each one came from. `add` is needed where an element may be selected twice.
    """
    numbers = c.op("Range", c.emit.constant(np.array(0)), c.op("Size", c.x(0)), c.emit.constant(np.array(1)))
    sources = select(c.like(numbers, c.x(0)))
    return scatter_flat(c, c.x(0), sources, c.dy(), add)


def scatter_flat(c: Vjp, target: ir.Value, places: ir.Value, updates: ir.Value, add: bool = True) -> ir.Value:
    """Zeros of the shape of `target` with each update put, or added, where `places` counts it in row-major
    order."""
    zeros = c.op(
        "ConstantOfShape", c.op("Reshape", c.op("Size", target), [1]), value=c.emit.zero(target.dtype)
    )
    flat = [c.op("Reshape", value, [-1]) for value in (places, updates)]
    return c.like(c.op("ScatterElements", zeros, *flat, axis=0, reduction="add" if add else None), target)


@vjp("Pad", inputs=(0, 2), limits="the padding must not be differentiated through its amounts (integers)")
def pad(c: Vjp) -> Grads:
    mode = c.str_attr("mode", "constant")
    if mode != "constant":
        operands = [c.x(1), None, c.optional(3)]
        return (_scatter_to_source(c, lambda numbers: c.op("Pad", numbers, *operands, mode=mode), add=True),)
    inner = c.op("Pad", c.dy(), c.op("Neg", c.x(1)), None, c.optional(3))
    if not c.wants(2):
        return (inner,)
    total = c.op("ReduceSum", c.dy(), keepdims=0)
    # the elements of x that the output shows: all of inner, unless negative padding cut some off, whose
    # gradient is 0
    return inner, None, c.like(c.op("Sub", total, c.op("ReduceSum", inner, keepdims=0)), c.x(2))


@vjp("Tile", inputs=(0,))
def tile(c: Vjp) -> Grads:
    """Sum over the copies: [r0 * d0, r1 * d1] is [r0, d0, r1, d1] with the even axes summed."""
    rank = c.rank(c.x(0))
    if rank == 0:
        return (c.dy(),)
    pairs = c.op("Concat", c.op("Unsqueeze", c.x(1), [1]), c.op("Unsqueeze", c.shape(c.x(0)), [1]), axis=1)
    copies = c.op("Reshape", c.dy(), c.op("Reshape", pairs, [-1]), allowzero=1)
    return (c.op("ReduceSum", copies, list(range(0, 2 * rank, 2)), keepdims=0),)


@vjp("Trilu", inputs=(0,))
def trilu(c: Vjp) -> Grads:
    return (c.op("Trilu", c.dy(), c.optional(1), upper=c.int_attr("upper", 1)),)


@vjp("ReverseSequence", inputs=(0,))
def reverse_sequence(c: Vjp) -> Grads:
    batch_axis, time_axis = c.int_attr("batch_axis", 1), c.int_attr("time_axis", 0)
    return (c.op("ReverseSequence", c.dy(), c.x(1), batch_axis=batch_axis, time_axis=time_axis),)


@vjp("CenterCropPad", inputs=(0,))
def center_crop_pad(c: Vjp) -> Grads:
    """Cropping and padding undo one another when they are centred alike."""
    axes = c.ints_attr("axes")
    shape = c.shape(c.x(0))
    if axes is not None:
        shape = c.op("Gather", shape, axes, axis=0)
    return (c.op("CenterCropPad", c.dy(), shape, axes=axes),)


@vjp("Compress", inputs=(0,))
def compress(c: Vjp) -> Grads:
    axis = c.node.attributes.get("axis")
    number = None if axis is None else axis.as_int()
    return (_scatter_to_source(c, lambda numbers: c.op("Compress", numbers, c.x(1), axis=number)),)


# -- indexed access ------------------------------------------------------------------------------------------


@vjp("Gather", inputs=(0,))
def gather(c: Vjp) -> Grads:
    """One scatter-add; repeated and negative indices are right. Of float rows, one EmbeddingGrad."""
    data, indices = c.x(0), c.x(1)
    rank = c.rank(data)
    axis = c.int_attr("axis", 0) % rank
    single = c.known(1)
    if single is not None and single.size == 1:
        return (_gather_one(c, axis, int(single.item())),)
    if axis == 0 and data.dtype == ir.DataType.FLOAT and rank + c.rank(indices) > 1:
        operator = operators.EMBEDDING_GRAD
        return (c.op(operator.name, c.dy(), indices, data, domain=operator.domain, version=operator.version),)
    flat = c.op("Reshape", indices, [-1])
    index_rank = c.rank(indices)
    if index_rank == 1:
        updates = c.dy()
    else:
        updates = c.op("Reshape", c.dy(), _joined_shape(c, axis, flat), allowzero=1)
    places = c.op("Unsqueeze", flat, [place for place in range(rank) if place != axis]) if rank > 1 else flat
    places = c.op("Expand", places, c.op("Shape", updates)) if rank > 1 else places
    return (c.op("ScatterElements", c.zeros_like(data), places, updates, axis=axis, reduction="add"),)


def _joined_shape(c: Vjp, axis: int, flat_indices: ir.Value) -> ir.Value:
    """The shape of the data with the size of `axis` replaced by the number of indices."""
    data = c.x(0)
    dims = data.shape
    assert dims is not None
    sizes = [size for place, size in enumerate(dims) if place != axis]
    if all(isinstance(size, int) and size > 0 for size in sizes):
        return c.emit.ints([-1 if place == axis else size for place, size in enumerate(dims)])  # type: ignore[misc]
    return c.join(
        *(c.op("Shape", flat_indices) if place == axis else c.dim(data, place) for place in range(len(dims)))
    )


def _gather_one(c: Vjp, axis: int, index: int) -> ir.Value:
    """One slice was taken: it goes back between zeros."""
    index_rank = c.rank(c.x(1))
    part = c.dy()
    if index_rank == 0:
        part = c.op("Unsqueeze", part, [axis])
    elif index_rank > 1:
        part = c.op("Squeeze", part, list(range(axis, axis + index_rank - 1)))
    size = c.dim(c.x(0), axis)
    before = _slice_start(c, axis, index)
    after = c.sub(c.sub(size, before), [1])
    return _pad_axes(c, part, [axis], [before], [after])


@vjp("GatherElements", inputs=(0,))
def gather_elements(c: Vjp) -> Grads:
    axis = c.int_attr("axis", 0)
    return (c.op("ScatterElements", c.zeros_like(c.x(0)), c.x(1), c.dy(), axis=axis, reduction="add"),)


@vjp("GatherND", inputs=(0,))
def gather_nd(c: Vjp) -> Grads:
    batch_dims = c.int_attr("batch_dims", 0)
    return (
        _scatter_to_source(
            c, lambda numbers: c.op("GatherND", numbers, c.x(1), batch_dims=batch_dims), add=True
        ),
    )


@vjp("ScatterElements", inputs=(0, 2))
def scatter_elements(c: Vjp) -> Grads:
    axis = c.int_attr("axis", 0)
    return _scatter(
        c,
        lambda value: c.op("GatherElements", value, c.x(1), axis=axis),
        lambda value, updates, reduction: c.op(
            "ScatterElements", value, c.x(1), updates, axis=axis, reduction=reduction
        ),
    )


@vjp("ScatterND", inputs=(0, 2))
def scatter_nd(c: Vjp) -> Grads:
    return _scatter(
        c,
        lambda value: c.op("GatherND", value, c.x(1)),
        lambda value, updates, reduction: c.op("ScatterND", value, c.x(1), updates, reduction=reduction),
    )


def _scatter(c: Vjp, take: Callable[[ir.Value], ir.Value], put: Put) -> Grads:
    """`take` reads the places that `put` writes.

    With reduction "none" an element that was overwritten has no gradient. "mul": the product of the others.
    "max", "min": those that equal the result share evenly.
    """
    data, updates, reduction = c.x(0), c.x(2), c.str_attr("reduction", "none")
    if reduction == "add":
        return c.dy(), None, take(c.dy())
    if reduction == "none":
        return put(c.dy(), c.zeros_like(updates), "none"), None, take(c.dy())
    if reduction == "mul":
        whole = c.op("Mul", c.dy(), c.y())
        return c.op("Div", whole, data), None, c.op("Div", take(whole), updates)
    data_hits = c.cast(c.op("Equal", data, c.y()), c.dtype)
    update_hits = c.cast(c.op("Equal", updates, take(c.y())), c.dtype)
    share = c.op("Div", c.dy(), c.op("Max", put(data_hits, update_hits, "add"), 1.0))
    return c.op("Mul", share, data_hits), None, c.op("Mul", take(share), update_hits)


@vjp("OneHot", inputs=(2,))
def one_hot(c: Vjp) -> Grads:
    """values is [off, on]: the sum of the gradient where the output is off, and where it is on."""
    on_mask = c.op(
        "OneHot", c.x(0), c.x(1), c.op("Cast", [0, 1], to=int(c.dtype)), axis=c.int_attr("axis", -1)
    )
    on = c.op("ReduceSum", c.op("Mul", c.dy(), on_mask), keepdims=0)
    off = c.op("Sub", c.op("ReduceSum", c.dy(), keepdims=0), on)
    return None, None, c.op("Concat", c.op("Reshape", off, [1]), c.op("Reshape", on, [1]), axis=0)


@vjp("TopK", inputs=(0,))
def topk(c: Vjp) -> Grads:
    axis = c.int_attr("axis", -1)
    return (c.op("ScatterElements", c.zeros_like(c.x(0)), c.y(1, ir.DataType.INT64), c.dy(), axis=axis),)


@vjp("Range")
def range_(c: Vjp) -> Grads:
    """start + i * delta; how many elements there are does not change smoothly with the limit."""
    steps = c.cast(
        c.op("Range", c.emit.constant(np.array(0)), c.op("Size", c.y()), c.emit.constant(np.array(1))),
        c.dtype,
    )
    return (
        c.op("ReduceSum", c.dy(), keepdims=0),
        None,
        c.op("ReduceSum", c.op("Mul", c.dy(), steps), keepdims=0),
    )


@vjp("Unique", inputs=(0,))
def unique(c: Vjp) -> Grads:
    """Of equal elements, or slices along an axis, the first one is the one that was taken."""
    taken = c.y(1, ir.DataType.INT64)
    if "axis" not in c.node.attributes:
        return (scatter_flat(c, c.x(0), taken, c.dy(), add=False),)
    rank = c.rank(c.x(0))
    axis = c.int_attr("axis", 0) % rank
    others = [place for place in range(rank) if place != axis]
    places = c.op("Expand", c.op("Unsqueeze", taken, others) if others else taken, c.op("Shape", c.dy()))
    return (c.op("ScatterElements", c.zeros_like(c.x(0)), places, c.dy(), axis=axis),)


@vjp("TensorScatter", inputs=(0, 1))
def tensor_scatter(c: Vjp) -> Grads:
    """The same node on other tensors says what was overwritten, and by which element of the update."""
    cache, update = c.x(0), c.x(1)
    attributes = {name: attribute.value for name, attribute in c.node.attributes.items()}
    ones = c.op("Expand", c.emit.scalar(1.0, c.dtype), c.shape(cache))
    kept = c.op("TensorScatter", ones, c.zeros_like(update), c.optional(2), **attributes)
    zero, one = (c.emit.constant(np.array(number)) for number in (0, 1))
    numbers = c.like(c.op("Range", zero, c.op("Size", update), one), update)
    blank = c.op("ConstantOfShape", c.shape(cache), value=c.emit.zero(ir.DataType.INT64))
    sources = c.op("TensorScatter", blank, numbers, c.optional(2), **attributes)
    written = c.op("Mul", c.dy(), c.op("Sub", 1.0, kept))
    return c.op("Mul", c.dy(), kept), scatter_flat(c, update, sources, written)
