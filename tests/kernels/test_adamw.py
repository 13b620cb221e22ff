"""AdamW's CPU kernel: the bits of the same float32 operations one by one, and near float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native import INVALID_PARAMETER, NULL_POINTER, KernelError, Library, Threads, tensor
from oracle import FLOAT, FLOAT32_ROUNDOFF

RESULTS = ("parameter_updated", "first_moment_updated", "second_moment_updated")
BETA1, BETA2, EPSILON = np.float32(0.9), np.float32(0.999), np.float32(1e-8)


def make_inputs(
    shape: tuple[int, ...], *, optional: bool = True, seed: int = 0
) -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(seed)
    parameter, gradient, first = rng.standard_normal((3, *shape), dtype=np.float32)
    second = np.square(rng.standard_normal(shape, dtype=np.float32))

    def scalar(value: float) -> np.ndarray:
        return np.array(value, np.float32)

    return {
        "parameter": parameter,
        "gradient": gradient,
        "first_moment": first,
        "second_moment": second,
        "gradient_weight": scalar(0.1),
        "square_weight": scalar(0.001),
        "step_size": scalar(0.003),
        "inverse_root": scalar(1.7) if optional else None,
        "decay": scalar(0.99) if optional else None,
        "update": None,
    }


def run(library: Library, inputs: dict, form: str = "pytorch", **options) -> dict[str, np.ndarray]:
    outputs = {name: (inputs["parameter"].shape, FLOAT) for name in RESULTS}
    attributes = [form.encode(), *(ctypes.c_float(value) for value in (BETA1, BETA2, EPSILON))]
    return library.run_operator("adamw", inputs, outputs, *attributes, **options)


def formula(inputs: dict, form: str, dtype: type) -> dict[str, np.ndarray]:
    """The operations one by one, each rounded to `dtype`."""
    one = np.ones((), dtype)
    values = {name: one if array is None else array.astype(dtype) for name, array in inputs.items()}
    g = values["gradient"]
    first = values["first_moment"] * dtype(BETA1) + g * values["gradient_weight"]
    second = values["second_moment"] * dtype(BETA2) + (g * g) * values["square_weight"]
    move = first / (np.sqrt(second) * values["inverse_root"] + dtype(EPSILON)) * values["step_size"]
    if form == "pytorch":
        parameter = values["parameter"] * values["decay"] - move
    else:
        parameter = (values["parameter"] - move) * values["decay"]
    return dict(zip(RESULTS, (parameter, first, second), strict=True))


def assert_same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        assert actual[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("form", ["pytorch", "hugging_face"])
@pytest.mark.parametrize("optional", [True, False])
def test_every_length(library: Library, form: str, optional: bool) -> None:
    for shape in ((), *((n,) for n in (*range(35), 63, 64, 65, 1000)), (3, 32769)):
        inputs = make_inputs(shape, optional=optional)
        results = run(library, inputs, form)
        assert_same_bits(results, formula(inputs, form, np.float32))
        exact = formula(inputs, form, np.float64)
        move = np.abs(exact["parameter_updated"] - inputs["parameter"])
        first = np.abs(inputs["first_moment"]) + np.abs(inputs["gradient"])
        bounds = {
            # The first moment may cancel; the move is off as far as it is, and by a few roundings of its own.
            "parameter_updated": 4 * np.abs(inputs["parameter"])
            + 12 * move
            + 4 * first * inputs["step_size"] / np.sqrt(exact["second_moment_updated"]),
            "first_moment_updated": 3 * first,
            "second_moment_updated": 4 * exact["second_moment_updated"],
        }
        for name, bound in bounds.items():
            assert (np.abs(results[name] - exact[name]) <= FLOAT32_ROUNDOFF * bound).all(), name


@pytest.mark.parametrize("form", ["pytorch", "hugging_face"])
def test_threads_alignment_and_shared_buffers_change_no_bit(library: Library, form: str) -> None:
    inputs = make_inputs((3, 40001))
    alone = run(library, inputs, form)
    for count in (2, 5):
        assert_same_bits(run(library, inputs, form, threads=Threads(count, seed=count)), alone)
    assert_same_bits(run(library, inputs, form, offsets={"gradient": 4, "parameter_updated": 8}), alone)
    shared = {f"{name}_updated": name for name in ("parameter", "first_moment", "second_moment")}
    assert_same_bits(run(library, inputs, form, in_place=shared, threads=Threads(2)), alone)


def test_an_update_that_is_skipped_keeps_every_bit(library: Library) -> None:
    inputs = make_inputs((3, 40001)) | {"gradient": np.full((3, 40001), np.nan, np.float32)}
    kept = dict(
        zip(RESULTS, (inputs[n] for n in ("parameter", "first_moment", "second_moment")), strict=True)
    )
    skipped = inputs | {"update": np.array(False)}
    assert_same_bits(run(library, skipped), kept)
    shared = {f"{name}_updated": name for name in ("parameter", "first_moment", "second_moment")}
    assert_same_bits(run(library, skipped, in_place=shared), kept)
    made = run(library, inputs | {"update": np.array(True)})
    assert all(np.isnan(array).all() for array in made.values())


def test_non_finite_values_stay_where_they_are(library: Library) -> None:
    good = make_inputs((77,))
    clean = run(library, good)
    for name in ("parameter", "gradient", "first_moment", "second_moment"):
        for value in (np.nan, np.inf, -np.inf):
            bad = good[name].copy()
            bad[70] = value
            inputs = good | {name: bad}
            with np.errstate(all="ignore"):
                expected = formula(inputs, "pytorch", np.float32)
            results = run(library, inputs)
            for result in RESULTS:
                np.testing.assert_array_equal(results[result], expected[result])
                assert results[result][:70].tobytes() == clean[result][:70].tobytes()


REFUSED = [
    ("parameter", tensor([4, 6], 10), INVALID_PARAMETER, "parameter must be float; got float16"),
    (
        "gradient",
        tensor([6, 4], 1),
        INVALID_PARAMETER,
        "gradient must have the shape of parameter, [4,6]; got [6,4]",
    ),
    ("second_moment", None, NULL_POINTER, "second_moment is required; got a null pointer"),
    ("step_size", tensor([2], 1), INVALID_PARAMETER, "step_size must have one element; got [2]"),
    ("step_size", tensor([0], 1), INVALID_PARAMETER, "step_size must have one element; got [0]"),
    ("decay", tensor([], 11), INVALID_PARAMETER, "decay must be float; got ONNX data type 11"),
    ("update", tensor([], 1), INVALID_PARAMETER, "update must be bool; got float"),
    (
        "first_moment_updated",
        tensor([4, 5], 1),
        INVALID_PARAMETER,
        "first_moment_updated must have the shape of parameter, [4,6]; got [4,5]",
    ),
]


@pytest.mark.parametrize(("name", "wrong", "status", "sentence"), REFUSED, ids=[row[3] for row in REFUSED])
def test_what_is_refused(installed: Library, name: str, wrong, status: int, sentence: str) -> None:
    tensors = {key: tensor([4, 6], 1) for key in ("parameter", "gradient", "first_moment", "second_moment")}
    scalars = ("gradient_weight", "square_weight", "step_size", "inverse_root", "decay")
    tensors |= {key: tensor([], 1) for key in scalars}
    tensors |= {"update": tensor([], 9)} | {key: tensor([4, 6], 1) for key in RESULTS}
    floats = [ctypes.c_float(0.5)] * 3
    installed.plan_operator("adamw", list(tensors.values()), b"pytorch", *floats)
    with pytest.raises(KernelError) as caught:
        installed.plan_operator("adamw", list((tensors | {name: wrong}).values()), b"pytorch", *floats)
    assert (caught.value.status, str(caught.value)) == (status, sentence)
    with pytest.raises(KernelError, match="form must be pytorch or hugging_face; got torch"):
        installed.plan_operator("adamw", list(tensors.values()), b"torch", *floats)
