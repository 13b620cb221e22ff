"""AddLayerNormGrad: LayerNorm's backward pass with the Add before it and the residual gradient after it.

The formulas are those of a LayerNorm's backward pass (Ba, Kiros and Hinton, "Layer Normalization", 2016),
with the Add before it and the residual gradient after it folded in, input for input as in CANN's
aclnnAddLayerNormGrad.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference, agree, text
from ort_ops.operators.operator import DATA_TYPES, DOMAIN, AttributeValue, Operator, Slot


def _body(present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    """The formulas on a table of [rows, cols].

    Flattening makes one text serve every rank and any number of normalised axes, and rstd and mean with
    or without their trailing ones. All arithmetic is in float32; the sum x1 + x2 is rounded to T on the
    way, because mean and rstd were computed from the rounded sum. (A float32 sum rounded to a 16-bit type
    equals the 16-bit sum.)
    """
    if "x2" in present:
        x = """
        x1_float = Cast <to = 1> (x1)
        x2_float = Cast <to = 1> (x2)
        x_exact = Add (x1_float, x2_float)
        x_rounded = CastLike (x_exact, x1)
        x = Cast <to = 1> (x_rounded)"""
    else:
        x = """
        x = Cast <to = 1> (x1)"""
    if "dsum" in present:
        dx = """
        dsum_float = Cast <to = 1> (dsum)
        dx_float = Add (dx_norm, dsum_float)"""
    else:
        dx = """
        dx_float = Identity (dx_norm)"""
    return f"""
        axis_rows = Constant <value_ints = [0]> ()
        axis_cols = Constant <value_ints = [1]> ()
        one = Constant <value_ints = [1]> ()
        any = Constant <value_ints = [-1]> ()

        dy_float = Cast <to = 1> (dy)
        gamma_float = Cast <to = 1> (gamma)
        dy_shape = Shape (dy)
        gamma_shape = Shape (gamma)
        gamma_size = Size (gamma_float)
        cols = Reshape (gamma_size, one)
        any_by_cols = Concat <axis = 0> (any, cols)
        dy_table = Reshape <allowzero = 1> (dy_float, any_by_cols)
        table_shape = Shape (dy_table)
        rows = Shape <start = 0, end = 1> (dy_table)
        column_shape = Concat <axis = 0> (rows, one)
        mean_column = Reshape <allowzero = 1> (mean, column_shape)
        rstd_column = Reshape <allowzero = 1> (rstd, column_shape)
{x}
        x_table = Reshape <allowzero = 1> (x, table_shape)
        centred = Sub (x_table, mean_column)
        xhat = Mul (centred, rstd_column)

        g_float = Mul (dy_float, gamma_float)
        g = Reshape <allowzero = 1> (g_float, table_shape)
        g_xhat = Mul (g, xhat)
        sum_g = ReduceSum <keepdims = 1> (g, axis_cols)
        sum_g_xhat = ReduceSum <keepdims = 1> (g_xhat, axis_cols)
        along_xhat = Mul (xhat, sum_g_xhat)
        projection = Add (sum_g, along_xhat)
        cols_float = Cast <to = 1> (cols)
        mean_projection = Div (projection, cols_float)
        residue = Sub (g, mean_projection)
        dx_table = Mul (residue, rstd_column)
        dx_norm = Reshape <allowzero = 1> (dx_table, dy_shape)
{dx}
        dx = CastLike (dx_float, dy)

        dy_xhat = Mul (dy_table, xhat)
        dgamma_flat = ReduceSum <keepdims = 0> (dy_xhat, axis_rows)
        dbeta_flat = ReduceSum <keepdims = 0> (dy_table, axis_rows)
        dgamma = Reshape (dgamma_flat, gamma_shape)
        dbeta = Reshape (dbeta_flat, gamma_shape)
    """


def _infer(node: Inference) -> None:
    """dx is as dy in type and shape, dgamma and dbeta are float and shaped as gamma; clashes are refused."""
    dy = node.shapes.get("dy")
    gamma = node.shapes.get("gamma")
    node.check_rank("dy")
    for name in ("x1", "x2", "dsum"):
        node.check_same_shape(name, "dy")
    if gamma is not None:
        if not gamma:
            node.fail("gamma must have rank 1 or more, one axis for each normalised axis", "a scalar")
        if 0 in gamma:
            node.fail("gamma must have at least one element", text(gamma))
    if dy is not None and gamma is not None:
        if len(gamma) > len(dy) or not agree(gamma, dy[len(dy) - len(gamma) :]):
            node.fail(f"gamma must have the shape of the last axes of dy {text(dy)}", text(gamma))
        leading = dy[: len(dy) - len(gamma)]
        with_ones = [*leading, *([1] * len(gamma))]
        for name in ("rstd", "mean"):
            shape = node.shapes.get(name)
            if shape is not None and not (agree(shape, with_ones) or agree(shape, leading)):
                node.fail(f"{name} must be {text(with_ones)} or {text(leading)}", text(shape))
    if "dy" in node.types and "gamma" in node.types:
        allowed = {node.types["dy"], TensorProto.FLOAT, TensorProto.UNDEFINED}
        if node.types["gamma"] not in allowed:
            got = TensorProto.DataType.Name(node.types["gamma"]).lower()
            node.fail("gamma must have dy's type or be float", got)
    node.set_output_like(0, "dy")
    node.set_output(1, TensorProto.FLOAT, gamma)
    node.set_output(2, TensorProto.FLOAT, gamma)


class AddLayerNormGrad(OpRun):
    """The operator for `onnx.reference`: float64 inside, each result rounded once.

    Shapes: dy, x1, x2, dsum and dx [..., *norm]; rstd and mean [..., 1 x rank(norm)] or [...]; gamma,
    dgamma and dbeta [*norm].
    """

    op_domain = DOMAIN

    def _run(
        self,
        dy: np.ndarray,
        x1: np.ndarray,
        x2: np.ndarray | None,
        rstd: np.ndarray,
        mean: np.ndarray,
        gamma: np.ndarray,
        dsum: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        def wide(array: np.ndarray) -> np.ndarray:
            return array.astype(np.float64)

        # The forward Add rounds to T, and mean and rstd belong to the rounded sum.
        x = x1 if x2 is None else (wide(x1) + wide(x2)).astype(x1.dtype)
        cols = gamma.size
        rows = dy.size // cols
        table, column = (rows, cols), (rows, 1)
        dy_table = wide(dy).reshape(table)
        rstd_column = wide(rstd).reshape(column)
        xhat = (wide(x).reshape(table) - wide(mean).reshape(column)) * rstd_column
        g = dy_table * wide(gamma).reshape(1, cols)
        sum_g = g.sum(axis=1, keepdims=True)
        sum_g_xhat = (g * xhat).sum(axis=1, keepdims=True)
        dx = (rstd_column * (g - (sum_g + xhat * sum_g_xhat) / cols)).reshape(dy.shape)
        if dsum is not None:
            dx = dx + wide(dsum)
        dgamma = (dy_table * xhat).sum(axis=0).reshape(gamma.shape)
        dbeta = dy_table.sum(axis=0).reshape(gamma.shape)
        return dx.astype(dy.dtype), dgamma.astype(np.float32), dbeta.astype(np.float32)


ADD_LAYER_NORM_GRAD = Operator(
    name="AddLayerNormGrad",
    doc=(
        "Backward pass of y = LayerNorm(x1 + x2), with the residual branch's gradient added to the result. "
        "With rows = product of the leading axes and cols = number of elements of gamma: "
        "x = round_T(x1 + x2), xhat = (x - mean) * rstd, g = dy * gamma, "
        "dx = round_T(rstd * (g - (sum_cols(g) + xhat * sum_cols(g * xhat)) / cols) + dsum), "
        "dgamma = sum_rows(dy * xhat), dbeta = sum_rows(dy)."
    ),
    inputs=(
        Slot("dy", "T", "[..., *norm]: gradient of the norm's output; rank 1 to 8"),
        Slot("x1", "T", "as dy: first addend of the forward Add"),
        Slot("x2", "T", "as dy: second addend; when absent, x = x1", optional=True),
        Slot("rstd", "tensor(float)", "[...] or [..., 1 for each axis of norm]: 1/sqrt(Var(x) + epsilon)"),
        Slot("mean", "tensor(float)", "as rstd: E(x)"),
        Slot("gamma", "G", "[*norm]: scale; its rank says how many trailing axes are normalised"),
        Slot("dsum", "T", "as dy: gradient that reaches x by another way; added last", optional=True),
    ),
    outputs=(
        Slot("dx", "T", "as dy: gradient of x, so of x1 and of x2 alike"),
        Slot("dgamma", "tensor(float)", "as gamma: its gradient", optional=True),
        Slot("dbeta", "tensor(float)", "as gamma: gradient of the forward pass's bias", optional=True),
    ),
    type_constraints=(
        ("T", DATA_TYPES, "Type of the activations and their gradients."),
        ("G", DATA_TYPES, "T, or float when T is 16 bits wide."),
    ),
    body=_body,
    infer=_infer,
    reference=AddLayerNormGrad,
)
