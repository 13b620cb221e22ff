"""From a forward model to the files of a training: models with loss and gradients, optimizer, checkpoint."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir

from ort_ops.training import onnxblock
from ort_ops.training.artifact_files import write_artifacts
from ort_ops.training.checkpoint import Checkpoint
from ort_ops.training.convert import convert as convert
from ort_ops.training.model_file import Model, read_model
from ort_ops.training.onnxblock.optim import optimizer_model, rule_of
from ort_ops.training.optimizer import SGD, Adam, AdamW, Lion, LossScaling, UpdateRule
from ort_ops.training.training_graphs import TrainingGraphs, WithOutputs, build_training_graphs


class LossType(enum.Enum):
    """The losses that `generate_artifacts` knows by name, with their defaults; the blocks of `onnxblock.loss`
    take arguments."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4
    HuberLoss = 5


class OptimType(enum.Enum):
    """The optimizers that `generate_artifacts` knows by name, with PyTorch's defaults; the rules in
    `ort_ops.training.optimizer` take arguments."""

    AdamW = 1
    SGD = 2
    Adam = 3
    Lion = 4


_LOSSES: dict[LossType, Callable[[], onnxblock.Block]] = {
    LossType.MSELoss: onnxblock.loss.MSELoss,
    LossType.CrossEntropyLoss: onnxblock.loss.CrossEntropyLoss,
    LossType.BCEWithLogitsLoss: onnxblock.loss.BCEWithLogitsLoss,
    LossType.L1Loss: onnxblock.loss.L1Loss,
    LossType.HuberLoss: onnxblock.loss.HuberLoss,
}

_RULES: dict[OptimType, Callable[[], UpdateRule]] = {
    OptimType.AdamW: AdamW,
    OptimType.SGD: SGD,
    OptimType.Adam: Adam,
    OptimType.Lion: Lion,
}


@dataclass(frozen=True)
class Artifacts:
    """What a training needs, in memory; see `generate_artifacts`. Without an optimizer its model is None."""

    training_model: onnx.ModelProto
    eval_model: onnx.ModelProto
    optimizer_model: onnx.ModelProto | None
    checkpoint: Checkpoint


def generate_artifacts(
    model: Model,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | UpdateRule | onnxblock.Block | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    train_batch_norm: bool = True,
    evaluation_model: Model | None = None,
    compute_type: str | None = None,
    loss_scale: LossScaling | float | str | None = None,
) -> None:
    """Write `training_model.onnx`, `eval_model.onnx`, `optimizer_model.onnx` and `checkpoint`.

    The files are written when everything could be built, each whole; older ones of these names are replaced.

    Args:
        artifact_directory: where to; it is made if it is missing. The current directory by default.
        prefix: put before the files' names.
        ort_format: also write the models in ONNX Runtime's own format (`training_model.ort`, ...) with the
            lists of operators that they need (`training_model.required_operators.config`, ...).
        custom_op_library: the library of custom operators that the model uses. It is needed for `ort_format`,
            which runs ONNX Runtime; where the models are run, register it on the SessionOptions too.
        nominal_checkpoint: also write `nominal_checkpoint`, with the parameters' names, types and shapes.

    The other arguments are those of `build_artifacts`, which also says what the models have as inputs and
    outputs.

    Raises:
        ValueError: see `build_artifacts`; a prefix that is no beginning of a file's name.
        FileNotFoundError: there is no file of the model or of the library.
        RuntimeError: ONNX Runtime cannot convert a model to its own format.
        OSError: a file cannot be written.
    """
    if custom_op_library is not None and not os.path.isfile(custom_op_library):
        raise FileNotFoundError(
            f"generate_artifacts: there is no custom_op_library at '{os.fspath(custom_op_library)}'."
        )
    artifacts = build_artifacts(
        model,
        requires_grad,
        frozen_params,
        loss,
        optimizer,
        additional_output_names,
        loss_input_names,
        train_batch_norm=train_batch_norm,
        evaluation_model=evaluation_model,
        compute_type=compute_type,
        loss_scale=loss_scale,
    )
    models = {"training_model": artifacts.training_model, "eval_model": artifacts.eval_model}
    if artifacts.optimizer_model is not None:
        models["optimizer_model"] = artifacts.optimizer_model
    write_artifacts(
        Path.cwd() if artifact_directory is None else Path(artifact_directory),
        prefix,
        models,
        artifacts.checkpoint,
        nominal_checkpoint=nominal_checkpoint,
        ort_format=ort_format,
        custom_op_library=None if custom_op_library is None else Path(custom_op_library),
    )


def build_artifacts(
    model: Model,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | UpdateRule | onnxblock.Block | None = None,
    additional_output_names: Sequence[str] | None = None,
    loss_input_names: Sequence[str] | None = None,
    *,
    train_batch_norm: bool = True,
    evaluation_model: Model | None = None,
    compute_type: str | None = None,
    loss_scale: LossScaling | float | str | None = None,
) -> Artifacts:
    """What `generate_artifacts` writes, in memory.

    Args:
        model: the forward model, of opset 11 or newer, with parameters in float32, float64, float16 or
            bfloat16. It is not changed.
        requires_grad: names or patterns (`*`, `?`) of the tensors to train: initializers, or outputs of
            Constant nodes. By default every float tensor with at least one axis that reaches the loss and is
            not frozen, except attention masks, told by their huge or infinite numbers, and what PyTorch's
            exporters name `Constant_output_0`, or `val_0` if it is a single number. A tensor without axes is
            trained only if named in full, since exporters store factors of the computation so. A tensor that
            the loss does not depend on at all is frozen, with a warning.
        frozen_params: names or patterns of parameters that are inputs and in the checkpoint, but not trained.
            What is in neither list stays in the models as a constant.
        loss: a `LossType`; a block, which is called with the names of the model's outputs and returns the
            name of the loss, or a list of that and further outputs; None if the first output is the loss.
            Losses read a new input of the models, `labels` for cross entropy and `target` for the others,
            unless the model has an input of that name.
        optimizer: an `OptimType`; a rule from `ort_ops.training.optimizer`; a block, which is called with the
            lists of trained and frozen parameters, and whose `to_model_proto` returns the optimizer model;
            None for no optimizer model.
        additional_output_names: values of the graph that each step shall return after the loss.
        loss_input_names: values of the graph that the loss block is called with, instead of all outputs.
        train_batch_norm: whether BatchNormalization takes the batch's statistics in training and updates the
            running ones. With False the running ones are used and kept, as is usual when a trained model is
            adapted with small batches.
        evaluation_model: `model` in evaluation mode, with the same inputs and parameters, where that is more
            than Dropout and BatchNormalization can say. Then `model` is trained as it stands, and its outputs
            `<p>_updated` are the new values of its parameters p, which are frozen.
        compute_type: "float16" or "bfloat16": training computes matrix products and convolutions in it; the
            parameters stay float32, and evaluation is computed as the model has it.
        loss_scale: what the loss is multiplied by while gradients are computed, so that float16 can hold
            them; the optimizer divides by it. "dynamic": as large as the gradients allow, starting with
            65536; steps in which a gradient overflows are skipped. A number: always that. A `LossScaling`: by
            its rules. None: "dynamic" if compute_type is "float16", else none.

    The training model: inputs are the forward model's, the loss's, then every parameter in the order of the
    initializers. Outputs are the loss, the additional ones, the forward model's, `<p>_grad` of each trained p
    and `<s>_updated` of each running statistic s, which is a frozen parameter. Dropout is active if the
    model's own input says so. Opset 18 or newer; it runs with and without the plugin.
    The eval model: the same inputs, outputs without gradients and updates; Dropout does nothing,
    BatchNormalization takes the running statistics.
    The optimizer model: see `optimizer.build_optimizer_model`.

    Raises:
        LookupError: the model has no value that the loss is to be computed from.
        ValueError: the message says which argument or tensor, what is wrong and what to do: names that match
            nothing, a loss that is not a scalar, operators without a derivative (all of them), ...
        TypeError: an argument of a wrong kind.
        FileNotFoundError: there is no file of the model.
    """
    for argument, names in (
        ("requires_grad", requires_grad),
        ("frozen_params", frozen_params),
        ("additional_output_names", additional_output_names),
        ("loss_input_names", loss_input_names),
    ):
        _check_names(argument, names)
    block = _loss_block(loss)
    scaling = _loss_scaling("dynamic" if loss_scale is None and compute_type == "float16" else loss_scale)
    with_loss = partial(
        _add_loss,
        block=block,
        loss_input_names=loss_input_names or (),
        additional_output_names=additional_output_names or (),
    )
    trained = with_loss(read_model(model, external_data=True))
    evaluated = (
        None if evaluation_model is None else with_loss(read_model(evaluation_model, external_data=True))
    )
    graphs = build_training_graphs(
        trained.model,
        trained.outputs,
        requires_grad=requires_grad,
        frozen_params=frozen_params or (),
        constants=trained.constants,
        returned=trained.returned,
        train_batch_norm=train_batch_norm,
        evaluation=evaluated,
        compute_type=_compute_type(compute_type),
        scale_loss=scaling is not None,
    )
    return Artifacts(
        graphs.training_model,
        graphs.eval_model,
        _optimizer_model(optimizer, graphs, scaling),
        _checkpoint(graphs),
    )


@dataclass(frozen=True)
class _ForwardWithLoss(WithOutputs):
    """A forward model to which a loss was added.

    Attributes:
        returned: those of `outputs` that a step returns besides the loss.
        constants: initializers that came with the loss.
    """

    returned: Sequence[str]
    constants: Collection[str]


def _add_loss(
    forward: onnx.ModelProto,
    block: onnxblock.Block,
    loss_input_names: Sequence[str],
    additional_output_names: Sequence[str],
) -> _ForwardWithLoss:
    own_outputs = [value.name for value in forward.graph.output]
    if not own_outputs:
        raise ValueError(
            "generate_artifacts: the model must have an output for the loss to be computed from; it has none."
        )
    with onnxblock.base(forward) as accessor:
        try:
            result = block(*(loss_input_names or own_outputs))
        except onnx.checker.ValidationError as error:
            raise ValueError(
                f"generate_artifacts: onnx's checker refuses the model with its loss: {error} Mend the model "
                "or the loss block."
            ) from error
        loss_name, *further = [result] if isinstance(result, str) else result
        returned = list(dict.fromkeys([*further, *additional_output_names]))
        outputs = [loss_name, *returned, *own_outputs]
        return _ForwardWithLoss(accessor.model, outputs, returned, accessor.constants)


def _check_names(argument: str, names: Sequence[str] | None) -> None:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
        raise TypeError(f"generate_artifacts: {argument} must be a list of names; got {names!r}.")


def _loss_block(loss: LossType | onnxblock.Block | None) -> onnxblock.Block:
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, LossType):
        return _LOSSES[loss]()
    if isinstance(loss, onnxblock.Block):
        return loss
    raise TypeError(
        "generate_artifacts: loss must be a LossType, an onnxblock.Block such as onnxblock.loss.MSELoss(), "
        f"or None if the model's first output is the loss; got {loss!r}."
    )


def _compute_type(name: str | None) -> ir.DataType | None:
    types = {None: None, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
    if name not in types:
        raise ValueError(
            f"generate_artifacts: compute_type must be 'float16', 'bfloat16' or None; got {name!r}."
        )
    return types[name]


def _loss_scaling(scale: LossScaling | float | str | None) -> LossScaling | None:
    if scale is None or isinstance(scale, LossScaling):
        return scale
    if scale == "dynamic":
        return LossScaling()
    if isinstance(scale, str):
        raise ValueError(f"generate_artifacts: loss_scale must be 'dynamic' or a number; got {scale!r}.")
    return LossScaling(initial_scale=scale, minimum_scale=scale, growth_factor=1.0, backoff_factor=1.0)


def _optimizer_model(
    optimizer: OptimType | UpdateRule | onnxblock.Block | None,
    graphs: TrainingGraphs,
    scaling: LossScaling | None,
) -> onnx.ModelProto | None:
    trainable = list(graphs.trainable.values())
    if optimizer is None:
        return None
    if isinstance(optimizer, OptimType):
        optimizer = _RULES[optimizer]()
    if isinstance(optimizer, onnxblock.ForwardBlock):
        with onnxblock.empty_base():
            optimizer((trainable, list(graphs.frozen.values())))
        built = optimizer.to_model_proto()
        optimizer = rule_of(built)
        if optimizer is None:
            return built
    if isinstance(optimizer, UpdateRule):
        return optimizer_model(trainable, optimizer, scaling)
    raise TypeError(
        "generate_artifacts: optimizer must be an OptimType, a rule such as "
        "ort_ops.training.optimizer.AdamW(weight_decay=0.1), an onnxblock.ForwardBlock, or None; got "
        f"{optimizer!r}."
    )


def _checkpoint(graphs: TrainingGraphs) -> Checkpoint:
    tensors = {**graphs.trainable, **graphs.frozen}
    return Checkpoint(
        {name: onnx.numpy_helper.to_array(tensor) for name, tensor in tensors.items()},
        frozen=frozenset(graphs.frozen),
    )
