"""Optimizers as ONNX graphs in standard operators: gradients and state in, new parameters and new state out.

Every tensor is a named input or output. `<parameter>_grad` is the gradient's name, as `build_gradient_model`
calls it; the new value of an input is the output `<input>_updated`, which is how `TrainingRunner` knows what
belongs together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import onnx
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

OPSET = 18
IR_VERSION = 9

GRADIENT_SUFFIX = "_grad"
UPDATED_SUFFIX = "_updated"
FIRST_MOMENT_SUFFIX = "_first_moment"
SECOND_MOMENT_SUFFIX = "_second_moment"

LEARNING_RATE = "learning_rate"
STEP = "step"
GRADIENT_NORM = "gradient_norm"

# The constant that torch.nn.utils.clip_grad_norm_ adds to the norm before it divides.
_CLIP_EPSILON = 1e-6


def build_adamw_model(
    parameters: Mapping[str, Sequence[int]],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    no_decay: Sequence[str] = (),
    max_gradient_norm: float | None = None,
) -> onnx.ModelProto:
    """AdamW with decoupled weight decay, as torch.optim.AdamW computes it, for float32 parameters.

    parameters: name and shape of each.
    no_decay: patterns (`*` and `?`, as in file names) of parameters without weight decay, usually norms and
        biases.
    max_gradient_norm: when given, gradients are scaled so that their global L2 norm does not exceed it (as
        torch.nn.utils.clip_grad_norm_ does), and the norm before scaling is the output `gradient_norm`, float
        [].

    Inputs: `learning_rate` float [], `step` int64 [] (updates done before this one), then for every parameter
    `p`, each of its shape: `p`, `p_grad`, `p_first_moment`, `p_second_moment`. Outputs: `p_updated`,
    `p_first_moment_updated`, `p_second_moment_updated` for each. The moments start as zeros. With g the
    gradient, t = step + 1:

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p = p * (1 - learning_rate * weight_decay)
              - learning_rate / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + epsilon)

    Source: Loshchilov & Hutter 2019, algorithm 2, in PyTorch's form. Raises ValueError for values outside
    their range, a pattern that matches nothing, and names that collide.
    """
    _check_adamw(parameters, betas, epsilon, weight_decay, no_decay, max_gradient_norm)
    graph = ir.Graph(name="adamw", inputs=[], outputs=[], nodes=[], opset_imports={"": OPSET})
    builder = GraphBuilder(graph)
    op = builder.op
    learning_rate = builder.input(LEARNING_RATE, ir.DataType.FLOAT, [])
    step = builder.input(STEP, ir.DataType.INT64, [])
    inputs = {
        name: [
            builder.input(name + suffix, ir.DataType.FLOAT, shape)
            for suffix in ("", GRADIENT_SUFFIX, FIRST_MOMENT_SUFFIX, SECOND_MOMENT_SUFFIX)
        ]
        for name, shape in parameters.items()
    }

    beta1, beta2 = betas
    # In float64: 1 - beta^t of the first steps would lose five digits in float32.
    t = op.Cast(op.Add(step, 1), to=ir.DataType.DOUBLE)
    step_size = op.Div(op.Cast(learning_rate, to=ir.DataType.DOUBLE), _bias_correction(op, beta1, t))
    step_size = op.Cast(step_size, to=ir.DataType.FLOAT)
    inverse_root = op.Reciprocal(op.Sqrt(_bias_correction(op, beta2, t)))
    inverse_root = op.Cast(inverse_root, to=ir.DataType.FLOAT)
    decay = op.Sub(1.0, op.Mul(learning_rate, weight_decay))
    gradients = [gradient for _, gradient, _, _ in inputs.values()]
    gradient_weight, square_weight = op.Constant(value_float=1 - beta1), op.Constant(value_float=1 - beta2)
    if max_gradient_norm is not None:
        norm = _global_norm(op, gradients)
        scale = op.Min(op.Div(max_gradient_norm, op.Add(norm, _CLIP_EPSILON)), 1.0)
        # The scale goes into the moments' weights, which saves a pass over every gradient.
        gradient_weight = op.Mul(gradient_weight, scale)
        square_weight = op.Mul(square_weight, op.Mul(scale, scale))
        _add_output(builder, norm, GRADIENT_NORM, [])

    for name, (parameter, gradient, first, second) in inputs.items():
        first = op.Add(op.Mul(first, beta1), op.Mul(gradient, gradient_weight))
        second = op.Add(op.Mul(second, beta2), op.Mul(op.Mul(gradient, gradient), square_weight))
        if weight_decay and not _matches(name, no_decay):
            parameter = op.Mul(parameter, decay)
        denominator = op.Add(op.Mul(op.Sqrt(second), inverse_root), epsilon)
        parameter = op.Sub(parameter, op.Mul(op.Div(first, denominator), step_size))
        shape = parameters[name]
        _add_output(builder, parameter, name + UPDATED_SUFFIX, shape)
        _add_output(builder, first, name + FIRST_MOMENT_SUFFIX + UPDATED_SUFFIX, shape)
        _add_output(builder, second, name + SECOND_MOMENT_SUFFIX + UPDATED_SUFFIX, shape)
    return ir.to_proto(ir.Model(graph, ir_version=IR_VERSION, producer_name="ort_ops"))


def _bias_correction(op: OpBuilder, beta: float, t: ir.Value) -> ir.Value:
    """1 - beta^t in float64."""
    return op.Sub(_double(op, 1.0), op.Pow(_double(op, beta), t))


def _double(op: OpBuilder, value: float) -> ir.Value:
    return op.Constant(value=ir.tensor(value, dtype=ir.DataType.DOUBLE))


def _global_norm(op: OpBuilder, gradients: Sequence[ir.Value]) -> ir.Value:
    squares = [op.ReduceSumSquare(gradient, keepdims=0) for gradient in gradients]
    return op.Sqrt(op.Sum(*squares))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _add_output(builder: GraphBuilder, value: ir.Value, name: str, shape: Sequence[int]) -> None:
    value.dtype = ir.DataType.FLOAT
    value.shape = ir.Shape(shape)
    builder.add_output(value, name)


def _check_adamw(
    parameters: Mapping[str, Sequence[int]],
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    no_decay: Sequence[str],
    max_gradient_norm: float | None,
) -> None:
    if not parameters:
        raise ValueError("build_adamw_model: parameters must name at least one parameter; got none.")
    for beta in betas:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"build_adamw_model: betas must be in [0, 1); got {betas}.")
    if not epsilon >= 0.0:
        raise ValueError(f"build_adamw_model: epsilon must not be negative; got {epsilon}.")
    if not weight_decay >= 0.0:
        raise ValueError(f"build_adamw_model: weight_decay must not be negative; got {weight_decay}.")
    if max_gradient_norm is not None and not max_gradient_norm > 0.0:
        raise ValueError(f"build_adamw_model: max_gradient_norm must be positive; got {max_gradient_norm}.")
    for pattern in no_decay:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise ValueError(
                f"build_adamw_model: every pattern of no_decay must match a parameter; '{pattern}' matches "
                f"none of {len(parameters)}: {', '.join(parameters)}."
            )
    suffixes = ("", GRADIENT_SUFFIX, FIRST_MOMENT_SUFFIX, SECOND_MOMENT_SUFFIX)
    names = [LEARNING_RATE, STEP, GRADIENT_NORM]
    names += [name + suffix for name in parameters for suffix in suffixes]
    names += [name + suffix + UPDATED_SUFFIX for name in parameters for suffix in suffixes]
    collisions = sorted(name for name, count in Counter(names).items() if count > 1)
    if collisions:
        raise ValueError(
            f"build_adamw_model: the parameters' names and the names made from them must all differ; "
            f"{', '.join(collisions)} would appear twice. Rename the parameter."
        )
