"""The float64 truth about the operators, and how far from it a right float32 implementation may be.

`add_layer_norm_grad` evaluates the formula in float64 on the inputs as they are stored, that is, after
they were rounded to their own types. `assert_matches` compares results with it. The bounds are derived,
not tuned; with u = 2^-24 (half a unit in the last place of float32), rows and cols as in the operator's
description, and sums of n terms taken in float32 in any order:

- A sum's rounding errors are each at most u times a partial sum, and so at most u * sum|term|. They are
  independent, so n of them add up like a random walk: sqrt(n) * u * sum|term|. (Adding one by one in the
  worst case would allow n instead of sqrt(n); the operator promises the square root.)
- xhat = (x - mean) * rstd is two operations: 2u. dy * xhat: 3u. g = dy * gamma: 1u. g * xhat: 4u.
- dgamma = sum(dy * xhat) is then within (sqrt(rows) + 4) * u * sum|dy * xhat|, storing it included;
  dbeta = sum(dy) within (sqrt(rows) + 1) * u * sum|dy|.
- dx is rstd * (g - (S1 + xhat * S2) / cols) + dsum, S1 = sum(g), S2 = sum(g * xhat). With M1 = sum|g| /
  cols, M2 = |xhat| * sum|g * xhat| / cols it takes from S1 and S2 (sqrt(cols) + 4) * u * (M1 + M2), from
  xhat beside S2 2u * M2, and at most six operations on terms no larger than |g| + M1 + M2: altogether
  rstd * u * (8 * |g| + (sqrt(cols) + 12) * (M1 + M2)), u * |dx| for adding dsum, and at the end one
  rounding to T: half the distance between neighbours of T around dx.
- Products that fall below float32's normal range lose up to 2^-150 each, absolutely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import ml_dtypes
import numpy as np

FLOAT32_ROUNDOFF = 2.0**-24
_FLOAT32_UNDERFLOW = 2.0**-149

FLOAT = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (FLOAT, FLOAT16, BFLOAT16)


@dataclass(frozen=True)
class Inputs:
    """The operator's inputs under their names in the operator's signature."""

    dy: np.ndarray
    x1: np.ndarray
    x2: np.ndarray | None
    rstd: np.ndarray
    mean: np.ndarray
    gamma: np.ndarray
    dsum: np.ndarray | None

    @property
    def cols(self) -> int:
        return int(self.gamma.size)

    @property
    def rows(self) -> int:
        return self.dy.size // self.cols

    def arrays(self) -> dict[str, np.ndarray]:
        """Those that are present, by name, in the order of the signature."""
        return {name: array for name, array in vars(self).items() if array is not None}

    def replace(self, **changes: np.ndarray | None) -> Inputs:
        return replace(self, **changes)


def make_inputs(
    shape: Sequence[int],
    dtype: np.dtype = FLOAT,
    *,
    axes: int = 1,
    gamma_dtype: np.dtype | None = None,
    x2: bool = True,
    dsum: bool = True,
    trailing_ones: bool = True,
    x_mean: float = 0.0,
    epsilon: float = 1e-5,
    seed: int = 0,
) -> Inputs:
    """Random inputs as a forward pass leaves them: mean and rstd belong to the rounded sum x1 + x2.

    The last `axes` axes are normalised. x has about the given mean and standard deviation 1.
    """
    rng = np.random.default_rng(seed)
    shape = tuple(shape)
    leading, norm = shape[: len(shape) - axes], shape[len(shape) - axes :]

    def normal(size: tuple[int, ...], mean: float = 0.0, scale: float = 1.0) -> np.ndarray:
        return (mean + scale * rng.standard_normal(size, dtype=np.float32)).astype(dtype)

    first = normal(shape, x_mean, 0.8 if x2 else 1.0)
    second = normal(shape, 0.0, 0.6) if x2 else None
    table = _rounded_sum(first, second).astype(np.float64).reshape(prod(leading), prod(norm))
    mean = table.mean(axis=1)
    rstd = 1.0 / np.sqrt(table.var(axis=1) + epsilon)
    statistics_shape = (*leading, *([1] * axes)) if trailing_ones else leading
    gamma = (1.0 + 0.2 * rng.standard_normal(norm)).astype(gamma_dtype or dtype)
    return Inputs(
        dy=normal(shape),
        x1=first,
        x2=second,
        rstd=rstd.astype(np.float32).reshape(statistics_shape),
        mean=mean.astype(np.float32).reshape(statistics_shape),
        gamma=gamma,
        dsum=normal(shape) if dsum else None,
    )


def add_layer_norm_grad(
    dy: np.ndarray,
    x1: np.ndarray,
    x2: np.ndarray | None,
    rstd: np.ndarray,
    mean: np.ndarray,
    gamma: np.ndarray,
    dsum: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dgamma, dbeta) in float64, not rounded; only x1 + x2 is, to its type, as by the forward Add."""
    terms = _Terms(Inputs(dy, x1, x2, rstd, mean, gamma, dsum))
    return (
        terms.dx.reshape(dy.shape),
        terms.dgamma.reshape(gamma.shape),
        terms.dbeta.reshape(gamma.shape),
    )


def assert_matches(
    inputs: Inputs,
    *,
    dx: np.ndarray | None = None,
    dgamma: np.ndarray | None = None,
    dbeta: np.ndarray | None = None,
) -> dict[str, float]:
    """Checks the given results' types, shapes, values, and NaN and Inf against the float64 formula.

    Returns, for each result, its largest error in units of its bound (so at most 1).
    """
    terms = _Terms(inputs)
    u = FLOAT32_ROUNDOFF
    worst = {}
    with np.errstate(all="ignore"):
        if dx is not None:
            m1 = np.abs(terms.g).mean(axis=1, keepdims=True)
            m2 = np.abs(terms.xhat) * np.abs(terms.g * terms.xhat).mean(axis=1, keepdims=True)
            factor = np.sqrt(inputs.cols) + 12
            bound = u * (np.abs(terms.rstd) * (8 * np.abs(terms.g) + factor * (m1 + m2)) + np.abs(terms.dx))
            bound = bound + _FLOAT32_UNDERFLOW * (1 + np.abs(terms.rstd)) * inputs.cols
            bound = bound + _half_spacing(np.abs(terms.dx) + bound, inputs.dy.dtype)
            worst["dx"] = _compare("dx", dx, terms.dx, bound, inputs.dy.shape, inputs.dy.dtype)
        if dgamma is not None:
            magnitude = np.abs(terms.dy * terms.xhat).sum(axis=0)
            bound = (np.sqrt(inputs.rows) + 4) * u * magnitude + inputs.rows * _FLOAT32_UNDERFLOW
            worst["dgamma"] = _compare("dgamma", dgamma, terms.dgamma, bound, inputs.gamma.shape, FLOAT)
        if dbeta is not None:
            magnitude = np.abs(terms.dy).sum(axis=0)
            bound = (np.sqrt(inputs.rows) + 1) * u * magnitude
            worst["dbeta"] = _compare("dbeta", dbeta, terms.dbeta, bound, inputs.gamma.shape, FLOAT)
    assert worst, "assert_matches was given no result to check"
    return worst


class _Terms:
    """The formula's quantities as float64 tables of [rows, cols]."""

    def __init__(self, inputs: Inputs) -> None:
        table = (inputs.rows, inputs.cols)
        column = (inputs.rows, 1)
        with np.errstate(all="ignore"):
            self.dy = inputs.dy.astype(np.float64).reshape(table)
            x = _rounded_sum(inputs.x1, inputs.x2).astype(np.float64).reshape(table)
            self.rstd = inputs.rstd.astype(np.float64).reshape(column)
            self.xhat = (x - inputs.mean.astype(np.float64).reshape(column)) * self.rstd
            self.g = self.dy * inputs.gamma.astype(np.float64).reshape(1, inputs.cols)
            mean_g = self.g.mean(axis=1, keepdims=True)
            mean_g_xhat = (self.g * self.xhat).mean(axis=1, keepdims=True)
            self.dx = self.rstd * (self.g - mean_g - self.xhat * mean_g_xhat)
            if inputs.dsum is not None:
                self.dx = self.dx + inputs.dsum.astype(np.float64).reshape(table)
            self.dgamma = (self.dy * self.xhat).sum(axis=0)
            self.dbeta = self.dy.sum(axis=0)


def _rounded_sum(x1: np.ndarray, x2: np.ndarray | None) -> np.ndarray:
    """x1 + x2 rounded to its type. Rounding to float64 before does no harm: it has over twice the digits."""
    if x2 is None:
        return x1
    with np.errstate(all="ignore"):
        return (x1.astype(np.float64) + x2.astype(np.float64)).astype(x1.dtype)


def _half_spacing(magnitude: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Half the distance between neighbouring numbers of this type around this magnitude."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(magnitude, float(info.smallest_normal))))
    return np.exp2(exponent - info.nmant - 1)


def _compare(
    name: str,
    actual: np.ndarray,
    expected: np.ndarray,
    bound: np.ndarray,
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> float:
    assert actual.dtype == dtype, f"{name} is {actual.dtype}, expected {dtype}"
    assert actual.shape == shape, f"{name} has shape {actual.shape}, expected {shape}"
    values = actual.astype(np.float64).reshape(expected.shape)

    nan = np.isnan(expected)
    _assert_all(name, np.isnan(values)[nan], "NaN expected")
    # Beyond the type's largest number, and within the bound of it, infinity is the right rounding.
    largest = float(ml_dtypes.finfo(dtype).max)
    magnitude = np.abs(expected)
    infinite = ~nan & ((magnitude == np.inf) | (magnitude - bound > largest))
    _assert_all(name, ~np.isfinite(values[infinite]), "Inf or NaN expected")
    finite = ~nan & ~infinite & (magnitude + bound < largest)
    _assert_all(name, np.isfinite(values[finite]), "a finite value expected")

    error = np.abs(values[finite] - expected[finite])
    ratio = error / bound[finite]
    ratio[error == 0] = 0
    worst = float(ratio.max(initial=0.0))
    if worst > 1:
        at = np.argwhere(finite)[ratio.argmax()]
        raise AssertionError(
            f"{name}: {np.count_nonzero(ratio > 1)} of {ratio.size} values are off by more than their bound; "
            f"worst at (row, column) {tuple(int(i) for i in at)}: got {values[tuple(at)]!r}, float64 says "
            f"{expected[tuple(at)]!r}, bound {bound[tuple(at)]:.3g}, error {worst:.3g} times the bound"
        )
    return worst


def _assert_all(name: str, holds: np.ndarray, rule: str) -> None:
    assert holds.all(), f"{name}: {rule} at {np.count_nonzero(~holds)} of {holds.size} places"
