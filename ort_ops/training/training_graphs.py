"""From a model with a loss to the pair of models that training runs: one with gradients, one to evaluate.

Both have the parameters as inputs, so that they can share them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from ort_ops import passes
from ort_ops.gradient import build_gradient_model
from ort_ops.gradient.builder import GRADIENT_SUFFIX, IR_VERSION
from ort_ops.gradient.registry import OLDEST_OPSET
from ort_ops.training import modes
from ort_ops.training.optimizer import LOSS_SCALE, UPDATED_SUFFIX
from ort_ops.training.parameters import (
    ParameterNames,
    choose_parameters,
    give_equal_parameters_tensors_of_their_own,
)

FROZEN_KEY = "ort_ops.frozen"
"""Where the models' metadata lists, in JSON, the parameters that are not trained."""

ADDITIONAL_OUTPUTS_KEY = "ort_ops.additional_outputs"
"""Where it lists the outputs that a Module returns after the loss."""


@dataclass(frozen=True)
class TrainingGraphs:
    """What `build_training_graphs` makes.

    Attributes:
        training_model: inputs: those of the forward model, then every parameter in the order of the
            initializers. Outputs: the loss and the others that were asked for, `<p>_grad` of each trainable
            p, `<s>_updated` of each running statistic s.
        eval_model: the same inputs; the loss and the others that were asked for.
        trainable, frozen: the parameters' first values by name.
    """

    training_model: onnx.ModelProto
    eval_model: onnx.ModelProto
    trainable: dict[str, onnx.TensorProto]
    frozen: dict[str, onnx.TensorProto]


@dataclass(frozen=True)
class WithOutputs:
    """A forward model with its loss, and the names of its values to return: the loss, then the others."""

    model: onnx.ModelProto
    outputs: Sequence[str]


def build_training_graphs(
    model: onnx.ModelProto,
    outputs: Sequence[str],
    *,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] = (),
    constants: Collection[str] = (),
    returned: Sequence[str] = (),
    train_batch_norm: bool = True,
    evaluation: WithOutputs | None = None,
    compute_type: ir.DataType | None = None,
    scale_loss: bool = False,
) -> TrainingGraphs:
    """Build both models.

    Args:
        model: the forward model with its loss, which is not changed.
        outputs: names of values of its graph: the loss, then what else the models shall return.
        requires_grad, frozen_params, constants: see `parameters.choose_parameters`.
        returned: which of `outputs` a Module returns after the loss; both models' metadata says so.
        train_batch_norm: whether BatchNormalization takes the batch's statistics in training.
        evaluation: the model in evaluation mode with its outputs. Then `model` is trained as it stands:
            BatchNormalization keeps the mode that it has, and an output `<p>_updated` is the new value of p.
        compute_type: FLOAT16 or BFLOAT16: the training model computes its matrix products and convolutions in
            it, see `passes.mixed_precision`.
        scale_loss: the training model has a last input `loss_scale`, float [], and its gradients are those of
            the loss times that.

    Raises:
        ValueError: an output is not there, the loss is not a scalar, a parameter cannot be chosen so, or
            operators have no derivative (all are listed).
    """
    forward = _prepared(model, outputs)
    stated = [] if evaluation is None else modes.stated_updates(forward)
    names = choose_parameters(
        forward,
        forward.graph.outputs[0],
        requires_grad,
        frozen_params,
        statistics=[*modes.statistics(forward), *(name.removesuffix(UPDATED_SUFFIX) for name in stated)],
        constants=constants,
    )
    if evaluation is None:
        evaluated = forward.clone()
        modes.set_evaluation_mode(evaluated)
    else:
        evaluated = _prepared(evaluation.model, evaluation.outputs)
    if compute_type is not None:
        forward = passes.mixed_precision(forward, compute_type)
    tensors = {
        name: forward.graph.initializers[name].const_value for name in (*names.trainable, *names.frozen)
    }
    for made in (forward, evaluated):
        _parameters_to_inputs(made, tensors)
    RemoveUnusedNodesPass()(evaluated)  # what only the training mode needs
    _take_inputs(evaluated, forward)
    for made in (forward, evaluated):
        made.metadata_props[FROZEN_KEY] = json.dumps(names.frozen)
        made.metadata_props[ADDITIONAL_OUTPUTS_KEY] = json.dumps(list(returned))
        made.ir_version = max(made.ir_version or 0, IR_VERSION)  # as the operators of this opset need
    updated = _batch_norm_updates(forward, train_batch_norm) if evaluation is None else stated
    return TrainingGraphs(
        _training_model(forward, names, updated, scale_loss),
        ir.to_proto(evaluated),
        {name: _message(tensors[name]) for name in names.trainable},
        {name: _message(tensors[name]) for name in names.frozen},
    )


def _prepared(model: onnx.ModelProto, outputs: Sequence[str]) -> ir.Model:
    """The model as passes can read it, with these outputs, its functions inlined, its constants initializers
    and its types known."""
    forward = ir.from_proto(model)
    for value in list(forward.graph.inputs):
        if value.is_initializer():
            forward.graph.inputs.remove(value)
    passes.infer_shapes(forward)
    _set_outputs(forward.graph, outputs)
    forward = passes.upgrade_opset(passes.inline_functions(forward), OLDEST_OPSET)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(forward)
    give_equal_parameters_tensors_of_their_own(forward.graph)
    passes.infer_shapes(forward)
    return forward


def _set_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    values = ir.convenience.create_value_mapping(graph)
    unknown = [name for name in names if name not in values]
    if unknown:
        raise ValueError(
            f"The graph has no value {', '.join(map(repr, unknown))} to use as an output; its outputs are "
            f"{', '.join(repr(value.name) for value in graph.outputs)}; the output of any node can be named."
        )
    graph.outputs[:] = [values[name] for name in dict.fromkeys(names)]


def _parameters_to_inputs(model: ir.Model, parameters: Collection[str]) -> None:
    """Turn the parameters into inputs, after the others."""
    for name in [name for name in model.graph.initializers if name in parameters]:
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)


def _message(tensor: ir.TensorProtocol | None) -> onnx.TensorProto:
    assert tensor is not None
    return ir.serde.serialize_tensor(tensor)


def _take_inputs(model: ir.Model, other: ir.Model) -> None:
    """Give `model` the inputs of `other` that it lacks, in the order of `other`."""
    own = {value.name: value for value in model.graph.inputs}
    model.graph.inputs[:] = [
        own[value.name] if value.name in own else ir.val(value.name, type=value.type, shape=value.shape)
        for value in other.graph.inputs
    ]


def _batch_norm_updates(model: ir.Model, train: bool) -> list[str]:
    """Set the mode of BatchNormalization; returns the outputs, added here, with new running statistics."""
    if not train:
        modes.freeze_batch_norm(model)
        return []
    updated = modes.train_batch_norm(model)
    model.graph.outputs.extend(updated)
    return [str(value.name) for value in updated]


def _training_model(
    model: ir.Model, names: ParameterNames, updated: Sequence[str], scale_loss: bool
) -> onnx.ModelProto:
    """With gradients, the outputs `updated` behind them."""
    outputs = [str(value.name) for value in model.graph.outputs if value.name not in updated]
    outputs += [name + GRADIENT_SUFFIX for name in names.trainable]
    loss = _scaled_loss(model) if scale_loss else outputs[0]
    result = build_gradient_model(ir.to_proto(model), names.trainable, loss=loss)
    _check_gradient_names(result, names)
    by_name = {value.name: value for value in result.graph.output}
    del result.graph.output[:]
    result.graph.output.extend(by_name[name] for name in [*outputs, *updated])
    return result


def _check_gradient_names(model: onnx.ModelProto, names: ParameterNames) -> None:
    """A gradient gets another name if the model has an input, output or initializer of its name."""
    made = [value.name for value in model.graph.output][-len(names.trainable) :]
    for name, made_name in zip(names.trainable, made, strict=True):
        gradient_name = name + GRADIENT_SUFFIX
        if made_name != gradient_name:
            raise ValueError(
                f"The model has a value {gradient_name!r}, but the gradient of {name!r} has that name; "
                "rename the value."
            )


def _scaled_loss(model: ir.Model) -> str:
    """Add the input `loss_scale`, and the loss times it as an output, whose name is returned."""
    graph = model.graph
    taken = ir.convenience.create_value_mapping(graph)
    if LOSS_SCALE in taken:
        raise ValueError(
            f"The model has a value {LOSS_SCALE!r}, but the input for the scale of the loss has that name; "
            "rename the value."
        )
    loss = graph.outputs[0]
    scale = ir.val(LOSS_SCALE, ir.DataType.FLOAT, [])
    graph.inputs.append(scale)
    cast = ir.node("CastLike", [scale, loss])
    scaled = ir.node("Mul", [loss, cast.outputs[0]])
    graph.extend([cast, scaled])
    name = f"{loss.name}_scaled"
    while name in taken:
        name += "_"
    output = scaled.outputs[0]
    output.name, output.type, output.shape = name, loss.type, loss.shape
    graph.outputs.append(output)
    return name
