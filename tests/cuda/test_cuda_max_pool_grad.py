"""MaxPoolGrad's CUDA kernels, emulated (emulated.py), by the tests of the CPU's, which run here as they are,
and by a test for what is CUDA's own.
"""

from __future__ import annotations

import numpy as np
from emulated import ADA, RANDOM, REVERSE, Device, EmulatedLibrary
from test_max_pool_grad import (  # noqa: F401
    max_pool_grad,
    test_a_nan_gradient_stays_at_its_place,
    test_empty,
    test_every_window,
    test_uneven_padding_and_windows_that_see_nothing,
    window,
)


def test_neither_the_grid_nor_the_order_of_threads_changes_a_bit(library: EmulatedLibrary) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 20, 21)).astype(np.float32)
    dy = rng.standard_normal((2, 3, 18, 19)).astype(np.float32)
    seen = window((3, 3), (1, 1))
    library.take_launches()
    expected = max_pool_grad(library, dy, x, seen)
    assert library.take_launches() == ["FindMaxima", "AddWindows"]
    for device, order in ((Device(1, 65536, 65536), REVERSE), (ADA, RANDOM)):
        library.use(device, order=order)
        assert max_pool_grad(library, dy, x, seen).tobytes() == expected.tobytes()
