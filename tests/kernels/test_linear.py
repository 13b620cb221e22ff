"""Linear's CPU kernels, forward and backward, against float64.

The bound, with u = 2^-24: a sum of n products, fused or not, in any order is off by at most (n + 2) * u times
the sum of the products' magnitudes; the error of random ones grows with sqrt(n), which is what is asserted,
with a factor for the worst of many sums. Numbers that are small integers make every sum exact: then the bits
must be right.
"""

from __future__ import annotations

import numpy as np
import pytest
from native import INVALID_PARAMETER, NULL_POINTER, KernelError, Library, Threads, tensor
from oracle import FLOAT, FLOAT32_ROUNDOFF

LAYOUTS = ("in_out", "out_in")

# Rows, inputs, outputs: below, at and above the sizes of tiles (6 rows, 8 to 32 columns), panels (384 deep)
# and blocks (1536 deep and wide), alone and together.
SIZES = (
    (1, 1, 1), (1, 7, 33), (5, 3, 2), (6, 384, 16), (7, 385, 17), (13, 64, 31), (50, 400, 65), (97, 33, 260),
    (300, 20, 1550), (1550, 21, 18), (2, 1540, 40), (9, 40, 1540),
)  # fmt: skip


def weight_shape(layout: str, inputs: int, outputs: int) -> tuple[int, int]:
    return (inputs, outputs) if layout == "in_out" else (outputs, inputs)


def forward(
    library: Library, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, layout: str, **options
) -> np.ndarray:
    outputs = w.shape[1 if layout == "in_out" else 0]
    shapes = {"y": ((*x.shape[:-1], outputs), FLOAT)}
    return library.run_operator("linear", {"x": x, "w": w, "b": b}, shapes, layout.encode(), **options)["y"]


def backward(
    library: Library, dy: np.ndarray, x: np.ndarray, w: np.ndarray, layout: str, **options
) -> dict[str, np.ndarray]:
    shapes = {"dx": (x.shape, FLOAT), "db": (dy.shape[-1:], FLOAT), "dw": (w.shape, FLOAT)}
    inputs = {"dy": dy, "x": x, "w": w}
    return library.run_operator("linear_grad", inputs, shapes, layout.encode(), **options)


def expected_gradients(dy: np.ndarray, x: np.ndarray, w: np.ndarray, layout: str) -> dict[str, np.ndarray]:
    weight = w if layout == "in_out" else w.T
    dw = x.T @ dy
    return {"dx": dy @ weight.T, "dw": dw if layout == "in_out" else dw.T, "db": dy.sum(axis=0)}


def make_inputs(
    rows: int, inputs: int, outputs: int, layout: str, *, integers: bool = False
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows + 31 * inputs + 997 * outputs)

    def draw(*shape: int) -> np.ndarray:
        values = rng.integers(-8, 9, shape) if integers else rng.standard_normal(shape)
        return values.astype(np.float32)

    return {
        "x": draw(rows, inputs),
        "w": draw(*weight_shape(layout, inputs, outputs)),
        "b": draw(outputs),
        "dy": draw(rows, outputs),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_of_small_integers_are_exact(library: Library, sizes: tuple[int, int, int], layout: str) -> None:
    made = make_inputs(*sizes, layout, integers=True)
    wide = {name: array.astype(np.float64) for name, array in made.items()}
    weight = wide["w"] if layout == "in_out" else wide["w"].T
    y = forward(library, made["x"], made["w"], made["b"], layout, threads=Threads(3))
    np.testing.assert_array_equal(y, wide["x"] @ weight + wide["b"])
    np.testing.assert_array_equal(forward(library, made["x"], made["w"], None, layout), wide["x"] @ weight)
    gradients = backward(library, made["dy"], made["x"], made["w"], layout, threads=Threads(3))
    for name, expected in expected_gradients(wide["dy"], wide["x"], wide["w"], layout).items():
        np.testing.assert_array_equal(gradients[name], expected, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounding_is_that_of_a_sum(library: Library, layout: str) -> None:
    rows, inputs, outputs = 1500, 400, 130
    made = make_inputs(rows, inputs, outputs, layout)
    wide = {name: array.astype(np.float64) for name, array in made.items()}
    y = forward(library, made["x"], made["w"], made["b"], layout)
    weight = wide["w"] if layout == "in_out" else wide["w"].T
    checked = {"y": (y, wide["x"] @ weight + wide["b"], inputs)}
    depths = {"dx": outputs, "dw": rows, "db": rows}
    gradients = backward(library, made["dy"], made["x"], made["w"], layout)
    for name, expected in expected_gradients(wide["dy"], wide["x"], wide["w"], layout).items():
        checked[name] = gradients[name], expected, depths[name]
    for name, (actual, expected, depth) in checked.items():
        # Standard normal factors: partial sums are about sqrt(depth) large, and depth roundings of them add
        # up like a random walk.
        error = np.abs(actual - expected).max()
        assert error <= 6 * depth * FLOAT32_ROUNDOFF, f"{name}: {error}"
        assert error > 0, f"{name}: float32 cannot be exact here"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wanted", [("dw",), ("dx", "dw"), ("db", "dw")], ids="+".join)
def test_gradients_that_nobody_wants(library: Library, wanted: tuple[str, ...], layout: str) -> None:
    made = make_inputs(70, 40, 30, layout)
    everything = backward(library, made["dy"], made["x"], made["w"], layout)
    shapes = {name: (array.shape, FLOAT) if name in wanted else None for name, array in everything.items()}
    inputs = {name: made[name] for name in ("dy", "x", "w")}
    some = library.run_operator("linear_grad", inputs, shapes, layout.encode())
    assert set(some) == set(wanted)
    for name, array in some.items():
        assert array.tobytes() == everything[name].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [4, 20])
def test_the_same_bits_at_every_alignment_and_number_of_threads(
    library: Library, offset: int, layout: str
) -> None:
    made = make_inputs(333, 400, 47, layout)
    y = forward(library, made["x"], made["w"], made["b"], layout)
    gradients = backward(library, made["dy"], made["x"], made["w"], layout)
    for threads in (None, Threads(2), Threads(5)):
        names = ("x", "w", "b", "y", "dy", "dx", "dw", "db")
        options = {"threads": threads, "offsets": dict.fromkeys(names, offset)}
        assert forward(library, made["x"], made["w"], made["b"], layout, **options).tobytes() == y.tobytes()
        for name, array in backward(library, made["dy"], made["x"], made["w"], layout, **options).items():
            assert array.tobytes() == gradients[name].tobytes(), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(0, 3, 4), (5, 0, 4), (5, 3, 0), (0, 0, 0)], ids=str)
def test_empty_axes(library: Library, sizes: tuple[int, int, int], layout: str) -> None:
    made = make_inputs(*sizes, layout, integers=True)
    rows, _, outputs = sizes
    y = forward(library, made["x"], made["w"], made["b"], layout)
    np.testing.assert_array_equal(
        y, np.broadcast_to(made["x"] @ np.zeros((sizes[1], outputs)) + made["b"], (rows, outputs))
    )
    for name, array in backward(library, made["dy"], made["x"], made["w"], layout).items():
        expected = expected_gradients(made["dy"], made["x"], made["w"], layout)[name]
        np.testing.assert_array_equal(array, expected, err_msg=name)


def test_non_finite_numbers_stay_where_they_are(library: Library) -> None:
    made = make_inputs(20, 30, 40, "out_in")
    made["x"][7, 3] = np.inf
    made["x"][9, 4] = np.nan
    y = forward(library, made["x"], made["w"], made["b"], "out_in")
    assert np.isinf(y[7]).all() and np.isnan(y[9]).all()
    rest = np.delete(y, (7, 9), axis=0)
    assert np.isfinite(rest).all()


def test_what_is_wrong_is_said(installed: Library) -> None:
    def plan(x, w, b, y, layout=b"in_out") -> None:
        installed.plan_operator("linear", [x, w, b, y], layout)

    good = [tensor((5, 3), 1), tensor((3, 4), 1), tensor((4,), 1), tensor((5, 4), 1)]
    plan(*good)
    for index, wrong, sentence in (
        (0, tensor((3,), 1), "x must have rank 2 to 8; got rank 1"),
        (0, tensor((5, 3), 10), "x must be float; got float16"),
        (1, tensor((3, 4, 1), 1), "w must have rank 2; got [3,4,1]"),
        (1, tensor((4, 3), 1), "w must be [in,out] with x's last axis, 3, as in; got [4,3]"),
        (2, tensor((3,), 1), "b must be [4], as many as w has outputs; got [3]"),
        (3, tensor((4, 5), 1), "y must be [5,4]; got [4,5]"),
    ):
        with pytest.raises(KernelError) as caught:
            plan(*good[:index], wrong, *good[index + 1 :])
        assert caught.value.status == INVALID_PARAMETER
        assert sentence in str(caught.value)
    with pytest.raises(KernelError, match="weight_layout must be in_out or out_in; got out_out") as caught:
        plan(*good, layout=b"out_out")
    with pytest.raises(KernelError, match="x is required; got a null pointer") as caught:
        plan(None, *good[1:])
    assert caught.value.status == NULL_POINTER
