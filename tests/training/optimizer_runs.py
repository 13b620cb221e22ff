"""Runs an optimizer model over several steps in plain ONNX Runtime, and the settings that tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from operator_models import run_session

from ort_ops.training.optimizer import initial_state

SHAPES: dict[str, tuple[int, ...]] = {"weight": (5, 7), "norm.weight": (7,), "scalar": (), "empty": (0, 3)}
STEPS = 12
# As float32, in which the run time hands them over.
LEARNING_RATES = [float(np.float32(0.03 * (1 - step / STEPS))) for step in range(STEPS)]

Tensors = dict[str, np.ndarray]


def parameter_types(
    shapes: Mapping[str, Sequence[int]] = SHAPES, dtype: ir.DataType = ir.DataType.FLOAT
) -> dict[str, tuple[Sequence[int], int]]:
    return {name: (shape, dtype) for name, shape in shapes.items()}


def random_tensors(seed: int, scale: float = 1.0, dtype: ir.DataType = ir.DataType.FLOAT) -> Tensors:
    generator = np.random.default_rng(seed)
    return {
        name: np.asarray(scale * generator.normal(size=shape)).astype(dtype.numpy())
        for name, shape in SHAPES.items()
    }


def run_steps(
    model: onnx.ModelProto,
    parameters: Tensors,
    gradients: Sequence[Tensors],
    learning_rates: Sequence[float] = LEARNING_RATES,
) -> tuple[list[Tensors], list[Tensors]]:
    """For every step: all that the model updates as it is after the step, and what the model reports."""
    state = {**parameters, **initial_state(model)}
    states, reports = [], []
    run = step_of(model)
    for gradient, rate in zip(gradients, learning_rates, strict=True):
        state, report = run(state, gradient, rate)
        states.append(state)
        reports.append(report)
    return states, reports


def step_of(model: onnx.ModelProto) -> Callable[[Tensors, Tensors, float], tuple[Tensors, Tensors]]:
    """A function from the state (which holds the parameters), the gradients and the learning rate to the new
    state and the reports.
    """
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(state: Tensors, gradient: Tensors, learning_rate: float) -> tuple[Tensors, Tensors]:
        feeds = {f"{name}_grad": value for name, value in gradient.items()}
        feeds["learning_rate"] = np.array(learning_rate, np.float32)
        results = run_session(session, {**state, **feeds})
        updated = {n.removesuffix("_updated"): v for n, v in results.items() if n.endswith("_updated")}
        return updated, {name: v for name, v in results.items() if not name.endswith("_updated")}

    return run
