"""The attention kernels against float64.

The bounds, with u = 2^-24: a product over n elements is off by at most n * u times the sum of the magnitudes
of its terms, and a score that is off by d makes its exponential off by the factor 1 + d. So with `slack`, the
largest error of a score (and of log_sum_exp), every probability is off by 2 * slack relatively, and what is
summed up with it by that much of the sum of magnitudes.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
from native import INVALID_PARAMETER, NULL_POINTER, KernelError, Library, Threads
from oracle import FLOAT, FLOAT32_ROUNDOFF

RNG = np.random.default_rng(7)

SHAPES = [
    # batch, queries, keys, heads, size
    (1, 1, 1, 1, 1),
    (2, 5, 5, 3, 7),
    (1, 33, 33, 2, 16),
    (2, 64, 64, 1, 26),
    (1, 100, 31, 2, 64),
    (1, 31, 100, 2, 130),
]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(FLOAT)


def heads(tokens: np.ndarray) -> np.ndarray:
    return tokens.astype(np.float64).swapaxes(1, 2)


class Problem:
    """Operands, and what they give in float64."""

    def __init__(self, shape: tuple[int, ...], visibility: str, mask: np.ndarray | None) -> None:
        batch, queries, keys, count, size = shape
        self.query, self.key = normal(batch, queries, count, size), normal(batch, keys, count, size)
        self.value, self.dy = normal(*self.key.shape), normal(*self.query.shape)
        self.mask, self.visibility, self.scale = mask, visibility, size**-0.5
        query, key, value, dy = (heads(part) for part in (self.query, self.key, self.value, self.dy))
        transposed_key, transposed_value = key.swapaxes(-1, -2), value.swapaxes(-1, -2)
        scores = self.scale * query @ transposed_key + (0.0 if mask is None else mask)
        if visibility == "causal":
            scores = np.where(np.tri(queries, keys, dtype=bool), scores, -np.inf)
        with np.errstate(invalid="ignore", divide="ignore"):
            largest = scores.max(axis=-1, keepdims=True)
            total = np.exp(scores - largest).sum(axis=-1, keepdims=True)
            self.log_sum_exp = (largest + np.log(total))[..., 0]
            p = np.exp(scores - largest) / total
        self.y = p @ value
        along = (dy * self.y).sum(axis=-1, keepdims=True)
        dscores = p * (dy @ transposed_value - along) * self.scale
        self.dquery, self.dkey = dscores @ key, dscores.swapaxes(-1, -2) @ query
        self.dvalue = p.swapaxes(-1, -2) @ dy

        visible = np.where(np.isfinite(scores), np.abs(scores), 0.0).max()
        products = (self.scale * np.abs(query) @ np.abs(transposed_key)).max()
        self.slack = FLOAT32_ROUNDOFF * ((size + 4) * products + 8 * (visible + np.log(keys) + 1))
        error = 2 * self.slack + FLOAT32_ROUNDOFF * (keys + size + 8)
        magnitude = p * (
            np.abs(dy) @ np.abs(transposed_value) + (np.abs(dy) * np.abs(self.y)).sum(-1, keepdims=True)
        )
        magnitude *= self.scale
        queries_error = error + FLOAT32_ROUNDOFF * queries
        self.bounds = {
            "y": error * (p @ np.abs(value)),
            "log_sum_exp": np.full_like(self.log_sum_exp, self.slack),
            "dquery": 3 * error * (magnitude @ np.abs(key)),
            "dkey": 3 * queries_error * (magnitude.swapaxes(-1, -2) @ np.abs(query)),
            "dvalue": queries_error * (p.swapaxes(-1, -2) @ np.abs(dy)),
        }

    def attributes(self) -> tuple[ctypes.c_float, bytes]:
        return ctypes.c_float(self.scale), self.visibility.encode()

    def operands(self, joined: bool) -> dict[str, np.ndarray | None]:
        if joined:
            together = np.stack([self.query, self.key, self.value], axis=2)
            return {"query": together, "key": None, "value": None, "mask": self.mask}
        return {"query": self.query, "key": self.key, "value": self.value, "mask": self.mask}

    def run(self, library: Library, joined: bool = False, **options) -> dict[str, np.ndarray]:
        operands = self.operands(joined)
        outputs = {"y": (self.dy.shape, FLOAT), "log_sum_exp": (self.log_sum_exp.shape, FLOAT)}
        results = library.run_operator("attention", operands, outputs, *self.attributes(), **options)
        inputs = {"dy": self.dy, **operands, **results}
        gradients = {
            f"d{name}": None if operands[name] is None else (operands[name].shape, FLOAT)
            for name in ("query", "key", "value")
        }
        found = library.run_operator("attention_grad", inputs, gradients, *self.attributes(), **options)
        if joined:
            parts = np.moveaxis(found["dquery"], 2, 0)
            found = dict(zip(gradients, parts, strict=True))
        return results | found

    def assert_right(self, results: dict[str, np.ndarray]) -> None:
        for name, bound in self.bounds.items():
            expected = getattr(self, name)
            actual = results[name].astype(np.float64)
            actual = actual if name == "log_sum_exp" else actual.swapaxes(1, 2)
            nan = np.isnan(expected)
            assert np.array_equal(np.isnan(actual), nan), name
            assert (np.abs(actual - expected)[~nan] <= bound[~nan]).all(), name


@pytest.mark.parametrize("visibility", ["all", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(library: Library, shape: tuple[int, ...], visibility: str) -> None:
    problem = Problem(shape, visibility, None)
    problem.assert_right(problem.run(library))


@pytest.mark.parametrize("shape", [(3, 40, 40, 2, 24), (1, 7, 7, 1, 3)], ids=str)
def test_query_key_and_value_in_one_tensor(library: Library, shape: tuple[int, ...]) -> None:
    problem = Problem(shape, "causal", None)
    apart, joined = problem.run(library), problem.run(library, joined=True)
    for name, result in apart.items():
        assert result.tobytes() == np.ascontiguousarray(joined[name]).tobytes(), name


@pytest.mark.parametrize("mask_shape", [(1,), (35,), (9, 1), (2, 1, 1, 35), (1, 3, 9, 35)], ids=str)
def test_masks_of_every_rank(library: Library, mask_shape: tuple[int, ...]) -> None:
    problem = Problem((2, 9, 35, 3, 8), "all", normal(*mask_shape))
    problem.assert_right(problem.run(library))


def test_hidden_keys_count_for_nothing_and_a_row_without_keys_is_nan(library: Library) -> None:
    mask = np.zeros((2, 1, 1, 40), FLOAT)
    mask[0, ..., 11:] = -np.inf
    mask[1] = -np.inf
    problem = Problem((2, 6, 40, 2, 16), "all", mask)
    assert np.isnan(problem.y[1]).all() and not np.isnan(problem.y[0]).any()
    problem.assert_right(problem.run(library))


def test_large_scores_do_not_overflow(library: Library) -> None:
    mask = np.full((1, 1, 1, 20), 3e4, FLOAT)
    problem = Problem((1, 4, 20, 1, 8), "all", mask)
    problem.assert_right(problem.run(library))


def test_the_same_bits_on_any_number_of_threads(library: Library) -> None:
    problem = Problem((9, 33, 33, 5, 12), "causal", None)  # more units of work than tasks
    alone = problem.run(library)
    shared = problem.run(library, threads=Threads(3))
    for name, result in alone.items():
        assert result.tobytes() == shared[name].tobytes(), name


def test_nothing_to_do(library: Library) -> None:
    for shape in [(0, 3, 3, 2, 4), (2, 0, 3, 2, 4), (2, 3, 3, 0, 4)]:
        query, key = (
            np.zeros((shape[0], shape[1], *shape[3:]), FLOAT),
            np.zeros((shape[0], *shape[2:]), FLOAT),
        )
        operands = {"query": query, "key": key, "value": key, "mask": None}
        outputs = {"y": (query.shape, FLOAT), "log_sum_exp": ((shape[0], shape[3], shape[1]), FLOAT)}
        attributes = ctypes.c_float(1.0), b"all"
        results = library.run_operator("attention", operands, outputs, *attributes)
        inputs = {"dy": query, **operands, **results}
        gradients = {"dquery": (query.shape, FLOAT), "dkey": (key.shape, FLOAT), "dvalue": (key.shape, FLOAT)}
        found = library.run_operator("attention_grad", inputs, gradients, *attributes)
        assert not found["dkey"].any() and not found["dvalue"].any()


@pytest.mark.parametrize(
    ("changes", "attributes", "sentence"),
    [
        ({"query": normal(2, 3, 4)}, (1.0, b"all"), "query must have rank 4; got [2,3,4]"),
        ({"key": normal(2, 3, 5, 4)}, (1.0, b"all"), "key must be [2,3,2,4]; got [2,3,5,4]"),
        ({"value": None}, (1.0, b"all"), "value is required; got a null pointer"),
        (
            {"mask": normal(2, 3)},
            (1.0, b"all"),
            "mask must broadcast to the scores' shape [2,2,3,3]; got [2,3]",
        ),
        ({}, (1.0, b"some"), "visibility must be all or causal; got some"),
    ],
)
def test_what_is_wrong_is_said(library: Library, changes, attributes, sentence: str) -> None:
    tokens = normal(2, 3, 2, 4)
    operands = {"query": tokens, "key": tokens, "value": tokens, "mask": None} | changes
    outputs = {"y": (tokens.shape, FLOAT), "log_sum_exp": ((2, 2, 3), FLOAT)}
    with pytest.raises(KernelError, match=re.escape(sentence)) as caught:
        library.run_operator("attention", operands, outputs, ctypes.c_float(attributes[0]), attributes[1])
    assert caught.value.status in (INVALID_PARAMETER, NULL_POINTER)
