"""LayerNorms written out in basic operators become LayerNormalization.

Exporters write them out below opset 17, Paddle's and TensorFlow's ones always. As one node they are
differentiated as one node. Cases that are recognised, each with a scale, each only if it is exactly a
LayerNorm:

1. d / sqrt(mean(d^2) + eps) * scale with d = x - mean(x): d^2 as Pow or Mul, the division as Div or as Mul
   with Reciprocal;
2. the same plus a bias, by joining an Add of a bias of the scale's shape to case 1;
3. x * s + (bias - mean * s) with s = scale / sqrt(var + eps), as TensorFlow's batch_normalization writes it.

Exactly a LayerNorm means: the mean and the variance are taken over the same trailing axes, epsilon is a
constant, scale and bias have the shape of those axes, and nothing else reads the values in between. float16
is left alone: LayerNormalization computes its statistics in float32, so the results would change.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter import pattern
from onnxscript.rewriter.pattern import MatchResult, OrValue, RewriteRuleClassBase, RewriteRuleSet

_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


def fuse_layer_norm(model: ir.Model) -> bool:
    """Replace written-out LayerNorms in place; returns whether there were any."""
    if not any(node.op_type == "Sqrt" for node in model.graph):
        return False
    if not _RULES.apply_to_model(model):
        return False
    RemoveUnusedNodesPass()(model)  # the constants of what was written out: ONNX Runtime warns of each
    return True


def _centred(op, x, axes):  # type: ignore[no-untyped-def]
    return op.Sub(x, op.ReduceMean(x, axes, _outputs=["mean"]))


def _deviation(op, x, centred, variance_axes, epsilon):  # type: ignore[no-untyped-def]
    square = OrValue([op.Pow(centred, pattern.Var("two")), op.Mul(centred, centred)])
    return op.Sqrt(op.Add(op.ReduceMean(square, variance_axes, _outputs=["variance"]), epsilon))


class _WrittenOut(RewriteRuleClassBase):
    """Case 1. `swapped`: the scale is the first operand."""

    def __init__(self, swapped: bool) -> None:
        super().__init__(f"LayerNorm{'Swapped' if swapped else ''}")
        self.swapped = swapped

    def pattern(self, op, x, scale, axes, variance_axes, epsilon):  # type: ignore[no-untyped-def, override]
        centred = _centred(op, x, axes)
        deviation = _deviation(op, x, centred, variance_axes, epsilon)
        normalised = OrValue([op.Div(centred, deviation), op.Mul(centred, op.Reciprocal(deviation))])
        return op.Mul(scale, normalised) if self.swapped else op.Mul(normalised, scale)

    def check(self, context, x, scale, two=None, **parts):  # type: ignore[no-untyped-def, override]
        return _check(x, two, parts, scale)

    def rewrite(self, op, x, scale, axes, epsilon, **_):  # type: ignore[no-untyped-def, override]
        return _layer_norm(op, x, axes, epsilon, scale)


class _WithBias(RewriteRuleClassBase):
    """Case 2. `swapped`: the bias is the first operand."""

    def __init__(self, swapped: bool) -> None:
        super().__init__(f"LayerNormBias{'Swapped' if swapped else ''}")
        self.swapped = swapped

    def pattern(self, op, x, scale, bias):  # type: ignore[no-untyped-def, override]
        norm = op.LayerNormalization(x, scale, _outputs=["norm"])
        return op.Add(bias, norm) if self.swapped else op.Add(norm, bias)

    def check(self, context, scale, bias, **_):  # type: ignore[no-untyped-def, override]
        result = MatchResult()
        if scale.shape is None or not scale.shape.is_static() or bias.shape != scale.shape:
            return result.fail("the bias must have the shape of the scale", bias)
        return result

    def rewrite(self, op, x, scale, bias, norm, **_):  # type: ignore[no-untyped-def, override]
        return op.LayerNormalization(x, scale, bias, **norm.producer().attributes)


class _ScaleAndShift(RewriteRuleClassBase):
    """Case 3."""

    def pattern(self, op, x, scale, bias, axes, variance_axes, epsilon):  # type: ignore[no-untyped-def, override]
        mean = op.ReduceMean(x, axes, _outputs=["mean"])
        deviation = _deviation(op, x, op.Sub(x, mean), variance_axes, epsilon)
        factor = op.Mul(op.Reciprocal(deviation), scale)
        return op.Add(op.Mul(x, factor), op.Sub(bias, op.Mul(mean, factor)))

    def check(self, context, x, scale, bias, two=None, **parts):  # type: ignore[no-untyped-def, override]
        return _check(x, two, parts, scale, bias)

    def rewrite(self, op, x, scale, bias, axes, epsilon, **_):  # type: ignore[no-untyped-def, override]
        return _layer_norm(op, x, axes, epsilon, scale, bias)


def _check(x: ir.Value, two: ir.Value | None, parts: dict[str, ir.Value], *affine: ir.Value) -> MatchResult:
    """`parts`: the axes and results of the two means, and epsilon."""
    result = MatchResult()
    axes, variance_axes, epsilon = parts["axes"], parts["variance_axes"], parts["epsilon"]
    for mean in (parts["mean"], parts["variance"]):
        node = mean.producer()
        if node is None or node.attributes.get_int("keepdims", 1) != 1:
            return result.fail("the means must keep their axes", mean)
    if x.dtype not in _TYPES or x.shape is None:
        return result.fail("x must be float or double, of known rank", x)
    if two is not None and (_constant(two) is None or not np.all(_constant(two) == 2)):
        return result.fail("the exponent must be 2", two)
    number = _constant(epsilon)
    if number is None or number.size != 1:
        return result.fail("epsilon must be one constant", epsilon)
    normalised = _trailing(axes, len(x.shape))
    if normalised is None or _trailing(variance_axes, len(x.shape)) != normalised:
        return result.fail("mean and variance must be over the same trailing axes", axes)
    wanted = list(x.shape)[-normalised:]
    for value in affine:
        if value.shape is None or len(value.shape) != normalised:
            return result.fail("scale and bias must have the shape of the normalised axes", value)
        for size, full in zip(value.shape, wanted, strict=True):
            if not isinstance(size, int) or (size != full and (isinstance(full, int) or size == 1)):
                return result.fail("scale and bias must have the shape of the normalised axes", value)
    return result


def _constant(value: ir.Value) -> np.ndarray | None:
    return None if value.const_value is None else value.const_value.numpy()


def _trailing(axes: ir.Value, rank: int) -> int | None:
    """How many trailing axes `axes` names, None if it names others or is not known."""
    known = _constant(axes)
    if known is None or known.size == 0:
        return None
    named = sorted(int(axis) % rank for axis in known.reshape(-1))
    return len(named) if named == list(range(rank - len(named), rank)) else None


def _layer_norm(op, x, axes, epsilon, *affine):  # type: ignore[no-untyped-def]
    number = float(_constant(epsilon).reshape(-1)[0])  # type: ignore[union-attr]
    # the statistics stay in the type that they were computed in
    return op.LayerNormalization(
        x, *affine, axis=-_trailing(axes, len(x.shape)), epsilon=number, stash_type=int(ir.DataType.FLOAT)
    )


_RULES = RewriteRuleSet(
    [
        _ScaleAndShift.rule(),
        _WrittenOut.rule(swapped=False),
        _WrittenOut.rule(swapped=True),
        _WithBias.rule(swapped=False),
        _WithBias.rule(swapped=True),
    ]
)
