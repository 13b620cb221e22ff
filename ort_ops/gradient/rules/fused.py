"""Derivatives of the plugin's own forward operators."""

from __future__ import annotations

from ort_ops import operators
from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.registry import Grads, vjp


@vjp(operators.ATTENTION.name, domain=operators.DOMAIN, inputs=(0, 1, 2))
def scaled_dot_product_attention(c: Vjp) -> Grads:
    if c.has_dy(1):
        raise c.fail("its output log_sum_exp is not supported as part of the loss")
    operands = [c.optional(index) for index in range(4)]
    gradients = c.multi(
        operators.ATTENTION_GRAD.name,
        c.dy(), *operands, c.y(), c.y(1),
        domain=operators.DOMAIN,
        version=operators.ATTENTION_GRAD.version,
        outputs=3 if c.has(1) else 1,
        scale=c.float_attr("scale", 1.0),
        visibility=c.str_attr("visibility", "all"),
    )  # fmt: skip
    return gradients


@vjp(operators.LINEAR.name, domain=operators.DOMAIN)
def linear(c: Vjp) -> Grads:
    """One LinearGrad. Only layers whose weight is trained become a Linear: its gradient is always wanted."""
    operator = operators.LINEAR_GRAD
    dx, db, dw = c.multi(
        operator.name, c.dy(), c.x(0), c.x(1),
        domain=operator.domain, version=operator.version, outputs=3,
        weight_layout=c.str_attr("weight_layout", "in_out"),
    )  # fmt: skip
    for gradient, index in ((dx, 0), (db, 2)):
        if not c.wants(index):
            gradient.name = ""
    return dx if c.wants(0) else None, dw, db if c.wants(2) else None


@vjp(operators.CROSS_ENTROPY.name, domain=operators.DOMAIN, inputs=(0,))
def cross_entropy(c: Vjp) -> Grads:
    if c.has_dy(1):
        raise c.fail("its output log_sum_exp is not supported as part of the loss")
    operator = operators.CROSS_ENTROPY_GRAD
    return (
        c.op(
            operator.name, c.dy(), c.x(0), c.x(1), c.y(1),
            domain=operator.domain, version=operator.version, ignore_index=c.int_attr("ignore_index", -100),
        ),
    )  # fmt: skip
