"""The CUDA kernels of the operators that work row by row, emulated (emulated.py).

Against the references of the CPU's kernels, by tests of theirs, which run here as they are, and by tests for
what is CUDA's own.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import test_add_layer_norm as add_layer_norm
import test_cross_entropy as cross_entropy
from emulated import ADA, RANDOM, REVERSE, SMALL, WARP_AHEAD, Device, EmulatedLibrary
from oracle import DTYPES, FLOAT
from test_add_layer_norm import (  # noqa: F401
    test_a_mean_far_from_zero,
    test_every_number_of_normalised_axes,
    test_every_width,
    test_nan_with_a_full_payload_stays_nan,
    test_non_finite_values_stay_in_their_row,
)
from test_cross_entropy import (  # noqa: F401
    test_a_sure_and_right_row_keeps_the_digits_of_its_small_loss,
    test_every_number_of_classes,
    test_ignored_rows_have_neither_loss_nor_gradient,
    test_no_rows,
    test_non_finite_scores,
    test_scores_of_any_size,
)

DEVICES = ((Device(1, 65536, 65536), REVERSE), (ADA, RANDOM), (SMALL, WARP_AHEAD))


def test_every_kernel_is_run_and_no_other(library: EmulatedLibrary) -> None:
    library.take_launches()
    for dtype in DTYPES:
        add_layer_norm.run(library, add_layer_norm.make_inputs((5, 40), dtype))
    scores, labels = cross_entropy.make_inputs((5, 40))
    cross_entropy.assert_right(library, scores, labels)
    types = ("float", "__half", "__nv_bfloat16")
    expected = {*(f"AddLayerNorm<{name}>" for name in types), "CrossEntropy", "CrossEntropyGrad"}
    assert set(library.take_launches()) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_absent_and_shared_buffers_change_no_bit(library: EmulatedLibrary, dtype: np.dtype) -> None:
    # The last rows are too long for shared memory.
    for shape, x2, beta in itertools.product(
        ((70, 37), (300, 64), (3, 1100), (2, 30001)), *[(True, False)] * 2
    ):
        inputs = add_layer_norm.make_inputs(shape, dtype, x2=x2, beta=beta)
        everything = add_layer_norm.run(library, inputs)
        add_layer_norm.assert_right(everything, inputs)
        for others in ((), ("mean",), ("rstd", "x"), ("mean", "rstd")):
            results = add_layer_norm.run(library, inputs, ("y", *others))
            add_layer_norm.assert_same_bits(results, everything)
        for source in ("x1", "x2") if x2 else ("x1",):
            for output in ("y", "x"):
                results = add_layer_norm.run(library, inputs, in_place={output: source})
                add_layer_norm.assert_same_bits(results, everything)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_may_begin_anywhere(library: EmulatedLibrary, dtype: np.dtype) -> None:
    for cols in (9, 64, 1003, 30000):
        inputs = add_layer_norm.make_inputs((3, cols), dtype)
        for shift, other in itertools.product((0, 1, 3), (0, 1)):
            offsets = {name: shift * dtype.itemsize for name in ("x1", "x2", "y")}
            offsets |= {"x": (shift + other) * dtype.itemsize, "gamma": 4, "beta": dtype.itemsize}
            add_layer_norm.assert_right(add_layer_norm.run(library, inputs, offsets=offsets), inputs)


def test_scores_may_begin_anywhere(library: EmulatedLibrary) -> None:
    scores, labels = cross_entropy.make_inputs((5, 77))
    expected = cross_entropy.forward(library, scores, labels)
    gradient = cross_entropy.backward(library, *expected[:1], scores, labels, expected[1])
    for shift, other in itertools.product((0, 4, 12), (0, 8)):
        offsets = {"scores": shift, "dscores": shift + other, "labels": 8, "row_loss": 4}
        results = cross_entropy.forward(library, scores, labels, offsets=offsets)
        for result, array in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, array, rtol=1e-6)
        again = cross_entropy.backward(library, *expected[:1], scores, labels, expected[1], offsets=offsets)
        assert again.tobytes() == gradient.tobytes()


def test_neither_the_grid_nor_the_order_of_threads_changes_a_bit(library: EmulatedLibrary) -> None:
    for cols in (5, 100, 700, 5000):
        inputs = add_layer_norm.make_inputs((40, cols))
        scores, labels = cross_entropy.make_inputs((40, cols))
        normalised = add_layer_norm.run(library, inputs)
        row_loss, log_sum_exp = cross_entropy.forward(library, scores, labels)
        gradient = cross_entropy.backward(library, row_loss, scores, labels, log_sum_exp)
        for device, order in DEVICES:
            library.use(device, order=order)
            add_layer_norm.assert_same_bits(add_layer_norm.run(library, inputs), normalised)
            again = cross_entropy.forward(library, scores, labels)
            assert [array.tobytes() for array in again] == [row_loss.tobytes(), log_sum_exp.tobytes()]
            options = {"in_place": {"dscores": "scores"}}
            again = cross_entropy.backward(library, row_loss, scores, labels, log_sum_exp, **options)
            assert again.tobytes() == gradient.tobytes()
        library.use(SMALL)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("wrong", [9, -1, -101, 2**31 - 1])
def test_a_label_out_of_range_makes_its_row_nan(library: EmulatedLibrary, dtype: type, wrong: int) -> None:
    scores, labels = cross_entropy.make_inputs((4, 9), dtype)
    clean, log_sum_exp = cross_entropy.forward(library, scores, labels)
    gradient = cross_entropy.backward(library, np.ones(4, FLOAT), scores, labels, log_sum_exp)
    labels[2] = wrong
    row_loss, log_sum_exp = cross_entropy.forward(library, scores, labels)
    dscores = cross_entropy.backward(library, np.ones(4, FLOAT), scores, labels, log_sum_exp)
    assert np.isnan(row_loss[2]) and np.isnan(dscores[2]).all()
    others = [0, 1, 3]
    assert row_loss[others].tobytes() == clean[others].tobytes()
    assert dscores[others].tobytes() == gradient[others].tobytes()
