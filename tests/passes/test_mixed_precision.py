"""Mixed precision: which nodes compute in which type, the numbers against PyTorch's autocast and float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from operator_models import run_session

from ort_ops.gradient import build_gradient_model
from ort_ops.passes import PassError, infer_shapes, inline_functions, mixed_precision, round_on_cpu

BFLOAT16, FLOAT16 = ir.DataType.BFLOAT16, ir.DataType.FLOAT16
TYPES = {"bfloat16": BFLOAT16, "float16": FLOAT16}
# The largest relative error of rounding to each type.
ROUNDING = {BFLOAT16: 2.0**-9, FLOAT16: 2.0**-11}


def forward_model(text: str, opset: int = 20, **initializers: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> f {text}')
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in initializers.items()
    )
    return model


def rewritten(model: onnx.ModelProto, dtype: ir.DataType = BFLOAT16) -> onnx.ModelProto:
    result = ir.to_proto(mixed_precision(ir.from_proto(model), dtype))
    onnx.checker.check_model(result, full_check=True)
    return result


def computed_types(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """Every node but casts with the type of its first output."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}
    return [
        (node.op_type, onnx.TensorProto.DataType.Name(types[node.output[0]]).lower())
        for node in graph.node
        if node.op_type != "Cast"
    ]


def run(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    on_cpu = ir.from_proto(model)
    round_on_cpu(on_cpu)
    session = ort.InferenceSession(
        ir.to_proto(on_cpu).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return run_session(session, inputs)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_products_and_what_lies_between_them_are_narrow() -> None:
    model = forward_model(
        """(float[N,4] x, float[N,6] other) => (float[N,6] y, float[N,6] hidden, int64[2] s)
        { product = MatMul(x, w)
          hidden = Add(product, b)
          active = Relu(hidden)
          scaled = Mul(active, half)
          s = Shape(scaled)
          second = MatMul(scaled, v)
          residual = Add(second, other)
          norm = LayerNormalization(residual, gamma)
          third = MatMul(norm, v)
          odds = Softmax(third)
          power = Pow(odds, half)
          y = Add(power, third) }""",
        w=random(0, 4, 6),
        b=random(1, 6),
        v=random(2, 6, 6),
        gamma=np.ones(6, np.float32),
        half=np.float32(0.5),
    )
    result = rewritten(model)
    assert computed_types(result) == [
        ("MatMul", "bfloat16"),
        ("Add", "bfloat16"),  # the bias is cast
        ("Relu", "bfloat16"),
        ("Mul", "bfloat16"),
        ("Shape", "int64"),
        ("MatMul", "bfloat16"),
        ("Add", "float"),  # the other addend is float32
        ("LayerNormalization", "float"),
        ("MatMul", "bfloat16"),
        ("Softmax", "float"),
        ("Pow", "float"),
        ("Add", "float"),
    ]
    # Each value is cast once: v, which two products read, and third, which two nodes read as float32.
    casts = [node.input[0] for node in result.graph.node if node.op_type == "Cast"]
    assert len(casts) == len(set(casts))
    assert [value for value in result.graph.output] == list(model.graph.output)
    assert [tensor for tensor in result.graph.initializer] == list(model.graph.initializer)
    x, other = random(3, 5, 4), random(4, 5, 6)
    exact, got = run(model, {"x": x, "other": other}), run(result, {"x": x, "other": other})
    # `hidden` is a product of four terms: two factors, the product and the sum are rounded, and the bias.
    error = np.abs(got["hidden"] - exact["hidden"]).max()
    assert 0 < error <= 5 * ROUNDING[BFLOAT16] * np.abs(x @ random(0, 4, 6)).max()


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(-1e9, "float"), (-65504.0, "float16"), (-65520.0, "float"), (-np.inf, "float16"), (0.0, "float16")],
)
def test_constants_beyond_the_range_stay_float(mask: float, expected: str) -> None:
    model = forward_model(
        """(float[2,3] q, float[3,2] k) => (float[2,2] y)
        { scores = MatMul(q, k)
          view = Reshape(mask, shape)
          masked = Add(scores, view)
          y = Softmax(masked) }""",
        mask=np.array([[[mask, 0], [0, 0]]], np.float32),
        shape=np.array([2, 2]),
    )
    assert dict(computed_types(rewritten(model, FLOAT16)))["Add"] == expected


def test_what_is_not_float32_is_left_alone() -> None:
    text = """(TYPE[2,3] x) => (TYPE[2,2] y)
        { product = MatMul(x, w)
          active = Relu(product)
          y = Softmax(active) }"""
    for kind, numpy_type in (("float16", np.float16), ("double", np.float64)):
        model = forward_model(text.replace("TYPE", kind), w=random(0, 3, 2).astype(numpy_type))
        result = rewritten(model, FLOAT16)
        assert [node.op_type for node in result.graph.node] == ["MatMul", "Relu", "Softmax"]
        assert [kind for _, kind in computed_types(result)] == [kind] * 3


def test_a_copy_of_the_model_keeps_its_types() -> None:
    model = ir.from_proto(
        forward_model("(float[2,3] x) => (float[2,2] y) { h = MatMul(x, w) y = Relu(h) }", w=random(0, 3, 2))
    )
    infer_shapes(model)
    copy = model.clone()
    result = mixed_precision(model, BFLOAT16)
    assert {value.dtype for node in copy.graph for value in node.outputs} == {ir.DataType.FLOAT}
    assert BFLOAT16 in {value.dtype for node in result.graph for value in node.outputs}


def test_branches_read_float32() -> None:
    model = forward_model(
        """(float[2,3] x, bool c) => (float[2,2] y)
        { product = MatMul(x, w)
          y = If(c) <
            then_branch = yes () => (float[2,2] p) { p = Exp(product) },
            else_branch = no () => (float[2,2] r) { r = Identity(product) }
          > }""",
        w=random(0, 3, 2),
    )
    result = rewritten(model)
    assert computed_types(result) == [("MatMul", "bfloat16"), ("If", "float")]
    x = random(1, 2, 3)
    product = run(result, {"x": x, "c": np.array(False)})["y"]
    np.testing.assert_array_equal(
        run(result, {"x": x, "c": np.array(True)})["y"], run(exp_model(), {"x": product})["y"]
    )


def exp_model() -> onnx.ModelProto:
    return forward_model("(float[2,2] x) => (float[2,2] y) { y = Exp(x) }")


def test_convolutions_in_bfloat16_raise_the_opset() -> None:
    model = forward_model(
        """(float[1,2,5,5] x) => (float[1,3,3,3] y)
        { c = Conv(x, w, b)
          y = Relu(c) }""",
        opset=17,
        w=random(0, 3, 2, 3, 3),
        b=random(1, 3),
    )
    for dtype, opset in ((BFLOAT16, 22), (FLOAT16, 17)):
        result = rewritten(model, dtype)
        assert result.opset_import[0].version == opset
        assert computed_types(result)[0] == ("Conv", dtype.name.lower())
        x = random(2, 1, 2, 5, 5)
        exact, got = run(model, {"x": x})["y"], run(result, {"x": x})["y"]
        # x, w and b are rounded, then the sum of 18 products of them.
        assert 0 < np.abs(got - exact).max() <= 4 * ROUNDING[dtype] * np.abs(exact).max()


def test_what_the_standard_does_not_allow_stays_float() -> None:
    model = forward_model(
        """(float[2,3] x) => (float[2,2] y) { y = Einsum <equation = "ij,jk->ik"> (x, w) }""",
        w=random(0, 3, 2),
    )
    assert computed_types(rewritten(model, BFLOAT16)) == [("Einsum", "float")]
    assert computed_types(rewritten(model, FLOAT16)) == [("Einsum", "float16")]


def test_dropout_keeps_its_ratio_and_mask() -> None:
    model = forward_model(
        """(float[2,3] x) => (float[2,2] y, bool[2,2] mask)
        { product = MatMul(x, w)
          y, mask = Dropout(product, ratio, training) }""",
        w=random(0, 3, 2),
        ratio=np.float32(0.0),
        training=np.array(True),
    )
    result = rewritten(model)
    assert computed_types(result) == [("MatMul", "bfloat16"), ("Dropout", "bfloat16")]
    (dropout,) = (node for node in result.graph.node if node.op_type == "Dropout")
    assert dropout.input[1] == "ratio"
    assert run(result, {"x": random(1, 2, 3)})["mask"].all()


def test_names_that_are_taken() -> None:
    model = forward_model(
        """(float[2,3] x_bfloat16) => (float[2,2] y, float[2,2] y_bfloat16)
        { y = MatMul(x_bfloat16, w)
          y_bfloat16 = Exp(y) }""",
        w=random(0, 3, 2),
    )
    assert computed_types(rewritten(model)) == [("MatMul", "bfloat16"), ("Exp", "float")]


def test_refuses_other_types() -> None:
    model = ir.from_proto(exp_model())
    with pytest.raises(PassError, match="compute type must be float16 or bfloat16; got double"):
        mixed_precision(model, ir.DataType.DOUBLE)


MLP = """(float[32,16] x, int64[32] labels) => (float loss, float[32,5] logits)
    { a1 = Gemm <transB = 1> (x, w1, b1)
      h1 = Gelu(a1)
      a2 = Gemm <transB = 1> (h1, w2, b2)
      n = LayerNormalization <axis = -1> (a2, gamma, beta)
      h2 = Tanh(n)
      logits = Gemm <transB = 1> (h2, w3, b3)
      loss = SoftmaxCrossEntropyLoss(logits, labels) }"""


def mlp_parameters() -> dict[str, np.ndarray]:
    return {
        "w1": random(1, 24, 16) / 4,
        "b1": random(2, 24) / 4,
        "w2": random(3, 24, 24) / 5,
        "b2": random(4, 24) / 5,
        "gamma": 1 + random(5, 24) / 5,
        "beta": random(6, 24) / 5,
        "w3": random(7, 5, 24) / 5,
        "b3": random(8, 5) / 5,
    }


def torch_gradients(dtype: str, autocast: bool, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")
    functional = torch.nn.functional
    wide = torch.float32 if autocast else torch.float64
    p = {name: torch.tensor(v, dtype=wide, requires_grad=True) for name, v in mlp_parameters().items()}
    with torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=autocast):
        h = functional.gelu(functional.linear(torch.tensor(x, dtype=wide), p["w1"], p["b1"]))
        h = functional.linear(h, p["w2"], p["b2"])
        h = torch.tanh(functional.layer_norm(h, (24,), p["gamma"], p["beta"]))
        logits = functional.linear(h, p["w3"], p["b3"])
        loss = functional.cross_entropy(logits, torch.tensor(labels))
    loss.backward()
    return {name: value.grad.numpy().astype(np.float64) for name, value in p.items()} | {
        "loss": loss.detach().numpy().astype(np.float64)
    }


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_gradients_of_a_network_agree_with_autocast(dtype: ir.DataType) -> None:
    x, labels = random(9, 32, 16), np.random.default_rng(10).integers(0, 5, 32)
    model = rewritten(forward_model(MLP, **mlp_parameters()), dtype)
    gradient_model = build_gradient_model(model, list(mlp_parameters()))
    assert {value.type.tensor_type.elem_type for value in gradient_model.graph.output} == {
        onnx.TensorProto.FLOAT
    }
    got = run(gradient_model, {**mlp_parameters(), "x": x, "labels": labels})
    name = dtype.name.lower()
    exact, autocast = (torch_gradients(name, on, x, labels) for on in (False, True))
    for key, expected in exact.items():
        ours = got["loss" if key == "loss" else f"{key}_grad"].astype(np.float64)
        # From a parameter through the loss and back there are about 12 roundings to 16 bits in a row. They
        # are independent, and no layer makes an error much larger than it was.
        largest = 12 * ROUNDING[dtype] * np.linalg.norm(expected)
        assert np.linalg.norm(ours - expected) <= largest, key
        assert np.linalg.norm(ours - autocast[key]) <= largest, key
        # Not better than 16 bits allow: the products were computed in them.
        assert key == "loss" or np.linalg.norm(ours - expected) > 2.0**-20 * np.linalg.norm(expected), key


EXPORTED = Path(__file__).parents[1] / "data" / "gradcheck"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXPORTED.glob("*.onnx")))
def test_exported_models_compute_all_products_in_16_bits(name: str) -> None:
    """Gradients stay near those that PyTorch computed in float32 when the model was exported."""
    forward = onnx.load(EXPORTED / f"{name}.onnx")
    expected = np.load(EXPORTED / f"{name}.npz")
    model = mixed_precision(inline_functions(ir.from_proto(forward)), BFLOAT16)
    narrow = [node for node in model.graph if node.outputs[0].dtype is BFLOAT16 and node.op_type != "Cast"]
    products = [node for node in model.graph if node.op_type in ("Conv", "Gemm", "MatMul")]
    assert products and set(products) <= set(narrow)

    references = {
        key.removeprefix("grad:"): expected[key] for key in expected.files if key.startswith("grad:")
    }
    feeds = {key.removeprefix("in:"): expected[key] for key in expected.files if key.startswith("in:")}
    feeds |= {parameter: tensor(forward, parameter) for parameter in references}
    results = run(build_gradient_model(ir.to_proto(model), list(references)), feeds)
    error = np.sqrt(sum(np.sum((results[f"{key}_grad"] - value) ** 2) for key, value in references.items()))
    size = np.sqrt(sum(np.sum(value**2) for value in references.values()))
    # Each of these nodes adds an independent error of at most one rounding to what passes through it.
    assert 0 < error <= np.sqrt(len(narrow)) * ROUNDING[BFLOAT16] * size


def tensor(model: onnx.ModelProto, name: str) -> np.ndarray:
    for initializer in model.graph.initializer:
        if initializer.name == name:
            return onnx.numpy_helper.to_array(initializer)
    (node,) = (node for node in model.graph.node if name in node.output)
    return onnx.numpy_helper.to_array(node.attribute[0].t)
