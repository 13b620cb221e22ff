"""The CUDA kernels of ScaledDotProductAttention and its gradient, emulated (emulated.py), by the tests of the
CPU's, which run here as they are, and by tests for what is CUDA's own.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulated import ADA, HOPPER, RANDOM, REVERSE, SMALL, TURING, WARP_AHEAD, Device, EmulatedLibrary
from native import INVALID_PARAMETER, KernelError
from test_attention import (  # noqa: F401
    Problem,
    normal,
    test_every_shape,
    test_hidden_keys_count_for_nothing_and_a_row_without_keys_is_nan,
    test_large_scores_do_not_overflow,
    test_masks_of_every_rank,
    test_nothing_to_do,
    test_query_key_and_value_in_one_tensor,
)


@pytest.mark.parametrize("visibility", ["all", "causal"])
@pytest.mark.parametrize("shape", [(2, 33, 33, 2, 12), (1, 7, 70, 3, 40)], ids=str)
def test_the_order_of_threads_changes_no_bit(library: EmulatedLibrary, shape, visibility: str) -> None:
    problem = Problem(shape, visibility, normal(shape[1], shape[2]))
    library.take_launches()
    expected = problem.run(library)
    assert library.take_launches() == ["Attention", "KeyAndValueGradients", "QueryGradients"]
    problem.assert_right(expected)
    for order, seed, offset in ((REVERSE, 0, 4), (RANDOM, 1, 8), (WARP_AHEAD, 2, 12)):
        library.use(SMALL, order=order, seed=seed)
        again = problem.run(library, offsets=dict.fromkeys(("query", "key", "y", "dy", "dkey"), offset))
        for name, array in expected.items():
            assert again[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("device", "size"), [(HOPPER, 600), (ADA, 200), (TURING, 300), (Device(1, 65536, 8192), 64)], ids=str
)
def test_large_heads_take_smaller_tiles(library: EmulatedLibrary, device: Device, size: int) -> None:
    library.use(device)
    for visibility in ("all", "causal"):
        problem = Problem((1, 20, 41, 1, size), visibility, None)
        problem.assert_right(problem.run(library))


def test_a_head_that_fits_no_block_is_refused(library: EmulatedLibrary) -> None:
    library.use(TURING)
    with pytest.raises(
        KernelError, match=r"must fit .* 65536 bytes on this device; got heads of 5000"
    ) as error:
        Problem((1, 1, 1, 1, 5000), "all", None).run(library)
    assert error.value.status == INVALID_PARAMETER


def test_a_nan_reaches_what_depends_on_it_and_nothing_else(library: EmulatedLibrary) -> None:
    problem = Problem((2, 40, 40, 2, 8), "causal", None)
    clean = problem.run(library)
    problem.query[1, 35, 1, 3] = np.nan
    results = problem.run(library)
    assert np.isnan(results["y"][1, 35, 1]).all() and np.isnan(results["log_sum_exp"][1, 1, 35])
    assert np.isnan(results["dquery"][1, 35, 1]).all() and np.isnan(results["dkey"][1, :36, 1]).all()
    for name, array in results.items():
        others = array.swapaxes(1, 2) if name != "log_sum_exp" else array
        cleaned = clean[name].swapaxes(1, 2) if name != "log_sum_exp" else clean[name]
        for head in ((0, 0), (0, 1), (1, 0)):
            assert others[head].tobytes() == cleaned[head].tobytes(), name
    kept = np.arange(40) != 35
    for name in ("y", "dquery"):
        assert (results[name][1, kept, 1] == clean[name][1, kept, 1]).all(), name
