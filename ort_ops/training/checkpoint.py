"""Checkpoints: parameters, optimizer state and properties in one safetensors file that is always whole.

Tensors are stored as `parameters/<name>` and `optimizer/<name>`; everything else is in the file's metadata. A
file is written beside its final name and renamed, so a process killed while saving leaves the old checkpoint
or the new one, never a part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

STEP = "step"
"""Name of the optimizer's state that counts the updates made."""

_METADATA_KEY = "ort_ops.checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """What a training run needs to go on.

    parameters: every tensor that is not part of the graph itself, trained or frozen.
    optimizer_state: the optimizer's tensors by the names of its model's inputs (`w_first_moment`, `step`,
        ...). Empty when training starts, or when the optimizer's state was not saved.
    learning_rate: what the optimizer used last; None when no optimizer has run.
    frozen: names of the parameters that are not trained.
    properties: the caller's own notes.
    nominal: the checkpoint holds names, types and shapes of the parameters, but not their values: those must
        be given before anything runs. The arrays in `parameters` are zeros then, without memory of their own.
    """

    parameters: Mapping[str, np.ndarray]
    optimizer_state: Mapping[str, np.ndarray] = field(default_factory=dict)
    learning_rate: float | None = None
    frozen: frozenset[str] = frozenset()
    properties: Mapping[str, int | float | str] = field(default_factory=dict)
    nominal: bool = False

    @property
    def step(self) -> int:
        """Number of updates made, as the optimizer counts them; 0 without an optimizer's state."""
        return int(self.optimizer_state.get(STEP, 0))


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path`, replacing in one move what was there. The folder is made when it is
    missing.

    The same checkpoint always gives the same bytes. Raises OSError when the file cannot be written; what was
    at `path` before is then untouched. Raises ValueError for properties that are not int, float or str, and
    for a name in `frozen` that is no parameter.
    """
    path = Path(path)
    _check(checkpoint)
    tensors = {f"optimizer/{name}": array for name, array in checkpoint.optimizer_state.items()}
    state: dict[str, object] = {
        "learning_rate": checkpoint.learning_rate,
        "frozen": sorted(checkpoint.frozen),
        "properties": dict(checkpoint.properties),
    }
    if checkpoint.nominal:
        state["nominal"] = {
            name: [array.dtype.name, list(array.shape)] for name, array in checkpoint.parameters.items()
        }
    else:
        tensors |= {f"parameters/{name}": array for name, array in checkpoint.parameters.items()}
    # safetensors writes an array's memory as it lies: column-major or strided ones would come back wrong.
    tensors = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    # One metadata entry only: safetensors writes several in an order that changes from one process to the
    # next.
    metadata = {_METADATA_KEY: json.dumps(state)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors' own save_file takes a random temporary name, so each killed process would leave another
    # file. This name is always the same: the next save overwrites what was left.
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(safetensors.numpy.save(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read what `save_checkpoint` wrote.

    Raises FileNotFoundError when there is no file, ValueError when it is not a whole checkpoint of this kind.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"load_checkpoint: there is no checkpoint at '{path}'.")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except safetensors.SafetensorError as error:
        raise ValueError(f"load_checkpoint: '{path}' is not a whole safetensors file ({error}).") from error
    if _METADATA_KEY not in metadata:
        raise ValueError(
            f"load_checkpoint: the metadata of '{path}' must have the entry '{_METADATA_KEY}' of "
            f"save_checkpoint; it has {sorted(metadata) or 'none'}. Is it a checkpoint of a training run?"
        )
    try:
        return _checkpoint(json.loads(metadata[_METADATA_KEY]), tensors)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"load_checkpoint: the entry '{_METADATA_KEY}' in the metadata of '{path}' must be what "
            f"save_checkpoint writes; it is something else ({type(error).__name__}: {error}). Was the file "
            "made by another program or version?"
        ) from error


def _check(checkpoint: Checkpoint) -> None:
    for name, value in checkpoint.properties.items():
        check_property(name, value)
    unknown = sorted(checkpoint.frozen - set(checkpoint.parameters))
    if unknown:
        raise ValueError(
            f"save_checkpoint: frozen must name parameters of the checkpoint; it has no parameter "
            f"{', '.join(unknown)}."
        )


def check_property(name: str, value: object) -> None:
    """Raise ValueError for a property that a checkpoint cannot hold."""
    # bool is an int to Python, but would come back as one that is no longer True or False.
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise ValueError(
            f"A property of a checkpoint must be an int, a float or a str; '{name}' is a "
            f"{type(value).__name__}. Turn it into a str, for example with json.dumps."
        )


def _checkpoint(state: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Checkpoint:
    parameters = _with_prefix(tensors, "parameters/")
    if "nominal" in state:
        parameters = {
            name: np.broadcast_to(np.zeros((), _dtype(dtype)), shape)
            for name, (dtype, shape) in state["nominal"].items()
        }
    return Checkpoint(
        parameters=parameters,
        optimizer_state=_with_prefix(tensors, "optimizer/"),
        learning_rate=state["learning_rate"],
        frozen=frozenset(state["frozen"]),
        properties=state["properties"],
        nominal="nominal" in state,
    )


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _with_prefix(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def _flush_folder(folder: Path) -> None:
    """Make a rename in `folder` durable. Windows has no such call, nor the need for it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
