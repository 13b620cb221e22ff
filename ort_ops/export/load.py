"""Trained values back into a PyTorch module."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
from torch import nn

from ort_ops.training.checkpoint import Checkpoint, load_checkpoint


def load_into_torch(
    module: nn.Module, checkpoint: Checkpoint | str | os.PathLike[str], *, strict: bool = True
) -> None:
    """Copy the values of a checkpoint into the module's parameters and buffers of the same names.

    Args:
        module: the module that was exported, or one of the same shape. Nothing is changed unless all fits.
        checkpoint: from `load_checkpoint`, or the path of its file.
        strict: every parameter of the module must be in the checkpoint. One that the loss did not depend on
            is not; with False it keeps its value.

    Raises:
        ValueError: a tensor is missing, unknown, or has another shape or type than in the module, or the
            checkpoint is nominal.
        FileNotFoundError: there is no such file.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = load_checkpoint(checkpoint)
    kind = type(module).__name__
    if checkpoint.nominal:
        raise ValueError(
            f"load_into_torch: the checkpoint for {kind} is nominal: it holds shapes, but no values; save "
            "one after training."
        )
    targets = dict(module.named_parameters()) | dict(module.named_buffers())
    unknown = [name for name in checkpoint.parameters if name not in targets]
    if unknown:
        raise ValueError(
            f"load_into_torch: the checkpoint has {_listed(unknown)}, which {kind} does not; it has "
            f"{_listed(list(targets))}. Give the module that was exported."
        )
    missing = [name for name, _ in module.named_parameters() if name not in checkpoint.parameters]
    if strict and missing:
        raise ValueError(
            f"load_into_torch: the checkpoint lacks {_listed(missing)} of {kind}. If the loss does not "
            "depend on them, strict=False lets them keep their values."
        )
    values = {name: _as_torch(value) for name, value in checkpoint.parameters.items()}
    for name, value in values.items():
        target = targets[name]
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            raise ValueError(
                f"load_into_torch: {name!r} of {kind} must be {target.dtype} {list(target.shape)}; the "
                f"checkpoint has {value.dtype} {list(value.shape)}."
            )
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)


def _as_torch(value: np.ndarray) -> torch.Tensor:
    if value.dtype == ml_dtypes.bfloat16:  # unknown to torch.from_numpy
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
