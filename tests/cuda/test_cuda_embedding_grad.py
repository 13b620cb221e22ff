"""EmbeddingGrad's CUDA kernel, emulated (emulated.py), by the tests of the CPU's, which run here as they are,
and by tests for what is CUDA's own.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulated import ADA, RANDOM, REVERSE, SMALL, WARP_AHEAD, Device, EmulatedLibrary
from oracle import FLOAT
from test_embedding_grad import (  # noqa: F401
    assert_right,
    make_inputs,
    run,
    test_non_finite_values_reach_their_row_alone,
    test_shapes,
)


@pytest.mark.parametrize("table_shape", [(7, 1), (50, 3), (9, 64), (40, 130), (5000, 20)], ids=str)
def test_the_order_of_the_sums_is_that_of_the_indices(library: EmulatedLibrary, table_shape) -> None:
    """On any device and in any order of the threads: bits as of one addition after the other."""
    dy, indices, table = make_inputs((2500,), table_shape)
    indices[::3] = 4  # a row that gets many
    expected = np.zeros(table_shape, FLOAT)
    for index, row in zip(indices, dy, strict=True):
        expected[index] += row
    library.take_launches()
    for device, order in (
        *((SMALL, RANDOM), (SMALL, WARP_AHEAD), (ADA, REVERSE)),
        (Device(1, 65536, 65536), RANDOM),
    ):
        library.use(device, order=order)
        options = {"offsets": {"dy": 4, "dtable": 12, "indices": 8}}
        assert run(library, dy, indices, table, **options).tobytes() == expected.tobytes()
    assert set(library.take_launches()) == {"EmbeddingGrad<long>"}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("wrong", [5, -6, 2**31 - 1, -(2**31)])
def test_an_index_out_of_range_is_passed_over(library: EmulatedLibrary, dtype: type, wrong: int) -> None:
    dy, indices, table = make_inputs((40,), (5, 3), dtype)
    indices[2] = wrong
    others = np.arange(40) != 2
    expected = run(library, dy[others], indices[others], table)
    assert run(library, dy, indices, table).tobytes() == expected.tobytes()
