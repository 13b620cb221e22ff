"""From a model with a loss to the pair of models that training runs: one with gradients, one to evaluate.

Both have the parameters as inputs, so that they can share them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from ort_ops import passes
from ort_ops.gradient import build_gradient_model
from ort_ops.gradient.builder import GRADIENT_SUFFIX
from ort_ops.gradient.registry import OLDEST_OPSET
from ort_ops.training import modes
from ort_ops.training.parameters import ParameterNames, choose_parameters

TRAINABLE_KEY = "ort_ops.trainable"
"""Where the models' metadata lists the trained parameters, in JSON."""

FROZEN_KEY = "ort_ops.frozen"
"""Where it lists those that are not."""


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
    train_batch_norm: bool = True,
    evaluation: WithOutputs | None = None,
) -> TrainingGraphs:
    """Build both models.

    Args:
        model: the forward model with its loss, which is not changed.
        outputs: names of values of its graph: the loss, then what else the models shall return.
        requires_grad, frozen_params, constants: see `parameters.choose_parameters`.
        train_batch_norm: whether BatchNormalization takes the batch's statistics in training.
        evaluation: the model in evaluation mode with its outputs. Then `model` is trained as it stands:
            BatchNormalization keeps the mode that it has, and an output `<p>_updated` is the new value of p.

    Raises:
        ValueError: an output is not there, the loss is not a scalar, a parameter cannot be chosen so, or
            operators have no derivative (all are listed).
    """
    forward = _prepared(model, outputs)
    names = choose_parameters(
        forward,
        forward.graph.outputs[0],
        requires_grad,
        frozen_params,
        statistics=[*modes.statistics(forward), *(modes.stated_updates(forward) if evaluation else ())],
        constants=constants,
    )
    tensors = _parameters_to_inputs(forward, names)
    _note_names(forward, names)
    if evaluation is None:
        evaluated = forward.clone()
        modes.set_evaluation_mode(evaluated)
        updated = modes.train_batch_norm(forward) if train_batch_norm else {}
        if not train_batch_norm:
            modes.freeze_batch_norm(forward)
    else:
        evaluated = _evaluation_model(evaluation, forward, names)
        updated = modes.stated_updates(forward)
    return TrainingGraphs(
        _training_model(forward, names, updated),
        ir.to_proto(evaluated),
        {name: tensors[name] for name in names.trainable},
        {name: tensors[name] for name in names.frozen},
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


def _parameters_to_inputs(model: ir.Model, names: ParameterNames) -> dict[str, onnx.TensorProto]:
    """Turn the parameters into inputs, after the others; returns their values."""
    tensors = {}
    parameters = {*names.trainable, *names.frozen}
    for name in [name for name in model.graph.initializers if name in parameters]:
        value = model.graph.initializers.pop(name)
        assert value.const_value is not None
        tensors[name] = ir.serde.serialize_tensor(value.const_value)
        value.const_value = None
        model.graph.inputs.append(value)
    return tensors


def _training_model(model: ir.Model, names: ParameterNames, updated: dict[str, ir.Value]) -> onnx.ModelProto:
    """With the gradients, and the `updated` values of parameters behind them."""
    kept = [value for value in model.graph.outputs if value not in updated.values()]
    model.graph.outputs[:] = [*kept, *updated.values()]
    outputs = [str(value.name) for value in kept]
    result = build_gradient_model(ir.to_proto(model), names.trainable, loss=outputs[0])
    outputs += [name + GRADIENT_SUFFIX for name in names.trainable]
    outputs += [str(value.name) for value in updated.values()]
    by_name = {value.name: value for value in result.graph.output}
    ordered = [by_name[name] for name in outputs]
    del result.graph.output[:]
    result.graph.output.extend(ordered)
    return result


def _evaluation_model(evaluation: WithOutputs, training: ir.Model, names: ParameterNames) -> ir.Model:
    """The model in evaluation mode with the inputs of the one in training mode."""
    model = _prepared(evaluation.model, evaluation.outputs)
    _parameters_to_inputs(model, names)
    own = {value.name: value for value in model.graph.inputs}
    model.graph.inputs[:] = [
        own.get(value.name) or ir.Value(name=value.name, type=value.type, shape=value.shape)
        for value in training.graph.inputs
    ]
    _note_names(model, names)
    return model


def _note_names(model: ir.Model, names: ParameterNames) -> None:
    model.metadata_props[TRAINABLE_KEY] = json.dumps(names.trainable)
    model.metadata_props[FROZEN_KEY] = json.dumps(names.frozen)
