"""AddLayerNorm's CPU kernel against float64.

The bounds, with u = 2^-24 and n columns: the sum of x is off by sqrt(n) * u * sum|x|, so the mean by
(sqrt(n) + 2) * u * M with M the mean of |x|. That shift leaves the sum of squares nearly alone (it adds its
square); each square has three roundings and the sum sqrt(n): rstd is off relatively by (sqrt(n) + 8) * u / 2
and a few more. xhat is off by rstd times the mean's error, and relatively by rstd's and two roundings; y by
that times gamma, and two more.
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from native import INVALID_PARAMETER, NULL_POINTER, KernelError, Library, Threads, tensor
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, FLOAT32_ROUNDOFF

EPSILON = 1e-5
OUTPUTS = ("y", "mean", "rstd", "x")
TYPE_PAIRS = [(FLOAT, FLOAT), (FLOAT16, FLOAT16), (FLOAT16, FLOAT), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT)]
TYPE_IDS = [f"{dtype}-gamma_{gamma}" for dtype, gamma in TYPE_PAIRS]

Inputs = dict[str, np.ndarray | None]


def make_inputs(
    shape: tuple[int, ...],
    dtype: np.dtype = FLOAT,
    gamma_dtype: np.dtype | None = None,
    *,
    axes: int = 1,
    x2: bool = True,
    beta: bool = True,
    x_mean: float = 0.0,
    seed: int = 0,
) -> Inputs:
    rng = np.random.default_rng(seed)
    norm = shape[len(shape) - axes :]
    return {
        "x1": (x_mean + rng.standard_normal(shape)).astype(dtype),
        "x2": rng.standard_normal(shape).astype(dtype) if x2 else None,
        "gamma": (1 + 0.2 * rng.standard_normal(norm)).astype(gamma_dtype or dtype),
        "beta": rng.standard_normal(norm).astype(gamma_dtype or dtype) if beta else None,
    }


def run(library: Library, inputs: Inputs, outputs=OUTPUTS, **options) -> dict[str, np.ndarray]:
    x1, gamma = inputs["x1"], inputs["gamma"]
    statistic = (*x1.shape[: x1.ndim - gamma.ndim], *[1] * gamma.ndim)
    shapes = {"y": (x1.shape, x1.dtype), "mean": (statistic, FLOAT), "rstd": (statistic, FLOAT)}
    shapes["x"] = (x1.shape, x1.dtype)
    wanted = {name: shape if name in outputs else None for name, shape in shapes.items()}
    return library.run_operator("add_layer_norm", inputs, wanted, ctypes.c_float(EPSILON), **options)


def assert_right(results: dict[str, np.ndarray], inputs: Inputs) -> None:
    x1, gamma = inputs["x1"], inputs["gamma"]
    dtype, cols, u = x1.dtype, gamma.size, FLOAT32_ROUNDOFF
    exact = x1.astype(np.float64) + (0 if inputs["x2"] is None else inputs["x2"].astype(np.float64))
    x = exact.astype(dtype)
    np.testing.assert_array_equal(results["x"].astype(np.float32), x.astype(np.float32))
    table = x.astype(np.float64).reshape(-1, cols)
    mean = table.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(table.var(axis=1, keepdims=True) + float(np.float32(EPSILON)))
    mean_bound = (np.sqrt(cols) + 2) * u * np.abs(table).mean(axis=1, keepdims=True)
    relative = (np.sqrt(cols) + 16) * u / 2 + np.square(mean_bound * rstd)
    assert (np.abs(results["mean"].reshape(-1, 1) - mean) <= mean_bound).all()
    assert (np.abs(results["rstd"].reshape(-1, 1) - rstd) <= relative * rstd).all()
    scale = gamma.astype(np.float64).reshape(1, cols)
    shift = 0 if inputs["beta"] is None else inputs["beta"].astype(np.float64).reshape(1, cols)
    y = (table - mean) * rstd * scale + shift
    bound = np.abs(scale) * rstd * (np.abs(table - mean) * (relative + 4 * u) + mean_bound) + 2 * u * np.abs(
        y
    )
    if dtype != FLOAT:
        bound = bound + {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}[dtype] * (np.abs(y) + bound) + 2.0**-25
    assert results["y"].dtype == dtype and results["y"].shape == x1.shape
    assert (np.abs(results["y"].astype(np.float64).reshape(-1, cols) - y) <= bound).all()


def assert_same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in actual.items():
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize(("dtype", "gamma_dtype"), TYPE_PAIRS, ids=TYPE_IDS)
def test_every_width(library: Library, dtype: np.dtype, gamma_dtype: np.dtype) -> None:
    for cols in [*range(1, 36), 63, 64, 65, 768, 769, 1600, 65537]:
        inputs = make_inputs((7 if cols < 2000 else 2, cols), dtype, gamma_dtype, seed=cols)
        assert_right(run(library, inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mean_far_from_zero(library: Library, dtype: np.dtype) -> None:
    for cols in (3, 17, 100, 769):
        inputs = make_inputs((9, cols), dtype, x_mean=50.0)
        assert_right(run(library, inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x2", [True, False], ids=["x2", "no_x2"])
@pytest.mark.parametrize("beta", [True, False], ids=["beta", "no_beta"])
def test_every_presence(library: Library, dtype: np.dtype, x2: bool, beta: bool) -> None:
    for shape in ((70, 37), (2000, 64), (3, 1100)):
        inputs = make_inputs(shape, dtype, x2=x2, beta=beta)
        everything = run(library, inputs)
        assert_right(everything, inputs)
        for count in range(4):
            for others in itertools.combinations(OUTPUTS[1:], count):
                assert_same_bits(run(library, inputs, ("y", *others)), everything)
        assert_same_bits(run(library, inputs, threads=Threads(3)), everything)
        for source in ("x1", "x2") if x2 else ("x1",):
            assert_same_bits(run(library, inputs, ("y",), in_place={"y": source}), everything)
            assert_same_bits(run(library, inputs, in_place={"x": source}), everything)
            assert_same_bits(run(library, inputs, in_place={"y": source}), everything)
        offsets = {"x1": dtype.itemsize, "y": 2 * dtype.itemsize, "x": 3 * dtype.itemsize, "gamma": 4}
        assert_same_bits(run(library, inputs, offsets=offsets), everything)


def test_every_number_of_normalised_axes(library: Library) -> None:
    for shape in ((5,), (2, 3, 5), (1, 1, 1, 1, 2, 1, 3, 4), (0, 8), (3, 0, 8)):
        for axes in range(1, len(shape) + 1):
            if 0 in shape[len(shape) - axes :]:
                continue
            inputs = make_inputs(shape, axes=axes)
            assert_right(run(library, inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_values_stay_in_their_row(library: Library, dtype: np.dtype) -> None:
    for cols in (7, 48):
        good = make_inputs((4, cols), dtype)
        clean = run(library, good)
        for name in ("x1", "x2"):
            for value in (np.nan, np.inf, -np.inf):
                bad = good[name].copy()
                bad[1, 3] = value
                results = run(library, good | {name: bad})
                assert np.isnan(results["y"][1].astype(np.float32)).all() and np.isnan(results["rstd"][1])
                for result, array in results.items():
                    assert array[[0, 2, 3]].tobytes() == clean[result][[0, 2, 3]].tobytes()


def test_nan_with_a_full_payload_stays_nan(library: Library) -> None:
    for payload in np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32):
        for name in ("gamma", "beta"):
            inputs = make_inputs((4, 70), BFLOAT16, FLOAT)
            inputs[name][[0, 69]] = payload
            y = run(library, inputs)["y"].astype(np.float32)
            assert np.isnan(y[:, [0, 69]]).all() and np.isfinite(y[:, 1:69]).all()


REFUSED = [
    (
        {"x1": tensor([4, 6], 11)},
        INVALID_PARAMETER,
        "x1 must be float, float16 or bfloat16; got ONNX data type 11",
    ),
    ({"x2": tensor([4, 5], 1)}, INVALID_PARAMETER, "x2 must have the shape of x1, [4,6]; got [4,5]"),
    ({"gamma": tensor([5], 1)}, INVALID_PARAMETER, "gamma must be [6], the last axis of x1 [4,6]; got [5]"),
    ({"gamma": None}, NULL_POINTER, "gamma is required; got a null pointer"),
    ({"beta": tensor([1], 1)}, INVALID_PARAMETER, "beta must have the shape of gamma, [6]; got [1]"),
    ({"beta": tensor([6], 10)}, INVALID_PARAMETER, "beta must be float, the type of gamma; got float16"),
    ({"y": None}, NULL_POINTER, "y is required; got a null pointer"),
    (
        {"mean": tensor([6, 1], 1)},
        INVALID_PARAMETER,
        "mean must be [4,1], one value for each row of x1 [4,6], "
        "or the same without the trailing ones; got [6,1]",
    ),
    ({"x": tensor([4, 6], 10)}, INVALID_PARAMETER, "x must be float, the type of x1; got float16"),
]


@pytest.mark.parametrize(("changes", "status", "sentence"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_what_is_refused(installed: Library, changes, status: int, sentence: str) -> None:
    tensors = {name: tensor([4, 6], 1) for name in ("x1", "x2", "gamma", "beta", "y", "mean", "rstd", "x")}
    tensors |= {name: tensor([6], 1) for name in ("gamma", "beta")}
    tensors |= {name: tensor([4, 1], 1) for name in ("mean", "rstd")}
    epsilon = ctypes.c_float(EPSILON)
    installed.plan_operator("add_layer_norm", list(tensors.values()), epsilon)
    with pytest.raises(KernelError) as caught:
        installed.plan_operator("add_layer_norm", list((tensors | changes).values()), epsilon)
    assert (caught.value.status, str(caught.value)) == (status, sentence)
