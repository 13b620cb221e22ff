"""One built model is right at several sizes, 1 included, where broadcasting means something else."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from finite_differences import central_differences, runner

import ort_ops
from ort_ops.gradient import build_gradient_model

H, HEADS = 8, 2
GENERATOR = np.random.default_rng(5)


def random(*shape: int) -> np.ndarray:
    return GENERATOR.standard_normal(shape).astype(np.float32)


WEIGHTS = {
    "embedding": random(11, H), "positions": random(16, H), "gamma": 1 + random(H) / 4, "beta": random(H), "wq": random(H, H), "wk": random(H, H),
    "wv": random(H, H), "bias": random(H), "scale": random(1, 1, H), "head": random(H, 11),
}  # fmt: skip
BLOCK = """<ir_version: 8, opset_import: ["": 18]> g (int64[B,S] tokens, int64[B,S] targets) => (float loss) {
    e = Gather(embedding, tokens)
    one = Constant<value_int=1>()  zero = Constant<value_int=0>()  first = Constant<value_ints=[0]>()
    shape = Shape(tokens)  length = Gather(shape, one)  batch = Gather(shape, zero)
    until = Unsqueeze(length, first)  used = Slice(positions, first, until, first)  x = Add(e, used)
    n = LayerNormalization(x, gamma, beta)
    q0 = MatMul(n, wq)  q1 = Add(q0, bias)  k0 = MatMul(n, wk)  v0 = MatMul(n, wv)
    split = Constant<value_ints=[0, 0, 2, 4]>()
    q2 = Reshape(q1, split)  k2 = Reshape(k0, split)  v2 = Reshape(v0, split)
    q = Transpose<perm=[0, 2, 1, 3]>(q2)  k = Transpose<perm=[0, 2, 3, 1]>(k2)  v = Transpose<perm=[0, 2, 1, 3]>(v2)
    scores = MatMul(q, k)  half = Constant<value_float=0.5>()  scaled = Mul(scores, half)
    ones = ConstantOfShape<value=float[1]{-10000.0}>(square)  mask = Trilu(ones, one)
    lengths = Concat<axis=0>(until, until)
    masked = Add(scaled, mask)  p = Softmax(masked)  a = MatMul(p, v)  t = Transpose<perm=[0, 2, 1, 3]>(a)
    join = Constant<value_ints=[0, 0, 8]>()  joined = Reshape(t, join)  r = Add(x, joined)  s = Mul(r, scale)
    logits = MatMul(s, head)  flat = Constant<value_ints=[-1, 11]>()  rows = Reshape(logits, flat)
    all = Constant<value_ints=[-1]>()  labels = Reshape(targets, all)
    loss = SoftmaxCrossEntropyLoss(rows, labels) }""".replace(
    "    lengths = Concat<axis=0>(until, until)\n", ""
).replace("    ones =", "    square = Concat<axis=0>(until, until)\n    ones =")


def model() -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(BLOCK)
    parsed.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in WEIGHTS.items()
    )
    return parsed


def torch_gradients(tokens: np.ndarray, targets: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    w = {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in WEIGHTS.items()
    }
    batch, length = tokens.shape
    x = w["embedding"][torch.tensor(tokens)] + w["positions"][:length]
    n = torch.nn.functional.layer_norm(x, (H,), w["gamma"], w["beta"])

    def heads(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(batch, length, HEADS, H // HEADS).transpose(1, 2)

    q, k, v = heads(n @ w["wq"] + w["bias"]), heads(n @ w["wk"]), heads(n @ w["wv"])
    scores = q @ k.transpose(2, 3) * 0.5 + torch.triu(
        torch.full((length, length), -10000.0, dtype=torch.float64), 1
    )
    joined = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, H)
    logits = (x + joined) * w["scale"] @ w["head"]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 11), torch.tensor(targets).reshape(-1))
    loss.backward()
    return float(loss), {name: value.grad.numpy() for name, value in w.items()}


@pytest.mark.parametrize("plugin", [True, False], ids=["kernel", "body"])
def test_an_attention_block_at_several_sizes(plugin: bool) -> None:
    training = build_gradient_model(model(), list(WEIGHTS))
    onnx.checker.check_model(training, full_check=True)
    options = onnxruntime.SessionOptions()
    if plugin:
        ort_ops.register(options)
    session = onnxruntime.InferenceSession(
        training.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for batch, length in ((2, 5), (1, 1), (3, 1), (1, 7), (2, 5)):
        tokens = GENERATOR.integers(-11, 11, (batch, length))
        targets = GENERATOR.integers(0, 11, (batch, length))
        loss, *gradients = session.run(None, {"tokens": tokens, "targets": targets, **WEIGHTS})
        expected_loss, expected = torch_gradients(tokens % 11, targets)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        # some thirty float32 stages; what cancels in one tensor's gradient was as large as the others'
        tolerance = 100 * 2.0**-24 * max(np.abs(value).max() for value in expected.values())
        for name, gradient in zip(WEIGHTS, gradients, strict=True):
            np.testing.assert_allclose(
                gradient, expected[name], rtol=0, atol=tolerance, err_msg=f"{name} {batch}x{length}"
            )


PATTERNS = [
    ("P,Q", "R,S", (2, 3), (2, 3)), ("P,Q", "R,S", (2, 3), (1, 3)), ("P,Q", "R,S", (1, 3), (2, 1)), ("P,Q", "R", (2, 3), (1,)), ("P", "R,S,T", (3,), (2, 1, 3)),
    ("P,Q", "P,S", (2, 3), (2, 1)), ("P,Q", "Q", (2, 3), (3,)), ("P,3", "R,3", (1, 3), (4, 3)),
]  # fmt: skip


@pytest.mark.parametrize("operator", ["Add", "Mul", "Sub", "Div", "Pow", "Where"])
@pytest.mark.parametrize(("left", "right", "a_shape", "b_shape"), PATTERNS)
def test_broadcasting_is_undone_at_run_time(
    operator: str, left: str, right: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    call = "Where(c, a, b)" if operator == "Where" else f"{operator}(a, b)"
    parsed = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]> g (float[{left}] a, float[{right}] b, bool c) => (float loss) {{
        y = {call}  z = Mul(y, y)  loss = ReduceSum<keepdims=0>(z) }}""")
    training = build_gradient_model(parsed, ["a", "b"])
    feeds = {"a": np.abs(random(*a_shape)) + 0.5, "b": np.abs(random(*b_shape)) + 0.5}
    session = onnxruntime.InferenceSession(training.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {value.name for value in session.get_inputs()}
    _, da, db = session.run(None, {**feeds, **({"c": np.array(True)} if "c" in given else {})})
    a, b = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in feeds.values())
    y = {
        "Add": lambda: a + b, "Mul": lambda: a * b, "Sub": lambda: a - b, "Div": lambda: a / b, "Pow": lambda: a**b,
        "Where": lambda: torch.where(torch.tensor(True), a, b),
    }[operator]()  # fmt: skip
    torch.sum(y * y).backward()
    for gradient, tensor in ((da, a), (db, b)):
        assert gradient.shape == tuple(tensor.shape)
        expected = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-5)


def test_known_dims_are_undone_without_looking_at_shapes() -> None:
    parsed = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]> g (float[B,S,8] a, float[8] b) => (float loss) {
        y = Mul(a, b)  loss = ReduceSum<keepdims=0>(y) }""")
    training = build_gradient_model(parsed, ["b"])
    assert [node.op_type for node in training.graph.node].count("NonZero") == 0


FORMS = {
    "product with a weight": ("y = MatMul(x, w)", {"x": "B,S,3", "w": "3,4"}),
    "product of heads": ("y = MatMul(x, w)", {"x": "B,2,S,3", "w": "1,2,3,S"}),
    "slice to a size": ("n = Shape<start=1, end=2>(like)  b = Constant<value_ints=[0]>()  a = Constant<value_ints=[1]>()  y = Slice(x, b, n, a)", {"x": "B,5,3", "like": "B,S"}),
    "slice to the end": ("b = Constant<value_ints=[-1]>()  e = Constant<value_ints=[9223372036854775807]>()  a = Constant<value_ints=[1]>()  y = Slice(x, b, e, a)", {"x": "B,S,3"}),
    "slice backwards": ("b = Constant<value_ints=[-1]>()  e = Constant<value_ints=[-9223372036854775807]>()  a = Constant<value_ints=[1]>()  k = Constant<value_ints=[-2]>()  y = Slice(x, b, e, a, k)", {"x": "B,S,3"}),
    "reshape": ("s = Constant<value_ints=[0, -1, 2]>()  y = Reshape(x, s)", {"x": "B,S,4"}),
    "expand to a computed shape": ("s = Shape(like)  y = Expand(x, s)", {"x": "B,1,3", "like": "B,S,3"}),
    "unsqueeze and squeeze": ("a = Constant<value_ints=[1]>()  u = Unsqueeze(x, a)  v = Mul(u, u)  y = Squeeze(v, a)", {"x": "B,S"}),
    "concat": ("y = Concat<axis=1>(x, t, x)", {"x": "B,S,2", "t": "B,3,2"}),
    **{f"{op} with {label}": (f"y = {op}(x, t)", {"x": "B,S,3", "t": dims}) for op in ("Add", "Mul", "Div", "Sub", "Pow") for label, dims in {"a batch of one": "1,S,3", "a position of one": "B,1,3", "a vector": "3", "the same": "B,S,3"}.items()},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_one_built_model_at_several_sizes(form: str) -> None:
    body, inputs = FORMS[form]
    declared = ", ".join(f"double[{dims}] {name}" for name, dims in inputs.items())
    forward = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]> g ({declared}) => (double loss) {{
        {body}  p = Mul(y, y)  loss = ReduceSum<keepdims=0>(p) }}""")
    names = [name for name in inputs if name != "like"]  # whose shape alone is read
    training = build_gradient_model(forward, names)
    onnx.checker.check_model(training, full_check=True)
    produced = [output for node in training.graph.node for output in node.output if output]
    assert len(set(produced)) == len(produced)
    run_forward, run_training = runner(forward), runner(training)
    for batch, length in ((2, 3), (1, 3), (2, 1), (1, 1), (3, 2)):
        sizes = {"B": batch, "S": length}
        shapes = {
            name: [sizes.get(dim) or int(dim) for dim in dims.split(",")] for name, dims in inputs.items()
        }
        feeds = {name: GENERATOR.uniform(0.6, 1.8, shape) for name, shape in shapes.items()}
        _, *gradients = run_training(feeds)
        for name, gradient in zip(names, gradients, strict=True):
            expected = central_differences(lambda moved: float(run_forward(moved)[0]), feeds, name, 1e-5)
            np.testing.assert_allclose(
                gradient, expected, rtol=1e-6, atol=1e-6, err_msg=f"d{name} at {sizes}"
            )
