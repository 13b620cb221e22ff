"""BatchNormGrad's CUDA kernels, emulated (emulated.py), by the tests of the CPU's, which run here as they
are, and by tests for what is CUDA's own.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulated import ADA, RANDOM, REVERSE, SMALL, WARP_AHEAD, Device, EmulatedLibrary
from test_batch_norm_grad import (  # noqa: F401
    EPS,
    SHAPES,
    batch_norm_grad,
    exact,
    magnitudes,
    operands,
    test_a_constant_channel,
    test_against_float64,
    test_empty,
    test_nan_and_infinity_stay_in_their_channel,
)


@pytest.mark.parametrize("shape", [*SHAPES, (3, 40, 8, 8), (5, 2, 64, 64)], ids=str)
def test_the_order_of_threads_and_shared_buffers_change_no_bit(library: EmulatedLibrary, shape) -> None:
    dy, x, scale = operands(shape)
    expected = batch_norm_grad(library, dy, x, scale)
    for order, seed, options in (
        (REVERSE, 0, {"in_place": {"dx": "dy"}}),
        (RANDOM, 1, {"in_place": {"dx": "x"}}),
        (WARP_AHEAD, 2, {"offsets": {"scale": 4, "dscale": 8, "dbias": 12}}),
    ):
        library.use(SMALL, order=order, seed=seed)
        again = batch_norm_grad(library, dy, x, scale, **options)
        for name, array in expected.items():
            assert again[name].tobytes() == array.tobytes(), (name, options)


@pytest.mark.parametrize("shape", [(4, 3, 64, 48), (9, 2, 33, 31)], ids=str)
def test_every_device_and_alignment(library: EmulatedLibrary, shape: tuple[int, ...]) -> None:
    """Devices cut the channels into other pieces; misaligned tensors are read element by element."""
    dy, x, scale = operands(shape, offset=300)
    expected = exact(dy, x, scale, 1e-5)
    library.take_launches()
    for device in (Device(1, 65536, 65536), ADA):
        for offset in (0, 4):
            library.use(device)
            actual = batch_norm_grad(library, dy, x, scale, offsets={"dx": offset})
            for name, bound in magnitudes(dy, x, scale, 1e-5).items():
                assert (np.abs(actual[name] - expected[name]) <= 16 * EPS * bound).all(), name
    whole = shape[2] * shape[3] % 4 == 0
    names = {f"{kernel}<1>" for kernel in ("SumPieces", "WriteGradients")}
    names |= {f"{kernel}<4>" for kernel in ("SumPieces", "WriteGradients") if whole}
    assert set(library.take_launches()) == names
