"""Updating the parameters with an optimizer that is an ONNX graph."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort

from ort_ops.training.api.device import HOST, Device
from ort_ops.training.api.module import Module
from ort_ops.training.api.session import Session
from ort_ops.training.api.tensor import Tensor, check_tensor, ort_value, to_numpy
from ort_ops.training.checkpoint import STEP
from ort_ops.training.in_place import in_place_outputs
from ort_ops.training.model_file import Model, read_model
from ort_ops.training.optimizer import (
    GRADIENT_SUFFIX,
    LEARNING_RATE,
    UPDATED_SUFFIX,
    initial_state,
)

DEFAULT_LEARNING_RATE = 1e-3


class Optimizer:
    """Updates the parameters of a Module from their gradients.

    optimizer_uri: a path, ModelProto or bytes of an optimizer model: from `generate_artifacts`,
        `build_optimizer_model`, or another whose inputs and outputs are named by the same convention.
    module: whose parameters are updated; device and session options are the module's too.

    The optimizer's state (moments, step count, ...) and the learning rate go on from what the Module's state
    was loaded with, or start anew: as zeros, and 1e-3. Parameters and state are updated in place, so each of
    them is in memory once.

    Raises TypeError for a module that is none, FileNotFoundError when there is no model, ValueError when the
    model does not fit the module's parameters or the state's optimizer state.
    """

    def __init__(self, optimizer_uri: Model, module: Module) -> None:
        if not isinstance(module, Module):
            raise TypeError(f"Optimizer: module must be a Module; got {type(module).__name__}.")
        self._state = module.state.training_state
        model = read_model(optimizer_uri, external_data=False)
        self._session = Session(optimizer_uri, self._state.device, module.session_options)
        self._updated = [
            name.removesuffix(UPDATED_SUFFIX)
            for name in self._session.outputs
            if name.endswith(UPDATED_SUFFIX)
        ]
        self._reports = [name for name in self._session.outputs if not name.endswith(UPDATED_SUFFIX)]
        self._parameter_names = [
            name for name in self._updated if name + GRADIENT_SUFFIX in self._session.inputs
        ]
        self._check_model()
        self._make_state(model)
        in_place = in_place_outputs(model)
        self._in_place = [name for name in self._updated if name in in_place]
        self._copied = [name for name in self._updated if name not in in_place]
        if self._state.learning_rate is None:
            self._state.learning_rate = DEFAULT_LEARNING_RATE

    def step(self) -> dict[str, np.ndarray]:
        """Update the parameters once, from their gradients as they are.

        Returns what the optimizer reports: `gradient_norm`, the norm before clipping, of one that clips;
        `skipped`, of one with loss scaling: True when a gradient was not finite and nothing was updated.
        """
        with self._state.lock:
            self._state.require_values()
            tensors = self._tensors()
            inputs = {name: tensor.value for name, tensor in tensors.items()}
            for name in self._parameter_names:
                inputs[name + GRADIENT_SUFFIX] = self._state.gradients[name].value
            inputs[LEARNING_RATE] = ort_value(np.array(self._state.learning_rate, np.float32))
            outputs: dict[str, ort.OrtValue | Device] = dict.fromkeys(self._reports, HOST)
            outputs |= {name + UPDATED_SUFFIX: tensors[name].value for name in self._in_place}
            outputs |= dict.fromkeys([name + UPDATED_SUFFIX for name in self._copied], self._state.device)
            results = self._session.run(inputs, outputs)
            for name in self._copied:
                tensors[name].write(results[name + UPDATED_SUFFIX])
        return {name: to_numpy(results[name]) for name in self._reports}

    def set_learning_rate(self, learning_rate: float) -> None:
        """Raises ValueError for a rate that is negative or not finite."""
        if not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise ValueError(f"The learning rate must be finite and not negative; got {learning_rate}.")
        self._state.learning_rate = float(learning_rate)

    def get_learning_rate(self) -> float:
        assert self._state.learning_rate is not None
        return self._state.learning_rate

    @property
    def step_count(self) -> int:
        """Number of updates made so far, those before a resume included and skipped ones not."""
        if STEP not in self._updated:
            raise ValueError(
                f"This optimizer model does not count its steps: it has no state '{STEP}', int64 []. Build "
                "it with generate_artifacts or build_optimizer_model."
            )
        with self._state.lock:
            return int(self._state.optimizer_state[STEP].read())

    def _tensors(self) -> dict[str, Tensor]:
        """The parameters and the state that the model updates."""
        return {
            name: self._state.parameters.get(name) or self._state.optimizer_state[name]
            for name in self._updated
        }

    def _check_model(self) -> None:
        """All inputs must be something that the run time has: see the convention of names."""
        known = {LEARNING_RATE, *self._updated, *(name + GRADIENT_SUFFIX for name in self._parameter_names)}
        unknown = sorted(set(self._session.inputs) - known)
        if unknown:
            raise ValueError(
                f"An input of an optimizer model must be '{LEARNING_RATE}', a gradient '<parameter>"
                f"{GRADIENT_SUFFIX}', or have an output '<input>{UPDATED_SUFFIX}'; {', '.join(unknown)} is "
                "not. Build the model with generate_artifacts or build_optimizer_model."
            )
        for name in self._parameter_names:
            if name not in self._state.gradients:
                raise ValueError(
                    f"The optimizer model updates '{name}', which is not a trained parameter of the module; "
                    f"those are {', '.join(self._state.gradients)}. Take both models from one call of "
                    "generate_artifacts."
                )
            check_tensor(name, self._session.inputs[name], self._state.parameters[name], "optimizer model")

    def _make_state(self, model: onnx.ModelProto) -> None:
        """Keep the optimizer state of the checkpoint, or make the first one."""
        state = self._state.optimizer_state
        first = initial_state(model)
        if not state:
            state.update((name, Tensor.of(array, self._state.device)) for name, array in first.items())
        missing, unknown = sorted(set(first) - set(state)), sorted(set(state) - set(first))
        if missing or unknown:
            raise ValueError(
                "The checkpoint's optimizer state must be that of this optimizer model; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}. Use the "
                "optimizer model that it was saved with, or a checkpoint without optimizer state."
            )
        for name in first:
            check_tensor(name, self._session.inputs[name], state[name], "optimizer model")
