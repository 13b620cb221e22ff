"""The model in training: forward and backward passes, evaluation, and the way back to an inference model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from ort_ops.training.api.accumulation import Accumulation
from ort_ops.training.api.batch import named_batch, result_converter, to_ort_values
from ort_ops.training.api.checkpoint_state import CheckpointState, TrainingState
from ort_ops.training.api.device import HOST, Device
from ort_ops.training.api.inference_model import write_inference_model
from ort_ops.training.api.session import Session
from ort_ops.training.api.tensor import Tensor, check_tensor, ort_value, to_numpy
from ort_ops.training.losses import label_checks
from ort_ops.training.model_file import Model
from ort_ops.training.optimizer import GRADIENT_SUFFIX, LOSS_SCALE, UPDATED_SUFFIX
from ort_ops.training.training_graphs import ADDITIONAL_OUTPUTS_KEY, FROZEN_KEY


class Module:
    """Runs training and evaluation steps of the artifacts that `generate_artifacts` made.

    Args:
        train_model_uri: the training model: a path, a ModelProto or its bytes. A path is needed for models
            with external data.
        state: parameters and gradients. Several Modules may share one.
        eval_model_uri: the evaluation model, for `eval()` and `export_model_for_inferencing`.
        device: `cpu`, `cuda` or `cuda:<index>`. All parameters, gradients and optimizer state are there.
        session_options: for the sessions of the Module and its Optimizer, e.g. with a number of threads. The
            plugin is registered on it; idle threads stop spinning and memory patterns are off.
        additional_output_names: outputs of the models, such as the logits, to return after the loss, instead
            of those chosen when the artifacts were generated.

    Raises TypeError for a state that is no CheckpointState, and FileNotFoundError, ValueError or RuntimeError
    when a model is missing, when models and state do not fit together, or when the device cannot be used.

    Calls from several threads take turns.
    """

    training: bool
    """Whether a call trains (the default) or evaluates; see `train` and `eval`."""

    def __init__(
        self,
        train_model_uri: Model,
        state: CheckpointState,
        eval_model_uri: Model | None = None,
        device: str = "cpu",
        session_options: ort.SessionOptions | None = None,
        *,
        additional_output_names: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise TypeError(
                "Module: state must be a CheckpointState, for example of "
                f"CheckpointState.load_checkpoint(path); got {type(state).__name__}."
            )
        self.training = True
        self.session_options = session_options or ort.SessionOptions()
        self.state = state
        self._state = state.training_state
        self._eval_model = eval_model_uri
        self._state.place_on(Device.parse(device))
        self._training = self._load("training model", train_model_uri, additional_output_names)
        self._evaluation = (
            None
            if eval_model_uri is None
            else self._load("evaluation model", eval_model_uri, additional_output_names)
        )
        _check_training_model(self._training.session, self._state)
        if self._evaluation is not None:
            _check_evaluation_model(self._evaluation, self._training)
        self._make_gradients()
        self._reset_pending = True  # the gradients are zeros: adding to them and overwriting them is the same
        self._accumulation: Accumulation | None = None

    def __call__(self, /, *inputs: Any, **named_inputs: Any) -> Any:
        """One step in the mode of the moment: a training step also computes the gradients.

        The batch is given in the order of `input_names()`, as one mapping by name, or by keywords: NumPy
        arrays, OrtValues, or tensors of a framework that speaks DLPack. What is returned is of the same kind:
        the loss, or a tuple of the loss and the additional outputs.

        Raises TypeError or ValueError for inputs that are not what the model wants (names, types, shapes,
        labels that are no classes), RuntimeError for `eval()` without an evaluation model and for parameters
        without values.
        """
        mode = self._mode()
        batch = named_batch(inputs, named_inputs, mode.input_names)
        values = to_ort_values(batch, mode.session.inputs)
        for check in mode.label_checks:
            check(to_numpy(values[check.name]))
        convert = result_converter(batch)
        results_on = HOST if convert is to_numpy else self._state.device
        outputs = dict.fromkeys(mode.result_names, results_on)
        with self._state.lock:
            self._state.require_values()
            if mode is self._training:
                results = self._train_step(values, outputs)
            else:
                results = mode.run(values, outputs)
        converted = tuple(convert(results[name]) for name in mode.result_names)
        return converted if len(converted) > 1 else converted[0]

    def train(self, mode: bool = True) -> Module:
        """Let calls train (or, with False, evaluate). Returns the Module."""
        if not mode and self._evaluation is None:
            raise RuntimeError(
                "This Module cannot evaluate: it has no evaluation model. Give its path as eval_model_uri "
                "when the Module is made."
            )
        self.training = mode
        return self

    def eval(self) -> Module:
        """Let calls evaluate. Returns the Module. Raises RuntimeError without an evaluation model."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Let the next training step overwrite the gradients; otherwise steps add to them."""
        self._reset_pending = True

    def input_names(self) -> list[str]:
        """The inputs of a batch, in the order of positional inputs."""
        return list(self._mode().input_names)

    def output_names(self) -> list[str]:
        """The outputs that a call returns: the loss and the additional ones."""
        return list(self._mode().result_names)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients by parameter, in the order of the training model's inputs. On the CPU,
        `gradients[name].array` is the gradient's own memory as a NumPy array.
        """
        return self._state.gradients

    @property
    def updated_parameters(self) -> dict[str, Tensor]:
        """The frozen parameters that the forward pass of a training step updates: running statistics."""
        return {
            name: tensor
            for name, tensor in self._state.parameters.items()
            if name + UPDATED_SUFFIX in self._training.session.outputs
        }

    # -- all parameters as one buffer ------------------------------------------------------------------------

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """The number of elements of all trained parameters, or of all parameters."""
        return sum(int(np.prod(tensor.shape)) for tensor in self._flat_order(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> ort.OrtValue:
        """A copy of all parameters, one after the other in the order of the training model's inputs, as one
        vector on the device. Raises ValueError when they are not of one type.
        """
        tensors = self._flat_order(trainable_only)
        dtype = self._common_dtype(tensors)
        with self._state.lock:
            self._state.require_values()
            flat = np.concatenate([np.zeros(0, dtype), *(tensor.read().reshape(-1) for tensor in tensors)])
        return Tensor.of(flat, self._state.device).value

    def copy_buffer_to_parameters(
        self, buffer: ort.OrtValue | np.ndarray, trainable_only: bool = True
    ) -> None:
        """Set the parameters from one vector, laid out as `get_contiguous_parameters` does. A state from a
        nominal checkpoint is complete after this.

        Raises ValueError for a vector of another size or type, TypeError for what is no vector.
        """
        tensors = self._flat_order(trainable_only)
        dtype = self._common_dtype(tensors)
        if not isinstance(buffer, (np.ndarray, ort.OrtValue)):
            raise TypeError(f"The buffer must be an OrtValue or a NumPy array; got {type(buffer).__name__}.")
        values = buffer if isinstance(buffer, np.ndarray) else to_numpy(buffer)
        size = self.get_parameters_size(trainable_only)
        if values.shape != (size,) or values.dtype != dtype:
            raise ValueError(
                f"The buffer must be {dtype} [{size}], the {'trained ' if trainable_only else ''}parameters "
                f"one after the other; got {values.dtype} {list(values.shape)}."
            )
        ends = np.cumsum([int(np.prod(tensor.shape)) for tensor in tensors])
        names = self._flat_names(trainable_only)
        with self._state.lock:
            for name, tensor, part in zip(names, tensors, np.split(values, ends[:-1]), strict=True):
                self._state.set_parameter(name, part.reshape(tensor.shape))

    # -- inference -------------------------------------------------------------------------------------------

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Write the part of the evaluation model that computes `graph_output_names`, which may be any values
        inside it, with the parameters of the moment as initializers.

        Raises RuntimeError without an evaluation model, ValueError for a name that the model does not have,
        TypeError for a single name that is not in a list.
        """
        if self._eval_model is None:
            raise RuntimeError(
                "This Module cannot export: it has no evaluation model. Give its path as eval_model_uri when "
                "the Module is made."
            )
        with self._state.lock:
            self._state.require_values()
            parameters = {name: tensor.on_host() for name, tensor in self._state.parameters.items()}
            write_inference_model(self._eval_model, parameters, graph_output_names, inference_model_uri)

    # -- inside ----------------------------------------------------------------------------------------------

    def _load(self, kind: str, model: Model, additional: Sequence[str] | None) -> _Mode:
        return _Mode(kind, Session(model, self._state.device, self.session_options), self._state, additional)

    def _mode(self) -> _Mode:
        if self.training:
            return self._training
        if self._evaluation is None:
            self.train(False)
        assert self._evaluation is not None
        return self._evaluation

    def _train_step(
        self, values: Mapping[str, ort.OrtValue], outputs: Mapping[str, Device]
    ) -> dict[str, ort.OrtValue]:
        """Run the training model; overwrite the gradients with the new ones, or add these to them."""
        updated = self.updated_parameters
        targets: dict[str, ort.OrtValue | Device] = dict(outputs)
        targets |= {name + UPDATED_SUFFIX: HOST for name in updated}
        for name, tensor in self._state.gradients.items():
            targets[name + GRADIENT_SUFFIX] = tensor.value if self._reset_pending else self._state.device
        results = self._training.run(values, targets)
        if not self._reset_pending:
            if self._accumulation is None:
                self._accumulation = Accumulation(self._state, self.session_options)
            self._accumulation.add(results)
        for name, tensor in updated.items():
            tensor.write(results[name + UPDATED_SUFFIX])
        self._reset_pending = False
        return results

    def _make_gradients(self) -> None:
        """In the order of the training model's inputs; those of another Module of the same state stay."""
        for name in self._flat_names(trainable_only=True):
            tensor = self._state.parameters[name]
            self._state.gradients.setdefault(name, Tensor(tensor.shape, tensor.dtype, self._state.device))

    def _flat_names(self, trainable_only: bool) -> list[str]:
        excluded = self._state.frozen if trainable_only else ()
        return [name for name in self._training.parameter_names if name not in excluded]

    def _flat_order(self, trainable_only: bool) -> list[Tensor]:
        return [self._state.parameters[name] for name in self._flat_names(trainable_only)]

    def _common_dtype(self, tensors: Sequence[Tensor]) -> np.dtype:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise ValueError(
                f"Parameters in one buffer must all have one type; these have {', '.join(map(str, dtypes))}. "
                "Use state.parameters[name].data for each."
            )
        return dtypes.pop() if dtypes else np.dtype(np.float32)


class _Mode:
    """A training or evaluation model: its session, what of its inputs is the batch, what it returns."""

    def __init__(
        self, kind: str, session: Session, state: TrainingState, additional: Sequence[str] | None
    ) -> None:
        for name, tensor in state.parameters.items():
            if name in session.inputs:
                check_tensor(name, session.inputs[name], tensor, kind)
        self.session = session
        self._state = state
        self.parameter_names = [name for name in session.inputs if name in state.parameters]
        self.input_names = [
            name for name in session.inputs if name not in state.parameters and name != LOSS_SCALE
        ]
        self.label_checks = label_checks(session.metadata)
        if additional is None:
            additional = json.loads(session.metadata.get(ADDITIONAL_OUTPUTS_KEY, "[]"))
        of_parameters = {
            name + suffix for name in self.parameter_names for suffix in (GRADIENT_SUFFIX, UPDATED_SUFFIX)
        }
        known = [name for name in session.outputs if name not in of_parameters]
        unknown = [name for name in additional if name not in known]
        if unknown:
            raise ValueError(
                f"additional_output_names must be outputs of the {kind}; {', '.join(unknown)} is none of "
                f"{', '.join(known)}."
            )
        self.result_names = [known[0], *additional]

    def run(
        self, values: Mapping[str, ort.OrtValue], outputs: Mapping[str, ort.OrtValue | Device]
    ) -> dict[str, ort.OrtValue]:
        """Run with the batch `values` and the state of the moment; see `Session.run`."""
        inputs = {name: self._state.parameters[name].value for name in self.parameter_names}
        if LOSS_SCALE in self.session.inputs:
            scale = self._state.optimizer_state.get(LOSS_SCALE)
            inputs[LOSS_SCALE] = ort_value(np.array(1, np.float32)) if scale is None else scale.value
        return self.session.run({**inputs, **values}, outputs)


def _check_training_model(session: Session, state: TrainingState) -> None:
    """The checkpoint must have the parameters of the model, and agree with it which of them are trained."""
    gradients = {name for name in session.inputs if name + GRADIENT_SUFFIX in session.outputs}
    frozen = set(json.loads(session.metadata.get(FROZEN_KEY, "[]")))
    parameters = set(state.parameters)
    problems = {
        "not in the model": parameters - set(session.inputs),
        "not in the checkpoint": (gradients | frozen) - parameters,
        "without gradient in the model, but not frozen in the checkpoint": (
            (parameters & set(session.inputs)) - state.frozen - gradients
        ),
        "frozen in the checkpoint, but with a gradient in the model": gradients & state.frozen,
    }
    found = [f"{what}: {', '.join(sorted(names))}" for what, names in problems.items() if names]
    if found:
        raise ValueError(
            f"The training model and the checkpoint do not belong together. Parameters {'; '.join(found)}. "
            "Take both from one call of generate_artifacts."
        )


def _check_evaluation_model(evaluation: _Mode, training: _Mode) -> None:
    """A training model would drop out and take the batch's statistics; a forward model would evaluate its own
    parameters, whatever is trained.
    """
    computed = [
        name for name in training.parameter_names if name + GRADIENT_SUFFIX in evaluation.session.outputs
    ]
    lacking = [name for name in training.parameter_names if name not in evaluation.session.inputs]
    if computed or lacking:
        problem = (
            f"it computes gradients ({', '.join(computed)})"
            if computed
            else f"the parameters {', '.join(lacking)} are no inputs of it"
        )
        raise ValueError(
            f"The model given as eval_model_uri is no evaluation model of this training: {problem}. Take the "
            "eval model from the same call of generate_artifacts."
        )
