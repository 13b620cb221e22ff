"""From a PyTorch module to the files of a training."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import onnx
from torch import nn

from ort_ops.export.arguments import DynamicShapes, Example
from ort_ops.export.forward_model import forward_model_from_torch
from ort_ops.export.names import first_names
from ort_ops.training import onnxblock
from ort_ops.training.artifacts import LossType, generate_artifacts


def training_model_from_torch(
    module: nn.Module,
    example_inputs: Example,
    *,
    loss: LossType | onnxblock.Block | nn.Module | None = None,
    example_targets: Example = (),
    dynamic_shapes: DynamicShapes | None = None,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] = (),
    **options: Any,
) -> None:
    """Write the files that train a PyTorch module without PyTorch: `training_model.onnx`, `eval_model.onnx`,
    `optimizer_model.onnx` and `checkpoint`.

    The module is exported twice, in training and in evaluation mode, so that each file does what the module
    does in that mode.

    Args:
        module, example_inputs, dynamic_shapes: see `forward_model_from_torch`.
        loss: a `LossType` or a block of `onnxblock`, which reads the first tensor that the module returns; a
            PyTorch loss, which becomes part of the graph and whose other arguments `example_targets` shows;
            or None if the module itself returns the loss: under the key `loss`, or as its first tensor.
        requires_grad: names or patterns (`*`, `?`) of the parameters to train. By default those that the
            module says require a gradient. All other parameters are frozen: they are part of the checkpoint.
        frozen_params: names or patterns of parameters to freeze.
        options: `optimizer`, `artifact_directory` and the other arguments of
            `ort_ops.training.artifacts.generate_artifacts`.

    Raises:
        ExportError: see `forward_model_from_torch`.
        ValueError, OSError, RuntimeError: see `generate_artifacts`.
    """
    torch_loss, loss_block = (loss, None) if isinstance(loss, nn.Module) else (None, loss)
    training_model, evaluation_model = (
        forward_model_from_torch(
            module,
            example_inputs,
            training=training,
            loss=torch_loss,
            example_targets=example_targets,
            dynamic_shapes=dynamic_shapes,
        )
        for training in (True, False)
    )
    trained, frozen = _choose_parameters(module, training_model, requires_grad, frozen_params)
    generate_artifacts(
        training_model,
        requires_grad=trained,
        frozen_params=frozen,
        loss=loss_block,
        evaluation_model=evaluation_model,
        **{"loss_input_names": [training_model.graph.output[0].name], **options},
    )


def _choose_parameters(
    module: nn.Module,
    model: onnx.ModelProto,
    requires_grad: Sequence[str] | None,
    frozen_params: Sequence[str],
) -> tuple[list[str], list[str]]:
    """What to train and what to freeze, together every parameter that the model reads."""
    first = first_names(module)
    frozen = [first.get(name, name) for name in frozen_params]
    initializers = {tensor.name for tensor in model.graph.initializer}
    read = {name: tensor for name, tensor in module.named_parameters() if name in initializers}
    if requires_grad is None:
        trained = [name for name, tensor in read.items() if tensor.requires_grad and not _any(frozen, name)]
    else:
        trained = [first.get(name, name) for name in requires_grad]
    return trained, [*frozen, *(name for name in read if not _any([*trained, *frozen], name))]


def _any(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
