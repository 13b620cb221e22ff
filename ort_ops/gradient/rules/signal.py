"""Derivatives of the discrete Fourier transform, of a whole signal and of its frames."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp


@vjp("DFT", inputs=(0,), limits="inverse and onesided at once only with a known length")
def dft(c: Vjp) -> Grads:
    """The transform is a matrix F (or F* / N): its adjoint is N times the inverse transform (or F / N).

    Bins that a onesided transform leaves out have no gradient; elements that a shorter or longer transform
    cut off or made up are zeros, or dropped.
    """
    inverse, onesided = c.int_attr("inverse", 0), c.int_attr("onesided", 0)
    if inverse and onesided:
        return (_real_inverse(c),)
    x, rank = c.x(0), c.rank(c.x(0))
    axis = _axis(c) % rank
    size = c.dim(x, axis)
    length = c.op("Reshape", c.x(1), [1]) if c.has(1) else size
    length = c.cast(length, ir.DataType.INT64)
    dy = c.dy()
    if onesided:
        dy = c.op("Pad", dy, c.join([0], c.sub(length, c.dim(c.y(), axis))), None, [axis])
    place = c.emit.constant(np.array(axis))
    if c.emit.opset >= 20:
        full = c.op("DFT", dy, None, place, inverse=1 - inverse)
    else:
        full = c.op("DFT", dy, inverse=1 - inverse, axis=axis)
    scale = c.cast(c.op("Squeeze", length), c.dtype)
    full = c.op("Div" if inverse else "Mul", full, scale)
    if c.has(1):
        full = c.op("Pad", full, c.join([0], c.sub(size, length)), None, [axis])
    components = x.shape[-1] if x.shape is not None else None
    if components == 2:
        return (full,)
    # x may be real: one component, or two
    return (c.op("Slice", full, [0], c.dim(x, rank - 1), [rank - 1]),)


def _real_inverse(c: Vjp) -> ir.Value:
    """A real signal of length N from its bins 0 to N / 2: those that stand for two, k and N - k, count
    twice."""
    x, rank = c.x(0), c.rank(c.x(0))
    axis = _axis(c) % rank
    length = c.y().shape[axis] if c.y().shape is not None else None  # type: ignore[index]
    if not isinstance(length, int):
        raise c.fail("with inverse and onesided the length must be known")
    bins = length // 2 + 1
    weights = np.full(bins, 2.0 / length)
    weights[0] = 1.0 / length
    if length % 2 == 0:
        weights[-1] = 1.0 / length
    shape = [1] * rank
    shape[axis] = bins
    scale = c.emit.constant(weights.reshape(shape).astype(c.dtype.numpy()), c.dtype)
    if c.emit.opset >= 20:
        spectrum = c.op("DFT", c.dy(), None, c.emit.constant(np.array(axis)), onesided=1)
    else:
        spectrum = c.op("DFT", c.dy(), onesided=1, axis=axis)
    full = c.op("Mul", spectrum, scale)
    return c.op("Pad", full, c.join([0], c.sub(c.dim(x, axis), [bins])), None, [axis])


def _axis(c: Vjp) -> int:
    if c.opset < 20:
        return c.int_attr("axis", 1)
    if not c.has(2):
        return -2
    known = c.known(2)
    if known is None:
        raise c.fail("the axis must be a constant")
    return int(known.item())


@vjp("STFT", inputs=(0, 2), limits="frame step and length must be known")
def stft(c: Vjp) -> Grads:
    """Overlapping frames of the signal, times the window, transformed each: go back through all three."""
    step = c.known(1)
    if step is None:
        raise c.fail("frame_step must be a constant")
    size = c.dim(c.x(2), 0) if c.has(2) else c.op("Reshape", c.x(3), [1])
    length = c.known(3) if c.has(3) else size.const_value.numpy() if size.const_value is not None else None
    if length is None:
        raise c.fail("frame_length must be a constant, or the window's size known")
    samples, hop = int(length.reshape(-1)[0]), int(step.reshape(-1)[0])
    signal, dy = c.x(0), c.dy()
    if c.int_attr("onesided", 1):
        dy = c.op("Pad", dy, [0, samples - (samples // 2 + 1)], None, [2])
    if c.emit.opset >= 20:
        full = c.op("DFT", dy, None, c.emit.constant(np.array(2)), inverse=1)
    else:
        full = c.op("DFT", dy, inverse=1, axis=2)
    full = c.op("Mul", full, float(samples))
    full = c.op("Slice", full, [0], c.dim(signal, 2), [3])  # a real signal has one component
    zero, one = (c.emit.constant(np.array(number)) for number in (0, 1))
    starts = c.op("Mul", c.op("Range", zero, c.op("Squeeze", c.dim(c.y(), 1)), one), hop)
    places = c.op("Add", c.op("Unsqueeze", starts, [1]), np.arange(samples))
    places = c.op("Reshape", places, [-1])
    dwindow = None
    if c.wants(2):
        frames = c.op("Gather", signal, places, axis=1)
        frames = c.op("Reshape", frames, c.op("Shape", full))
        dwindow = c.op("ReduceSum", c.op("Mul", frames, full), [0, 1, 3], keepdims=0)
    if c.has(2):
        full = c.op("Mul", full, c.op("Unsqueeze", c.x(2), [1]))
    flat = c.op("Reshape", full, c.join(c.dim(signal, 0), [-1], c.dim(signal, 2)))
    spread = c.op("Expand", c.op("Unsqueeze", places, [0, 2]), c.op("Shape", flat))
    dsignal = c.op("ScatterElements", c.zeros_like(signal), spread, flat, axis=1, reduction="add")
    return dsignal, None, dwindow
