"""The AdamW graph against torch.optim.AdamW, against its formula in float64, and its refusals."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ort_ops.training.optimizer import build_adamw_model

SHAPES = {"weight": (5, 7), "norm.weight": (7,), "scalar": (), "empty": (0, 3)}
STEPS = 12
LEARNING_RATES = [0.03 * (1 - step / STEPS) for step in range(STEPS)]


def random_gradients(seed: int, scale: float) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [
        {name: np.asarray(scale * generator.normal(size=shape), np.float32) for name, shape in SHAPES.items()}
        for _ in range(STEPS)
    ]


def random_parameters(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: np.asarray(generator.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def run_model(
    model: onnx.ModelProto, parameters: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], list[float]]:
    """The parameters after all steps, and `gradient_norm` of each step if the model has it."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    state = dict(parameters)
    for name, value in parameters.items():
        state[f"{name}_first_moment"] = np.zeros_like(value)
        state[f"{name}_second_moment"] = np.zeros_like(value)
    norms = []
    for step, gradient in enumerate(gradients):
        feeds = {f"{name}_grad": value for name, value in gradient.items()}
        feeds["learning_rate"] = np.array(LEARNING_RATES[step], np.float32)
        feeds["step"] = np.array(step, np.int64)
        results = dict(zip(names, session.run(names, {**state, **feeds}), strict=True))
        norms += [float(results.pop("gradient_norm"))] if "gradient_norm" in results else []
        state = {name.removesuffix("_updated"): value for name, value in results.items()}
    return {name: state[name] for name in parameters}, norms


@pytest.mark.parametrize("max_norm", [None, 1.0, 1e6])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_agrees_with_pytorch(max_norm: float | None, scale: float) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")
    settings = dict(betas=(0.9, 0.95), weight_decay=0.2)
    model = build_adamw_model(
        SHAPES, epsilon=1e-6, no_decay=["norm.*", "scalar"], max_gradient_norm=max_norm, **settings
    )
    onnx.checker.check_model(model, full_check=True)
    parameters, gradients = random_parameters(1), random_gradients(2, scale)

    reference = {
        name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in parameters.items()
    }
    decayed = [reference["weight"], reference["empty"]]
    others = [reference["norm.weight"], reference["scalar"]]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.0, eps=1e-6, **settings
    )
    expected_norms = []
    for step, gradient in enumerate(gradients):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATES[step]
        for name, value in gradient.items():
            reference[name].grad = torch.from_numpy(value.copy())
        if max_norm is not None:
            expected_norms.append(float(torch.nn.utils.clip_grad_norm_(list(reference.values()), max_norm)))
        optimizer.step()

    updated, norms = run_model(model, parameters, gradients)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for name, value in updated.items():
        expected = reference[name].detach().numpy()
        assert not np.array_equal(value, parameters[name]) or value.size == 0
        # Each step moves a parameter of size ~1 by at most lr * ~3, with the error of about ten float32
        # roundings of the move and one of the parameter: 12 steps stay below 12 * (10 * 0.1 + 3) * 2^-24 <
        # 3e-6.
        np.testing.assert_allclose(value, expected, rtol=0, atol=3e-6, err_msg=name)


def test_follows_the_formula_in_float64() -> None:
    beta1, beta2, epsilon, decay = 0.8, 0.99, 1e-3, 0.1
    model = build_adamw_model(
        SHAPES, betas=(beta1, beta2), epsilon=epsilon, weight_decay=decay, no_decay=["norm.weight"]
    )
    parameters, gradients = random_parameters(3), random_gradients(4, 0.1)
    updated, _ = run_model(model, parameters, gradients)
    for name, value in updated.items():
        p = parameters[name].astype(np.float64)
        m, v = np.zeros_like(p), np.zeros_like(p)
        for t, gradient in enumerate(gradients, start=1):
            g, rate = gradient[name].astype(np.float64), LEARNING_RATES[t - 1]
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            p = p * (1 - rate * (0.0 if name == "norm.weight" else decay))
            p = p - rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
        np.testing.assert_allclose(value, p, rtol=0, atol=3e-6, err_msg=name)


def test_first_step_is_exact_where_float32_powers_would_not_be() -> None:
    """1 - 0.999999^1 has no correct digit left after three in float32; the first step must still be lr *
    sign(g).
    """
    model = build_adamw_model({"w": (2,)}, betas=(0.9, 0.999999), epsilon=0.0, weight_decay=0.0)
    gradients = [{"w": np.array([0.5, -3.0], np.float32)}]
    updated, _ = run_model(model, {"w": np.zeros(2, np.float32)}, gradients)
    np.testing.assert_allclose(updated["w"], [-LEARNING_RATES[0], LEARNING_RATES[0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "settings", "message"),
    [
        ({}, {}, "at least one parameter; got none"),
        ({"w": (1,)}, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\); got \(0.9, 1.0\)"),
        ({"w": (1,)}, {"epsilon": -1.0}, "epsilon must not be negative; got -1.0"),
        ({"w": (1,)}, {"epsilon": float("nan")}, "epsilon must not be negative; got nan"),
        ({"w": (1,)}, {"weight_decay": -0.1}, "weight_decay must not be negative; got -0.1"),
        ({"w": (1,)}, {"max_gradient_norm": 0.0}, "max_gradient_norm must be positive; got 0.0"),
        ({"w": (1,)}, {"no_decay": ["*.bias"]}, r"'\*.bias' matches none of 1: w"),
        ({"w": (1,), "w_grad": (1,)}, {}, "w_grad, w_grad_updated would appear twice"),
        ({"step": (1,)}, {}, "step would appear twice"),
    ],
)
def test_refuses(parameters: dict[str, tuple[int, ...]], settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_adamw_model(parameters, **settings)  # type: ignore[arg-type]
