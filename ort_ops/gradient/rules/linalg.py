"""Derivatives of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ort_ops.gradient.driver import Dims, Vjp
from ort_ops.gradient.registry import Grads, vjp


@vjp("MatMul")
def matmul(c: Vjp) -> Grads:
    return matmul_gradients(c, c.dy())


def matmul_gradients(
    c: Vjp, dy: ir.Value, trans_a: bool = False, trans_b: bool = False
) -> tuple[ir.Value, ir.Value]:
    """dA = dY B^T, dB = A^T dY, summed over the batch axes that an operand was broadcast along.

    `trans_a`, `trans_b`: the node swaps the operand's last two axes first; such operands are no vectors.
    """
    a, b = c.x(0), c.x(1)
    a_rank, b_rank = c.rank(a), c.rank(b)
    if trans_a or trans_b:
        a_used = swap_last(c, a, a_rank) if trans_a else a
        b_used = swap_last(c, b, b_rank) if trans_b else b
        rank = max(a_rank, b_rank)
        if trans_a:
            da = _product(c, b_used, b_rank, swap_last(c, dy, rank), rank, a)
        else:
            da = _product(c, dy, rank, swap_last(c, b_used, b_rank), b_rank, a)
        if trans_b:
            db = _product(c, swap_last(c, dy, rank), rank, a_used, a_rank, b)
        else:
            db = _product(c, swap_last(c, a_used, a_rank), a_rank, dy, rank, b)
        return da, db
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


def _product(
    c: Vjp, left: ir.Value, left_rank: int, right: ir.Value, right_rank: int, target: ir.Value
) -> ir.Value:
    """left @ right, of the gradient's full shape, summed to the shape of `target`."""
    product = c.op("MatMul", left, right)
    rank = max(left_rank, right_rank)
    if c.rank(target) == 1:
        product = c.op("ReduceSum", product, list(range(rank - 2)), keepdims=0) if rank > 2 else product
        return c.like(product, target)
    if rank == 2:
        return product
    full = c.op("Concat", c.op("Shape", c.y(), end=-2), c.op("Shape", target, start=-2), axis=0)
    return c.sum_to(product, [*_batch(c, rank), *target.shape[-2:]], target, full)  # type: ignore[index]


def _batch(c: Vjp, rank: int) -> Sequence[int | ir.SymbolicDim]:
    """The batch dims of the output; unknown ones if its shape is not known."""
    shape = c.y().shape
    if shape is None:
        return [ir.SymbolicDim(None)] * (rank - 2)
    return list(shape)[: rank - 2]


def _weight_gradient(c: Vjp, a: ir.Value, dy: ir.Value, b: ir.Value) -> ir.Value:
    """A^T dY over all rows at once: one Gemm instead of a batch of products and a sum."""
    rows, columns = (c.x(1).shape[0], None) if c.rank(b) == 1 else c.x(1).shape  # type: ignore[index, misc]
    product = c.op(
        "Gemm", as_matrix(c, a, rows), as_matrix(c, dy, 1 if c.rank(b) == 1 else columns), transA=1
    )
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
    return gemm_gradients(c, c.dy())


def gemm_gradients(c: Vjp, dy: ir.Value) -> Grads:
    """Gradients of A, B and C by Y = alpha A' B' + beta C, with A' and B' transposed or not."""
    a, b = c.x(0), c.x(1)
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


@vjp("Einsum", limits="a label at most twice in one operand")
def einsum(c: Vjp) -> Grads:
    """The gradient of an operand is the Einsum of dy and the other operands, to the operand's labels.

    Labels that only this operand has were summed over: the gradient is repeated along them. A label that it
    has twice means its diagonal: the gradient is zero elsewhere.
    """
    operands, output = _einsum_labels(c)
    sizes = {
        label: c.dim(c.x(index), axis)
        for index, labels in enumerate(operands)
        for axis, label in enumerate(labels)
        if _may_be_broadcast(label) is False
    }
    return [_einsum_gradient(c, index, operands, output, sizes) for index in range(len(operands))]


def _einsum_labels(c: Vjp) -> tuple[list[str], str]:
    """The labels of each operand and of the output; the axes of an ellipsis get capital letters, from the
    right."""
    left, arrow, right = c.str_attr("equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    used = set(left + right)
    spare = [chr(code) for code in range(ord("A"), ord("Z") + 1) if chr(code) not in used]
    longest = 0
    operands = []
    for index, term in enumerate(terms):
        count = c.rank(c.x(index)) - len(term.replace("...", "")) if "..." in term else 0
        longest = max(longest, count)
        operands.append(term.replace("...", "".join(spare[:count])[::-1]))
    ellipsis = "".join(spare[:longest])[::-1]
    if not arrow:
        joined = "".join(term.replace("...", "") for term in terms)
        right = ellipsis + "".join(sorted(label for label in set(joined) if joined.count(label) == 1))
    return operands, right.replace("...", ellipsis)


def _may_be_broadcast(label: str) -> bool:
    return label.isupper()


def _einsum_gradient(
    c: Vjp, index: int, operands: list[str], output: str, sizes: dict[str, ir.Value]
) -> ir.Value | None:
    if not c.wants(index):
        return None
    x, labels = c.x(index), operands[index]
    others = [place for place in range(len(operands)) if place != index]
    known = set(output).union(*(operands[place] for place in others))
    unique = "".join(dict.fromkeys(labels))
    made = "".join(label for label in unique if label in known)
    equation = f"{','.join([output, *(operands[place] for place in others)])}->{made}"
    gradient = c.op("Einsum", c.dy(), *(c.x(place) for place in others), equation=equation)
    summed = [axis for axis, label in enumerate(labels) if label not in known]
    if len(unique) < len(labels):
        return _einsum_diagonal(c, gradient, labels, made)
    if summed:
        return c.op("Expand", c.op("Unsqueeze", gradient, summed), c.shape(x))
    if any(_may_be_broadcast(label) for label in labels):
        dims = c.y().shape
        source = None if dims is None else [
            dims[output.index(label)] if label in output else x.shape[axis]  # type: ignore[index]
            for axis, label in enumerate(labels)
        ]  # fmt: skip
        return c.sum_to(gradient, source, x)
    return gradient


def _einsum_diagonal(c: Vjp, gradient: ir.Value, labels: str, made: str) -> ir.Value:
    """`gradient`, with one axis for each of the labels `made`, spread to the axes `labels`: on the diagonal,
    else zero."""
    first = {label: labels.index(label) for label in made}
    missing = [axis for axis, label in enumerate(labels) if first.get(label) != axis]
    spread = c.op("Unsqueeze", gradient, missing)
    for label in dict.fromkeys(labels):
        places = [axis for axis, other in enumerate(labels) if other == label]
        if len(places) == 1:
            continue
        if len(places) > 2:
            raise c.fail(f"the label {label!r} stands more than twice in one operand")
        size = c.dim(c.x(0), places[0]) if len(c.node.inputs) == 1 else c.dim(_holder(c, labels), places[0])
        square = c.op("ConstantOfShape", c.join(size, size), value=c.emit.zero(c.dtype))
        eye = c.op("EyeLike", square)
        eye = c.op("Unsqueeze", eye, [axis for axis in range(len(labels)) if axis not in places])
        spread = c.op("Mul", spread, eye)
    return c.op("Expand", spread, c.shape(_holder(c, labels)))


def _holder(c: Vjp, labels: str) -> ir.Value:
    """The operand with these labels."""
    operands, _ = _einsum_labels(c)
    return c.x(operands.index(labels))


@vjp("Det")
def det(c: Vjp) -> Grads:
    """The cofactors: determinants of the matrix without one row and one column, with alternating signs."""
    x = c.x(0)
    rank = c.rank(x)
    size = x.shape[-1] if x.shape is not None else None
    if not isinstance(size, int):
        raise c.fail("the size of the matrix must be known")
    outer = c.op("Unsqueeze", c.dy(), [-2, -1])
    if size == 1:
        return (c.op("Expand", outer, c.shape(x)),)
    others = c.emit.constant(np.array([[k for k in range(size) if k != left] for left in range(size)]))
    rows = c.op("Gather", x, others, axis=rank - 2)
    both = c.op("Gather", rows, others, axis=rank)
    batch = list(range(rank - 2))
    minors = c.op("Transpose", both, perm=[*batch, rank - 2, rank, rank - 1, rank + 1])
    signs = np.fromfunction(lambda i, j: (-1.0) ** (i + j), (size, size))
    cofactors = c.op("Mul", c.op("Det", minors), c.emit.constant(signs.astype(c.dtype.numpy()), c.dtype))
    return (c.op("Mul", outer, cofactors),)
