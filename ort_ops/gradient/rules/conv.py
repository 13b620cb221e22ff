"""Derivatives of convolutions and poolings.

All of them look through the same window: output position o sees the input positions o * stride + k * dilation
- pad for k = 0 .. kernel - 1. The transposed convolution with no padding goes back from outputs to the padded
input; cropping or extending its result (`_fit`) gives the gradient of the input for every padding, rounding
mode and size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ort_ops import operators
from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp
from ort_ops.gradient.rules.shape import scatter_flat


class _Window:
    """What one output position sees of the input.

    Attributes:
        kernel, strides, dilations: one number per spatial axis.
        pad_begin, pad_end: int64 vectors, one element per spatial axis: constants where they are known.
    """

    def __init__(self, c: Vjp, source: ir.Value, kernel: Sequence[int], target: ir.Value) -> None:
        self.kernel = list(kernel)
        rank = len(self.kernel)
        self.strides = c.ints_attr("strides") or [1] * rank
        self.dilations = c.ints_attr("dilations") or [1] * rank
        self.axes = list(range(2, 2 + rank))
        mode = c.str_attr("auto_pad", "NOTSET")
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            self.pad_begin, self.pad_end = self._same_pads(c, source, target, mode)
        else:
            pads = (c.ints_attr("pads") if mode == "NOTSET" else None) or [0] * (2 * rank)
            self.pad_begin, self.pad_end = c.emit.ints(pads[:rank]), c.emit.ints(pads[rank:])

    @property
    def reach(self) -> list[int]:
        """Size of the window on each axis, holes included."""
        return [(size - 1) * step + 1 for size, step in zip(self.kernel, self.dilations, strict=True)]

    def _same_pads(self, c: Vjp, source: ir.Value, target: ir.Value, mode: str) -> tuple[ir.Value, ir.Value]:
        """As much padding as makes the output ceil(input / stride) long, the odd one at the end (upper) or
        start."""
        covered = c.add(c.mul(c.sub(spatial(c, target), [1]), self.strides), self.reach)
        total = c.maximum(c.sub(covered, spatial(c, source)), [0])
        half = (
            c.op("Div", total, [2])
            if total.const_value is None
            else c.emit.ints((total.const_value.numpy() // 2).tolist())
        )
        rest = c.sub(total, half)
        return (half, rest) if mode == "SAME_UPPER" else (rest, half)


def spatial(c: Vjp, value: ir.Value) -> ir.Value:
    """The sizes of all axes but the first two, as an int64 vector: a constant if they are known."""
    dims = value.shape
    if dims is not None and all(isinstance(size, int) for size in list(dims)[2:]):
        return c.emit.ints([int(size) for size in list(dims)[2:]])  # type: ignore[arg-type]
    return c.op("Shape", value, start=2)


def _kernel_of(c: Vjp, weight: ir.Value) -> list[int]:
    given = c.ints_attr("kernel_shape")
    if given is not None:
        return given
    sizes = list(weight.shape)[2:] if weight.shape is not None else [None]
    if not all(isinstance(size, int) for size in sizes):
        raise c.fail(
            "the kernel's spatial size must be known; give the weight a shape or the node a kernel_shape"
        )
    return [int(size) for size in sizes]  # type: ignore[arg-type]


def _fit(c: Vjp, full: ir.Value, full_size: ir.Value, window: _Window, source: ir.Value) -> ir.Value:
    """Cut the padding off a gradient of the padded input, and add zeros for what no window saw."""
    size = spatial(c, source)
    before = c.sub([0] * len(window.kernel), window.pad_begin)
    after = c.sub(c.add(size, window.pad_begin), full_size)
    pads = c.join(before, after)
    if pads.const_value is not None and not pads.const_value.numpy().any():
        return full
    return c.op("Pad", full, pads, None, window.axes)


def _input_gradient(
    c: Vjp, weight: ir.Value, dy: ir.Value, window: _Window, source: ir.Value, target: ir.Value, group: int
) -> ir.Value:
    """dx of y = conv(x, w): the transposed convolution of dy."""
    known = [spatial(c, source).const_value, window.pad_begin.const_value, spatial(c, target).const_value]
    if all(value is not None for value in known):
        size, begin, out = (value.numpy() for value in known if value is not None)
        end = (out - 1) * window.strides + window.reach - size - begin
        extra = np.maximum(-end, 0)
        return c.op(
            "ConvTranspose", dy, weight, group=group, strides=window.strides, dilations=window.dilations,
            pads=[*begin.tolist(), *(end + extra).tolist()],
            output_padding=extra.tolist() if extra.any() else None,
        )  # fmt: skip
    full = c.op("ConvTranspose", dy, weight, group=group, strides=window.strides, dilations=window.dilations)
    full_size = c.add(c.mul(c.sub(spatial(c, target), [1]), window.strides), window.reach)
    return _fit(c, full, full_size, window, source)


def _weight_gradient(
    c: Vjp,
    x: ir.Value,
    dy: ir.Value,
    window: _Window,
    group: int,
    channels: int | ir.SymbolicDim,
    target: ir.Value,
) -> ir.Value:
    """dw of y = conv(x, w), [O, C / group, *kernel]: a convolution of x with dy, batch and channels
    exchanged.

    w[o, c, k] meets x[n, c, o * stride + k * dilation] for every output position, so stride and dilation
    change places.
    """
    rank = len(window.kernel)
    space = list(range(2, 2 + rank))
    if group == 1:
        swapped = c.op("Transpose", x, perm=[1, 0, *space])
    else:
        if not isinstance(channels, int):
            raise c.fail(
                "the number of channels must be known for a grouped convolution; give the weight a shape"
            )
        apart = c.op("Reshape", x, c.join(c.dim(x, 0), [group, channels], spatial(c, x)))
        moved = c.op("Transpose", apart, perm=[2, 1, 0, *(axis + 1 for axis in space)])
        joined = c.join([channels, -1], spatial(c, x))
        swapped = c.op("Reshape", moved, joined)
    filters = c.op("Transpose", dy, perm=[1, 0, *space])
    # Exactly as much padding at the end as lets the result be as large as the kernel, no larger, where that
    # is known.
    known = [spatial(c, x).const_value, window.pad_begin.const_value, spatial(c, target).const_value]
    if all(value is not None for value in known):
        size, begin, out = (value.numpy() for value in known if value is not None)
        end = (out - 1) * window.strides + window.reach - size - begin
        product = c.op(
            "Conv",
            swapped,
            filters,
            group=group,
            pads=[*begin.tolist(), *np.maximum(end, 0).tolist()],
            strides=window.dilations,
            dilations=window.strides,
        )
        exact = bool(np.all(end >= 0))
    else:
        covered = c.add(c.mul(c.sub(spatial(c, target), [1]), window.strides), window.reach)
        end_pad = c.maximum(c.sub(c.sub(covered, spatial(c, x)), window.pad_begin), [0])
        padded = c.op("Pad", swapped, c.join(window.pad_begin, end_pad), None, window.axes)
        product = c.op(
            "Conv", padded, filters, group=group, strides=window.dilations, dilations=window.strides
        )
        exact = False
    if not exact:
        product = c.op("Slice", product, [0] * rank, window.kernel, window.axes)
    return c.op("Transpose", product, perm=[1, 0, *space])


def bias_gradient(c: Vjp, dy: ir.Value, rank: int) -> ir.Value:
    return c.op("ReduceSum", dy, [0, *range(2, 2 + rank)], keepdims=0)


@vjp("Conv")
def conv(c: Vjp) -> Grads:
    """One ConvGrad of a float convolution over one to three axes whose weight is trained; else convolutions
    of the standard, which take several times as long."""
    x, weight, dy = c.x(0), c.x(1), c.dy()
    window = _Window(c, x, _kernel_of(c, weight), c.y())
    group = c.int_attr("group", 1)
    begin, end = window.pad_begin.const_value, window.pad_end.const_value
    simple = len(window.kernel) <= 3 and x.dtype == ir.DataType.FLOAT
    if simple and c.wants(1) and begin is not None and end is not None:
        return _conv_grad(c, window, [*begin.numpy().tolist(), *end.numpy().tolist()], group)
    dx = _input_gradient(c, weight, dy, window, x, c.y(), group) if c.wants(0) else None
    dw = None
    if c.wants(1):
        assert weight.shape is not None
        dw = _weight_gradient(c, x, dy, window, group, weight.shape[1], c.y())
    return dx, dw, bias_gradient(c, dy, len(window.kernel)) if c.wants(2) else None


def _conv_grad(c: Vjp, window: _Window, pads: list[int], group: int) -> Grads:
    operator = operators.CONV_GRAD
    dx, db, dw = c.multi(
        operator.name, c.dy(), c.x(0), c.x(1), domain=operator.domain, version=operator.version, outputs=3,
        strides=window.strides, dilations=window.dilations, pads=pads, group=group,
    )  # fmt: skip
    for gradient, index in ((dx, 0), (db, 2)):
        if not c.wants(index):
            gradient.name = ""
    return dx if c.wants(0) else None, dw, db if c.wants(2) else None


@vjp("ConvTranspose", limits="with auto_pad or output_shape the input's spatial size must be known")
def conv_transpose(c: Vjp) -> Grads:
    """The roles of a convolution's input and output are exchanged: y looks at x through the same window."""
    x, weight, dy = c.x(0), c.x(1), c.dy()
    window = _TransposedWindow(c, _kernel_of(c, weight))
    group = c.int_attr("group", 1)
    rank = len(window.kernel)
    dx = None
    if c.wants(0):
        dx = c.op(
            "Conv", dy, weight, group=group, strides=window.strides, dilations=window.dilations,
            pads=window.pads,
        )  # fmt: skip
        if any(extra >= step for extra, step in zip(window.extra, window.strides, strict=True)):
            dx = c.op("Slice", dx, [0] * rank, spatial(c, x), window.axes)
    dw = None
    if c.wants(1):
        assert weight.shape is not None
        dw = _weight_gradient(c, dy, x, window, group, weight.shape[1], x)
    return dx, dw, bias_gradient(c, dy, rank) if c.wants(2) else None


class _TransposedWindow(_Window):
    """The window of a ConvTranspose, whose padding is taken off its output."""

    def __init__(self, c: Vjp, kernel: Sequence[int]) -> None:
        self.kernel = list(kernel)
        rank = len(self.kernel)
        self.strides = c.ints_attr("strides") or [1] * rank
        self.dilations = c.ints_attr("dilations") or [1] * rank
        self.extra = c.ints_attr("output_padding") or [0] * rank
        self.axes = list(range(2, 2 + rank))
        mode = c.str_attr("auto_pad", "NOTSET")
        if c.ints_attr("output_shape") is None and mode in ("NOTSET", "VALID"):
            self.pads = (c.ints_attr("pads") if mode == "NOTSET" else None) or [0] * (2 * rank)
        else:
            self.pads = self._automatic_pads(c, mode)
        self.pad_begin, self.pad_end = c.emit.ints(self.pads[:rank]), c.emit.ints(self.pads[rank:])

    def _automatic_pads(self, c: Vjp, mode: str) -> list[int]:
        known, made = spatial(c, c.x(0)).const_value, spatial(c, c.y()).const_value
        if known is None or made is None:
            raise c.fail("with auto_pad or output_shape, the spatial sizes of input and output must be known")
        total = (known.numpy() - 1) * self.strides + self.extra + self.reach - made.numpy()
        total = np.maximum(total, 0)
        small = total // 2
        large = total - small
        begin, end = (small, large) if mode == "SAME_UPPER" else (large, small)
        return [int(pad) for pad in (*begin, *end)]


# -- pooling -------------------------------------------------------------------------------------------------


@vjp("MaxPool")
def max_pool(c: Vjp) -> Grads:
    """One MaxPoolGrad of a float image without dilations; else scattered to the places that the forward node
    took its values from, which costs it several times the time."""
    operator, automatic = operators.MAX_POOL_GRAD, c.str_attr("auto_pad", "NOTSET")
    simple = automatic in ("NOTSET", "VALID") and set(c.ints_attr("dilations") or [1]) == {1}
    if simple and c.x(0).dtype == ir.DataType.FLOAT and c.rank(c.x(0)) == 4:
        dx = c.op(
            operator.name, c.dy(), c.x(0), domain=operator.domain, version=operator.version,
            kernel_shape=c.ints_attr("kernel_shape"), strides=c.ints_attr("strides") or [1, 1],
            pads=(c.ints_attr("pads") if automatic == "NOTSET" else None) or [0, 0, 0, 0],
            ceil_mode=c.int_attr("ceil_mode", 0),
        )  # fmt: skip
        return (dx,)
    places = c.y(1, ir.DataType.INT64)
    if c.int_attr("storage_order", 0):  # counted by columns: ask again, by rows
        attributes = {name: attribute.value for name, attribute in c.node.attributes.items()}
        places = c.multi("MaxPool", c.x(0), outputs=2, **{**attributes, "storage_order": 0})[1]
    return (scatter_flat(c, c.x(0), places, c.dy()),)


@vjp("AveragePool")
def average_pool(c: Vjp) -> Grads:
    window = _Window(c, c.x(0), c.ints_attr("kernel_shape") or [], c.y())
    return (_window_sum_gradient(c, c.op("Div", c.dy(), _window_counts(c, window)), window),)


@vjp("LpPool")
def lp_pool(c: Vjp) -> Grads:
    """y = (sum |x|^p)^(1/p): dx = sign(x) |x|^(p-1) * the windows' sum of dy * y^(1-p); zero where y is."""
    window = _Window(c, c.x(0), c.ints_attr("kernel_shape") or [], c.y())
    power = c.int_attr("p", 2)
    return (c.op("Mul", _power_slope(c, power), _window_sum_gradient(c, _per_norm(c, power), window)),)


@vjp("GlobalLpPool")
def global_lp_pool(c: Vjp) -> Grads:
    power = c.int_attr("p", 2)
    return (c.op("Mul", _power_slope(c, power), _per_norm(c, power)),)


def _power_slope(c: Vjp, power: int) -> ir.Value:
    x = c.x(0)
    if power == 1:
        return c.op("Sign", x)
    return x if power == 2 else c.op("Mul", c.op("Sign", x), c.op("Pow", c.op("Abs", x), float(power - 1)))


def _per_norm(c: Vjp, power: int) -> ir.Value:
    if power == 1:
        return c.dy()
    safe = c.op("Where", c.op("Equal", c.y(), 0.0), 1.0, c.y())
    return c.op("Div", c.dy(), safe if power == 2 else c.op("Pow", safe, float(power - 1)))


def _window_sum_gradient(c: Vjp, dy: ir.Value, window: _Window) -> ir.Value:
    """The gradient of the sum over each window: every channel is convolved with ones, on its own."""
    alone = c.op("Reshape", dy, c.join([-1, 1], spatial(c, c.y())))
    ones = c.emit.constant(np.ones([1, 1, *window.kernel], dtype=c.dtype.numpy()), c.dtype)
    full = c.op("ConvTranspose", alone, ones, strides=window.strides, dilations=window.dilations)
    full_size = c.add(c.mul(c.sub(spatial(c, c.y()), [1]), window.strides), window.reach)
    return c.like(_fit(c, full, full_size, window, c.x(0)), c.x(0))


def _window_counts(c: Vjp, window: _Window) -> ir.Value | float:
    """How many elements each output is the mean of."""
    include_pad, ceil = c.int_attr("count_include_pad", 0), c.int_attr("ceil_mode", 0)
    unpadded = [
        pads.const_value is not None and not pads.const_value.numpy().any()
        for pads in (window.pad_begin, window.pad_end)
    ]
    if not ceil and (include_pad or all(unpadded)):
        return float(np.prod(window.kernel))
    rank = len(window.kernel)
    counted = spatial(c, c.x(0))
    before = window.pad_begin
    if include_pad:
        counted = c.add(c.add(counted, window.pad_begin), window.pad_end)
        before = c.emit.ints([0] * rank)
    one = c.emit.constant(np.ones([1, 1] + [1] * rank, dtype=c.dtype.numpy()), c.dtype)
    ones = c.op("Expand", one, c.join([1, 1], counted))
    covered = c.add(c.mul(c.sub(spatial(c, c.y()), [1]), window.strides), window.reach)
    after = c.sub(c.sub(covered, counted), before)
    padded = c.op("Pad", ones, c.join(before, after), None, window.axes)
    kernel = c.emit.constant(np.ones([1, 1, *window.kernel], dtype=c.dtype.numpy()), c.dtype)
    return c.op("Conv", padded, kernel, strides=window.strides, dilations=window.dilations)


@vjp("GlobalAveragePool")
def global_average_pool(c: Vjp) -> Grads:
    size = spatial(c, c.x(0))
    count: ir.Value | float
    if size.const_value is not None:
        count = float(np.prod(size.const_value.numpy()))
    else:
        count = c.cast(c.op("ReduceProd", size, keepdims=0), c.dtype)
    return (c.op("Expand", c.op("Div", c.dy(), count), c.shape(c.x(0))),)


@vjp("GlobalMaxPool")
def global_max_pool(c: Vjp) -> Grads:
    """Elements that are all the maximum share the gradient evenly."""
    hits = c.cast(c.op("Equal", c.x(0), c.y()), c.dtype)
    count = c.op("ReduceSum", hits, list(range(2, c.rank(c.x(0)))), keepdims=1)
    return (c.op("Mul", hits, c.op("Div", c.dy(), count)),)


@vjp("MaxUnpool", inputs=(0,))
def max_unpool(c: Vjp) -> Grads:
    """The elements are where the indices put them, counted in the smallest output; an output_shape only adds
    zeros."""
    dy = c.dy()
    if c.has(2):
        kernel = c.ints_attr("kernel_shape") or []
        rank = len(kernel)
        pads = c.ints_attr("pads") or [0] * (2 * rank)
        lost = [pads[axis] + pads[axis + rank] - kernel[axis] for axis in range(rank)]
        strides = c.ints_attr("strides") or [1] * rank
        smallest = c.sub(c.mul(c.sub(spatial(c, c.x(0)), [1]), strides), lost)
        dy = c.op("Slice", dy, [0] * rank, smallest, list(range(2, 2 + rank)))
    flat = c.op("Reshape", dy, [-1])
    taken = c.op("Gather", flat, c.op("Reshape", c.x(1), [-1]), axis=0)
    return (c.like(taken, c.x(0)),)
