"""16-bit models on the CPU provider: which nodes get casts, and the bits that come out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from operator_models import run_session

import ort_ops
from ort_ops.gradient import build_gradient_model
from ort_ops.passes import inline_functions, round_on_cpu

HEADER = '<ir_version: 10, opset_import: ["" : 22]>'
BFLOAT16 = ml_dtypes.bfloat16
TYPES: dict[str, type] = {"bfloat16": BFLOAT16, "float16": np.float16}


def rewritten(text: str) -> onnx.ModelProto:
    model = ir.from_proto(onnx.parser.parse_model(f"{HEADER} {text}"))
    assert round_on_cpu(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(model: onnx.ModelProto, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return run_session(session, inputs)


def op_types(graph: onnx.GraphProto) -> list[str]:
    return [node.op_type for node in graph.node]


def numbers(seed: int, *shape: int, dtype: type = BFLOAT16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_every_result_is_rounded_once(dtype: type) -> None:
    text = """
        f (TYPE[3,4] x, TYPE[4] w) => (TYPE[3,4] y, TYPE[4,3] t)
        { product = Mul(x, w)
          sum = Add(product, product)
          t = Transpose <perm = [1, 0]> (sum)
          y = Sub(sum, x) }"""
    model = rewritten(text.replace("TYPE", dtype.__name__))
    assert op_types(model.graph) == [
        *("Cast", "Cast", "Mul", "Cast"),  # x and w to float32, the product rounded
        *("Cast", "Add", "Cast"),
        "Transpose",
        *("Cast", "Sub", "Cast"),  # x has been cast before
    ]
    x, w = numbers(0, 3, 4, dtype=dtype), numbers(1, 4, dtype=dtype)
    product = (x.astype(np.float32) * w.astype(np.float32)).astype(dtype)
    total = (product.astype(np.float32) + product.astype(np.float32)).astype(dtype)
    y = (total.astype(np.float32) - x.astype(np.float32)).astype(dtype)
    results = run(model, x=x, w=w)
    np.testing.assert_array_equal(results["y"], y, strict=True)
    np.testing.assert_array_equal(results["t"], total.T, strict=True)


def test_float16_overflows() -> None:
    model = rewritten("""
        f (float16[1] x) => (float16[1] y, float[1] z)
        { large = Mul(x, x)
          y = Div(large, x)
          z = Cast <to = 1> (large) }""")
    results = run(model, x=np.array([300], np.float16))
    assert np.isposinf(results["y"]) and np.isposinf(results["z"])


def test_only_16_bit_tensors_are_cast() -> None:
    model = rewritten("""
        f (bfloat16[2,4] x, float[2,4] z)
            => (bfloat16[2,4] y, bool[2,4] mask, float[2,4] s, float[2,1] best, int64[2,1] place)
            <int64[1] k = {1}>
        { y, mask = Dropout(x)
          s = Add(z, z)
          best, place = TopK <axis = 1> (z, k) }""")
    assert op_types(model.graph) == ["Cast", "Dropout", "Cast", "Add", "TopK"]
    x, z = numbers(0, 2, 4), np.arange(8, dtype=np.float32).reshape(2, 4)
    results = run(model, x=x, z=z)
    np.testing.assert_array_equal(results["y"], x, strict=True)
    np.testing.assert_array_equal(results["s"], z + z, strict=True)
    assert results["place"].ravel().tolist() == [3, 3]


@pytest.mark.parametrize(
    "body",
    [
        "(float[3] x) => (float[3] y) { y = Relu(x) }",
        "(bfloat16[3] x) => (bfloat16[1,3] y) <int64[1] axes = {0}> { y = Unsqueeze(x, axes) }",
        "(bfloat16[3] x) => (float[3] y) { y = Cast <to = 1> (x) }",
        "(float16[3] x) => (float16[3] y) { y = Identity(x) }",
        "(bfloat16[3] x, bfloat16[3] z) => (bfloat16[6] y) { y = Concat <axis = 0> (x, z) }",
    ],
)
def test_leaves_alone_what_runs_as_it_is(body: str) -> None:
    proto = onnx.parser.parse_model(f"{HEADER} f {body}")
    model = ir.from_proto(proto)
    nodes = op_types(proto.graph)
    assert not round_on_cpu(model)
    result = ir.to_proto(model)
    assert op_types(result.graph) == nodes
    ort.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])


def test_goes_into_branches() -> None:
    model = rewritten("""
        f (bfloat16[3] x, bool c) => (bfloat16[3] y)
        { z = Relu(x)
          y = If(c) <
            then_branch = yes () => (bfloat16[3] p) { q = Mul(x, z) p = Add(q, q) },
            else_branch = no () => (bfloat16[3] r) { r = Identity(z) }
          > }""")
    (branching,) = (node for node in model.graph.node if node.op_type == "If")
    branches = {attribute.name: op_types(attribute.g) for attribute in branching.attribute}
    assert branches == {
        "then_branch": ["Cast", "Cast", "Mul", "Cast", "Cast", "Add", "Cast"],
        "else_branch": ["Identity"],
    }
    x = numbers(0, 3)
    positive = np.maximum(x, BFLOAT16(0))
    q = (x.astype(np.float32) * positive.astype(np.float32)).astype(BFLOAT16)
    twice = (q.astype(np.float32) * 2).astype(BFLOAT16)
    np.testing.assert_array_equal(run(model, x=x, c=np.array(True))["y"], twice, strict=True)
    np.testing.assert_array_equal(run(model, x=x, c=np.array(False))["y"], positive, strict=True)


def test_type_that_an_attribute_asks_for() -> None:
    model = rewritten("f (float[2,2] x) => (bfloat16[2,2] y) { y = EyeLike <dtype = 16> (x) }")
    assert op_types(model.graph) == ["EyeLike", "Cast"]
    result = run(model, x=np.zeros((2, 2), np.float32))["y"]
    np.testing.assert_array_equal(result, np.eye(2).astype(BFLOAT16), strict=True)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("plugin", [False, True], ids=["without_plugin", "with_plugin"])
def test_a_norm_in_16_bits_is_trained(plugin: bool, dtype: type) -> None:
    """Its gradient is an operator of the plugin, whose kernel and whose body both run."""
    text = """
        f (TYPE[2,3,8] x, TYPE[8] gamma, TYPE[8] beta, TYPE[8,2] w) => (TYPE loss)
        { sum = Add(x, x)
          y = LayerNormalization <axis = -1> (sum, gamma, beta)
          z = MatMul(y, w)
          square = Mul(z, z)
          loss = ReduceSum <keepdims = 0> (square) }"""
    shapes = {"x": (2, 3, 8), "gamma": (8,), "beta": (8,), "w": (8, 2)}
    arrays = {name: numbers(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    gradients: dict[type, dict[str, np.ndarray]] = {}
    for kind in (dtype, np.float32):
        name = "float" if kind is np.float32 else kind.__name__
        forward = onnx.parser.parse_model(f"{HEADER} {text.replace('TYPE', name)}")
        model = ir.from_proto(build_gradient_model(forward, list(shapes)))
        assert round_on_cpu(model) == (kind is dtype)
        options = ort.SessionOptions()
        if plugin:
            ort_ops.register(options)
        session = ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        gradients[kind] = run_session(session, {key: array.astype(kind) for key, array in arrays.items()})
    for name in shapes:
        exact, got = gradients[np.float32][f"{name}_grad"], gradients[dtype][f"{name}_grad"]
        assert got.dtype == dtype
        # Half a dozen roundings in a row, of terms that are not larger than the largest result.
        error = np.abs(got.astype(np.float32) - exact).max()
        rounding = float(ml_dtypes.finfo(dtype).eps) / 2
        assert error <= 6 * rounding * np.abs(exact).max(), name


def test_inlined_functions_and_names_that_are_taken() -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 22, "local" : 1]>
        f (bfloat16[3] x, float[3] x_float) => (bfloat16[3] y) { y = local.Twice(x) }
        <domain: "local", opset_import: ["" : 22]>
        Twice (a) => (b) { b = Add(a, a) }"""
    model = inline_functions(ir.from_proto(onnx.parser.parse_model(text)))
    assert round_on_cpu(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    x = numbers(0, 3)
    twice = (x.astype(np.float32) * 2).astype(BFLOAT16)
    np.testing.assert_array_equal(run(proto, x=x, x_float=np.zeros(3, np.float32))["y"], twice, strict=True)
