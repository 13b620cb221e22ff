"""The state of a training run, shared by a Module and its Optimizer: parameters, gradients, the optimizer's
state, properties; how it is loaded and saved.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ort_ops.training import peer_checkpoint
from ort_ops.training.api.device import Device
from ort_ops.training.api.tensor import Tensor
from ort_ops.training.checkpoint import Checkpoint, check_property, load_checkpoint, save_checkpoint

_NAMES_IN_ERRORS = 3


class TrainingState:
    """The tensors behind a CheckpointState, for Module and Optimizer.

    gradients: of the trained parameters, made by the Module.
    missing: parameters of a nominal checkpoint that have no value yet.
    lock: held by whoever runs with these tensors or changes them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.device = Device()
        self.parameters = {
            name: Tensor.of(array, self.device) for name, array in sorted(checkpoint.parameters.items())
        }
        self.optimizer_state = {
            name: Tensor.of(array, self.device) for name, array in checkpoint.optimizer_state.items()
        }
        self.gradients: dict[str, Tensor] = {}
        self.learning_rate = checkpoint.learning_rate
        self.frozen = checkpoint.frozen
        self.missing = set(checkpoint.parameters) if checkpoint.nominal else set()
        self.properties = dict(checkpoint.properties)
        self.lock = threading.RLock()

    def place_on(self, device: Device) -> None:
        """Move the tensors to `device`. Raises ValueError if a Module uses them elsewhere already."""
        if device == self.device:
            return
        if self.gradients:
            raise ValueError(
                f"The state is on device '{self.device}', where another Module uses it; a Module on device "
                f"'{device}' needs a state of its own. Load the checkpoint a second time."
            )
        self.device = device
        for tensors in (self.parameters, self.optimizer_state):
            for name, tensor in tensors.items():
                tensors[name] = Tensor.of(tensor.read(), device)

    def set_parameter(self, name: str, value: np.ndarray) -> None:
        tensor = self.parameters[name]
        value = np.asarray(value)
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(
                f"The value of parameter '{name}' must be {tensor.dtype} {list(tensor.shape)}; "
                f"got {value.dtype} {list(value.shape)}."
            )
        with self.lock:
            tensor.write(value)
            self.missing.discard(name)

    def require_values(self) -> None:
        """Raise RuntimeError while a nominal checkpoint's parameters have no values."""
        if self.missing:
            some = sorted(self.missing)[:_NAMES_IN_ERRORS]
            more = ", ..." if len(self.missing) > len(some) else ""
            raise RuntimeError(
                f"The state was loaded from a nominal checkpoint, and {len(self.missing)} of its parameters "
                f"have no value yet ({', '.join(some)}{more}). Give them with "
                "module.copy_buffer_to_parameters or state.parameters[name] = value."
            )

    def checkpoint(self, include_optimizer_state: bool) -> Checkpoint:
        """The state of the moment, on the CPU in its own memory: to be used under the lock."""
        optimizer_state = self.optimizer_state if include_optimizer_state else {}
        if self.missing and len(self.missing) < len(self.parameters):
            self.require_values()
        return Checkpoint(
            parameters={name: tensor.on_host() for name, tensor in self.parameters.items()},
            optimizer_state={name: tensor.on_host() for name, tensor in optimizer_state.items()},
            learning_rate=self.learning_rate if include_optimizer_state else None,
            frozen=self.frozen,
            properties=self.properties,
            nominal=bool(self.missing),
        )


class Parameter:
    """One parameter of a CheckpointState."""

    def __init__(self, name: str, state: TrainingState) -> None:
        self._name = name
        self._state = state

    @property
    def name(self) -> str:
        return self._name

    @property
    def data(self) -> np.ndarray:
        """A copy of the value. Assigning copies into the parameter, whose shape and type must be met."""
        with self._state.lock:
            return self._state.parameters[self._name].read()

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._state.set_parameter(self._name, value)

    @property
    def grad(self) -> np.ndarray | None:
        """A copy of the gradient: zeros before the first training step, None when the parameter is frozen or
        no Module has been made. With loss scaling it is the gradient of the scaled loss.
        """
        with self._state.lock:
            gradient = self._state.gradients.get(self._name)
            return None if gradient is None else gradient.read()

    @property
    def requires_grad(self) -> bool:
        return self._name not in self._state.frozen

    def __repr__(self) -> str:
        tensor = self._state.parameters[self._name]
        return (
            f"Parameter(name={self.name!r}, dtype={tensor.dtype}, shape={tensor.shape}, "
            f"requires_grad={self.requires_grad})"
        )


class Parameters:
    """The parameters by name. Iterating gives pairs of name and Parameter, sorted by name."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        if name not in self:
            raise KeyError(f"Parameter {name} not found.")
        return Parameter(name, self._state)

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return name in self._state.parameters

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in self._state.parameters:
            yield name, self[name]

    def __len__(self) -> int:
        return len(self._state.parameters)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(self._state.parameters)})"


class Properties:
    """Notes of the caller, int, float or str by name, that a checkpoint keeps. Iterating gives pairs."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self:
            raise KeyError(f"Property {name} not found.")
        return self._state.properties[name]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        check_property(name, value)
        self._state.properties[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._state.properties

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        yield from self._state.properties.items()

    def __len__(self) -> int:
        return len(self._state.properties)

    def __repr__(self) -> str:
        return f"Properties({self._state.properties})"


class CheckpointState:
    """The state of a training run: parameters with their gradients, optimizer state and properties.

    checkpoint: the values to start from. They are copied. `CheckpointState.load_checkpoint` reads them from a
        file.
    """

    training_state: TrainingState
    """The tensors behind it, for those who run with them or exchange them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.training_state = TrainingState(checkpoint)
        self._parameters = Parameters(self.training_state)
        self._properties = Properties(self.training_state)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """The state in a file of `save_checkpoint`, of `generate_artifacts`, or of onnxruntime-training.

        Raises FileNotFoundError when there is no file, ValueError when it is no whole checkpoint.
        """
        return cls((peer_checkpoint.read if _is_peers(checkpoint_uri) else load_checkpoint)(checkpoint_uri))

    @staticmethod
    def save_checkpoint(
        state: CheckpointState, checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Write the state to a file, which holds the old or the new state, whole, at any moment.

        include_optimizer_state: save also what the optimizer knows, its learning rate and step count among
            it, so that training can go on as if it had not been interrupted.
        """
        with state.training_state.lock:
            save_checkpoint(checkpoint_uri, state.training_state.checkpoint(include_optimizer_state))

    @property
    def parameters(self) -> Parameters:
        return self._parameters

    @property
    def properties(self) -> Properties:
        return self._properties


def _is_peers(path: str | os.PathLike[str]) -> bool:
    """Whether the file is a checkpoint of onnxruntime-training."""
    path = Path(path)
    if not path.is_file():
        return False  # load_checkpoint says what is wrong
    with path.open("rb") as file:
        return file.read(8)[4:] == peer_checkpoint.IDENTIFIER
