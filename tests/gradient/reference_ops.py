"""Operators for onnx's reference implementation where its own is too coarse or refuses what the standard
allows.

Its Erf (also that inside Gelu) and Shrink compute in float32 whatever the input, its Mean does not broadcast
to a larger first operand, its constant Pad cannot crop, its LRN takes the batch size for the number of
channels, and its MeanVarianceNormalization mixes float32 constants with float64 data.
"""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
from onnx.reference.op_run import OpRun


class Erf(OpRun):
    def _run(self, x):  # type: ignore[no-untyped-def]
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Gelu(OpRun):
    def _run(self, x, approximate=None):  # type: ignore[no-untyped-def]
        if approximate == "tanh":
            return (0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1.0 + np.vectorize(math.erf, otypes=[x.dtype])(x * math.sqrt(0.5))),)


class Shrink(OpRun):
    def _run(self, x, bias=None, lambd=None):  # type: ignore[no-untyped-def]
        return (np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0.0)).astype(x.dtype),)


class Mean(OpRun):
    def _run(self, *operands):  # type: ignore[no-untyped-def]
        return ((reduce(np.add, operands) / len(operands)).astype(operands[0].dtype),)


class GlobalLpPool(OpRun):
    def _run(self, x, p=None):  # type: ignore[no-untyped-def]
        axes = tuple(range(2, x.ndim))
        return (np.power(np.power(np.abs(x), p).sum(axis=axes, keepdims=True), 1.0 / p).astype(x.dtype),)


class LRN(OpRun):
    def _run(self, x, alpha=None, beta=None, bias=None, size=None):  # type: ignore[no-untyped-def]
        before = (size - 1) // 2
        square = np.zeros_like(x)
        for channel in range(x.shape[1]):
            near = x[:, max(channel - before, 0) : channel + size - before]
            square[:, channel] = (near**2).sum(axis=1)
        return ((x / (bias + alpha / size * square) ** beta).astype(x.dtype),)


class MeanVarianceNormalization(OpRun):
    def _run(self, x, axes=None):  # type: ignore[no-untyped-def]
        centred = x - x.mean(axis=tuple(axes), keepdims=True)
        return (centred / (np.sqrt((centred**2).mean(axis=tuple(axes), keepdims=True)) + 1e-9),)


class Pad(OpRun):
    def _run(self, x, pads, value=None, axes=None, mode=None):  # type: ignore[no-untyped-def]
        axes = range(x.ndim) if axes is None else [int(axis) % x.ndim for axis in axes]
        count = len(axes)
        widths, crop = [(0, 0)] * x.ndim, [slice(None)] * x.ndim
        for place, axis in enumerate(axes):
            begin, end = int(pads[place]), int(pads[place + count])
            widths[axis] = (max(begin, 0), max(end, 0))
            crop[axis] = slice(max(-begin, 0), x.shape[axis] - max(-end, 0))
        cropped = x[tuple(crop)]
        if mode == "constant":
            fill = 0 if value is None else np.asarray(value).reshape(-1)[0]
            return (np.pad(cropped, widths, constant_values=fill).astype(x.dtype),)
        return (np.pad(cropped, widths, mode=mode),)


CORRECTED = [Erf, Gelu, Shrink, Mean, GlobalLpPool, LRN, MeanVarianceNormalization, Pad]
