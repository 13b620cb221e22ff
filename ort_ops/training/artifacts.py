"""From a forward model to the files of a training: models with loss and gradients, optimizer, checkpoint."""

from __future__ import annotations

import enum
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

from ort_ops.training import onnxblock
from ort_ops.training.checkpoint import Checkpoint, save_checkpoint
from ort_ops.training.optimizer import build_adamw_model
from ort_ops.training.training_graphs import TrainingGraphs, build_training_graphs

TRAINING_MODEL = "training_model.onnx"
EVAL_MODEL = "eval_model.onnx"
OPTIMIZER_MODEL = "optimizer_model.onnx"
CHECKPOINT = "checkpoint"


class LossType(enum.Enum):
    """The losses that `generate_artifacts` knows by name, with their defaults; blocks of `onnxblock.loss` take
    arguments."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4
    HuberLoss = 5


class OptimType(enum.Enum):
    """The optimizers that `generate_artifacts` knows by name, with their defaults."""

    AdamW = 1


_LOSSES: dict[LossType, Callable[[], onnxblock.Block]] = {
    LossType.MSELoss: onnxblock.loss.MSELoss,
    LossType.CrossEntropyLoss: onnxblock.loss.CrossEntropyLoss,
    LossType.BCEWithLogitsLoss: onnxblock.loss.BCEWithLogitsLoss,
    LossType.L1Loss: onnxblock.loss.L1Loss,
    LossType.HuberLoss: onnxblock.loss.HuberLoss,
}


def generate_artifacts(
    model: onnx.ModelProto | bytes | str | os.PathLike[str],
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    *,
    additional_output_names: Sequence[str] | None = None,
    loss_input_names: Sequence[str] | None = None,
) -> None:
    """Write what a training needs into a folder."""
    forward = _read(model)
    graphs = _training_graphs(
        forward, requires_grad, frozen_params, loss, additional_output_names, loss_input_names
    )
    optimizer_model = None if optimizer is None else _optimizer_model(graphs)
    folder = Path.cwd() if artifact_directory is None else Path(artifact_directory)
    _write(folder, prefix, graphs, optimizer_model)


def _read(model: onnx.ModelProto | bytes | str | os.PathLike[str]) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto):
        return model
    if isinstance(model, bytes):
        return onnx.load_from_string(model)
    path = Path(model)
    if not path.is_file():
        raise FileNotFoundError(f"generate_artifacts: there is no model file at '{path}'.")
    return onnx.load(path)


def _training_graphs(
    model: onnx.ModelProto,
    requires_grad: Sequence[str] | None,
    frozen_params: Sequence[str] | None,
    loss: LossType | onnxblock.Block | None,
    additional_output_names: Sequence[str] | None,
    loss_input_names: Sequence[str] | None,
) -> TrainingGraphs:
    block = _LOSSES[loss]() if isinstance(loss, LossType) else loss or onnxblock.blocks.PassThrough()
    own_outputs = [value.name for value in model.graph.output]
    with onnxblock.base(model) as accessor:
        result = block(*(loss_input_names or own_outputs))
        results = [result] if isinstance(result, str) else list(result)
        return build_training_graphs(
            accessor.model,
            [*results, *(additional_output_names or ()), *own_outputs],
            requires_grad=requires_grad,
            frozen_params=frozen_params or (),
            constants=accessor.constants,
        )


def _optimizer_model(graphs: TrainingGraphs) -> onnx.ModelProto:
    return build_adamw_model({name: list(tensor.dims) for name, tensor in graphs.trainable.items()})


def _write(
    folder: Path, prefix: str, graphs: TrainingGraphs, optimizer_model: onnx.ModelProto | None
) -> None:
    """Write all files beside their place and then move them, so that none is ever there in part."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".artifacts-", dir=folder))
    try:
        onnx.save(graphs.training_model, unfinished / f"{prefix}{TRAINING_MODEL}")
        onnx.save(graphs.eval_model, unfinished / f"{prefix}{EVAL_MODEL}")
        if optimizer_model is not None:
            onnx.save(optimizer_model, unfinished / f"{prefix}{OPTIMIZER_MODEL}")
        tensors = {**graphs.trainable, **graphs.frozen}
        parameters = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
        save_checkpoint(
            unfinished / f"{prefix}{CHECKPOINT}", Checkpoint(parameters, frozen=frozenset(graphs.frozen))
        )
        for file in sorted(unfinished.iterdir()):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(unfinished)
