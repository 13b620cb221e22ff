"""ReluGrad's CPU kernel: exact, in every type and for every kind of number."""

from __future__ import annotations

import numpy as np
import pytest
from native import INVALID_PARAMETER, KernelError, Library, Threads, tensor
from oracle import DTYPES, FLOAT


def relu_grad(installed: Library, dy: np.ndarray, y: np.ndarray, **options) -> np.ndarray:
    return installed.run_operator("relu_grad", {"dy": dy, "y": y}, {"dx": (dy.shape, dy.dtype)}, **options)[
        "dx"
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern(installed: Library, dtype: np.dtype) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32)
    y = (patterns << 16).view(np.float32) if dtype == FLOAT else patterns.astype(np.uint16).view(dtype)
    dy = np.random.default_rng(0).standard_normal(1 << 16).astype(dtype)
    expected = np.where(y.astype(np.float32) <= 0, np.zeros_like(dy), dy)
    alone = relu_grad(installed, dy, y)
    assert alone.tobytes() == expected.tobytes()
    assert relu_grad(installed, y, np.ones_like(y)).tobytes() == y.tobytes()
    for options in ({"threads": Threads(3)}, {"in_place": {"dx": "dy"}}, {"in_place": {"dx": "y"}}):
        assert relu_grad(installed, dy, y, **options).tobytes() == expected.tobytes()
    assert relu_grad(installed, dy[:0], y[:0]).size == 0


def test_what_is_refused(installed: Library) -> None:
    dy, y = tensor([4, 6], 1), tensor([4, 5], 1)
    with pytest.raises(KernelError, match=r"y must have the shape of dy, \[4,6\]; got \[4,5\]") as caught:
        installed.plan_operator("relu_grad", [dy, y, dy])
    assert caught.value.status == INVALID_PARAMETER
    with pytest.raises(KernelError, match="dy must be float, float16 or bfloat16; got int64"):
        installed.plan_operator("relu_grad", [tensor([4], 7)] * 3)
