"""BatchNormGrad's CPU kernel against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native import INVALID_PARAMETER, KernelError, Library, Threads, tensor

EPS = float(np.finfo(np.float32).eps)
SHAPES = [
    (3, 5, 7, 9),
    (2, 3, 1),
    (64, 6),
    (4, 2, 1, 2048),
    (2, 3, 50, 83),
    (1, 1, 2, 3, 2),
    (2, 1, 129, 129),
]


def batch_norm_grad(
    library: Library, dy: np.ndarray, x: np.ndarray, scale: np.ndarray, epsilon: float = 1e-5, **options
) -> dict[str, np.ndarray]:
    outputs = {
        "dx": (dy.shape, dy.dtype),
        "dscale": (scale.shape, dy.dtype),
        "dbias": (scale.shape, dy.dtype),
    }
    inputs = {"dy": dy, "x": x, "scale": scale}
    return library.run_operator("batch_norm_grad", inputs, outputs, ctypes.c_float(epsilon), **options)


def operands(shape: tuple[int, ...], offset: float = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(sum(shape))
    x = (rng.standard_normal(shape) + offset).astype(np.float32)
    return (
        rng.standard_normal(shape).astype(np.float32) + np.float32(0.3),
        x,
        rng.standard_normal(shape[1]).astype(np.float32),
    )


def exact(dy: np.ndarray, x: np.ndarray, scale: np.ndarray, epsilon: float) -> dict[str, np.ndarray]:
    """By the chain rule through mean, variance and root, each on its own, in float64."""
    axes = (0, *range(2, x.ndim))
    count = x.size / x.shape[1]
    dy, x = dy.astype(np.float64), x.astype(np.float64)
    scale = scale.astype(np.float64).reshape(-1, *[1] * (x.ndim - 2))
    centred = x - x.mean(axes, keepdims=True)
    spread = (centred**2).mean(axes, keepdims=True) + float(np.float32(epsilon))
    root = spread**-0.5
    dxhat = dy * scale
    droot = (dxhat * centred).sum(axes, keepdims=True)
    dspread = droot * -0.5 * spread**-1.5
    dcentred = dxhat * root + dspread * 2 * centred / count
    dx = dcentred - dcentred.mean(axes, keepdims=True)
    return {"dx": dx, "dscale": (dy * centred * root).sum(axes), "dbias": dy.sum(axes)}


def magnitudes(dy: np.ndarray, x: np.ndarray, scale: np.ndarray, epsilon: float) -> dict[str, np.ndarray]:
    """The same with each term's magnitude: what an error of one rounding is relative to."""
    axes = (0, *range(2, x.ndim))
    column = (-1, *[1] * (x.ndim - 2))
    x, dy = x.astype(np.float64), np.abs(dy.astype(np.float64))
    centred = x - x.mean(axes, keepdims=True)
    rstd = ((centred**2).mean(axes, keepdims=True) + epsilon) ** -0.5
    xhat = np.abs(centred) * rstd
    dscale, dbias = (dy * xhat).sum(axes), dy.sum(axes)
    count = x.size / x.shape[1]
    across = dy + (dbias.reshape(column) + xhat * dscale.reshape(column)) / count
    return {"dx": np.abs(scale.reshape(column)) * rstd * across, "dscale": dscale, "dbias": dbias}


@pytest.mark.parametrize("offset", [0, 1000], ids=["", "far mean"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(library: Library, shape: tuple[int, ...], offset: float) -> None:
    """Within 16 roundings of the terms' magnitudes: a lane adds up at most 512 numbers of a segment,
    whose roundings are random, and segments are added in double."""
    dy, x, scale = operands(shape, offset)
    actual, expected = batch_norm_grad(library, dy, x, scale, 0.1), exact(dy, x, scale, 0.1)
    for name, bound in magnitudes(dy, x, scale, 0.1).items():
        error = np.abs(actual[name] - expected[name])
        assert (error <= 16 * EPS * bound).all(), (name, (error / (EPS * bound)).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_neither_threads_nor_buffers(library: Library, shape: tuple[int, ...]) -> None:
    dy, x, scale = operands(shape)
    alone = batch_norm_grad(library, dy, x, scale)
    for options in (
        {"threads": Threads(3)},
        {"threads": Threads(2, seed=1), "offsets": {"dy": 4, "x": 8, "dx": 12, "scale": 4}},
        {"in_place": {"dx": "dy"}},
        {"in_place": {"dx": "x"}},
    ):
        again = batch_norm_grad(library, dy, x, scale, **options)
        for name, array in alone.items():
            assert again[name].tobytes() == array.tobytes(), (name, options)


def test_nan_and_infinity_stay_in_their_channel(library: Library) -> None:
    dy, x, scale = operands((3, 4, 5, 7))
    clean = batch_norm_grad(library, dy, x, scale)
    x[1, 0, 2, 3], x[0, 1, 4, 6], dy[2, 2, 0, 0] = np.nan, np.inf, np.nan
    actual = batch_norm_grad(library, dy, x, scale)
    assert np.isnan(actual["dx"][:, :3]).all()
    assert np.isnan(actual["dscale"][:3]).all()
    assert np.isnan(actual["dbias"]).tolist() == [False, False, True, False]
    assert (actual["dx"][:, 3] == clean["dx"][:, 3]).all()


def test_a_constant_channel(library: Library) -> None:
    """Its variance is exactly 0, whatever its value: only epsilon is left under the root."""
    dy, x, scale = operands((4, 3, 33))
    x[:, 1] = 1234.567
    actual, expected = batch_norm_grad(library, dy, x, scale), exact(dy, x, scale, 1e-5)
    np.testing.assert_allclose(actual["dx"][:, 1], expected["dx"][:, 1], rtol=1e-5, atol=1e-3)
    assert actual["dscale"][1] == 0


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0, 5), (2, 0, 4)], ids=str)
def test_empty(library: Library, shape: tuple[int, ...]) -> None:
    actual = batch_norm_grad(library, *operands(shape))
    assert actual["dx"].size == 0
    assert actual["dscale"].tolist() == actual["dbias"].tolist() == [0] * shape[1]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({0: tensor([4], 1)}, "dy must have rank 2 to 8; got rank 1"),
        ({0: tensor([2, 3, 5], 10)}, "dy must be float; got float16"),
        ({1: tensor([2, 3, 4], 1)}, r"x must have the shape of dy, \[2,3,5\]; got \[2,3,4\]"),
        ({2: tensor([2], 1)}, r"scale must be \[3\], the channels of dy \[2,3,5\]; got \[2\]"),
        ({2: tensor([3, 1], 1)}, r"scale must be \[3\], the channels of dy \[2,3,5\]; got \[3,1\]"),
        ({3: tensor([2, 3], 1)}, r"dx must have the shape of dy, \[2,3,5\]; got \[2,3\]"),
        ({5: tensor([5], 1)}, r"dbias must be \[3\], the channels of dy"),
    ],
)
def test_what_is_refused(installed: Library, changes: dict, sentence: str) -> None:
    good = [tensor([2, 3, 5], 1)] * 2 + [tensor([3], 1), tensor([2, 3, 5], 1)] + [tensor([3], 1)] * 2
    given = [changes.get(index, value) for index, value in enumerate(good)]
    with pytest.raises(KernelError, match=sentence) as caught:
        installed.plan_operator("batch_norm_grad", given, ctypes.c_float(1e-5))
    assert caught.value.status == INVALID_PARAMETER
    assert installed.plan_operator("batch_norm_grad", good, ctypes.c_float(1e-5)) == 0
