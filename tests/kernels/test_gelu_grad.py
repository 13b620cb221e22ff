"""GeluGrad's CPU kernel against float64.

The bound, with u = 2^-24: the derivative is a sum of two terms, each a product of a few factors with a
handful of roundings (those of the exponential, the division and the polynomial included) and of an
exponential whose argument, of size a, is off by a few roundings and so makes the factor off by a few times
a * u. So the error is at most (12 + 4 * a) * u times the terms' magnitudes, and for a type T one rounding to
T besides. Below float's normal range an exponential loses up to 2^-149 absolutely.
"""

from __future__ import annotations

import numpy as np
import pytest
from native import INVALID_PARAMETER, NULL_POINTER, KernelError, Library, Threads, tensor
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, FLOAT32_ROUNDOFF
from scipy.special import erfc

FORMS = ("none", "tanh")


def terms(x: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The derivative's two terms, and the size of the exponential's argument, in float64."""
    with np.errstate(all="ignore"):
        if form == "none":
            density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
            return erfc(-x / np.sqrt(2)) / 2, x * density, x**2 / 2
        slope = np.sqrt(2 / np.pi)
        twice_u = 2 * slope * (x + 0.044715 * x**3)
        tails = 1 / (1 + np.exp(-twice_u)), 1 / (1 + np.exp(twice_u))
        du = slope * (1 + 3 * 0.044715 * x**2)
        return tails[0], x * 2 * (tails[0] * tails[1]) * du, np.abs(twice_u)


def gelu_grad(library: Library, dy: np.ndarray, x: np.ndarray, form: str, **options) -> np.ndarray:
    outputs = {"dx": (dy.shape, dy.dtype)}
    return library.run_operator("gelu_grad", {"dy": dy, "x": x}, outputs, form.encode(), **options)["dx"]


def assert_right(dx: np.ndarray, dy: np.ndarray, x: np.ndarray, form: str) -> None:
    wide_dy, wide_x = dy.astype(np.float64), x.astype(np.float64)
    with np.errstate(all="ignore"):
        first, second, argument = terms(wide_x, form)
        expected = wide_dy * (first + second)
        magnitude = np.abs(wide_dy) * (np.abs(first) + np.abs(second))
        bound = (12 + 4 * np.minimum(argument, 110)) * FLOAT32_ROUNDOFF * magnitude
        # What an exponential lost below float's normal range, times its factors: x and, for tanh, 2 du/dx.
        factors = 1 + np.minimum(np.abs(wide_x), 20) * (1 if form == "none" else 401)
        bound = bound + (1 + np.abs(wide_dy) * factors) * 2.0**-149
        if dx.dtype != FLOAT:
            # One rounding to T, relative, or half of T's smallest number.
            relative, smallest = {FLOAT16: (2.0**-11, 2.0**-25), BFLOAT16: (2.0**-8, 2.0**-134)}[dx.dtype]
            bound = bound + np.maximum(relative * (np.abs(expected) + bound), smallest)
    assert dx.dtype == dy.dtype and dx.shape == dy.shape
    error = np.abs(dx.astype(np.float64) - expected)
    nan = np.isnan(expected)
    assert np.isnan(dx.astype(np.float64)[nan]).all()
    wrong = np.flatnonzero(~nan & ~(error <= bound))
    assert not wrong.size, (
        f"{form}: {wrong.size} of {x.size}, first: dy {dy.flat[wrong[0]]}, x {x.flat[wrong[0]]}: "
        f"got {dx.flat[wrong[0]]}, expected {expected.flat[wrong[0]]}, bound {bound.flat[wrong[0]]}"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_x(library: Library, dtype: np.dtype, form: str) -> None:
    if dtype == FLOAT:
        x = np.concatenate([np.linspace(-16, 16, 300001), np.geomspace(1e-38, 1e30, 2001)])
        x = np.concatenate([x, -x[-2001:]]).astype(dtype)
    else:
        with np.errstate(all="ignore"):
            x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
            x = x[np.isfinite(x.astype(np.float32))]
    assert_right(gelu_grad(library, np.ones_like(x), x, form), np.ones_like(x), x, form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_length_and_alignment(library: Library, dtype: np.dtype, form: str) -> None:
    rng = np.random.default_rng(0)
    for count in [*range(40), 63, 64, 65, 32767, 32768, 32769, 100003]:
        dy, x = rng.standard_normal((2, count)).astype(dtype)
        dx = gelu_grad(library, dy, x, form)
        assert_right(dx, dy, x, form)
        moved = gelu_grad(library, dy, x, form, offsets={"dy": dtype.itemsize, "dx": 2 * dtype.itemsize})
        assert moved.tobytes() == dx.tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_threads_and_buffers_change_no_bit(library: Library, form: str) -> None:
    rng = np.random.default_rng(1)
    dy, x = rng.standard_normal((2, 3, 50001), dtype=np.float32)
    alone = gelu_grad(library, dy, x, form)
    for count in (2, 5):
        threads = Threads(count, seed=count)
        assert gelu_grad(library, dy, x, form, threads=threads).tobytes() == alone.tobytes()
        assert threads.task_counts == [5]
    for name in ("dy", "x"):
        assert gelu_grad(library, dy, x, form, in_place={"dx": name}).tobytes() == alone.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_non_finite_values(library: Library, dtype: np.dtype, form: str) -> None:
    for count in (5, 64, 77):
        good = np.linspace(-2, 2, count).astype(dtype)
        clean = gelu_grad(library, good, good, form)
        for value in (np.nan, np.inf, -np.inf):
            bad = good.copy()
            bad[3] = value
            others = np.arange(count) != 3
            for dy, x in ((bad, good), (good, bad)):
                dx = gelu_grad(library, dy, x, form)
                assert not np.isfinite(dx.astype(np.float32)[3])
                assert dx[others].tobytes() == clean[others].tobytes()


REFUSED = [
    ({"x": tensor([4, 5], 1)}, b"none", INVALID_PARAMETER, "x must have the shape of dy, [4,6]; got [4,5]"),
    ({"x": tensor([4, 6], 10)}, b"none", INVALID_PARAMETER, "x must be float, the type of dy; got float16"),
    ({"dx": tensor([24], 1)}, b"none", INVALID_PARAMETER, "dx must have the shape of dy, [4,6]; got [24]"),
    (
        {"dy": tensor([4, 6], 11)},
        b"none",
        INVALID_PARAMETER,
        "dy must be float, float16 or bfloat16; got ONNX data type 11",
    ),
    ({"dy": tensor([], 1)}, b"none", INVALID_PARAMETER, "dy must have rank 1 to 8; got rank 0"),
    ({"dy": None}, b"none", NULL_POINTER, "dy is required; got a null pointer"),
    ({"dx": None}, b"none", NULL_POINTER, "dx is required; got a null pointer"),
    ({}, b"erf", INVALID_PARAMETER, "approximate must be none or tanh; got erf"),
    ({}, None, NULL_POINTER, "approximate is required; got a null pointer"),
]


@pytest.mark.parametrize(("changes", "form", "status", "sentence"), REFUSED, ids=[row[3] for row in REFUSED])
def test_what_is_refused(installed: Library, changes, form, status, sentence) -> None:
    tensors = {name: tensor([4, 6], 1) for name in ("dy", "x", "dx")} | changes
    with pytest.raises(KernelError) as caught:
        installed.plan_operator("gelu_grad", list(tensors.values()), form)
    assert (caught.value.status, str(caught.value)) == (status, sentence)
