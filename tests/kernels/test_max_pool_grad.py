"""MaxPoolGrad's CPU kernel against windows that are looked through one by one in Python.

Without PyTorch, which the sanitizers' build does not run beside; tests/gradient/test_against_pytorch.py asks
it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from native import INVALID_PARAMETER, KernelError, Library, Threads, tensor


class Window(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_int64 * 2),
        ("strides", ctypes.c_int64 * 2),
        ("pads", ctypes.c_int64 * 4),
        ("ceil_mode", ctypes.c_int32),
    ]


def window(
    kernel: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, ...] = (0, 0, 0, 0),
    ceil_mode: int = 0,
) -> Window:
    return Window(
        (ctypes.c_int64 * 2)(*kernel), (ctypes.c_int64 * 2)(*strides), (ctypes.c_int64 * 4)(*pads), ceil_mode
    )


def max_pool_grad(installed: Library, dy: np.ndarray, x: np.ndarray, seen: Window, **options) -> np.ndarray:
    arguments = ({"dy": dy, "x": x}, {"dx": (x.shape, x.dtype)}, ctypes.byref(seen))
    return installed.run_operator("max_pool_grad", *arguments, **options)["dx"]


# Multiples of a quarter: sums of a few are exact in any order, so that bits can be compared; and many ties.
def quarters(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-8, 8, shape).astype(np.float32) / 4


def count_of(size: int, kernel: int, stride: int, pad: int, ceil_mode: bool) -> int:
    """The windows on an axis that begin before the padding behind it, as PyTorch counts them."""
    begins = range(-pad, size, stride)
    return sum(begin + kernel <= size + pad or (ceil_mode and begin < size) for begin in begins)


def exact(
    dy: np.ndarray, x: np.ndarray, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]
) -> np.ndarray:
    dx = np.zeros(x.shape)
    for n, c, i, j in np.ndindex(dy.shape):
        rows = range(i * strides[0] - pads[0], i * strides[0] - pads[0] + kernel[0])
        cols = range(j * strides[1] - pads[1], j * strides[1] - pads[1] + kernel[1])
        seen = [(r, q) for r in rows for q in cols if 0 <= r < x.shape[2] and 0 <= q < x.shape[3]]
        nan = [place for place in seen if np.isnan(x[(n, c, *place)])]
        place = nan[-1] if nan else max(seen, key=lambda place: x[(n, c, *place)])
        dx[(n, c, *place)] += dy[n, c, i, j]
    return dx.astype(np.float32)


CASES = {
    "2x2": ((5, 3, 8, 6), (2, 2), (2, 2), (0, 0), False),
    "rest at the end": ((2, 3, 9, 7), (2, 2), (2, 2), (0, 0), False),
    "ceil": ((2, 3, 9, 7), (2, 2), (2, 2), (0, 0), True),
    "overlapping": ((2, 3, 10, 11), (3, 3), (1, 1), (0, 0), False),
    "padded": ((2, 3, 9, 8), (3, 3), (2, 2), (1, 1), False),
    "padded ceil": ((2, 3, 9, 8), (3, 2), (2, 3), (1, 1), True),
    "gaps": ((2, 3, 9, 8), (2, 1), (3, 4), (0, 0), False),
    "many planes": ((9, 32, 14, 14), (2, 2), (2, 2), (0, 0), False),
    "large plane": ((1, 2, 60, 90), (3, 3), (2, 2), (1, 1), False),
    "2x2, rows longer than a vector": ((2, 3, 6, 75), (2, 2), (2, 2), (0, 0), False),
    "2x2 padded": ((2, 3, 8, 24), (2, 2), (2, 2), (1, 1), True),
    "2x2 of two in a row": ((3, 5, 6, 5), (2, 2), (2, 2), (0, 0), False),
    "2x2 overlapping": ((2, 3, 7, 22), (2, 2), (1, 2), (0, 0), False),
    "every other element": ((2, 3, 7, 41), (1, 1), (2, 2), (0, 0), False),
    "several windows at each border": ((2, 3, 9, 20), (5, 5), (1, 1), (2, 2), False),
    "threes": ((2, 3, 9, 64), (3, 3), (3, 3), (0, 1), False),
}


@pytest.mark.parametrize("values", ["ties", "NaN", "infinite"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_window(library: Library, case: tuple, values: str) -> None:
    shape, kernel, strides, pads, ceil_mode = case
    x = quarters(*shape)
    if values == "NaN":
        x[np.random.default_rng(1).random(shape) < 0.3] = np.nan
    elif values == "infinite":
        x[:, 0], x[:, 1] = -np.inf, np.inf
    seen = window(kernel, strides, (*pads, *pads), ceil_mode)
    windows = [
        count_of(*numbers, ceil_mode) for numbers in zip(shape[2:], kernel, strides, pads, strict=True)
    ]
    dy = quarters(*shape[:2], *windows)
    dy[dy == 0.5] = -0.0  # as a sum that began with 0, it gives 0
    expected = exact(dy, x, kernel, strides, pads)
    for options in ({}, {"threads": Threads(3)}, {"offsets": {"x": 4, "dy": 8, "dx": 12}}):
        dx = max_pool_grad(library, dy, x, seen, **options)
        assert dx.tobytes() == expected.tobytes()


def test_the_same_bits_on_threads_where_sums_are_rounded(installed: Library) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 30, 20, 21)).astype(np.float32)
    dy = rng.standard_normal((7, 30, 18, 19)).astype(np.float32)
    seen = window((3, 3), (1, 1))
    alone = max_pool_grad(installed, dy, x, seen)
    for seed in range(3):
        again = max_pool_grad(installed, dy, x, seen, threads=Threads(3, seed=seed))
        assert again.tobytes() == alone.tobytes()


def test_a_nan_gradient_stays_at_its_place(installed: Library) -> None:
    x, dy = quarters(1, 1, 4, 4), np.ones((1, 1, 2, 2), np.float32)
    x[0, 0, :2, :2], dy[0, 0, 0, 0] = [[0, 0], [3, 3]], np.nan
    dx = max_pool_grad(installed, dy, x, window((2, 2), (2, 2)))
    assert np.argwhere(np.isnan(dx)).tolist() == [[0, 0, 1, 0]]


def test_uneven_padding_and_windows_that_see_nothing(installed: Library) -> None:
    x = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2)
    dy = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 2, 4)
    dx = max_pool_grad(installed, dy, x, window((1, 1), (1, 1), (0, 1, 0, 1)))
    assert dx.tolist() == [[[[2, 3], [6, 7]]]]


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 1, 4), (2, 3, 0, 4)], ids=str)
def test_empty(installed: Library, shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    dy = np.ones((*shape[:2], shape[2] // 2, 2), np.float32)
    dx = max_pool_grad(installed, dy, x, window((2, 2), (2, 2)))
    assert dx.sum() == dy.sum()


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (
            {"dy": tensor([2, 3, 4, 5], 1)},
            r"dy must be \[2,3,4,4\], the shape of MaxPool\(x\) with x \[2,3,9,8\]",
        ),
        ({"dy": tensor([2, 3, 5, 4], 1)}, r"dy must be \[2,3,4,4\], .* got \[2,3,5,4\]"),
        ({"dy": tensor([2, 3, 4], 1)}, r"dy must be \[2,3,4,4\], .* got \[2,3,4\]"),
        ({"dy": tensor([2, 3, 4, 4], 10)}, "dy must be float; got float16"),
        ({"x": tensor([2, 3, 9], 1)}, r"x must be \[batch,channels,height,width\]; got \[2,3,9\]"),
        ({"x": tensor([2, 3, 9, 8], 11)}, "x must be float; got ONNX data type 11"),
        ({"x": tensor([2, 3, 2**16, 2**15], 1)}, r"x must have fewer than 2\^31 elements in a channel; got "),
        ({"dx": tensor([2, 3, 9, 9], 1)}, r"dx must have the shape of x, \[2,3,9,8\]; got \[2,3,9,9\]"),
        ({"window": window((0, 2), (2, 2))}, "kernel_shape must be at least 1 and at most 2\\^30; got 0"),
        ({"window": window((2, 2), (2, 0))}, "strides must be at least 1 .* got 0"),
        ({"window": window((2, 2), (2, 2), (0, 0, -1, 0))}, "pads must be at least 0 .* got -1"),
    ],
)
def test_what_is_refused(installed: Library, changes: dict, sentence: str) -> None:
    def plan(**changed) -> int:
        good = {"dy": tensor([2, 3, 4, 4], 1), "x": tensor([2, 3, 9, 8], 1), "dx": tensor([2, 3, 9, 8], 1)}
        seen = changed.pop("window", window((2, 2), (2, 2)))
        return installed.plan_operator("max_pool_grad", [*(good | changed).values()], ctypes.byref(seen))

    with pytest.raises(KernelError, match=sentence) as caught:
        plan(**changes)
    assert caught.value.status == INVALID_PARAMETER
    assert plan() == 0
    assert plan(dy=tensor([2, 3, 5, 4], 1), window=window((2, 2), (2, 2), ceil_mode=1)) == 0
