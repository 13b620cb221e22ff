"""Runs a training step in ONNX Runtime with parameters and optimizer state kept in OrtValues from step to
step.

A step is two runs: the gradient model (batch, parameters -> loss, gradients) and the optimizer model
(parameters, gradients, state -> new parameters, new state). The optimizer reads one set of buffers and writes
the other, then the sets change places: no tensor is copied, none is overwritten while it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from ort_ops.training.optimizer import GRADIENT_SUFFIX, LEARNING_RATE, STEP, UPDATED_SUFFIX

_DEVICE = "cpu"

# Sessions take turns here. Without it the threads of the one that has just run keep spinning on the cores
# that the next one needs.
_STOP_SPINNING = "session.force_spinning_stop"


class TrainingRunner:
    """Trains the parameters of a gradient model with an optimizer model.

    gradient_model: from `build_gradient_model`; its inputs are the batch and the parameters, its outputs the
        forward model's own and `<parameter>_grad` for each parameter.
    optimizer_model: from `build_adamw_model`, or another that follows the same convention of names.
    parameters: the first value, float32, of every parameter that the optimizer updates. They are copied.
    optimizer_state: the optimizer's state to go on from, e.g. of a checkpoint; zeros when absent.
    step: number of updates already made.
    session_options: for the sessions: threads, and the plugin registered on it. The runner adds a setting to
        it, that idle threads stop spinning.

    Parameters and optimizer state are held twice, gradients once. Raises ValueError, naming the tensor, when
    the models and the values do not fit together.
    """

    def __init__(
        self,
        gradient_model: onnx.ModelProto,
        optimizer_model: onnx.ModelProto,
        parameters: Mapping[str, np.ndarray],
        *,
        optimizer_state: Mapping[str, np.ndarray] | None = None,
        step: int = 0,
        session_options: ort.SessionOptions | None = None,
    ) -> None:
        updated = _updated_tensors(optimizer_model)
        optimizer_inputs = {value.name for value in optimizer_model.graph.input}
        self._parameter_names = [name for name in updated if name + GRADIENT_SUFFIX in optimizer_inputs]
        self._state_names = [name for name in updated if name not in self._parameter_names]
        gradient_shapes = {name + GRADIENT_SUFFIX: updated[name] for name in self._parameter_names}
        state_shapes = {name: updated[name] for name in self._state_names}
        if optimizer_state is None:
            optimizer_state = {name: np.zeros(shape, np.float32) for name, shape in state_shapes.items()}
        _check_values("parameters", parameters, {name: updated[name] for name in self._parameter_names})
        _check_values("optimizer_state", optimizer_state, state_shapes)
        _check_gradients(gradient_model, gradient_shapes)

        self._step = step
        self._gradient_session = _session(gradient_model, session_options)
        self._optimizer_session = _session(optimizer_model, session_options)
        self._batch_names = _input_names(self._gradient_session, without=self._parameter_names)
        self._result_names = _output_names(self._gradient_session, without=gradient_shapes)
        self._report_names = [
            name for name in _output_names(self._optimizer_session) if not name.endswith(UPDATED_SUFFIX)
        ]

        values = {**parameters, **optimizer_state}
        first = {name: _owned(values[name]) for name in updated}
        second = {name: _empty(shape) for name, shape in updated.items()}
        gradients = {name: _empty(shape) for name, shape in gradient_shapes.items()}
        self._buffers = (first, second)
        self._active = 0
        # Both directions are bound once, so that a step binds only its batch and scalars.
        self._gradient_bindings = [
            _bind(
                self._gradient_session,
                inputs={name: source[name] for name in self._parameter_names},
                results=self._result_names,
                outputs=gradients,
            )
            for source in (first, second)
        ]
        self._optimizer_bindings = [
            _bind(
                self._optimizer_session,
                inputs={**source, **gradients},
                results=self._report_names,
                outputs={name + UPDATED_SUFFIX: value for name, value in target.items()},
            )
            for source, target in ((first, second), (second, first))
        ]

    @property
    def step(self) -> int:
        """Number of updates made so far, those before a resume included."""
        return self._step

    @property
    def parameters(self) -> dict[str, ort.OrtValue]:
        """The parameters as they are now. The buffers are written again by the step after the next one."""
        return {name: self._buffers[self._active][name] for name in self._parameter_names}

    @property
    def optimizer_state(self) -> dict[str, ort.OrtValue]:
        """The optimizer's state as it is now. The buffers are written again by the step after the next
        one.
        """
        return {name: self._buffers[self._active][name] for name in self._state_names}

    def train_step(self, batch: Mapping[str, np.ndarray], learning_rate: float) -> dict[str, np.ndarray]:
        """One update from `batch`, the inputs of the forward model by name.

        Returns the forward model's outputs (the loss among them) as they were before the update, and what the
        optimizer reports (`gradient_norm` when it clips).
        """
        _check_batch(batch, self._batch_names)
        results = _run(
            self._gradient_session, self._gradient_bindings[self._active], batch, self._result_names
        )
        scalars: dict[str, np.ndarray] = {
            LEARNING_RATE: np.array(learning_rate, np.float32),
            STEP: np.array(self._step, np.int64),
        }
        report = _run(
            self._optimizer_session, self._optimizer_bindings[self._active], scalars, self._report_names
        )
        self._active = 1 - self._active
        self._step += 1
        return results | report


class EvaluationRunner:
    """Runs a forward model with the parameters of a `TrainingRunner` as they are at each run, without copying
    them.

    forward_model: what the gradient model was built from, or another whose initializers have those names.
    """

    def __init__(
        self,
        forward_model: onnx.ModelProto,
        training: TrainingRunner,
        session_options: ort.SessionOptions | None = None,
    ) -> None:
        self._training = training
        model = initializers_to_inputs(forward_model, training.parameters)
        self._session = _session(model, session_options)
        self._batch_names = _input_names(self._session, without=training.parameters)
        self._parameter_names = _input_names(self._session, without=self._batch_names)
        self._result_names = _output_names(self._session)

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The forward model's outputs for `batch`, its inputs by name."""
        _check_batch(batch, self._batch_names)
        parameters = self._training.parameters
        binding = _bind(
            self._session,
            inputs={name: parameters[name] for name in self._parameter_names},
            results=self._result_names,
            outputs={},
        )
        return _run(self._session, binding, batch, self._result_names)


def initializers_to_inputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of `model` whose initializers among `names` are inputs that must be given."""
    names = set(names)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    inputs = {value.name for value in result.graph.input}
    kept = [tensor for tensor in result.graph.initializer if tensor.name not in names]
    result.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in result.graph.initializer
        if tensor.name in names - inputs
    )
    del result.graph.initializer[:]
    result.graph.initializer.extend(kept)
    return result


def _session(model: onnx.ModelProto, session_options: ort.SessionOptions | None) -> ort.InferenceSession:
    options = session_options or ort.SessionOptions()
    try:
        options.get_session_config_entry(_STOP_SPINNING)
    except RuntimeError:  # not set yet; setting it a second time would make the runtime print a warning
        options.add_session_config_entry(_STOP_SPINNING, "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _input_names(session: ort.InferenceSession, without: Iterable[str] = ()) -> list[str]:
    excluded = set(without)
    return [value.name for value in session.get_inputs() if value.name not in excluded]


def _output_names(session: ort.InferenceSession, without: Iterable[str] = ()) -> list[str]:
    excluded = set(without)
    return [value.name for value in session.get_outputs() if value.name not in excluded]


def _updated_tensors(optimizer_model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that the optimizer gives a new value: its parameters and its state."""
    return {
        output.name.removesuffix(UPDATED_SUFFIX): tuple(
            d.dim_value for d in output.type.tensor_type.shape.dim
        )
        for output in optimizer_model.graph.output
        if output.name.endswith(UPDATED_SUFFIX)
    }


def _bind(
    session: ort.InferenceSession,
    inputs: Mapping[str, ort.OrtValue],
    results: list[str],
    outputs: Mapping[str, ort.OrtValue],
) -> ort.IOBinding:
    """Bind `results`, for which the runtime finds memory, before `outputs`, so that they come first in its
    list.
    """
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name in results:
        binding.bind_output(name, _DEVICE)
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, value)
    return binding


def _run(
    session: ort.InferenceSession, binding: ort.IOBinding, feeds: Mapping[str, np.ndarray], results: list[str]
) -> dict[str, np.ndarray]:
    """Run with `feeds` besides what `binding` holds already; returns the outputs that `_bind` knew as
    `results`.
    """
    # An OrtValue on the CPU borrows the array's memory: both must live until the run is over.
    values = {
        name: ort.OrtValue.ortvalue_from_numpy(np.asarray(feed, order="C")) for name, feed in feeds.items()
    }
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in results:
        # Again each time: otherwise the runtime would insist on the last result's memory and shape.
        binding.bind_output(name, _DEVICE)
    session.run_with_iobinding(binding)
    return {name: value.numpy() for name, value in zip(results, binding.get_outputs(), strict=False)}


def _owned(array: np.ndarray) -> ort.OrtValue:
    """An OrtValue over a copy. Without the copy the training would go on inside the caller's array."""
    return ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C", copy=True))


def _empty(shape: tuple[int, ...]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, _DEVICE)


def _check_values(
    argument: str, values: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    missing, unknown = sorted(set(shapes) - set(values)), sorted(set(values) - set(shapes))
    if missing or unknown:
        raise ValueError(
            f"TrainingRunner: {argument} must have exactly the tensors that the optimizer model updates; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}."
        )
    for name, shape in shapes.items():
        got = values[name]
        if tuple(got.shape) != shape or got.dtype != np.float32:
            raise ValueError(
                f"TrainingRunner: '{name}' in {argument} must be float32 {list(shape)}; "
                f"got {got.dtype} {list(got.shape)}."
            )


def _check_gradients(gradient_model: onnx.ModelProto, gradient_names: Iterable[str]) -> None:
    missing = sorted(set(gradient_names) - {value.name for value in gradient_model.graph.output})
    if missing:
        raise ValueError(
            f"TrainingRunner: the gradient model must output the gradient of every parameter that the "
            f"optimizer model updates; it lacks {', '.join(missing)}."
        )


def _check_batch(batch: Mapping[str, Any], names: list[str]) -> None:
    if set(batch) != set(names):
        raise ValueError(f"The batch must have exactly the inputs {sorted(names)}; got {sorted(batch)}.")
