"""Optimizers as ONNX graphs: gradients and state in, new parameters and new state out.

Every tensor is a named input or output. `<parameter>_grad` is the gradient's name, as `build_gradient_model`
calls it; the new value of an input is the output `<input>_updated`, which is how the run time knows what
belongs together. The rules themselves are in `update_rules.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import onnx
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from ort_ops import operators
from ort_ops.training.loss_scaling import LossScaling, all_finite, next_scale
from ort_ops.training.update_rules import (
    FIRST_MOMENT_SUFFIX,
    MOMENTUM_SUFFIX,
    SECOND_MOMENT_SUFFIX,
    SGD,
    Adam,
    AdamW,
    AdamWForm,
    Lion,
    ParameterGroup,
    UpdateRule,
)
from ort_ops.training.update_writer import UpdateWriter

__all__ = [
    "FIRST_MOMENT_SUFFIX",
    "GOOD_STEPS",
    "GRADIENT_NORM",
    "GRADIENT_SUFFIX",
    "LEARNING_RATE",
    "LOSS_SCALE",
    "MOMENTUM_SUFFIX",
    "SECOND_MOMENT_SUFFIX",
    "SGD",
    "SKIPPED",
    "STEP",
    "UPDATED_SUFFIX",
    "Adam",
    "AdamW",
    "AdamWForm",
    "Lion",
    "LossScaling",
    "ParameterGroup",
    "UpdateRule",
    "build_optimizer_model",
    "initial_state",
]

OPSET = 18
IR_VERSION = 9

GRADIENT_SUFFIX = "_grad"
UPDATED_SUFFIX = "_updated"

LEARNING_RATE = "learning_rate"
STEP = "step"
LOSS_SCALE = "loss_scale"
GOOD_STEPS = "good_steps"
GRADIENT_NORM = "gradient_norm"
SKIPPED = "skipped"

INITIAL_LOSS_SCALE_KEY = "ort_ops.initial_loss_scale"
"""Key of the model's metadata: the only state that does not start as zero."""

# The constant that torch.nn.utils.clip_grad_norm_ adds to the norm before it divides.
_CLIP_EPSILON = 1e-6

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def build_optimizer_model(
    parameters: Mapping[str, tuple[Sequence[int], int]],
    rule: UpdateRule,
    *,
    loss_scaling: LossScaling | None = None,
) -> onnx.ModelProto:
    """One update of all parameters by `rule`.

    parameters: shape and type (`onnx_ir.DataType` or `onnx.TensorProto`'s number: float, float16, bfloat16 or
        double) of each parameter by name.
    loss_scaling: when given, gradients are those of the loss times `loss_scale`.

    Inputs: `learning_rate` float []; `step` int64 [], the number of updates made so far; for every parameter
    `p`, each of its shape: `p` and `p_grad` of its type, and the rule's state such as `p_first_moment`,
    float32 (double for double parameters); with loss scaling `loss_scale` float [] and `good_steps` int64 [].
    Outputs: `<input>_updated` for all of these but the learning rate and the gradients, and reports.

    Reports: `gradient_norm` float [], with the rule's `max_gradient_norm`: the L2 norm of all gradients
    before clipping; `skipped` bool [], with loss scaling: a gradient was not finite, so that parameters,
    state and `step` stay as they are, to the bit, and the scale gets smaller.

    float16 and bfloat16 parameters are updated in float32 and rounded once. Every output `X_updated` may be
    written into the memory of input X (see `in_place.py`). The first state is that of `initial_state`. AdamW
    in float32 is an operator of the plugin, whose body the model carries; all else is standard operators.

    Raises ValueError for no parameters, unknown types, patterns that match nothing, and names that collide.
    """
    _check_parameters(parameters, rule, loss_scaling)
    graph = ir.Graph(
        name=type(rule).__name__.lower(), inputs=[], outputs=[], nodes=[], opset_imports={"": OPSET}
    )
    builder = GraphBuilder(graph)
    op = builder.op
    learning_rate = builder.input(LEARNING_RATE, ir.DataType.FLOAT, [])
    step = builder.input(STEP, ir.DataType.INT64, [])
    tensors = [_add_inputs(builder, name, rule, *kind) for name, kind in parameters.items()]
    gradients = [tensor.gradient for tensor in tensors]

    gradient_scale = finite = None
    if loss_scaling is not None:
        gradient_scale, finite = _add_loss_scaling(builder, loss_scaling, gradients)
    if rule.max_gradient_norm is not None:
        gradient_scale = _add_clipping(builder, rule.max_gradient_norm, gradients, gradient_scale)
    next_step = op.Add(step, op.Constant(value_int=1))
    updates = op.Cast(next_step, to=ir.DataType.DOUBLE)
    counted = next_step if finite is None else op.Where(finite, next_step, step)
    _add_output(builder, counted, STEP + UPDATED_SUFFIX, ir.DataType.INT64, [])
    written: dict[Hashable, ir.Value] = {}
    for tensor in tensors:
        group = _group_of(tensor.name, rule)
        write = UpdateWriter(
            op,
            written,
            dtype=tensor.compute_type,
            learning_rate=learning_rate,
            learning_rate_scale=group.learning_rate_scale,
            weight_decay=_weight_decay(tensor.name, rule, group),
            updates=updates,
            gradient_scale=gradient_scale,
            is_used=finite,
        )
        _add_update(builder, rule, tensor, write)
    _free_interface_names(graph)
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="ort_ops")
    if loss_scaling is not None:
        model.metadata_props[INITIAL_LOSS_SCALE_KEY] = repr(loss_scaling.initial_scale)
    return operators.embed_functions(ir.to_proto(model))


def initial_state(optimizer_model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """What the state of an optimizer model is before the first step: zeros, and the first loss scale.

    State are the inputs that have an output `<input>_updated` and no gradient (those are parameters).
    """
    inputs = {value.name: value for value in optimizer_model.graph.input}
    metadata = {entry.key: entry.value for entry in optimizer_model.metadata_props}
    state = {}
    for output in optimizer_model.graph.output:
        name = output.name.removesuffix(UPDATED_SUFFIX)
        if name == output.name or name not in inputs or name + GRADIENT_SUFFIX in inputs:
            continue
        kind = inputs[name].type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        state[name] = np.zeros(shape, ir.DataType(kind.elem_type).numpy())
    if INITIAL_LOSS_SCALE_KEY in metadata:
        state[LOSS_SCALE] = np.array(float(metadata[INITIAL_LOSS_SCALE_KEY]), np.float32)
    return state


@dataclass(frozen=True)
class _Tensors:
    """A parameter's inputs; `parameter` and `gradient` in the type that the update is computed in."""

    name: str
    shape: Sequence[int]
    dtype: ir.DataType
    compute_type: ir.DataType
    parameter: ir.Value
    gradient: ir.Value
    state: dict[str, ir.Value]


def _add_inputs(
    builder: GraphBuilder, name: str, rule: UpdateRule, shape: Sequence[int], dtype: int
) -> _Tensors:
    dtype = ir.DataType(dtype)
    compute_type = ir.DataType.DOUBLE if dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
    parameter = builder.input(name, dtype, shape)
    gradient = builder.input(name + GRADIENT_SUFFIX, dtype, shape)
    state = {
        name + suffix: builder.input(name + suffix, compute_type, shape) for suffix in rule.state_suffixes
    }
    if dtype is not compute_type:
        parameter = builder.op.Cast(parameter, to=compute_type)
        gradient = builder.op.Cast(gradient, to=compute_type)
        gradient.dtype = compute_type
    return _Tensors(name, shape, dtype, compute_type, parameter, gradient, state)


def _add_update(builder: GraphBuilder, rule: UpdateRule, tensor: _Tensors, write: UpdateWriter) -> None:
    parameter, state = rule.update(write, tensor.parameter, tensor.gradient, list(tensor.state.values()))
    if tensor.dtype is not tensor.compute_type:
        parameter = builder.op.Cast(parameter, to=tensor.dtype)
    _add_output(builder, parameter, tensor.name + UPDATED_SUFFIX, tensor.dtype, tensor.shape)
    for name, new in zip(tensor.state, state, strict=True):
        _add_output(builder, new, name + UPDATED_SUFFIX, tensor.compute_type, tensor.shape)


def _add_loss_scaling(
    builder: GraphBuilder, settings: LossScaling, gradients: Sequence[ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Add the state of loss scaling and its report; returns what gradients must be multiplied by, FLOAT [],
    and whether all of them are finite, BOOL [].
    """
    op = builder.op
    scale = builder.input(LOSS_SCALE, ir.DataType.FLOAT, [])
    good_steps = builder.input(GOOD_STEPS, ir.DataType.INT64, [])
    inverse_scale = op.Reciprocal(scale)
    finite = all_finite(op, gradients, inverse_scale)
    new_scale, new_good_steps = next_scale(op, settings, scale, good_steps, finite)
    _add_output(builder, op.Not(finite), SKIPPED, ir.DataType.BOOL, [])
    _add_output(builder, new_scale, LOSS_SCALE + UPDATED_SUFFIX, ir.DataType.FLOAT, [])
    _add_output(builder, new_good_steps, GOOD_STEPS + UPDATED_SUFFIX, ir.DataType.INT64, [])
    return inverse_scale, finite


def _add_clipping(
    builder: GraphBuilder, largest: float, gradients: Sequence[ir.Value], gradient_scale: ir.Value | None
) -> ir.Value:
    """Add the report of the norm; returns what gradients must be multiplied by, FLOAT []: `gradient_scale`
    and the factor of clipping in one.
    """
    op = builder.op
    norm = _global_norm(op, gradients)
    if gradient_scale is not None:
        norm = op.Mul(norm, gradient_scale)
    _add_output(builder, norm, GRADIENT_NORM, ir.DataType.FLOAT, [])
    clip = op.Min(op.Div(largest, op.Add(norm, _CLIP_EPSILON)), 1.0)
    return clip if gradient_scale is None else op.Mul(gradient_scale, clip)


def _global_norm(op: OpBuilder, gradients: Sequence[ir.Value]) -> ir.Value:
    squares = []
    for gradient in gradients:
        square = op.ReduceSumSquare(gradient, keepdims=0)
        is_float = gradient.dtype is ir.DataType.FLOAT
        squares.append(square if is_float else op.Cast(square, to=ir.DataType.FLOAT))
    return op.Sqrt(op.Sum(*squares))


def _add_output(
    builder: GraphBuilder, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int]
) -> None:
    value.dtype = dtype
    value.shape = ir.Shape(shape)
    builder.add_output(value, name)


def _free_interface_names(graph: ir.Graph) -> None:
    """Rename inner values that happen to have the name of a parameter or of something made from it."""
    interface = {value.name for value in (*graph.inputs, *graph.outputs)}
    outputs = set(graph.outputs)
    inner = [value for node in graph for value in node.outputs if value not in outputs]
    inner += graph.initializers.values()
    taken = interface | {value.name for value in inner}
    for value in inner:
        if value.name in interface:
            number = 0
            while f"{value.name}_{number}" in taken:
                number += 1
            value.name = f"{value.name}_{number}"
            taken.add(value.name)


# -- groups and checks ---------------------------------------------------------------------------------------


def _group_of(name: str, rule: UpdateRule) -> ParameterGroup:
    for group in rule.groups:
        if _matches(name, group.patterns):
            return group
    return ParameterGroup(patterns=())


def _weight_decay(name: str, rule: UpdateRule, group: ParameterGroup) -> float:
    if _matches(name, rule.no_decay):
        return 0.0
    return rule.weight_decay if group.weight_decay is None else group.weight_decay


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_parameters(
    parameters: Mapping[str, tuple[Sequence[int], int]], rule: UpdateRule, loss_scaling: LossScaling | None
) -> None:
    if not parameters:
        raise ValueError("build_optimizer_model: parameters must name at least one parameter; got none.")
    for name, (shape, dtype) in parameters.items():
        if dtype not in _FLOATS:
            raise ValueError(
                f"build_optimizer_model: parameter '{name}' must be float, float16, bfloat16 or double; got "
                f"{_type_name(dtype)}. Leave it out: only floating-point tensors are trained."
            )
        if not all(isinstance(size, int | np.integer) and size >= 0 for size in shape):
            raise ValueError(
                f"build_optimizer_model: the shape of parameter '{name}' must be known; got {list(shape)}."
            )
    patterns = {"no_decay": rule.no_decay}
    patterns |= {f"groups[{index}]": group.patterns for index, group in enumerate(rule.groups)}
    for where, some in patterns.items():
        for pattern in some:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                raise ValueError(
                    f"build_optimizer_model: every pattern of {where} must match a parameter; '{pattern}' "
                    f"matches none of {len(parameters)}: {', '.join(parameters)}."
                )
    _check_names(parameters, rule, loss_scaling)


def _type_name(dtype: int) -> str:
    try:
        return ir.DataType(dtype).name.lower()
    except ValueError:
        return repr(dtype)


def _check_names(
    parameters: Mapping[str, object], rule: UpdateRule, loss_scaling: LossScaling | None
) -> None:
    updated = [STEP, *([LOSS_SCALE, GOOD_STEPS] if loss_scaling is not None else [])]
    updated += [name + suffix for name in parameters for suffix in ("", *rule.state_suffixes)]
    names = [LEARNING_RATE, GRADIENT_NORM, *([SKIPPED] if loss_scaling is not None else []), *updated]
    names += [name + GRADIENT_SUFFIX for name in parameters]
    names += [name + UPDATED_SUFFIX for name in updated]
    collisions = sorted(name for name, count in Counter(names).items() if count > 1)
    if collisions:
        raise ValueError(
            f"build_optimizer_model: the parameters' names and the names made from them must all differ; "
            f"{', '.join(collisions)} would appear twice. Rename the parameter."
        )
