"""Dynamic loss scaling in the optimizer's graph: the same bits as without it, skipped steps, and how the
scale moves.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizer_runs import SHAPES, STEPS, Tensors, parameter_types, random_tensors, run_steps

from ort_ops.training.in_place import in_place_outputs
from ort_ops.training.optimizer import (
    SGD,
    Adam,
    AdamW,
    Lion,
    LossScaling,
    UpdateRule,
    build_optimizer_model,
    initial_state,
)

RULES: dict[str, UpdateRule] = {
    "adamw": AdamW(max_gradient_norm=1.0),
    "adam": Adam(weight_decay=0.1),
    "sgd": SGD(),
    "nesterov": SGD(momentum=0.9, nesterov=True, weight_decay=0.1, max_gradient_norm=1.0),
    "lion": Lion(weight_decay=0.1),
}
TYPES = {
    "float": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "double": ir.DataType.DOUBLE,
}


def assert_same_bits(got: Tensors, expected: Tensors, names: list[str]) -> None:
    for name in names:
        assert got[name].dtype == expected[name].dtype
        assert got[name].tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gives_the_same_bits_as_no_scaling(rule: UpdateRule) -> None:
    """Multiplying by a power of two and dividing by it again rounds nothing."""
    start = random_tensors(1)
    gradients = [random_tensors(10 + step) for step in range(STEPS)]
    scale = np.float32(2.0**10)
    scaled = [{name: np.asarray(value * scale) for name, value in each.items()} for each in gradients]
    expected, expected_reports = run_steps(build_optimizer_model(parameter_types(), rule), start, gradients)
    model = build_optimizer_model(
        parameter_types(), rule, loss_scaling=LossScaling(initial_scale=float(scale))
    )
    onnx.checker.check_model(model, full_check=True)
    states, reports = run_steps(model, start, scaled)
    for state, expected_state in zip(states, expected, strict=True):
        assert_same_bits(state, expected_state, list(expected_state))
    for report, expected_report in zip(reports, expected_reports, strict=True):
        assert not report.pop("skipped")
        assert_same_bits(report, expected_report, list(expected_report))
        assert set(report) == set(expected_report)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(
    rule: UpdateRule, dtype: ir.DataType, bad: float
) -> None:
    model = build_optimizer_model(
        parameter_types(dtype=dtype), rule, loss_scaling=LossScaling(initial_scale=8.0)
    )
    start = random_tensors(1, dtype=dtype)
    first, second, last = (random_tensors(10 + step, dtype=dtype) for step in range(3))
    second["weight"][4, 6] = bad
    states, reports = run_steps(model, start, [first, second, last], [0.1] * 3)
    assert [bool(report["skipped"]) for report in reports] == [False, True, False]
    assert [float(state["loss_scale"]) for state in states] == [8.0, 4.0, 4.0]
    assert [int(state["good_steps"]) for state in states] == [1, 0, 1]
    assert [int(state["step"]) for state in states] == [1, 1, 2]
    kept = [name for name in states[0] if name not in ("loss_scale", "good_steps")]
    assert_same_bits(states[1], states[0], kept)
    moved = [name for name in kept if states[2][name].tobytes() != states[0][name].tobytes()]
    assert set(moved) == {name for name in kept if not name.startswith("empty")}


def test_large_finite_gradients_are_not_skipped() -> None:
    """The sum of their squares overflows, and so would the sum of some of them."""
    model = build_optimizer_model(parameter_types(), SGD(), loss_scaling=LossScaling(initial_scale=2.0**100))
    huge = {name: np.full(shape, 3e38, np.float32) for name, shape in SHAPES.items()}
    start = random_tensors(1)
    (state,), (report,) = run_steps(model, start, [huge], [1e-9])
    assert not report["skipped"]
    expected = start["weight"] - np.float32(1e-9) * (np.float32(3e38) / np.float32(2.0**100))
    # Three roundings of the move, which is 0.24, and one of the parameter, which is below 4.
    np.testing.assert_allclose(state["weight"], expected, rtol=0, atol=4 * 2.0**-24)


@pytest.mark.parametrize("growth_interval", [1, 3])
def test_the_scale_moves_as_that_of_pytorch(growth_interval: int) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")
    settings = LossScaling(initial_scale=64.0, growth_interval=growth_interval)
    model = build_optimizer_model({"w": ((1,), ir.DataType.FLOAT)}, SGD(), loss_scaling=settings)
    finite = [True] * 7 + [False, False, True, False] + [True] * 5
    gradients = [{"w": np.array([1.0 if good else np.inf], np.float32)} for good in finite]
    states, reports = run_steps(model, {"w": np.zeros(1, np.float32)}, gradients, [0.1] * len(finite))
    scale, good_steps = torch.tensor(64.0), torch.tensor(0, dtype=torch.int32)
    for good, state, report in zip(finite, states, reports, strict=True):
        torch._amp_update_scale_(scale, good_steps, torch.tensor(float(not good)), 2.0, 0.5, growth_interval)
        assert (float(state["loss_scale"]), int(state["good_steps"])) == (float(scale), int(good_steps))
        assert bool(report["skipped"]) is not good
    assert int(states[-1]["step"]) == sum(finite)


def test_the_scale_stays_between_its_limits() -> None:
    settings = LossScaling(
        initial_scale=3.0, minimum_scale=2.0, growth_interval=1, growth_factor=2.0**70, backoff_factor=0.1
    )
    model = build_optimizer_model({"w": ((1,), ir.DataType.FLOAT)}, SGD(), loss_scaling=settings)
    gradients = [{"w": np.array([value], np.float32)} for value in (np.nan, np.nan, 1.0, 1.0, 1.0)]
    states, _ = run_steps(model, {"w": np.zeros(1, np.float32)}, gradients, [0.1] * 5)
    scales = [float(state["loss_scale"]) for state in states]
    assert scales == [2.0, 2.0, 2.0**71, 2.0**126, 2.0**126]


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_everything_may_be_updated_in_place(dtype: ir.DataType) -> None:
    for rule in RULES.values():
        model = build_optimizer_model(parameter_types(dtype=dtype), rule, loss_scaling=LossScaling())
        assert in_place_outputs(model) == {*SHAPES, *initial_state(model)}
        assert {"step", "loss_scale", "good_steps"} <= set(initial_state(model))


def test_first_state_is_zero_but_for_the_scale() -> None:
    types = {"w": ((2, 3), ir.DataType.BFLOAT16), "d": ((1,), ir.DataType.DOUBLE)}
    state = initial_state(build_optimizer_model(types, AdamW(), loss_scaling=LossScaling(initial_scale=7.0)))
    expected = {
        "step": np.zeros((), np.int64),
        "loss_scale": np.array(7.0, np.float32),
        "good_steps": np.zeros((), np.int64),
        "w_first_moment": np.zeros((2, 3), np.float32),
        "w_second_moment": np.zeros((2, 3), np.float32),
        "d_first_moment": np.zeros(1),
        "d_second_moment": np.zeros(1),
    }
    assert set(state) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, strict=True, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_scale": 0.5}, "minimum_scale 1.0 and initial_scale 0.5"),
        ({"minimum_scale": 0.0}, "minimum_scale 0.0 and initial_scale 65536.0"),
        ({"initial_scale": float("inf")}, "initial_scale inf"),
        ({"growth_factor": 0.5}, "growth_factor must be 1 or more; got 0.5"),
        ({"growth_factor": float("nan")}, "growth_factor must be 1 or more; got nan"),
        ({"backoff_factor": 0.0}, r"backoff_factor must be in \(0, 1\]; got 0.0"),
        ({"growth_interval": 0}, "growth_interval must be 1 or more; got 0"),
    ],
)
def test_refuses_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaling(**settings)  # type: ignore[arg-type]


def test_parameters_may_not_take_the_names_of_its_state() -> None:
    types = {"loss_scale": ((1,), ir.DataType.FLOAT)}
    build_optimizer_model(types, SGD())
    with pytest.raises(ValueError, match="loss_scale, loss_scale_updated would appear twice"):
        build_optimizer_model(types, SGD(), loss_scaling=LossScaling())
