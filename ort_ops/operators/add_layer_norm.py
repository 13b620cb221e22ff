"""AddLayerNorm: a residual Add and the LayerNorm that reads it, with the statistics for the backward pass.

Source of the formula: Ba, Kiros and Hinton, "Layer Normalization", 2016. The backward pass is
AddLayerNormGrad.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference, agree, text
from ort_ops.operators.operator import DATA_TYPES, DOMAIN, Attribute, AttributeValue, Operator, Slot

_EPSILON = 1e-5


def _body(present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    """The formulas on a table of [rows, cols], in float32; the sum x1 + x2 is rounded to T on the way.

    Flattening makes one text serve every rank and any number of normalised axes.
    """
    if "x2" in present:
        x = """
        x1_float = Cast <to = 1> (x1)
        x2_float = Cast <to = 1> (x2)
        x_exact = Add (x1_float, x2_float)
        x = CastLike (x_exact, x1)"""
    else:
        x = """
        x = Identity (x1)"""
    if "beta" in present:
        shifted = """
        beta_float = Cast <to = 1> (beta)
        y_float = Add (scaled, beta_float)"""
    else:
        shifted = """
        y_float = Identity (scaled)"""
    return f"""
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        any = Constant <value_ints = [-1]> ()
        epsilon = Constant <value_float: float = @epsilon> ()
        {x}
        x_float = Cast <to = 1> (x)
        gamma_float = Cast <to = 1> (gamma)
        gamma_shape = Shape (gamma)
        x_shape = Shape (x1)
        gamma_size = Size (gamma_float)
        cols = Reshape (gamma_size, one)
        cols_float = Cast <to = 1> (cols)
        any_by_cols = Concat <axis = 0> (any, cols)
        table = Reshape <allowzero = 1> (x_float, any_by_cols)
        sums = ReduceSum <keepdims = 1> (table, one)
        mean_column = Div (sums, cols_float)
        centred = Sub (table, mean_column)
        squares = Mul (centred, centred)
        square_sums = ReduceSum <keepdims = 1> (squares, one)
        variance = Div (square_sums, cols_float)
        safe_variance = Add (variance, epsilon)
        deviation = Sqrt (safe_variance)
        rstd_column = Reciprocal (deviation)
        xhat_table = Mul (centred, rstd_column)
        xhat = Reshape <allowzero = 1> (xhat_table, x_shape)
        scaled = Mul (xhat, gamma_float)
        {shifted}
        y = CastLike (y_float, x1)

        norm_rank = Shape (gamma_shape)
        rank = Shape (x_shape)
        leading_rank = Sub (rank, norm_rank)
        leading = Slice (x_shape, zero, leading_rank)
        ones = Expand (one, norm_rank)
        statistic_shape = Concat <axis = 0> (leading, ones)
        mean = Reshape <allowzero = 1> (mean_column, statistic_shape)
        rstd = Reshape <allowzero = 1> (rstd_column, statistic_shape)
    """


def _infer(node: Inference) -> None:
    """y and x are as x1; mean and rstd are float, with 1 for each normalised axis."""
    x1, gamma = node.shapes.get("x1"), node.shapes.get("gamma")
    node.check_rank("x1")
    node.check_same_shape("x2", "x1")
    node.check_same_shape("beta", "gamma")
    statistic = None
    if gamma is not None:
        if not gamma:
            node.fail("gamma must have rank 1 or more, one axis for each normalised axis", "a scalar")
        if 0 in gamma:
            node.fail("gamma must have at least one element", text(gamma))
        if x1 is not None:
            if len(gamma) > len(x1) or not agree(gamma, x1[len(x1) - len(gamma) :]):
                node.fail(f"gamma must have the shape of the last axes of x1 {text(x1)}", text(gamma))
            statistic = [*x1[: len(x1) - len(gamma)], *([1] * len(gamma))]
    node.set_output_like(0, "x1")
    node.set_output(1, TensorProto.FLOAT, statistic)
    node.set_output(2, TensorProto.FLOAT, statistic)
    node.set_output_like(3, "x1")


class AddLayerNorm(OpRun):
    """The operator for `onnx.reference`: float64 inside, each result rounded once.

    Shapes: x1, x2, y and x [..., *norm]; gamma and beta [*norm]; mean and rstd [..., 1 x rank(norm)].
    """

    op_domain = DOMAIN

    def _run(
        self,
        x1: np.ndarray,
        x2: np.ndarray | None,
        gamma: np.ndarray,
        beta: np.ndarray | None = None,
        epsilon: float = _EPSILON,
    ) -> tuple[np.ndarray, ...]:
        x = x1 if x2 is None else (x1.astype(np.float64) + x2.astype(np.float64)).astype(x1.dtype)
        axes = tuple(range(x1.ndim - gamma.ndim, x1.ndim))
        wide = x.astype(np.float64)
        mean = wide.mean(axis=axes, keepdims=True)
        rstd = 1 / np.sqrt(np.square(wide - mean).mean(axis=axes, keepdims=True) + epsilon)
        y = (wide - mean) * rstd * gamma.astype(np.float64)
        if beta is not None:
            y = y + beta.astype(np.float64)
        return y.astype(x1.dtype), mean.astype(np.float32), rstd.astype(np.float32), x


ADD_LAYER_NORM = Operator(
    name="AddLayerNorm",
    doc=(
        "y = LayerNorm(x1 + x2), with the sum and the statistics that AddLayerNormGrad needs. With cols = "
        "number of elements of gamma: x = round_T(x1 + x2), mean = sum_cols(x) / cols, "
        "rstd = 1 / sqrt(sum_cols((x - mean)^2) / cols + epsilon), "
        "y = round_T((x - mean) * rstd * gamma + beta)."
    ),
    inputs=(
        Slot("x1", "T", "[..., *norm]: first addend; rank 1 to 8"),
        Slot("x2", "T", "as x1: second addend; when absent, x = x1", optional=True),
        Slot("gamma", "G", "[*norm]: scale; its rank says how many trailing axes are normalised"),
        Slot("beta", "G", "as gamma: what is added last; when absent, 0", optional=True),
    ),
    outputs=(
        Slot("y", "T", "as x1: the normalised sum"),
        Slot("mean", "tensor(float)", "[..., 1 for each axis of norm]: E(x)", optional=True),
        Slot("rstd", "tensor(float)", "as mean: 1/sqrt(Var(x) + epsilon)", optional=True),
        Slot("x", "T", "as x1: the sum", optional=True),
    ),
    attributes=(Attribute("epsilon", _EPSILON, "added to the variance"),),
    type_constraints=(
        ("T", DATA_TYPES, "Type of the activations."),
        ("G", DATA_TYPES, "T, or float when T is 16 bits wide."),
    ),
    body=_body,
    infer=_infer,
    reference=AddLayerNorm,
)
