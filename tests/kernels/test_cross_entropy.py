"""CrossEntropy's CPU kernels, forward and backward, against float64.

The bounds, with u = 2^-24, M the row's largest |score|, n its number of classes: scores - largest is off by
2M * u, and so is an exponential of it relatively, besides a few roundings of its own; a sum of n positive
terms by another sqrt(n) + 1 of them; storing log_sum_exp rounds once more. A loss that is small beside M
keeps its digits as far as scores - largest does. exp(scores - log_sum_exp) is off relatively by what its
exponent is off absolutely.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native import INVALID_PARAMETER, NULL_POINTER, KernelError, Library, Threads, tensor
from oracle import FLOAT, FLOAT32_ROUNDOFF

IGNORE_INDEX = ctypes.c_int64(-100)


def forward(
    library: Library, scores: np.ndarray, labels: np.ndarray, ignore_index=IGNORE_INDEX, **options
) -> tuple[np.ndarray, np.ndarray]:
    outputs = {"row_loss": (labels.shape, FLOAT), "log_sum_exp": (labels.shape, FLOAT)}
    inputs = {"scores": scores, "labels": labels}
    results = library.run_operator("cross_entropy", inputs, outputs, ignore_index, **options)
    return results["row_loss"], results["log_sum_exp"]


def backward(
    library: Library,
    drow_loss: np.ndarray,
    scores: np.ndarray,
    labels: np.ndarray,
    log_sum_exp: np.ndarray,
    ignore_index=IGNORE_INDEX,
    **options,
) -> np.ndarray:
    inputs = {"drow_loss": drow_loss, "scores": scores, "labels": labels, "log_sum_exp": log_sum_exp}
    outputs = {"dscores": (scores.shape, FLOAT)}
    return library.run_operator("cross_entropy_grad", inputs, outputs, ignore_index, **options)["dscores"]


def make_inputs(
    shape: tuple[int, ...], dtype: type = np.int64, *, scale: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = scale * rng.standard_normal(shape, dtype=np.float32)
    return scores, np.asarray(rng.integers(0, shape[-1], shape[:-1])).astype(dtype)


def assert_right(library: Library, scores: np.ndarray, labels: np.ndarray) -> None:
    row_loss, log_sum_exp = forward(library, scores, labels)
    wide = scores.astype(np.float64)
    largest = wide.max(axis=-1, keepdims=True)
    exact_log_sum_exp = np.log(np.exp(wide - largest).sum(axis=-1)) + largest[..., 0]
    at_label = np.take_along_axis(wide, labels.astype(np.int64)[..., None], -1)[..., 0]
    size = np.abs(wide).max(axis=-1)
    u = FLOAT32_ROUNDOFF
    bound = u * (2 * size + np.sqrt(scores.shape[-1]) + 8)
    assert (np.abs(log_sum_exp - exact_log_sum_exp) <= bound + u * np.abs(exact_log_sum_exp)).all()
    assert (np.abs(row_loss - (exact_log_sum_exp - at_label)) <= bound + u * np.abs(row_loss)).all()

    drow_loss = np.random.default_rng(1).standard_normal(labels.shape, dtype=np.float32)
    dscores = backward(library, drow_loss, scores, labels, log_sum_exp)
    probabilities = np.exp(wide - exact_log_sum_exp[..., None])
    is_label = np.arange(scores.shape[-1]) == labels[..., None]
    exact = drow_loss[..., None] * (probabilities - is_label)
    exponent = (bound + u * np.abs(exact_log_sum_exp))[..., None] + u * (
        np.abs(wide - largest) + 2 * size[..., None]
    )
    bound = (
        np.abs(drow_loss)[..., None] * probabilities * (exponent + 8 * u) + 4 * u * np.abs(exact) + 2.0**-148
    )
    assert (np.abs(dscores - exact) <= bound).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_every_number_of_classes(library: Library, dtype: type) -> None:
    for classes in [*range(1, 35), 63, 64, 65, 1000, 50257]:
        for shape in ((classes,), (2, 3, classes)):
            assert_right(library, *make_inputs(shape, dtype, seed=classes))


@pytest.mark.parametrize("scale", [1e-3, 10.0, 50.0])
def test_scores_of_any_size(library: Library, scale: float) -> None:
    assert_right(library, *make_inputs((50, 100), scale=scale))


def test_a_sure_and_right_row_keeps_the_digits_of_its_small_loss(library: Library) -> None:
    scores = np.zeros((1, 3), np.float32)
    scores[0, 1] = 20.0
    row_loss, log_sum_exp = forward(library, scores, np.array([1]))
    exact = np.log1p(2 * np.exp(-20.0))
    assert exact < 5e-9 and row_loss[0] == 0 or abs(row_loss[0] - exact) < 1e-6 * exact
    scores[0, 1] = 8.0
    row_loss, log_sum_exp = forward(library, scores, np.array([1]))
    exact = np.log1p(2 * np.exp(-8.0))
    assert abs(row_loss[0] - exact) <= 2 * FLOAT32_ROUNDOFF
    dscores = backward(library, np.ones(1, np.float32), scores, np.array([1]), log_sum_exp)
    assert abs(dscores.sum()) <= 2 * FLOAT32_ROUNDOFF * 8


def test_no_rows(library: Library) -> None:
    scores, labels = make_inputs((0, 5))
    assert forward(library, scores, labels)[0].shape == (0,)
    assert backward(library, labels.astype(FLOAT), scores, labels, labels.astype(FLOAT)).shape == (0, 5)


@pytest.mark.parametrize("ignore_index", [-100, 3, -1])
def test_ignored_rows_have_neither_loss_nor_gradient(library: Library, ignore_index: int) -> None:
    scores, labels = make_inputs((40, 9))
    kept = labels != ignore_index
    labels[::4], kept[::4] = ignore_index, False
    scores[0] = np.nan
    number = ctypes.c_int64(ignore_index)
    row_loss, log_sum_exp = forward(library, scores, labels, number)
    assert not row_loss[~kept].any() and row_loss[kept].all()
    dscores = backward(library, np.ones(40, np.float32), scores, labels, log_sum_exp, number)
    assert not dscores[~kept].any() and dscores[kept].all()


def test_threads_alignment_and_shared_buffers_change_no_bit(library: Library) -> None:
    scores, labels = make_inputs((500, 300))
    row_loss, log_sum_exp = forward(library, scores, labels)
    drow_loss = np.random.default_rng(1).standard_normal(500, dtype=np.float32)
    dscores = backward(library, drow_loss, scores, labels, log_sum_exp)
    for options in (
        {"threads": Threads(2)},
        {"threads": Threads(5, seed=3)},
        {"offsets": {"scores": 4, "row_loss": 8, "dscores": 12}},
        {"in_place": {"dscores": "scores"}},
    ):
        if "in_place" not in options:
            again = forward(library, scores, labels, **options)
            assert [array.tobytes() for array in again] == [row_loss.tobytes(), log_sum_exp.tobytes()]
        assert (
            backward(library, drow_loss, scores, labels, log_sum_exp, **options).tobytes()
            == dscores.tobytes()
        )


def test_non_finite_scores(library: Library) -> None:
    for classes in (5, 64, 77):
        scores, labels = make_inputs((4, classes))
        clean = forward(library, scores, labels)
        for where in (0, classes - 1):
            for value in (np.nan, np.inf, -np.inf):
                bad = scores.copy()
                bad[1, where] = value
                labels[1] = 2
                row_loss, log_sum_exp = forward(library, bad, labels)
                dscores = backward(library, np.ones(4, np.float32), bad, labels, log_sum_exp)
                if value == -np.inf:  # a class that cannot be: its probability is 0
                    assert np.isfinite(row_loss[1]) and dscores[1, where] == 0
                else:
                    assert np.isnan(row_loss[1]) and np.isnan(dscores[1]).any()
                others = [0, 2, 3]
                assert row_loss[others].tobytes() == clean[0][others].tobytes()
                assert np.isfinite(dscores[others]).all()
    nothing = np.full((1, 6), -np.inf, np.float32)
    assert np.isnan(forward(library, nothing, np.array([0]))[0]).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("wrong", [9, -1, -101, 2**31 - 1])
def test_labels_out_of_range_are_refused(installed: Library, dtype: type, wrong: int) -> None:
    scores, labels = make_inputs((4, 9), dtype)
    row_values = np.zeros(4, np.float32)
    labels[2] = wrong
    sentence = (
        "labels must be at least 0 and below 9, the number of classes, or -100, the ignore_index; "
        f"got {wrong} at place 2"
    )
    for call in (
        lambda: forward(installed, scores, labels),
        lambda: backward(installed, row_values, scores, labels, row_values),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert (caught.value.status, str(caught.value)) == (INVALID_PARAMETER, sentence)


REFUSED = [
    ({"scores": tensor([4, 9], 10)}, INVALID_PARAMETER, "scores must be float; got float16"),
    (
        {"scores": tensor([4, 0], 1)},
        INVALID_PARAMETER,
        "scores must have at least one class, its last axis; got [4,0]",
    ),
    ({"labels": tensor([4], 1)}, INVALID_PARAMETER, "labels must be int32 or int64; got float"),
    (
        {"labels": tensor([4, 1], 7)},
        INVALID_PARAMETER,
        "labels must be [4], scores [4,9] without the last axis; got [4,1]",
    ),
    (
        {"drow_loss": tensor([3], 1)},
        INVALID_PARAMETER,
        "drow_loss must have the shape of labels, [4]; got [3]",
    ),
    ({"log_sum_exp": None}, NULL_POINTER, "log_sum_exp is required; got a null pointer"),
    (
        {"dscores": tensor([4, 8], 1)},
        INVALID_PARAMETER,
        "dscores must have the shape of scores, [4,9]; got [4,8]",
    ),
]


@pytest.mark.parametrize(("changes", "status", "sentence"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_is_refused(installed: Library, changes, status: int, sentence: str) -> None:
    tensors = {
        "drow_loss": tensor([4], 1),
        "scores": tensor([4, 9], 1),
        "labels": tensor([4], 7),
        "log_sum_exp": tensor([4], 1),
        "dscores": tensor([4, 9], 1),
    }
    installed.plan_operator("cross_entropy_grad", list(tensors.values()), IGNORE_INDEX)
    with pytest.raises(KernelError) as caught:
        installed.plan_operator("cross_entropy_grad", list((tensors | changes).values()), IGNORE_INDEX)
    assert (caught.value.status, str(caught.value)) == (status, sentence)
