"""EmbeddingGrad's CPU kernel against float64 sums.

The bound, with u = 2^-24: a float32 sum of n terms has n - 1 roundings, each of at most u * sum|term|; many
of them add up like a random walk, of which three times the root of the number is allowed.
"""

from __future__ import annotations

import numpy as np
import pytest
from native import INVALID_PARAMETER, NULL_POINTER, KernelError, Library, Threads, tensor
from oracle import FLOAT, FLOAT32_ROUNDOFF


def run(installed: Library, dy: np.ndarray, indices: np.ndarray, table: np.ndarray, **options) -> np.ndarray:
    inputs = {"dy": dy, "indices": indices, "table": table}
    return installed.run_operator("embedding_grad", inputs, {"dtable": (table.shape, FLOAT)}, **options)[
        "dtable"
    ]


def make_inputs(
    indices_shape: tuple[int, ...], table_shape: tuple[int, ...], dtype: type = np.int64, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = table_shape[0]
    indices = np.asarray(rng.integers(-rows, rows, indices_shape)).astype(dtype)
    dy = rng.standard_normal((*indices_shape, *table_shape[1:]), dtype=np.float32)
    # Of the table, nothing but the shape may be read.
    return dy, indices, np.full(table_shape, np.nan, np.float32)


def assert_right(dtable: np.ndarray, dy: np.ndarray, indices: np.ndarray) -> None:
    expected, magnitude = np.zeros((2, *dtable.shape))
    count = np.zeros(len(dtable))
    np.add.at(expected, indices, dy.astype(np.float64))
    np.add.at(magnitude, indices, np.abs(dy.astype(np.float64)))
    np.add.at(count, indices, 1)
    roundings = np.minimum(count - 1, 3 * np.sqrt(count)).clip(0).reshape(-1, *[1] * (dtable.ndim - 1))
    assert (np.abs(dtable - expected) <= roundings * FLOAT32_ROUNDOFF * magnitude).all()
    assert not dtable[count == 0].any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "indices_shape, table_shape",
    [
        ((7,), (3, 5)),
        ((), (4, 6)),
        ((2, 3, 4), (50, 2, 3)),
        ((100,), (9,)),
        ((0,), (4, 6)),
        ((5,), (4, 0)),
        ((0, 3), (0, 6)),
        ((300,), (1, 129)),
        ((64, 8), (5000, 300)),
    ],
    ids=str,
)
def test_shapes(installed: Library, dtype: type, indices_shape, table_shape) -> None:
    dy, indices, table = make_inputs(indices_shape, table_shape, dtype)
    assert_right(run(installed, dy, indices, table), dy, indices)


def test_the_same_bits_on_any_number_of_threads(installed: Library) -> None:
    dy, indices, table = make_inputs((3000,), (5000, 300))
    indices[::3] = 4  # a row that gets many
    alone = run(installed, dy, indices, table)
    assert_right(alone, dy, indices)
    in_order = np.zeros(300, np.float32)
    for row in dy[(indices == 4) | (indices == 4 - 5000)]:
        in_order += row
    assert alone[4].tobytes() == in_order.tobytes()
    for count in (2, 3, 8):
        threads = Threads(count, seed=count)
        assert run(installed, dy, indices, table, threads=threads).tobytes() == alone.tobytes()
        assert threads.task_counts == [9]
    assert run(installed, dy, indices, table, offsets={"dy": 4, "dtable": 12}).tobytes() == alone.tobytes()


def test_non_finite_values_reach_their_row_alone(installed: Library) -> None:
    dy, indices, table = make_inputs((40,), (10, 20))
    clean = run(installed, dy, indices, table)
    dy[7, 3] = np.nan
    dtable = run(installed, dy, indices, table)
    assert np.isnan(dtable[indices[7], 3])
    dtable[indices[7], 3] = clean[indices[7], 3]
    assert dtable.tobytes() == clean.tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("wrong", [5, -6, 2**31 - 1, -(2**31)])
def test_indices_out_of_range_are_refused(installed: Library, dtype: type, wrong: int) -> None:
    dy, indices, table = make_inputs((4,), (5, 3), dtype)
    indices[2] = wrong
    sentence = f"indices must be at least -5 and below 5, the number of rows of table; got {wrong} at place 2"
    with pytest.raises(KernelError) as caught:
        run(installed, dy, indices, table)
    assert (caught.value.status, str(caught.value)) == (INVALID_PARAMETER, sentence)


REFUSED = [
    ({"indices": tensor([8], 1)}, INVALID_PARAMETER, "indices must be int32 or int64; got float"),
    ({"table": tensor([], 1)}, INVALID_PARAMETER, "table must have rank 1 to 8; got rank 0"),
    ({"table": tensor([9, 4], 10)}, INVALID_PARAMETER, "table must be float; got float16"),
    (
        {"dy": tensor([8, 5], 1)},
        INVALID_PARAMETER,
        "dy must be [8,4], the shape of indices and that of a row of table; got [8,5]",
    ),
    (
        {"indices": tensor([1] * 8, 7)},
        INVALID_PARAMETER,
        "dy must be [1,1,1,1,1,1,1,1,4], the shape of indices and that of a row of table; got [8,4]",
    ),
    (
        {"dtable": tensor([9, 5], 1)},
        INVALID_PARAMETER,
        "dtable must have the shape of table, [9,4]; got [9,5]",
    ),
    ({"dtable": None}, NULL_POINTER, "dtable is required; got a null pointer"),
]


@pytest.mark.parametrize(("changes", "status", "sentence"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_is_refused(installed: Library, changes, status: int, sentence: str) -> None:
    tensors = {
        "dy": tensor([8, 4], 1),
        "indices": tensor([8], 7),
        "table": tensor([9, 4], 1),
        "dtable": tensor([9, 4], 1),
    }
    installed.plan_operator("embedding_grad", list(tensors.values()))
    with pytest.raises(KernelError) as caught:
        installed.plan_operator("embedding_grad", list((tensors | changes).values()))
    assert (caught.value.status, str(caught.value)) == (status, sentence)
