"""Derivatives of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_ops.gradient.driver import Dims, Vjp
from ort_ops.gradient.registry import Grads, vjp


@vjp("MatMul")
def matmul(c: Vjp) -> Grads:
    """dA = dY B^T, dB = A^T dY, summed over the batch axes that an operand was broadcast along."""
    a, b = c.x(0), c.x(1)
    a_rank, b_rank = c.rank(a), c.rank(b)
    dy = c.dy()
    # a vector counts as a matrix of one row (left) or one column (right)
    if b_rank == 1:
        dy = c.op("Unsqueeze", dy, [-1])
    if a_rank == 1:
        dy = c.op("Unsqueeze", dy, [-2])
    left = c.op("Unsqueeze", a, [0]) if a_rank == 1 else a
    right = c.op("Unsqueeze", b, [1]) if b_rank == 1 else b
    da = _product(c, dy, max(a_rank, b_rank, 2), swap_last(c, right, max(b_rank, 2)), max(b_rank, 2), a)
    if a_rank > 2 and b_rank <= 2:
        db = _weight_gradient(c, a, dy, b)
    else:
        db = _product(c, swap_last(c, left, max(a_rank, 2)), max(a_rank, 2), dy, max(a_rank, b_rank, 2), b)
    return da, db


def _product(c: Vjp, left: ir.Value, left_rank: int, right: ir.Value, right_rank: int, target: ir.Value) -> ir.Value:
    """left @ right, of the gradient's full shape, summed to the shape of `target`."""
    product = c.op("MatMul", left, right)
    rank = max(left_rank, right_rank)
    if c.rank(target) == 1:
        product = c.op("ReduceSum", product, list(range(rank - 2)), keepdims=0) if rank > 2 else product
        return c.like(product, target)
    if rank == 2:
        return product
    return c.sum_to(product, [*_batch(c, rank), *target.shape[-2:]], target)  # type: ignore[index]


def _batch(c: Vjp, rank: int) -> Sequence[int | ir.SymbolicDim]:
    """The batch dims of the output; unknown ones if its shape is not known."""
    shape = c.y().shape
    if shape is None:
        return [ir.SymbolicDim(None)] * (rank - 2)
    return list(shape)[: rank - 2]


def _weight_gradient(c: Vjp, a: ir.Value, dy: ir.Value, b: ir.Value) -> ir.Value:
    """A^T dY over all rows at once: one Gemm instead of a batch of products and a sum."""
    rows, columns = (c.x(1).shape[0], None) if c.rank(b) == 1 else c.x(1).shape  # type: ignore[index, misc]
    product = c.op("Gemm", as_matrix(c, a, rows), as_matrix(c, dy, 1 if c.rank(b) == 1 else columns), transA=1)
    return c.like(product, b) if c.rank(b) == 1 else product


def as_matrix(c: Vjp, value: ir.Value, columns: int | ir.SymbolicDim | None) -> ir.Value:
    """`value` with all but its last axis, of size `columns`, joined to one."""
    if isinstance(columns, int) and columns > 0:
        return c.op("Reshape", value, [-1, columns])
    size = c.op("Gather", c.op("Shape", value), [-1], axis=0)
    return c.op("Reshape", value, c.op("Concat", [-1], size, axis=0))


def swap_last(c: Vjp, value: ir.Value, rank: int) -> ir.Value:
    """`value`, of rank `rank`, with its last two axes swapped."""
    return c.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


@vjp("Gemm")
def gemm(c: Vjp) -> Grads:
    """Y = alpha A' B' + beta C, with A' and B' transposed or not."""
    a, b, dy = c.x(0), c.x(1), c.dy()
    trans_a, trans_b = c.int_attr("transA", 0), c.int_attr("transB", 0)
    alpha, beta = c.float_attr("alpha", 1.0), c.float_attr("beta", 1.0)
    scale = None if alpha == 1.0 else alpha
    if trans_a:
        da = c.op("Gemm", b, dy, transA=trans_b, transB=1, alpha=scale)
    else:
        da = c.op("Gemm", dy, b, transB=1 - trans_b, alpha=scale)
    if trans_b:
        db = c.op("Gemm", dy, a, transA=1, transB=trans_a, alpha=scale)
    else:
        db = c.op("Gemm", a, dy, transA=1 - trans_a, alpha=scale)
    if not c.wants(2):
        return da, db
    output: Dims | None = c.y().shape
    dc = c.sum_to(dy if beta == 1.0 else c.op("Mul", dy, beta), output, c.x(2))
    return da, db, dc
