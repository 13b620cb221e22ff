"""ONNX's own backend node tests as forward models: which of them are differentiated, and agree with
differences.

Run as a script it prints the share and the list of the rest with the reason; the test asserts the share.

A node test is used if a floating-point output depends on a floating-point input through operators that have a
derivative (the registry knows which have none by definition). The loss is the sum of all floating-point
outputs times fixed random numbers. Integers and truth values are constants, as exporters write them.
Floating-point inputs are moved a little, away from the kinks and ties that the tests put them on. The
gradient along random directions is compared with central differences, in float64 by onnx's reference
implementation or, where that does not do (operators without float64, computed in float32 inside, with forms
that it lacks, or too slow for a large input), in float32 by ONNX Runtime with a larger step.
"""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from finite_differences import runner
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases

from ort_ops.gradient import GradientError, all_rules, build_gradient_model
from ort_ops.gradient.registry import OLDEST_OPSET, find_rule

NOT_DIFFERENTIABLE = {rule.op_type for rule in all_rules() if rule.kind == "not differentiable"}
SLOW_IN_REFERENCE = {"AveragePool", "ConvTranspose", "LpPool", "MaxPool"}
"""Operators that onnx's reference implementation computes window by window: seconds for a large input."""
LARGE = 1000
"""Elements of an input that is large in that sense."""
DIRECTIONS = 2
LOSS = "the_loss"
LARGEST = 1e30


@dataclass(frozen=True)
class Result:
    """What came of one node test: `outcome` is "right", "not used" or "failed", `reason` says why."""

    name: str
    operator: str
    outcome: str
    reason: str = ""


def results() -> Iterator[Result]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tests divide by zero and overflow on purpose
        cases = collect_testcases(None)
    for case in cases:
        if (
            "_expanded" in case.name
        ):  # the same test once more, with the function's body in the operator's place
            continue
        model, name = case.model, case.name.removeprefix("test_")
        operators = collections.Counter(node.op_type for node in model.graph.node)
        operator = operators.most_common(1)[0][0] if operators else "none"
        try:
            outcome, reason = _check(model, case.data_sets[0][0])
        except GradientError as error:
            unreachable = "does not depend on" in str(error)
            outcome, reason = (
                ("not used", "no differentiable path") if unreachable else ("failed", str(error))
            )
        except Exception as error:  # a survey: whatever goes wrong is a line of the report
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
        yield Result(name, operator, outcome, reason.replace("\n", " ")[:300])


def _check(model: onnx.ModelProto, given: Sequence[object]) -> tuple[str, str]:
    if not all(value.type.HasField("tensor_type") for value in [*model.graph.input, *model.graph.output]):
        return "not used", "sequence, optional or map types"
    if any(node.domain != "" for node in model.graph.node):
        return "not used", "operators of another domain"
    if all(node.op_type in NOT_DIFFERENTIABLE for node in model.graph.node):
        return "not used", "not differentiable by definition"
    if any(isinstance(data, onnx.TensorProto) for data in given):
        return "not used", "types that NumPy lacks"
    feeds = {value.name: np.asarray(data) for value, data in zip(model.graph.input, given, strict=False)}
    if any(value.dtype.kind == "V" or value.dtype.name in ("bfloat16",) for value in feeds.values()):
        return "not used", "types that ONNX Runtime's Python interface lacks"
    fixed = _not_differentiable_inputs(model)
    floats = [
        name
        for name, value in feeds.items()
        if value.dtype == np.float32 and value.size and name not in fixed
    ]
    try:
        outputs = _finite_outputs(model, feeds)
    except Exception:  # no runtime here has all of the operator's forms
        return "not used", "the forward model does not run here"
    if not floats or not outputs:
        return "not used", "no float32 input or finite float32 output"
    model = _with_constants(model, {name: value for name, value in feeds.items() if name not in floats})
    feeds = _away_from_kinks(model, {name: feeds[name] for name in floats})
    slow = any(node.op_type in SLOW_IN_REFERENCE for node in model.graph.node)
    if not (slow and any(value.size > LARGE for value in feeds.values())):
        try:
            first = _compare(*_in_float64(model, feeds), floats, outputs, 1e-5, 1e-4, reference_only=True)
        except Exception as error:  # of any kind: float32 decides
            first = "failed", str(error)
        if first[0] == "right":
            return first
    return _compare(model, feeds, floats, outputs, 1e-2, 1e-2, reference_only=False)


def _not_differentiable_inputs(model: onnx.ModelProto) -> set[str]:
    """Inputs that no rule differentiates by, such as the scales of Resize."""
    fixed, free = set(), set()
    version = next((entry.version for entry in model.opset_import if entry.domain == ""), 1)
    for node in model.graph.node:
        rule = find_rule("", node.op_type, max(version, OLDEST_OPSET))
        for index, name in enumerate(node.input):
            (free if rule is None or rule.inputs is None or index in rule.inputs else fixed).add(name)
    return fixed - free


def _finite_outputs(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[str]:
    """float32 outputs without infinities, NaN or masks as large as float32 goes: their sum can be a loss."""
    values = zip(model.graph.output, runner(model)(feeds), strict=True)
    return [
        value.name
        for value, data in values
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and np.all(np.abs(data) < LARGEST)
    ]


def _with_constants(model: onnx.ModelProto, constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model with some of its inputs as initializers."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    inputs = [value for value in fixed.graph.input if value.name not in constants]
    del fixed.graph.input[:]
    fixed.graph.input.extend(inputs)
    fixed.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return fixed


def _away_from_kinks(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs moved a little towards zero, or up, or their absolute values: what the model makes no NaN of."""
    generator = np.random.default_rng(2)
    moves = {name: generator.uniform(0.02, 0.05, value.shape) for name, value in feeds.items()}
    ways: list[Callable[[np.ndarray, np.ndarray], np.ndarray]] = [
        lambda value, move: value * (1 - move) + (value == 0) * move,
        lambda value, move: value + move,
        lambda value, move: np.abs(value) + move,
    ]
    for way in ways:
        moved = {
            name: np.asarray(way(value, moves[name])).astype(value.dtype) for name, value in feeds.items()
        }
        if not any(np.isnan(np.asarray(value, np.float64)).any() for value in runner(model)(moved)):
            return moved
    return moved


def _in_float64(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    double = onnx.ModelProto()
    double.CopyFrom(model)
    for value in [*double.graph.input, *double.graph.output, *double.graph.value_info]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return double, {
        name: value.astype(np.float64) if value.dtype == np.float32 else value
        for name, value in feeds.items()
    }


def _with_loss(
    model: onnx.ModelProto, outputs: list[str], shapes: dict[str, tuple[int, ...]], dtype: np.dtype
) -> onnx.ModelProto:
    """The sum of the outputs times fixed random numbers, as the only output."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    generator = np.random.default_rng(0)
    parts = []
    for name in outputs:
        weights = generator.uniform(0.5, 1.5, shapes[name]).astype(dtype)
        whole.graph.initializer.append(numpy_helper.from_array(weights, f"{name}_weights"))
        whole.graph.node.append(onnx.helper.make_node("Mul", [name, f"{name}_weights"], [f"{name}_product"]))
        whole.graph.node.append(
            onnx.helper.make_node("ReduceSum", [f"{name}_product"], [f"{name}_part"], keepdims=0)
        )
        parts.append(f"{name}_part")
    whole.graph.node.append(onnx.helper.make_node("Sum", parts, [LOSS]))
    del whole.graph.output[:]
    kind = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    whole.graph.output.append(onnx.helper.make_tensor_value_info(LOSS, kind, []))
    return whole


def _compare(
    model: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    floats: list[str],
    outputs: list[str],
    step: float,
    tolerance: float,
    reference_only: bool,
) -> tuple[str, str]:
    forward = runner(model, reference_only)(feeds)
    names = [value.name for value in model.graph.output]
    shapes = {name: np.shape(value) for name, value in zip(names, forward, strict=True)}
    dtype = feeds[floats[0]].dtype
    whole = _with_loss(model, outputs, shapes, dtype)
    wanted, training = _build(whole, floats)
    gradients = dict(zip(wanted, runner(training, reference_only)(feeds)[1:], strict=True))
    loss = runner(whole, reference_only)
    generator = np.random.default_rng(1)
    for _ in range(DIRECTIONS):
        direction = {name: generator.standard_normal(feeds[name].shape) for name in wanted}
        ends = [
            float(
                loss(
                    {
                        **feeds,
                        **{
                            name: np.asarray(feeds[name] + sign * step * way).astype(dtype)
                            for name, way in direction.items()
                        },
                    }
                )[0]
            )
            for sign in (1, -1)
        ]
        expected = (ends[0] - ends[1]) / (2 * step)
        terms = [float((gradients[name].astype(np.float64) * way).sum()) for name, way in direction.items()]
        scale = max(
            1.0,
            abs(expected),
            *(float(np.abs(gradients[name] * way).sum()) for name, way in direction.items()),
        )
        if not abs(sum(terms) - expected) <= tolerance * scale:
            return "failed", f"gradient {sum(terms):.6g}, differences {expected:.6g}"
    return "right", ""


def _build(model: onnx.ModelProto, names: list[str]) -> tuple[list[str], onnx.ModelProto]:
    """The gradient model by those of `names` that the builder does not call unreachable."""
    wanted = list(names)
    while True:
        try:
            return wanted, build_gradient_model(model, wanted, LOSS)
        except GradientError as error:
            lost = [name for name in wanted if f"'{name}'" in str(error).partition("but the loss")[0]]
            if "does not depend on" not in str(error) or len(lost) == len(wanted):
                raise
            wanted = [name for name in wanted if name not in lost]


def summary(found: list[Result]) -> str:
    """The share that is right, and every other test with its reason."""
    counts = collections.Counter(result.outcome for result in found)
    tried = counts["right"] + counts["failed"]
    lines = [
        f"{result.name} ({result.operator}): {result.reason}"
        for result in found
        if result.outcome == "failed"
    ]
    share = 100 * counts["right"] / tried
    lines.append(f"{counts['right']} of {tried} right ({share:.1f} %), {counts['not used']} not used")
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(list(results())))
