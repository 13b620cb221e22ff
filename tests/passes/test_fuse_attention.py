"""Written-out attention becomes one operator, exactly where that is the same thing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ort_ops import operators, passes

RNG = np.random.default_rng(3)
MINUS_INFINITY = np.float32(-np.inf)

PARTS = """
        parts_q, parts_k, parts_v = Split <axis = 2, num_outputs = 3> (x)
        tokens_q = Reshape (parts_q, heads)
        tokens_k = Reshape (parts_k, heads)
        tokens_v = Reshape (parts_v, heads)
"""
HEADS = """
        q = Transpose <perm = [0, 2, 1, 3]> (tokens_q)
        v = Transpose <perm = [0, 2, 1, 3]> (tokens_v)
"""
KEY = "k = Transpose <perm = [0, 2, 3, 1]> (tokens_k)"
PLAIN = "products = MatMul (q, k)\n scores = Mul (products, half)"
ATTEND = """
        p = Softmax <axis = -1> (scores)
        y_heads = MatMul (p, v)
        y_tokens = Transpose <perm = [0, 2, 1, 3]> (y_heads)
        y = Neg (y_tokens)
"""
APART = "tokens_q = Identity (x)\n tokens_k = Identity (x2)\n tokens_v = Identity (x3)"


def model(
    *text: str, inputs: str = "float[2,5,24] x", constants: dict[str, np.ndarray] | None = None
) -> ir.Model:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]>\ng ({inputs}) => (float[2,5,2,4] y) {{{"".join(text)}}}'
    )
    known = {"heads": np.array([2, 5, 2, 4]), "half": np.float32(0.5)} | (constants or {})
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in known.items())
    return passes.prepare(ir.from_proto(proto), 18)


def fused(*text: str, trainable: tuple[str, ...] = (), **options) -> tuple[Counter[str], list[dict], bool]:
    """The operators after the pass, the attributes of the fused ones, and whether the pass says it did
    anything; the results must be the same as before."""
    before = model(*text, **options)
    after = model(*text, **options)
    values = [value for value in after.graph.inputs if value.name in trainable]
    changed = passes.fuse_attention(after, values)
    feeds = {
        value.name: RNG.standard_normal(value.shape.numpy()).astype(np.float32)
        for value in before.graph.inputs
    }
    results = [
        ReferenceEvaluator(proto, new_ops=operators.REFERENCE_OPS).run(None, feeds)[0]
        for proto in (ir.to_proto(before), ir.to_proto(after))
    ]
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)
    attributes = [
        {name: attribute.value for name, attribute in node.attributes.items()}
        for node in after.graph
        if node.domain == operators.DOMAIN
    ]
    return Counter(node.op_type for node in after.graph), attributes, changed


ONE = {"Reshape": 1, "ScaledDotProductAttention": 1, "Neg": 1}


def test_three_parts_of_one_tensor() -> None:
    count, attributes, changed = fused(PARTS, HEADS, KEY, PLAIN, ATTEND)
    assert changed and count == ONE
    assert attributes == [{"scale": 0.5, "visibility": "all"}]


def test_parts_of_one_tensor_have_one_batch_though_it_is_not_known() -> None:
    parts = PARTS.replace("axis = 2", "axis = 1")
    mask = np.triu(np.full((5, 5), MINUS_INFINITY), k=1)
    constants = {"heads": np.array([-1, 5, 2, 4]), "mask": mask}
    text = "".join((parts, HEADS, KEY, MASKED, ATTEND))
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]>\ng (float[n,24] x) => (float[m,5,2,4] y) {{{text}}}'
    )
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(v), k)
        for k, v in (constants | {"half": np.float32(0.5)}).items()
    )
    prepared = passes.prepare(ir.from_proto(proto), 18)
    assert passes.fuse_attention(prepared, [])
    x = RNG.standard_normal((15, 24)).astype(np.float32)
    expected = ReferenceEvaluator(proto).run(None, {"x": x})[0]
    evaluator = ReferenceEvaluator(ir.to_proto(prepared), new_ops=operators.REFERENCE_OPS)
    np.testing.assert_allclose(evaluator.run(None, {"x": x})[0], expected, atol=1e-6)


def test_tensors_of_their_own() -> None:
    inputs = "float[2,5,2,4] x, float[2,7,2,4] x2, float[2,7,2,4] x3"
    count, _, changed = fused(APART, HEADS, KEY, PLAIN, ATTEND, inputs=inputs)
    assert changed and count == {"ScaledDotProductAttention": 1, "Neg": 1}


@pytest.mark.parametrize(
    "key",
    [
        """k_heads = Transpose <perm = [0, 2, 1, 3]> (tokens_k)
        k = Transpose <perm = [0, 1, 3, 2]> (k_heads)""",
        """k_heads = Transpose <perm = [0, 2, 1, 3]> (tokens_k)
        k_three = Reshape (k_heads, three)
        k_turned = Transpose <perm = [0, 2, 1]> (k_three)
        k = Reshape (k_turned, four)""",
    ],
    ids=["two transposes", "through three axes"],
)
def test_ways_to_turn_the_key(key: str) -> None:
    constants = {"three": np.array([4, 5, 4]), "four": np.array([2, 2, 4, 5])}
    count, _, changed = fused(PARTS, HEADS, key, PLAIN, ATTEND, constants=constants)
    assert changed and count == ONE


def test_factors_of_both_operands() -> None:
    scores = "q_scaled = Mul (half, q)\n k_scaled = Div (k, half)\n scores = MatMul (q_scaled, k_scaled)"
    _, attributes, changed = fused(PARTS, HEADS, KEY, scores, ATTEND)
    assert changed and attributes == [{"scale": 1.0, "visibility": "all"}]


MASKED = "products = MatMul (q, k)\n scaled = Mul (products, half)\n scores = Add (mask, scaled)"


@pytest.mark.parametrize("hidden", [MINUS_INFINITY, np.finfo(np.float32).min], ids=str)
def test_a_mask_of_the_upper_triangle_is_the_causal_form(hidden: np.float32) -> None:
    mask = np.triu(np.full((1, 5, 5), hidden, np.float32), k=1)
    count, attributes, changed = fused(PARTS, HEADS, KEY, MASKED, ATTEND, constants={"mask": mask})
    assert changed and count == ONE
    assert attributes == [{"scale": 0.5, "visibility": "causal"}]


def test_a_mask_that_follows_from_constants_is_looked_into() -> None:
    made = """
        ones = ConstantOfShape <value = float[1] {1.0}> (square)
        lower = Trilu <upper = 0> (ones)
        zero = Constant <value_float = 0.0> ()
        low = Constant <value_float = -1e38> ()
        hides = Equal (lower, zero)
        mask = Where (hides, low, zero)
    """
    _, attributes, changed = fused(
        PARTS, HEADS, KEY, made, MASKED, ATTEND, constants={"square": np.array([5, 5])}
    )
    assert changed and attributes[0]["visibility"] == "causal"


@pytest.mark.parametrize("inputs", ["", ", float[2,1,1,5] mask"], ids=["constant", "given"])
def test_other_masks_are_added(inputs: str) -> None:
    # one above the diagonal, and one more
    mask = np.triu(np.full((5, 5), MINUS_INFINITY), k=1)
    mask[3, 0] = MINUS_INFINITY
    options = {"inputs": f"float[2,5,24] x{inputs}"} if inputs else {"constants": {"mask": mask}}
    count, attributes, changed = fused(PARTS, HEADS, KEY, MASKED, ATTEND, **options)
    assert changed and count == ONE
    assert attributes == [{"scale": 0.5, "visibility": "all"}]


def test_a_mask_to_be_trained_stays() -> None:
    inputs = "float[2,5,24] x, float[5,5] mask"
    count, _, changed = fused(PARTS, HEADS, KEY, MASKED, ATTEND, inputs=inputs, trainable=("mask",))
    assert not changed and count["Softmax"] == 1


def test_a_softmax_over_the_queries_stays() -> None:
    count, _, changed = fused(PARTS, HEADS, KEY, PLAIN, ATTEND.replace("axis = -1", "axis = 2"))
    assert not changed and count["Softmax"] == 1


def test_what_changes_the_probabilities_stays() -> None:
    attend = ATTEND.replace("y_heads = MatMul (p, v)", "p_kept = Mul (p, p)\n y_heads = MatMul (p_kept, v)")
    count, _, changed = fused(PARTS, HEADS, KEY, PLAIN, attend)
    assert not changed and count["Softmax"] == 1


def test_values_of_another_size_stay() -> None:
    inputs = "float[2,5,2,4] x, float[2,7,2,4] x2, float[2,7,2,3] x3"
    text = (APART, HEADS, KEY, PLAIN, ATTEND)
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]>\ng ({inputs}) => (float[2,5,2,3] y) {{{"".join(text)}}}'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    assert not passes.fuse_attention(passes.prepare(ir.from_proto(proto), 18), [])
