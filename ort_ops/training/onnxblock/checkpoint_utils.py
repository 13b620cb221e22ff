"""Checkpoints of parameters that blocks found, and parameters of a checkpoint in a model for inference."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import onnx

from ort_ops.training import checkpoint


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Write a checkpoint for the start of a training.

    parameters: trained and frozen ones, as `TrainingBlock.parameters` returns them.
    nominal_checkpoint: store names, types and shapes only.
    """
    trainable, frozen = parameters
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in [*trainable, *frozen]}
    names = frozenset(tensor.name for tensor in frozen)
    checkpoint.save_checkpoint(
        path_to_checkpoint, checkpoint.Checkpoint(arrays, frozen=names, nominal=nominal_checkpoint)
    )


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Set, in place, the initializers of `model` that the checkpoint has values for.

    Raises ValueError for a nominal checkpoint, when none of its parameters is an initializer, and when one
    has another shape or type there.
    """
    loaded = checkpoint.load_checkpoint(path_to_checkpoint)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    found = [name for name in loaded.parameters if name in initializers]
    if loaded.nominal or not found:
        what = "has no values" if loaded.nominal else "has no parameter that is an initializer of the model"
        raise ValueError(
            f"load_checkpoint_to_model: the checkpoint '{os.fspath(path_to_checkpoint)}' {what}; give the "
            "checkpoint of a training of this model."
        )
    for name in found:
        _check_same_kind(name, initializers[name], loaded.parameters[name])
    for name in found:
        initializers[name].CopyFrom(onnx.numpy_helper.from_array(loaded.parameters[name], name))


def _check_same_kind(name: str, tensor: onnx.TensorProto, value: np.ndarray) -> None:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if tuple(tensor.dims) != value.shape or dtype != value.dtype:
        raise ValueError(
            f"load_checkpoint_to_model: '{name}' is {dtype} {list(tensor.dims)} in the model and "
            f"{value.dtype} {list(value.shape)} in the checkpoint; give the model that was trained."
        )
