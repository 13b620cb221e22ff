"""Products with trained weights become Linear, exactly where that is the same thing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ort_ops import operators, passes
from ort_ops.gradient import build_gradient_model

RNG = np.random.default_rng(4)


def fused(
    text: str,
    signature: str = "float[2,5,6] x, float[6,4] w, float[4] b",
    trainable: tuple[str, ...] = ("w",),
) -> tuple[Counter[str], list[tuple[list[str], str]]]:
    """The operators after the pass, and the inputs and layouts of its Linears; results must stay the same."""
    dtype = signature.split("[")[0]
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]>\ng ({signature}) => ({dtype}[2,5,4] y) {{{text}}}'
    )
    model = passes.prepare(ir.from_proto(proto), 18)
    values = [value for value in model.graph.inputs if value.name in trainable]
    changed = passes.fuse_linear(model, values)
    layers = [node for node in model.graph if node.op_type == "Linear"]
    assert changed == bool(layers)
    kind = np.float64 if dtype == "double" else np.float32
    feeds = {v.name: RNG.standard_normal(v.shape.numpy()).astype(kind) for v in model.graph.inputs}
    expected = ReferenceEvaluator(proto).run(None, feeds)[0]
    result = ReferenceEvaluator(ir.to_proto(model), new_ops=operators.REFERENCE_OPS).run(None, feeds)[0]
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    found = [
        ([str(value.name) for value in node.inputs if value], node.attributes["weight_layout"].as_string())
        for node in layers
    ]
    return Counter(node.op_type for node in model.graph), found


PRODUCT = "p = MatMul (x, w)\n"
RESHAPED = "\nshape = Constant <value_ints = [2, 5, 4]> ()\ny = Reshape (m, shape)"
MATRIX = "float[10,6] x, float[6,4] w, float[4] b"


@pytest.mark.parametrize("add", ["y = Add (p, b)", "y = Add (b, p)"])
def test_a_product_and_its_bias(add: str) -> None:
    count, layers = fused(PRODUCT + add)
    assert count == {"Linear": 1}
    assert layers == [(["x", "w", "b"], "in_out")]


def test_a_transposed_weight_as_exporters_write_it() -> None:
    count, layers = fused(
        "t = Transpose <perm = [1, 0]> (w)\np = MatMul (x, t)\ny = Add (p, b)",
        "float[2,5,6] x, float[4,6] w, float[4] b",
    )
    assert count == {"Linear": 1}
    assert layers == [(["x", "w", "b"], "out_in")]


@pytest.mark.parametrize(
    ("gemm", "weight", "operands", "layout"),
    [
        ("Gemm (x, w, b)", "6,4", ["x", "w", "b"], "in_out"),
        ("Gemm (x, w)", "6,4", ["x", "w"], "in_out"),
        ("Gemm <transB = 1> (x, w, b)", "4,6", ["x", "w", "b"], "out_in"),
    ],
)
def test_gemm(gemm: str, weight: str, operands: list[str], layout: str) -> None:
    count, layers = fused(
        f"m = {gemm}{RESHAPED}",
        f"float[10,6] x, float[{weight}] w, float[4] b",
    )
    assert count["Linear"] == 1 and count["Gemm"] == 0
    assert layers == [(operands, layout)]


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        ("p = MatMul (x, w)\ny = Add (p, b)", "float[2,5,6] x, float[6,4] w, float[1] b"),
        ("p = MatMul (x, w)\ny = Add (p, b)", "float[2,5,6] x, float[6,4] w, float[5,4] b"),
        ("p = MatMul (x, w)\nq = Add (p, b)\ny = Add (q, p)", "float[2,5,6] x, float[6,4] w, float[4] b"),
        ("p = MatMul (x, w)\ny = Mul (p, b)", "float[2,5,6] x, float[6,4] w, float[4] b"),
    ],
    ids=["a number", "a matrix", "the product is read elsewhere", "no addition"],
)
def test_what_is_no_bias_stays(text: str, signature: str) -> None:
    count, layers = fused(text, signature)
    assert layers == [(["x", "w"], "in_out")]
    assert count["Add"] + count["Mul"] == text.count("Add (") + text.count("= Mul (")


@pytest.mark.parametrize(
    ("text", "signature", "trainable"),
    [
        (PRODUCT + "y = Add (p, b)", "float[2,5,6] x, float[6,4] w, float[4] b", ("b", "x")),
        (PRODUCT + "y = Add (p, b)", "double[2,5,6] x, double[6,4] w, double[4] b", ("w",)),
        (PRODUCT + "y = Add (p, b)", "float[2,5,6] x, float[2,6,4] w, float[4] b", ("w",)),
        ("p = MatMul (w, x)\ny = Add (p, b)", "float[2,6,4] x, float[5,6] w, float[4] b", ("w",)),
        (f"m = Gemm <alpha = 0.5> (x, w, b){RESHAPED}", MATRIX, ("w",)),
        (f"m = Gemm <beta = 0.5> (x, w, b){RESHAPED}", MATRIX, ("w",)),
        (
            f"m = Gemm <transA = 1> (x, w, b){RESHAPED}",
            "float[6,10] x, float[6,4] w, float[4] b",
            ("w",),
        ),
    ],
    ids=["not trained", "double", "a batch of weights", "weight on the left", "alpha", "beta", "transA"],
)  # fmt: skip
def test_what_is_no_linear_layer_stays(text: str, signature: str, trainable: tuple[str, ...]) -> None:
    _, layers = fused(text, signature, trainable)
    assert layers == []


def test_only_wanted_gradients_are_outputs() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[n,6] x, float[6,4] w, float[4] b, float[4,3] u) => (float loss) {
            p = MatMul (x, w)
            h = Add (p, b)
            y = MatMul (h, u)
            loss = ReduceSum <keepdims = 0> (y)
        }"""
    )
    model = build_gradient_model(proto, requires_grad=["w", "u"])
    gradients = [list(node.output) for node in model.graph.node if node.op_type == "LinearGrad"]
    assert gradients == [["h_grad", "", "u_grad"], ["", "", "w_grad"]]
