"""Checkpoints: parameters, optimizer state and step in one safetensors file that is always whole.

Tensors are stored as `parameters/<name>` and `optimizer/<name>`; the step and the caller's own notes are in
the file's metadata. A file is written beside its final name and renamed, so a process killed while saving
leaves the old checkpoint or the new one, never a part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

_METADATA_KEY = "ort_ops.checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """State of a training run after `step` updates. `notes` holds anything JSON can, for the caller's own
    use.
    """

    parameters: Mapping[str, np.ndarray]
    optimizer_state: Mapping[str, np.ndarray]
    step: int
    notes: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path`, replacing in one move what was there. The folder is made when it is
    missing.

    The same checkpoint always gives the same bytes. Raises OSError when the file cannot be written; what was
    at `path` before is then untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"parameters/{name}": array for name, array in checkpoint.parameters.items()}
    tensors |= {f"optimizer/{name}": array for name, array in checkpoint.optimizer_state.items()}
    # safetensors writes an array's memory as it lies: column-major or strided ones would come back wrong.
    tensors = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    # One metadata entry only: safetensors writes several in an order that changes from one process to the
    # next.
    metadata = {_METADATA_KEY: json.dumps({"step": checkpoint.step, "notes": dict(checkpoint.notes)})}
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
    state = json.loads(metadata[_METADATA_KEY])
    return Checkpoint(
        parameters=_with_prefix(tensors, "parameters/"),
        optimizer_state=_with_prefix(tensors, "optimizer/"),
        step=state["step"],
        notes=state["notes"],
    )


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
