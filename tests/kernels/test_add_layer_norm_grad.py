"""AddLayerNormGrad's CPU kernel against the float64 oracle: every type, instruction set, width, presence
and alignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from native import OUTPUTS, Library, Threads
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, Inputs, assert_matches, make_inputs

TYPE_PAIRS = [(FLOAT, FLOAT), (FLOAT16, FLOAT16), (FLOAT16, FLOAT), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT)]
TYPE_IDS = [f"{dtype}-gamma_{gamma}" for dtype, gamma in TYPE_PAIRS]

# Around the groups of every instruction set (8, 16 and 32 elements) and their pairs, around the change of
# what is kept between the sweeps (1024), and around the longest rows that keep all of it (16384 floats, 32768
# 16-bit elements).
COLS = [
    *range(1, 36),
    *(63, 64, 65, 100, 127, 128, 129, 512, 513),
    *(768, 769, 1023, 1024, 1025, 1600),
    *(16383, 16384, 16385, 32768, 32769, 65537),
]


def assert_same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in actual.items():
        assert array.tobytes() == expected[name].tobytes(), f"{name} differs"


@pytest.mark.parametrize(("dtype", "gamma_dtype"), TYPE_PAIRS, ids=TYPE_IDS)
def test_every_width(library: Library, dtype: np.dtype, gamma_dtype: np.dtype) -> None:
    for cols in COLS:
        inputs = make_inputs([11 if cols < 2000 else 3, cols], dtype, gamma_dtype=gamma_dtype, seed=cols)
        assert_matches(inputs, **library.run(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_mean_far_from_zero_does_not_leak_in_from_padding(library: Library, dtype: np.dtype) -> None:
    for cols in (3, 5, 7, 17, 100, 769, 1536, 1600):
        inputs = make_inputs([9, cols], dtype, x_mean=50.0, seed=cols)
        assert_matches(inputs, **library.run(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x2", [True, False], ids=["x2", "no_x2"])
@pytest.mark.parametrize("dsum", [True, False], ids=["dsum", "no_dsum"])
def test_every_subset_of_outputs(library: Library, dtype: np.dtype, x2: bool, dsum: bool) -> None:
    for shape in ([70, 37], [300, 64], [3, 1100]):
        inputs = make_inputs(shape, dtype, x2=x2, dsum=dsum)
        everything = library.run(inputs)
        assert_matches(inputs, **everything)
        for count in range(len(OUTPUTS)):
            for outputs in itertools.combinations(OUTPUTS, count):
                assert_same_bits(library.run(inputs, outputs), everything)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_misaligned_buffers_give_the_same_bits(library: Library, dtype: np.dtype) -> None:
    # 6 MB per tensor: large enough to be written past the cache where the buffer allows it.
    inputs = make_inputs([2048, 768 if dtype == FLOAT else 1536], dtype)
    aligned = library.run(inputs)
    for name in [*inputs.arrays(), *OUTPUTS]:
        offset = {**inputs.arrays(), **aligned}[name].dtype.itemsize
        assert_same_bits(library.run(inputs, offsets={name: offset}), aligned)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["dy", "x1", "x2", "dsum"])
def test_dx_may_take_over_an_inputs_buffer(library: Library, dtype: np.dtype, name: str) -> None:
    for shape in ([5, 48], [40, 100], [3, 40000]):
        inputs = make_inputs(shape, dtype)
        assert_same_bits(library.run(inputs, in_place=name), library.run(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [[2000, 64], [513, 768], [37, 5000], [9, 200003]], ids=str)
def test_the_same_bits_on_any_number_of_threads(library: Library, dtype: np.dtype, shape: list[int]) -> None:
    inputs = make_inputs(shape, dtype)
    alone = library.run(inputs)
    assert_matches(inputs, **alone)
    for count in (1, 2, 3, 8):
        threads = Threads(count, seed=count)
        assert_same_bits(library.run(inputs, threads=threads), alone)
        assert threads.task_counts[0] > 1, "the shape is too small to try threads on"


def test_the_result_does_not_depend_on_what_the_workspace_held(library: Library) -> None:
    for shape in ([1, 4], [2, 9], [600, 64], [100, 1100]):
        inputs = make_inputs(shape)
        clean = library.run(inputs, workspace_fill=0)
        assert_same_bits(library.run(inputs, workspace_fill=0xFF), clean)
        assert_same_bits(library.run(inputs, workspace_fill=0x7F, repeats=3), clean)


@pytest.mark.parametrize("shape", [[5], [2, 3, 5], [2, 3, 4, 5], [1, 1, 1, 1, 2, 1, 3, 4]], ids=str)
def test_every_rank_and_number_of_normalised_axes(library: Library, shape: list[int]) -> None:
    for axes in range(1, len(shape) + 1):
        for trailing_ones in (True, False):
            inputs = make_inputs(shape, axes=axes, trailing_ones=trailing_ones)
            assert_matches(inputs, **library.run(inputs))


def test_no_rows(library: Library) -> None:
    for shape in ([0, 8], [3, 0, 8], [0, 0, 100]):
        inputs = make_inputs(shape)
        results = library.run(inputs)
        assert results["dx"].shape == tuple(shape)
        np.testing.assert_array_equal(results["dgamma"], np.zeros(shape[-1], np.float32))
        np.testing.assert_array_equal(results["dbeta"], np.zeros(shape[-1], np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_column_has_no_gradient_but_dsum(library: Library, dtype: np.dtype) -> None:
    inputs = make_inputs([100, 1], dtype)
    x = (inputs.x1 + inputs.x2).astype(np.float32)
    inputs = inputs.replace(mean=x, rstd=np.full([100, 1], 316.0, np.float32))
    np.testing.assert_array_equal(library.run(inputs)["dx"], inputs.dsum)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dsum_is_added_after_the_norms_backward(library: Library, dtype: np.dtype) -> None:
    inputs = make_inputs([64, 96], dtype, dsum=False)
    without = library.run(inputs)
    for scale in (1.0, 1e4):
        dsum = np.full([64, 96], scale).astype(dtype)
        with_dsum = library.run(inputs.replace(dsum=dsum))
        assert_matches(inputs.replace(dsum=dsum), **with_dsum)
        assert_same_bits({name: with_dsum[name] for name in ("dgamma", "dbeta")}, without)


def test_statistics_keep_their_precision_beside_bfloat16(library: Library) -> None:
    # Rounding the mean to bfloat16 would shift xhat by 0.13.
    inputs = make_inputs([512, 256], BFLOAT16, gamma_dtype=FLOAT, x_mean=100.37)
    assert_matches(inputs, **library.run(inputs))
    rounded = inputs.replace(mean=inputs.mean.astype(BFLOAT16).astype(np.float32))
    with pytest.raises(AssertionError):
        assert_matches(inputs, **library.run(rounded))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_the_sum_is_rounded_as_the_forward_add_rounds_it(library: Library, dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    cols = 4096
    first = rng.choice([1.0, 3.0, 256.0, 2048.0, 0.1, 1e-3, 60000.0], cols) * rng.choice([-1, 1], cols)
    second = rng.standard_normal(cols) * rng.choice([1e-3, 1.0, 100.0], cols)
    x1, x2 = (array.astype(dtype).reshape(1, cols) for array in (first, second))
    one = np.ones([1, 1], np.float32)
    inputs = Inputs(np.ones_like(x1), x1, x2, one, 0 * one, np.ones(cols, dtype), None)
    # With dy = 1, mean = 0 and rstd = 1, dgamma is x.
    with np.errstate(over="ignore"):
        expected = (x1.astype(np.float64) + x2.astype(np.float64)).astype(dtype)
    np.testing.assert_array_equal(library.run(inputs)["dgamma"], expected[0].astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_16_bit_pattern_passes_unchanged(library: Library, dtype: np.dtype) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32)
    values = (patterns << 16).view(np.float32) if dtype == FLOAT else patterns.astype(np.uint16).view(dtype)
    for cols in (64, 2048, 13):
        dsum = np.resize(values, [-(-values.size // cols), cols])
        zeros = np.zeros_like(dsum)
        statistic = np.zeros([len(dsum), 1], np.float32)
        inputs = Inputs(zeros, zeros, None, statistic, statistic, np.zeros(cols, dtype), dsum)
        with np.errstate(invalid="ignore"):
            # 0 * rstd + dsum turns -0 into 0 and makes a signalling NaN quiet.
            expected = (np.float32(0) + dsum.astype(np.float32)).astype(dtype)
        # As float32, because NumPy's comparison does not know the NaN of bfloat16.
        actual = library.run(inputs, ["dx"])["dx"].astype(np.float32)
        np.testing.assert_array_equal(actual, expected.astype(np.float32))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_dx_is_rounded_to_nearest_even_once(library: Library, dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    rows, cols = 20000, 64
    # Random float32 values, and values exactly between two neighbours of T.
    values = (rng.standard_normal(rows) * np.exp2(rng.integers(-30, 17, rows))).astype(np.float32)
    neighbours = rng.integers(0x0400, 0x7000, rows // 2).astype(np.uint16).view(dtype).astype(np.float64)
    above = np.nextafter(neighbours.astype(dtype), np.array(np.inf, dtype)).astype(np.float64)
    values[: rows // 2] = (neighbours + above) / 2
    values = values[np.isfinite(values) & (np.abs(values) < 1e30)]
    # One value in a row of zeros, x = mean: dx there is value - value / cols, a float32 subtraction of exact
    # terms.
    dy = np.zeros([len(values), cols], dtype)
    dy[:, 5] = 1
    statistic = np.zeros([len(values), 1], np.float32)
    gammas = np.zeros([cols], np.float32)
    with np.errstate(over="ignore"):
        expected = (values - values * np.float32(1 / cols)).astype(dtype)
    results = np.empty_like(expected)
    # gamma is one for all rows, so that each value takes a call of its own row.
    for i in range(0, len(values), 97):
        gammas[5] = values[i]
        row = slice(i, i + 1)
        inputs = Inputs(dy[row], dy[row] * 0, None, statistic[row] + 1, statistic[row], gammas, None)
        results[i] = library.run(inputs, ["dx"])["dx"][0, 5]
        assert results[i].tobytes() == expected[i].tobytes(), (
            f"{values[i]!r}: {results[i]!r}, not {expected[i]!r}"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [7, 48, 1500])
def test_non_finite_values(library: Library, dtype: np.dtype, cols: int) -> None:
    rng = np.random.default_rng(0)
    for name in ("dy", "x1", "x2", "dsum", "mean", "rstd", "gamma"):
        for value in (np.nan, np.inf, -np.inf):
            inputs = make_inputs([6, cols], dtype)
            array = inputs.arrays()[name].copy()
            array.reshape(-1)[rng.integers(array.size)] = value
            changed = inputs.replace(**{name: array})
            results = library.run(changed)
            assert_matches(changed, **results)
            if name != "gamma":
                # Other rows are untouched.
                other = library.run(inputs)["dx"]
                rows = (array != inputs.arrays()[name]).reshape(6, -1).any(axis=1)
                assert results["dx"][~rows].tobytes() == other[~rows].tobytes()


def test_nan_with_a_full_payload_stays_nan(library: Library) -> None:
    # Rounding to bfloat16 by integer arithmetic would carry it over into zero.
    payload = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    for nan in payload:
        for cols in (7, 64, 1100):
            inputs = make_inputs([4, cols], BFLOAT16, gamma_dtype=FLOAT)
            for name in ("mean", "rstd", "gamma"):
                array = inputs.arrays()[name].copy()
                array.reshape(-1)[0] = nan
                changed = inputs.replace(**{name: array})
                assert_matches(changed, **library.run(changed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dgamma_and_dbeta_stay_accurate_over_many_rows(library: Library, dtype: np.dtype) -> None:
    for dy_mean in (0.0, 1.0):
        inputs = make_inputs([65536, 64], dtype)
        inputs = inputs.replace(dy=(inputs.dy.astype(np.float32) + dy_mean).astype(dtype))
        results = library.run(inputs, ["dgamma", "dbeta"])
        assert_matches(inputs, **results)
        x = (inputs.x1.astype(np.float64) + inputs.x2.astype(np.float64)).astype(dtype).astype(np.float64)
        dy = inputs.dy.astype(np.float64)
        exact = {
            "dgamma": (dy * (x - inputs.mean) * inputs.rstd.astype(np.float64)).sum(0),
            "dbeta": dy.sum(0),
        }
        for name, reference in exact.items():
            assert np.abs(results[name] - reference).max() <= 5e-7 * np.abs(reference).max(), name
