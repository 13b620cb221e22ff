"""One runner for all single-operator cases: gradients against central differences, in float64.

A case is a line of ONNX text with its inputs (cases.py). The runner makes a forward model whose loss is the
sum of every output times fixed random numbers, builds the gradient model, and compares with central
differences of the *forward* model. Both run in ONNX Runtime where it has float64 kernels, else in onnx's
reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator
from reference_ops import CORRECTED

from ort_ops.gradient import build_gradient_model
from ort_ops.operators import REFERENCE_OPS

STEP = 1e-6
"""Central differences err by STEP^2 * f''' / 6 and by rounding, 2^-53 * |f| / STEP: some 1e-10 relative,
both."""

TOLERANCE = 2e-7
"""Relative to the largest element of the gradient or of the loss's terms; a thousand times the error
above."""

LINEAR_STEP = 0.25
LINEAR_TOLERANCE = 2e-5
"""For operators that are linear in each element, which float32 is enough for: the difference has no error but
rounding, some 100 additions of 2^-24 each over a step of 1/4."""

SINGLE_STEP = 1e-2
SINGLE_TOLERANCE = 1e-3
"""For smooth operators in float32: the difference errs by STEP^2 * f''' / 6, and by rounding, 2^-24 * |f| /
STEP, which is the larger part: some 1e-4."""

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One operator in one form.

    Attributes:
        text: statements in ONNX's text format that make the outputs from the inputs.
        inputs: graph inputs; the float64 ones are differentiated by.
        constants: initializers, such as axes.
        outputs: names of the outputs that the loss is made from.
        opset: version of the default domain.
        dynamic: also build the model with every dim of the inputs unknown.
        static: inputs whose dims are known also in the dynamic build, as those of weights are.
        linear: the operator is linear in each element, and ONNX Runtime has it in float32 only: run it in
            that.
        single: smooth, but ONNX Runtime has it in float32 only, and onnx's reference implementation not in
            every form.
        reference: ONNX Runtime's float64 kernel is no better than float32: run onnx's reference
            implementation.
        domains: other domains that the text uses, with versions.
    """

    text: str
    inputs: Feeds
    constants: Feeds = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    opset: int = 18
    dynamic: bool = True
    static: tuple[str, ...] = ()
    linear: bool = False
    single: bool = False
    reference: bool = False
    domains: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.real == np.float32:
            for values in (self.inputs, self.constants):
                for name, value in values.items():
                    values[name] = value.astype(np.float32) if value.dtype == np.float64 else value

    @property
    def real(self) -> type[np.floating]:
        """Element type that the case is computed in."""
        return np.float32 if self.linear or self.single else np.float64

    @property
    def precision(self) -> tuple[float, float]:
        """Step of the central differences, and tolerance."""
        if self.linear:
            return LINEAR_STEP, LINEAR_TOLERANCE
        return (SINGLE_STEP, SINGLE_TOLERANCE) if self.single else (STEP, TOLERANCE)

    @property
    def differentiated(self) -> list[str]:
        return [name for name, value in self.inputs.items() if value.dtype == self.real]


def forward_model(case: Case, dynamic: bool) -> onnx.ModelProto:
    """The case with `loss` = sum over outputs of output * weights; weights have the outputs' shapes."""

    def declare(name: str, value: np.ndarray) -> str:
        dims = [
            f"{name}_{axis}" if dynamic and name not in case.static else str(size)
            for axis, size in enumerate(value.shape)
        ]
        kind = onnx.helper.tensor_dtype_to_string(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
        return f"{kind.removeprefix('TensorProto.').lower()}[{','.join(dims)}] {name}".replace("[]", "")

    domains = "".join(f', "{domain}": {version}' for domain, version in case.domains.items())
    header = f'<ir_version: 8, opset_import: ["": {case.opset}{domains}]>'
    inputs = ", ".join(declare(name, value) for name, value in case.inputs.items())
    parts = [
        f"sum_{y} = Mul({y}, weights_{y})\n part_{y} = ReduceSum<keepdims=0>(sum_{y})" for y in case.outputs
    ]
    kind = "float" if case.real == np.float32 else "double"
    loss = f"loss = Sum({', '.join(f'part_{y}' for y in case.outputs)})"
    body = "\n".join([case.text, *parts, loss])
    model = onnx.parser.parse_model(f"{header} case ({inputs}) => ({kind} loss) {{ {body} }}")
    for name, value in case.constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    for y, shape in _output_shapes(case, model).items():
        weights = np.random.default_rng(len(case.text)).uniform(0.5, 1.5, shape).astype(case.real)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, f"weights_{y}"))
    return model


def _output_shapes(case: Case, model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.node[-1 - 2 * len(case.outputs) :]
    del probe.graph.output[:]
    probe.graph.output.extend(
        onnx.helper.make_tensor_value_info(y, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(case.real)), None)
        for y in case.outputs
    )
    return {
        y: value.shape
        for y, value in zip(case.outputs, runner(probe, case.reference)(case.inputs), strict=True)
    }


def runner(model: onnx.ModelProto, reference_only: bool = False) -> Callable[[Feeds], list[np.ndarray]]:
    """Something that runs a model: ONNX Runtime if it has the kernels, else onnx's reference
    implementation."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        if reference_only:
            raise NotImplementedError
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # which exception depends on what is missing: a kernel, an opset, a type
        reference = ReferenceEvaluator(model, new_ops=[*REFERENCE_OPS, *CORRECTED])
        return lambda feeds: [np.asarray(value) for value in reference.run(None, feeds)]
    names = {value.name for value in session.get_inputs()}
    # copies: BatchNormalization in training mode writes the new running statistics into its inputs' own
    # buffers
    return lambda feeds: session.run(
        None, {name: value.copy() for name, value in feeds.items() if name in names}
    )


def check_case(case: Case, dynamic: bool = False) -> None:
    """Assert that every gradient of the case agrees with central differences."""
    model = forward_model(case, dynamic)
    training = build_gradient_model(model, case.differentiated)
    onnx.checker.check_model(training)
    _, *gradients = runner(training, case.reference)(case.inputs)
    forward = runner(model, case.reference)
    for name, gradient in zip(case.differentiated, gradients, strict=True):
        step, tolerance = case.precision
        expected = central_differences(lambda feeds: float(forward(feeds)[0]), case.inputs, name, step)
        assert gradient.dtype == case.real
        assert gradient.shape == expected.shape
        scale = max(1.0, np.abs(expected).max(initial=0.0))
        np.testing.assert_allclose(
            gradient, expected, rtol=0, atol=tolerance * scale, err_msg=f"d{name} of {case.text}"
        )


def central_differences(
    function: Callable[[Feeds], float], feeds: Feeds, name: str, size: float
) -> np.ndarray:
    """The derivative of `function` by each element of input `name`, from steps of `size` both ways."""
    result = np.zeros(feeds[name].shape)
    for index in np.ndindex(result.shape):
        ends = []
        for step in (size, -size):
            moved = feeds[name].copy()
            moved[index] += step
            ends.append(function({**feeds, name: moved}))
        result[index] = (ends[0] - ends[1]) / (2 * size)
    return result
