"""Optimizer graphs against torch.optim, against the published formulas in float64, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizer_runs import (
    LEARNING_RATES,
    SHAPES,
    STEPS,
    Tensors,
    parameter_types,
    random_tensors,
    run_steps,
    step_of,
)

from ort_ops.training.in_place import in_place_outputs
from ort_ops.training.optimizer import (
    SGD,
    Adam,
    AdamW,
    AdamWForm,
    Lion,
    ParameterGroup,
    UpdateRule,
    build_optimizer_model,
    initial_state,
)

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE

TORCH_RULES: dict[str, tuple[UpdateRule, str, dict[str, Any]]] = {
    "adamw": (
        AdamW(betas=(0.9, 0.95), epsilon=1e-6, weight_decay=0.2),
        "AdamW",
        {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.2},
    ),
    "adamw_defaults": (AdamW(), "AdamW", {}),
    "adam": (Adam(), "Adam", {}),
    "adam_l2": (Adam(epsilon=1e-5, weight_decay=0.3), "Adam", {"eps": 1e-5, "weight_decay": 0.3}),
    "sgd": (SGD(), "SGD", {}),
    "sgd_l2": (SGD(weight_decay=0.1), "SGD", {"weight_decay": 0.1}),
    "momentum": (SGD(momentum=0.8), "SGD", {"momentum": 0.8}),
    "dampening": (
        SGD(momentum=0.8, dampening=0.3, weight_decay=0.1),
        "SGD",
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    ),
    "nesterov": (
        SGD(momentum=0.8, nesterov=True, weight_decay=0.1),
        "SGD",
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
}

# Rules that PyTorch does not have: new parameter and state from the old ones, the gradient, the learning rate
# and the number of the update, in float64.
Formula = Callable[[Any, list[Any], Any, float, int], tuple[Any, list[Any]]]


def hugging_face_adamw(p: Any, state: list[Any], g: Any, rate: float, t: int) -> tuple[Any, list[Any]]:
    m, v = 0.8 * state[0] + (1 - 0.8) * g, 0.99 * state[1] + (1 - 0.99) * g * g
    p = p - rate * np.sqrt(1 - 0.99**t) / (1 - 0.8**t) * m / (np.sqrt(v) + 1e-3)
    return p - rate * 0.1 * p, [m, v]


def uncorrected_hugging_face_adamw(
    p: Any, state: list[Any], g: Any, rate: float, t: int
) -> tuple[Any, list[Any]]:
    m, v = 0.8 * state[0] + (1 - 0.8) * g, 0.99 * state[1] + (1 - 0.99) * g * g
    p = p - rate * m / (np.sqrt(v) + 1e-3)
    return p - rate * 0.1 * p, [m, v]


def uncorrected_adamw(p: Any, state: list[Any], g: Any, rate: float, t: int) -> tuple[Any, list[Any]]:
    m, v = 0.8 * state[0] + (1 - 0.8) * g, 0.99 * state[1] + (1 - 0.99) * g * g
    return p * (1 - rate * 0.1) - rate * m / (np.sqrt(v) + 1e-3), [m, v]


def lion(p: Any, state: list[Any], g: Any, rate: float, t: int) -> tuple[Any, list[Any]]:
    p = p - rate * (np.sign(0.7 * state[0] + (1 - 0.7) * g) + 0.1 * p)
    return p, [0.95 * state[0] + (1 - 0.95) * g]


HUGGING_FACE = AdamWForm.HUGGING_FACE
ADAMW = {"betas": (0.8, 0.99), "epsilon": 1e-3, "weight_decay": 0.1}
FORMULAS: dict[str, tuple[UpdateRule, int, Formula]] = {
    "hugging_face": (AdamW(**ADAMW, form=HUGGING_FACE), 2, hugging_face_adamw),
    "hugging_face_uncorrected": (
        AdamW(**ADAMW, form=HUGGING_FACE, bias_correction=False),
        2,
        uncorrected_hugging_face_adamw,
    ),
    "adamw_uncorrected": (AdamW(**ADAMW, bias_correction=False), 2, uncorrected_adamw),
    "lion": (Lion(betas=(0.7, 0.95), weight_decay=0.1), 1, lion),
}


def assert_follows(got: list[Tensors], expected: list[Tensors], start: Tensors, dtype: ir.DataType) -> None:
    """Compare the parameters after each step.

    A step has the error of about ten roundings of its move and of three of the parameter (the factor of its
    decay, the product, the difference); errors of earlier steps stay.
    """
    epsilon = 2.0**-24 if dtype is FLOAT else 2.0**-53
    for name in SHAPES:
        before, tolerance = start[name].astype(np.float64), 0.0
        for step in range(STEPS):
            after = expected[step][name]
            if after.size:
                tolerance += epsilon * (10 * np.abs(after - before).max() + 3 * np.abs(before).max())
            np.testing.assert_allclose(got[step][name], after, rtol=0, atol=tolerance, err_msg=name)
            before = after
        assert got[-1][name].dtype == dtype.numpy()
        assert not np.array_equal(got[-1][name], start[name]) or got[-1][name].size == 0


def torch_steps(
    name: str,
    groups: list[tuple[list[str], dict[str, Any]]],
    start: Tensors,
    gradients: list[Tensors],
    max_norm: float | None = None,
    rate_scales: dict[str, float] | None = None,
) -> tuple[list[Tensors], list[float]]:
    """The parameters after each step, and the norm before clipping, all in float64."""
    torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")
    parameters = {
        key: torch.nn.Parameter(torch.from_numpy(value.astype(np.float64))) for key, value in start.items()
    }
    optimizer = getattr(torch.optim, name)(
        [{"params": [parameters[key] for key in keys], **settings} for keys, settings in groups], lr=0.0
    )
    states, norms = [], []
    for gradient, rate in zip(gradients, LEARNING_RATES, strict=True):
        for (keys, _), group in zip(groups, optimizer.param_groups, strict=True):
            group["lr"] = rate * (rate_scales or {}).get(keys[0], 1.0)
        for key, value in gradient.items():
            parameters[key].grad = torch.from_numpy(value.astype(np.float64))
        if max_norm is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(list(parameters.values()), max_norm)))
        optimizer.step()
        states.append({key: value.detach().numpy().copy() for key, value in parameters.items()})
    return states, norms


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE], ids=["float", "double"])
@pytest.mark.parametrize("case", TORCH_RULES)
def test_agrees_with_pytorch(case: str, dtype: ir.DataType) -> None:
    rule, name, settings = TORCH_RULES[case]
    model = build_optimizer_model(parameter_types(dtype=dtype), rule)
    onnx.checker.check_model(model, full_check=True)
    start = random_tensors(1, dtype=dtype)
    gradients = [random_tensors(10 + step, 0.5, dtype) for step in range(STEPS)]
    expected, _ = torch_steps(name, [(list(SHAPES), settings)], start, gradients)
    states, reports = run_steps(model, start, gradients)
    assert_follows(states, expected, start, dtype)
    assert [int(state["step"]) for state in states] == list(range(1, STEPS + 1))
    assert reports == [{}] * STEPS


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE], ids=["float", "double"])
@pytest.mark.parametrize("case", FORMULAS)
def test_follows_the_published_formula(case: str, dtype: ir.DataType) -> None:
    rule, states_per_parameter, formula = FORMULAS[case]
    model = build_optimizer_model(parameter_types(dtype=dtype), rule)
    onnx.checker.check_model(model, full_check=True)
    start = random_tensors(3, dtype=dtype)
    gradients = [random_tensors(30 + step, 0.1, dtype) for step in range(STEPS)]
    expected = []
    parameters = {name: value.astype(np.float64) for name, value in start.items()}
    state = {name: [np.zeros_like(value)] * states_per_parameter for name, value in parameters.items()}
    for step, gradient in enumerate(gradients):
        for name in SHAPES:
            parameters[name], state[name] = formula(
                parameters[name],
                state[name],
                gradient[name].astype(np.float64),
                LEARNING_RATES[step],
                step + 1,
            )
        expected.append(dict(parameters))
    states, _ = run_steps(model, start, gradients)
    assert_follows(states, expected, start, dtype)


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("case", ["adamw", "adam_l2", "sgd", "sgd_l2", "momentum", "dampening", "nesterov"])
def test_clips_the_global_norm_as_pytorch(case: str, scale: float, max_norm: float) -> None:
    rule, name, settings = TORCH_RULES[case]
    fields = {key: getattr(rule, key) for key in rule.__dataclass_fields__} | {"max_gradient_norm": max_norm}
    model = build_optimizer_model(parameter_types(), type(rule)(**fields))
    start = random_tensors(1)
    gradients = [random_tensors(10 + step, scale) for step in range(STEPS)]
    expected, norms = torch_steps(name, [(list(SHAPES), settings)], start, gradients, max_norm)
    states, reports = run_steps(model, start, gradients)
    assert_follows(states, expected, start, FLOAT)
    # A float32 sum of 43 squares and its root.
    assert [float(report["gradient_norm"]) for report in reports] == pytest.approx(norms, rel=50 * 2.0**-24)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", [*TORCH_RULES, *FORMULAS])
def test_16_bit_parameters_are_updated_in_float32_and_rounded_once(case: str, dtype: ir.DataType) -> None:
    """Each step gives the bits of a float32 step from the same parameters, gradients and state."""
    rule = {**TORCH_RULES, **FORMULAS}[case][0]
    model = build_optimizer_model(parameter_types(dtype=dtype), rule)
    onnx.checker.check_model(model, full_check=True)
    start = random_tensors(1, dtype=dtype)
    gradients = [random_tensors(10 + step, dtype=dtype) for step in range(STEPS)]
    states, _ = run_steps(model, start, gradients)
    wide_model = build_optimizer_model(parameter_types(), rule)
    wide_step = step_of(wide_model)
    state = {**start, **initial_state(wide_model)}
    for gradient, got, rate in zip(gradients, states, LEARNING_RATES, strict=True):
        wide = {name: gradient[name].astype(np.float32) for name in SHAPES}
        before = {name: state[name].astype(np.float32) for name in SHAPES}
        state, _ = wide_step({**state, **before}, wide, rate)
        state |= {name: state[name].astype(dtype.numpy()) for name in SHAPES}
        assert set(got) == set(state)
        for name, value in state.items():
            assert got[name].dtype == value.dtype
            assert got[name].tobytes() == value.tobytes(), name
    assert any(states[-1][name].tobytes() != start[name].tobytes() for name in SHAPES)


def test_types_may_differ_between_parameters() -> None:
    """The norm is taken over all of them."""
    types = {"a": ((2,), FLOAT), "b": ((), ir.DataType.BFLOAT16), "c": ((1,), DOUBLE)}
    model = build_optimizer_model(types, SGD(max_gradient_norm=1.0))
    start = {name: np.zeros(shape, kind.numpy()) for name, (shape, kind) in types.items()}
    gradients = {"a": [1, 2], "b": 2, "c": [4]}
    typed = {name: np.asarray(value).astype(start[name].dtype) for name, value in gradients.items()}
    (state,), (report,) = run_steps(model, start, [typed], [1.0])
    assert float(report["gradient_norm"]) == 5.0
    for name, value in gradients.items():
        # The factor and the product are rounded, and b to bfloat16.
        rounding = 2.0**-9 if name == "b" else 3 * 2.0**-24
        np.testing.assert_allclose(state[name].astype(float), -np.array(value) / (5 + 1e-6), rtol=rounding)


def test_parameter_groups_and_exclusion_from_decay() -> None:
    rule = AdamW(
        weight_decay=0.2,
        no_decay=["norm.*"],
        groups=[
            ParameterGroup(patterns=["sc?lar"], learning_rate_scale=0.25, weight_decay=0.4),
            ParameterGroup(patterns=["norm.weight", "scalar"], learning_rate_scale=3.0, weight_decay=0.9),
        ],
    )
    start, gradients = random_tensors(1), [random_tensors(10 + step) for step in range(STEPS)]
    groups = [
        (["weight", "empty"], {"weight_decay": 0.2}),
        (["scalar"], {"weight_decay": 0.4}),
        (["norm.weight"], {"weight_decay": 0.0}),
    ]
    scales = {"scalar": 0.25, "norm.weight": 3.0}
    expected, _ = torch_steps("AdamW", groups, start, gradients, rate_scales=scales)
    states, _ = run_steps(build_optimizer_model(parameter_types(), rule), start, gradients)
    assert_follows(states, expected, start, FLOAT)


def test_first_step_is_exact_where_float32_powers_would_not_be() -> None:
    """1 - 0.999999^1 has no correct digit left after three in float32; the first step must still be lr *
    sign(g).
    """
    rule = AdamW(betas=(0.9, 0.999999), epsilon=0.0, weight_decay=0.0)
    model = build_optimizer_model(parameter_types({"w": (2,)}), rule)
    gradient = {"w": np.array([0.5, -3.0], np.float32)}
    (state,), _ = run_steps(model, {"w": np.zeros(2, np.float32)}, [gradient], [0.25])
    np.testing.assert_allclose(state["w"], [-0.25, 0.25], rtol=1e-6)


def test_inner_names_make_way_for_parameters() -> None:
    """A parameter may have the very name that a node's output or a constant would have had."""
    plain = build_optimizer_model(parameter_types({"w": (2,)}), AdamW(max_gradient_norm=1.0))
    inner = [name for node in plain.graph.node for name in node.output if not name.endswith("_updated")]
    inner += [tensor.name for tensor in plain.graph.initializer]
    shapes: dict[str, tuple[int, ...]] = {
        name: (2,) for name in inner if name not in ("gradient_norm", "w_updated")
    }
    model = build_optimizer_model(parameter_types(shapes), AdamW(max_gradient_norm=1.0))
    onnx.checker.check_model(model, full_check=True)
    ones = {name: np.ones(2, np.float32) for name in shapes}
    (state,), _ = run_steps(model, ones, [ones], [0.1])
    # Adam's first move is lr * sign(g); the decay is 0.01 * lr.
    for name in shapes:
        np.testing.assert_allclose(state[name], [0.899, 0.899], rtol=1e-5)


@pytest.mark.parametrize("case", [*TORCH_RULES, *FORMULAS])
def test_everything_may_be_updated_in_place(case: str) -> None:
    rule = {**TORCH_RULES, **FORMULAS}[case][0]
    model = build_optimizer_model(parameter_types(), rule)
    assert in_place_outputs(model) == {"step", *SHAPES, *initial_state(model)}


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (AdamW, {"betas": (0.9, 1.0)}, r"AdamW: betas must be two numbers in \[0, 1\); got \(0.9, 1.0\)"),
        (AdamW, {"epsilon": -1.0}, "epsilon must be a number that is not negative; got -1.0"),
        (AdamW, {"epsilon": float("nan")}, "epsilon must be a number that is not negative; got nan"),
        (Adam, {"betas": (-0.1, 0.9)}, "Adam: betas must"),
        (Adam, {"epsilon": float("inf")}, "Adam: epsilon must be a number that is not negative; got inf"),
        (
            AdamW,
            {"weight_decay": -0.1},
            "AdamW: weight_decay must be a number that is not negative; got -0.1",
        ),
        (AdamW, {"max_gradient_norm": 0.0}, "max_gradient_norm must be positive; got 0.0"),
        (AdamW, {"no_decay": "*.bias"}, r"Write \['\*.bias'\]"),
        (SGD, {"momentum": -0.5}, "SGD: momentum must be a number that is not negative; got -0.5"),
        (SGD, {"nesterov": True}, "nesterov needs a positive momentum and no dampening; got momentum 0.0"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "got momentum 0.9 and dampening 0.1"),
        (SGD, {"dampening": 0.1}, "got dampening 0.1 without momentum"),
        (Lion, {"betas": (0.0, 0.9)}, r"Lion: beta1 must be positive; got betas \(0.0, 0.9\)"),
        (ParameterGroup, {"patterns": "*"}, r"Write \['\*'\]"),
        (
            ParameterGroup,
            {"patterns": [], "learning_rate_scale": -1.0},
            "learning_rate_scale must be a number",
        ),
        (ParameterGroup, {"patterns": [], "weight_decay": -1.0}, "ParameterGroup: weight_decay must be"),
    ],
)
def test_refuses_settings(rule: type, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**settings)


@pytest.mark.parametrize(
    ("parameters", "rule", "message"),
    [
        ({}, AdamW(), "at least one parameter; got none"),
        ({"w": ((1,), FLOAT)}, AdamW(no_decay=["*.bias"]), r"no_decay .* '\*.bias' matches none of 1: w"),
        (
            {"w": ((1,), FLOAT)},
            SGD(groups=[ParameterGroup(patterns=["w"]), ParameterGroup(patterns=["W"])]),
            r"groups\[1\] must match a parameter; 'W' matches none of 1: w",
        ),
        (
            {"w": ((1,), FLOAT), "w_grad": ((1,), FLOAT)},
            AdamW(),
            "w_grad would appear twice",
        ),
        ({"step": ((1,), FLOAT)}, AdamW(), "step, step_updated would appear twice"),
        ({"w": ((1,), ir.DataType.INT64)}, AdamW(), "parameter 'w' must be float, .* got int64"),
        ({"w": ((1,), 999)}, AdamW(), "parameter 'w' must be float, .* got 999"),
        ({"w": (("N",), FLOAT)}, AdamW(), r"shape of parameter 'w' must be known; got \['N'\]"),
    ],
)
def test_refuses_parameters(parameters: dict[str, Any], rule: UpdateRule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer_model(parameters, rule)
