"""ScaledDotProductAttention and its Grad: softmax attention over all heads at once, and its backward pass.

Source of the formulas: Vaswani et al., "Attention Is All You Need", 2017; that the scores need not be stored,
because the backward pass can compute them again from each row's log of the sum: Dao et al.,
"FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Dims, Inference, agree, text
from ort_ops.operators.operator import DOMAIN, Attribute, AttributeValue, Operator, Slot

_MIN_OPSET = 18  # ReduceMax takes its axes as an input, Split the number of its outputs

_HEADS = """
        query_heads = Transpose <perm = [0, 2, 1, 3]> (query_part)
        key_heads = Transpose <perm = [0, 2, 1, 3]> (key_part)
        value_heads = Transpose <perm = [0, 2, 1, 3]> (value_part)
        key_columns = Transpose <perm = [0, 2, 3, 1]> (key_part)
        scale = Constant <value_float: float = @scale> ()
        products = MatMul (query_heads, key_columns)
        scaled = Mul (products, scale)"""

_CAUSAL = """
        shape = Shape <start = 2> (masked)
        ones = ConstantOfShape <value = float[1] {1.0}> (shape)
        lower = Trilu <upper = 0> (ones)
        seen = Cast <to = 9> (lower)
        zero = Constant <value_float = 0.0> ()
        minus_infinity = Log (zero)
        scores = Where (seen, masked, minus_infinity)"""


def _scores(present: frozenset[str], attributes: Mapping[str, AttributeValue]) -> str:
    """The heads of query, key and value, and `scores`, [batch, heads, queries, keys]."""
    if "key" in present:
        parts = """
        query_part = Identity (query)
        key_part = Identity (key)
        value_part = Identity (value)"""
    else:
        parts = """
        axis_parts = Constant <value_ints = [2]> ()
        query_slice, key_slice, value_slice = Split <axis = 2, num_outputs = 3> (query)
        query_part = Squeeze (query_slice, axis_parts)
        key_part = Squeeze (key_slice, axis_parts)
        value_part = Squeeze (value_slice, axis_parts)"""
    masked = "Add (scaled, mask)" if "mask" in present else "Identity (scaled)"
    visible = _CAUSAL if attributes["visibility"] == "causal" else "\n        scores = Identity (masked)"
    return f"{parts}{_HEADS}\n        masked = {masked}{visible}"


def _body(present: frozenset[str], attributes: Mapping[str, AttributeValue]) -> str:
    return f"""{_scores(present, attributes)}
        last_axis = Constant <value_ints = [-1]> ()
        largest = ReduceMax <keepdims = 1> (scores, last_axis)
        shifted = Sub (scores, largest)
        exponentials = Exp (shifted)
        sum = ReduceSum <keepdims = 1> (exponentials, last_axis)
        probabilities = Div (exponentials, sum)
        y_heads = MatMul (probabilities, value_heads)
        y = Transpose <perm = [0, 2, 1, 3]> (y_heads)
        log_sum = Log (sum)
        log_sum_exp_column = Add (largest, log_sum)
        log_sum_exp = Squeeze (log_sum_exp_column, last_axis)
    """


def _grad_body(present: frozenset[str], attributes: Mapping[str, AttributeValue]) -> str:
    if "key" in present:
        results = """
        dquery = Identity (dquery_part)
        dkey = Identity (dkey_part)
        dvalue = Identity (dvalue_part)"""
    else:
        results = """
        dquery_slice = Unsqueeze (dquery_part, axis_parts)
        dkey_slice = Unsqueeze (dkey_part, axis_parts)
        dvalue_slice = Unsqueeze (dvalue_part, axis_parts)
        dquery = Concat <axis = 2> (dquery_slice, dkey_slice, dvalue_slice)
        dkey = Identity (dkey_part)
        dvalue = Identity (dvalue_part)"""
    return f"""{_scores(present, attributes)}
        last_axis = Constant <value_ints = [-1]> ()
        log_sum_exp_column = Unsqueeze (log_sum_exp, last_axis)
        exponents = Sub (scores, log_sum_exp_column)
        probabilities = Exp (exponents)
        dy_heads = Transpose <perm = [0, 2, 1, 3]> (dy)
        value_columns = Transpose <perm = [0, 2, 3, 1]> (value_part)
        dprobabilities = MatMul (dy_heads, value_columns)
        dy_y = Mul (dy, y)
        along_tokens = ReduceSum <keepdims = 1> (dy_y, last_axis)
        along = Transpose <perm = [0, 2, 1, 3]> (along_tokens)
        centred = Sub (dprobabilities, along)
        dscores = Mul (probabilities, centred)
        dproducts = Mul (dscores, scale)
        dproducts_rows = Transpose <perm = [0, 1, 3, 2]> (dproducts)
        probability_rows = Transpose <perm = [0, 1, 3, 2]> (probabilities)
        dquery_heads = MatMul (dproducts, key_heads)
        dkey_heads = MatMul (dproducts_rows, query_heads)
        dvalue_heads = MatMul (probability_rows, dy_heads)
        dquery_part = Transpose <perm = [0, 2, 1, 3]> (dquery_heads)
        dkey_part = Transpose <perm = [0, 2, 1, 3]> (dkey_heads)
        dvalue_part = Transpose <perm = [0, 2, 1, 3]> (dvalue_heads){results}
    """


def _check(node: Inference) -> None:
    query, key, value = (node.shapes.get(name) for name in ("query", "key", "value"))
    joined = "key" not in node.types
    if query is not None and joined and not (len(query) == 5 and query[2] in (3, None)):
        node.fail("query must be [batch,tokens,3,heads,size] where key and value are absent", text(query))
    if query is not None and not joined and len(query) != 4:
        node.fail("query must have rank 4", text(query))
    if query is not None and key is not None:
        expected = [query[0], key[1] if len(key) > 1 else None, *query[2:]]
        if not agree(key, expected):
            node.fail(f"key must be {text(expected)}", text(key))
    if key is not None and value is not None and not agree(value, key):
        node.fail(f"value must have key's shape {text(key)}", text(value))
    visibility = node.attribute("visibility")
    if visibility not in (None, "all", "causal"):
        node.fail("visibility must be all or causal", str(visibility))


def _infer(node: Inference) -> None:
    """y [batch, queries, heads, size], log_sum_exp [batch, heads, queries]."""
    _check(node)
    query = node.shapes.get("query")
    y: Dims | None = None
    log_sum_exp: Dims | None = None
    if query is not None:
        y = [*query[:2], *query[-2:]]
        log_sum_exp = [query[0], query[-2], query[1]]
    node.set_output(0, TensorProto.FLOAT, y)
    node.set_output(1, TensorProto.FLOAT, log_sum_exp)


def _infer_grad(node: Inference) -> None:
    """The gradients are as query, key and value."""
    _check(node)
    for index, name in enumerate(("query", "key", "value")):
        node.set_output_like(index, name)


class _Heads:
    """float64 views [batch, heads, tokens, size] of query, key and value, and the probabilities."""

    def __init__(
        self,
        query: np.ndarray,
        key: np.ndarray | None,
        value: np.ndarray | None,
        mask: np.ndarray | None,
        scale: float,
        visibility: str,
    ) -> None:
        parts = np.moveaxis(query, 2, 0) if key is None else (query, key, value)
        self.query, self.key, self.value = (heads(part) for part in parts)
        scores = scale * self.query @ self.key.swapaxes(-1, -2)
        if mask is not None:
            scores = scores + mask
        if visibility == "causal":
            scores = np.where(np.tri(*scores.shape[-2:]).astype(bool), scores, -np.inf)
        with np.errstate(invalid="ignore"):
            largest = scores.max(axis=-1, keepdims=True)
            exponentials = np.exp(scores - largest)
        total = exponentials.sum(axis=-1, keepdims=True)
        self.probabilities = exponentials / total
        self.log_sum_exp = (largest + np.log(total))[..., 0]


def heads(tokens: np.ndarray | None) -> np.ndarray:
    """[batch, tokens, heads, size] as float64 [batch, heads, tokens, size], and back."""
    assert tokens is not None
    return tokens.astype(np.float64).swapaxes(1, 2)


class ScaledDotProductAttention(OpRun):
    """The operator for `onnx.reference`: float64 inside, each result rounded once."""

    op_domain = DOMAIN

    def _run(self, query, key=None, value=None, mask=None, scale=None, visibility=None):  # type: ignore[no-untyped-def]
        scale, visibility = 1.0 if scale is None else scale, visibility or "all"
        found = _Heads(query, key, value, mask, scale, visibility)
        y = heads(found.probabilities @ found.value)
        return y.astype(np.float32), found.log_sum_exp.astype(np.float32)


class ScaledDotProductAttentionGrad(OpRun):
    """The operator for `onnx.reference`: float64 inside, each result rounded once."""

    op_domain = DOMAIN

    def _run(  # type: ignore[no-untyped-def]
        self,
        dy,
        query,
        key=None,
        value=None,
        mask=None,
        y=None,
        log_sum_exp=None,
        scale=None,
        visibility=None,
    ):
        scale, visibility = 1.0 if scale is None else scale, visibility or "all"
        found = _Heads(query, key, value, mask, scale, visibility)
        dy = heads(dy)
        along = (dy * heads(y)).sum(axis=-1, keepdims=True)
        dproducts = scale * found.probabilities * (dy @ found.value.swapaxes(-1, -2) - along)
        parts = [
            heads(dproducts @ found.key),
            heads(dproducts.swapaxes(-1, -2) @ found.query),
            heads(found.probabilities.swapaxes(-1, -2) @ dy),
        ]
        if key is None:
            parts[0] = np.stack(parts, axis=2)
        return tuple(part.astype(np.float32) for part in parts)


_FLOAT = "tensor(float)"
_OPERANDS = (
    Slot(
        "query",
        _FLOAT,
        "[batch, queries, heads, size]; or query, key and value, [batch, tokens, 3, heads, size]",
    ),
    Slot("key", _FLOAT, "[batch, keys, heads, size]; absent if query holds it", optional=True),
    Slot("value", _FLOAT, "as key", optional=True),
    Slot("mask", _FLOAT, "added to the scores, to whose shape it broadcasts", optional=True),
)
_ATTRIBUTES = (
    Attribute("scale", 1.0, "What the products of query and key are multiplied by."),
    Attribute("visibility", "all", "all, or causal: query i sees keys 0 to i."),
)

ATTENTION = Operator(
    name="ScaledDotProductAttention",
    doc=(
        "Softmax attention over all heads: scores = scale * query key^T + mask, "
        "log_sum_exp = log(sum over keys of exp(scores)), y = exp(scores - log_sum_exp) value."
    ),
    inputs=_OPERANDS,
    outputs=(
        Slot("y", _FLOAT, "[batch, queries, heads, size]"),
        Slot("log_sum_exp", _FLOAT, "[batch, heads, queries]: what the backward pass needs of the scores"),
    ),
    type_constraints=(),
    body=_body,
    infer=_infer,
    reference=ScaledDotProductAttention,
    attributes=_ATTRIBUTES,
    min_opset=_MIN_OPSET,
)

ATTENTION_GRAD = Operator(
    name="ScaledDotProductAttentionGrad",
    doc=(
        "Backward pass of ScaledDotProductAttention, without a gradient of the mask. "
        "With p = exp(scores - log_sum_exp): "
        "dscores = p * (dy value^T - sum(dy * y)), dquery = scale * dscores key, "
        "dkey = scale * dscores^T query, dvalue = p^T dy."
    ),
    inputs=(
        Slot("dy", _FLOAT, "[batch, queries, heads, size]: gradient of y"),
        *_OPERANDS,
        Slot("y", _FLOAT, "as dy: the forward pass's result"),
        Slot("log_sum_exp", _FLOAT, "[batch, heads, queries]: the forward pass's result"),
    ),
    outputs=(
        Slot("dquery", _FLOAT, "as query"),
        Slot("dkey", _FLOAT, "as key; absent if query holds it", optional=True),
        Slot("dvalue", _FLOAT, "as value; absent if query holds it", optional=True),
    ),
    type_constraints=(),
    body=_grad_body,
    infer=_infer_grad,
    reference=ScaledDotProductAttentionGrad,
    attributes=_ATTRIBUTES,
    min_opset=_MIN_OPSET,
)
