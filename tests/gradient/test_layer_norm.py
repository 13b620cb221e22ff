"""LayerNormalization: the fused operator, its statistics, the residual gradient inside it, and what may
surround it."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import ort_ops
from ort_ops.gradient import build_gradient_model

LEVELS = onnxruntime.GraphOptimizationLevel
GENERATOR = np.random.default_rng(3)
B, S, H = 2, 3, 8


def parse(text: str, opset: int = 18, ir_version: int = 8) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}]> {text}')


def run(
    model: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    level: LEVELS = LEVELS.ORT_ENABLE_ALL,
    plugin: bool = True,
) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    if plugin:
        ort_ops.register(options)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


def random(*shape: int) -> np.ndarray:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def layer_norm_gradient(
    x: np.ndarray, gamma: np.ndarray, dy: np.ndarray, axes: int = 1, epsilon: float = 1e-5
) -> tuple[np.ndarray, np.ndarray]:
    """dx and xhat, in float64."""
    over = tuple(range(-axes, 0))
    x, gamma, dy = (value.astype(np.float64) for value in (x, gamma, dy))
    rstd = 1 / np.sqrt(x.var(axis=over, keepdims=True) + epsilon)
    xhat = (x - x.mean(axis=over, keepdims=True)) * rstd
    g = dy * gamma
    dx = rstd * (g - g.mean(axis=over, keepdims=True) - xhat * (g * xhat).mean(axis=over, keepdims=True))
    return dx, xhat


def fused(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "AddLayerNormGrad"]


@pytest.mark.parametrize("plugin", [True, False], ids=["kernel", "body"])
@pytest.mark.parametrize("outputs", ["y", "y, , r", "y, m", "y, m, r"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("axis", "axes"), [(-1, 1), (2, 1), (1, 2), (0, 3)])
def test_every_form_of_the_node(outputs: str, bias: bool, axis: int, axes: int, plugin: bool) -> None:
    shape = (B, S, H)[3 - axes :]
    dims = ",".join(map(str, shape))
    model = parse(
        f"""g (float[{B},{S},{H}] x, float[{B},{S},{H}] dy, float[{dims}] gamma, float[{dims}] beta) => (float loss, float[{B},{S},{H}] y) {{
        {outputs} = LayerNormalization<axis={axis}>(x, gamma{", beta" if bias else ""})
        p = Mul(y, dy)  loss = ReduceSum<keepdims=0>(p) }}""",
        opset=17,
    )
    feeds = {"x": random(B, S, H), "dy": random(B, S, H), "gamma": random(*shape), "beta": random(*shape)}
    wanted = ["x", "gamma", "beta"] if bias else ["x", "gamma"]
    training = build_gradient_model(model, wanted)
    onnx.checker.check_model(training, full_check=True)
    (node,) = fused(training)
    norm = next(node for node in training.graph.node if node.op_type == "LayerNormalization")
    assert list(node.input[3:5]) == [norm.output[2], norm.output[1]]  # rstd, then mean
    if not bias:
        assert (
            len(node.output) < 3
            or not node.output[2]
            or node.output[2] not in {o.name for o in training.graph.output}
        )
        feeds.pop("beta") if "beta" not in [value.name for value in training.graph.input] else None
    results = run(training, feeds, plugin=plugin)
    np.testing.assert_array_equal(results["y"], run(model, feeds, plugin=plugin)["y"])
    dx, xhat = layer_norm_gradient(feeds["x"], feeds["gamma"], feeds["dy"], axes)
    rows = tuple(range(3 - axes))
    np.testing.assert_allclose(results["x_grad"], dx, rtol=0, atol=1e-5)
    np.testing.assert_allclose(results["gamma_grad"], (feeds["dy"] * xhat).sum(axis=rows), rtol=0, atol=1e-5)
    if bias:
        np.testing.assert_allclose(
            results["beta_grad"], feeds["dy"].astype(np.float64).sum(axis=rows), rtol=0, atol=1e-5
        )


POST_NORM = f"""g (float[B,{S},{H}] x, float[B,{S},{H}] dy) => (float loss) <float[{H},{H}] w, float[{H}] gamma, float[{H}] beta> {{
    a = MatMul(x, w)  s = Add(x, a)  y = LayerNormalization(s, gamma, beta)  p = Mul(y, dy)  loss = ReduceSum<keepdims=0>(p) }}"""


def with_data(model: onnx.ModelProto, tensors: dict[str, np.ndarray]) -> onnx.ModelProto:
    del model.graph.initializer[:]
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in tensors.items()
    )
    return model


@pytest.mark.parametrize("batch", ["B", str(B)])
def test_a_post_norm_block_is_right_at_every_optimisation_level(batch: str) -> None:
    """The runtime fuses Add + LayerNormalization if nothing else reads the sum, and some releases lose the
    statistics."""
    tensors = {"w": random(H, H), "gamma": random(H), "beta": random(H)}
    text = (
        POST_NORM.replace("[B,", f"[{batch},")
        .replace(f"<float[{H},{H}] w, float[{H}] gamma, float[{H}] beta>", "")
        .replace(
            f"[{batch},{S},{H}] dy)",
            f"[{batch},{S},{H}] dy, float[{H},{H}] w, float[{H}] gamma, float[{H}] beta)",
            1,
        )
    )
    model = parse(text)
    feeds = {"x": random(B, S, H), "dy": random(B, S, H), **tensors}
    training = build_gradient_model(model, ["w", "gamma", "beta", "x"])
    (node,) = fused(training)
    assert list(node.input[1:3]) == ["s", ""]  # the sum, which so has a second reader
    s = feeds["x"].astype(np.float64) + feeds["x"].astype(np.float64) @ feeds["w"]
    ds, _ = layer_norm_gradient(s, feeds["gamma"], feeds["dy"])
    dw = np.einsum("bsk,bsn->kn", feeds["x"].astype(np.float64), ds)
    for level in (
        LEVELS.ORT_DISABLE_ALL,
        LEVELS.ORT_ENABLE_BASIC,
        LEVELS.ORT_ENABLE_EXTENDED,
        LEVELS.ORT_ENABLE_ALL,
    ):
        results = run(training, feeds, level)
        np.testing.assert_allclose(results["w_grad"], dw, rtol=0, atol=1e-5 * np.abs(dw).max())
        np.testing.assert_allclose(
            results["x_grad"],
            ds + ds @ feeds["w"].astype(np.float64).T,
            rtol=0,
            atol=1e-5 * np.abs(ds).max() * 8,
        )


def test_a_pre_norm_block_adds_the_residual_gradient_inside() -> None:
    model = parse(f"""g (float[{B},{S},{H}] x, float[{B},{S},{H}] dy, float[{H},{H}] w, float[{H}] gamma) => (float loss) {{
        y = LayerNormalization(x, gamma)  a = MatMul(y, w)  z = Add(x, a)  p = Mul(z, dy)  loss = ReduceSum<keepdims=0>(p) }}""")
    feeds = {"x": random(B, S, H), "dy": random(B, S, H), "w": random(H, H), "gamma": random(H)}
    training = build_gradient_model(model, ["x", "w", "gamma"])
    (node,) = fused(training)
    assert node.input[6] and "x_grad" in node.output
    dx, _ = layer_norm_gradient(
        feeds["x"], feeds["gamma"], feeds["dy"].astype(np.float64) @ feeds["w"].astype(np.float64).T
    )
    np.testing.assert_allclose(run(training, feeds)["x_grad"], dx + feeds["dy"], rtol=0, atol=2e-5)


def test_parallel_branches_and_a_second_norm_of_the_same_sum() -> None:
    """All contributions that do not come through a norm are summed, then added inside; the norms follow one
    another."""
    model = parse(f"""g (float[{B},{S},{H}] x, float[{B},{S},{H}] dy, float[{H}] g, float[{H}] h) => (float loss) {{
        s = Identity(x)  y = LayerNormalization(s, g)  u = LayerNormalization(s, h)  t = Tanh(s)
        z = Sum(s, t, y, u)  p = Mul(z, dy)  loss = ReduceSum<keepdims=0>(p) }}""")
    feeds = {"x": random(B, S, H), "dy": random(B, S, H), "g": random(H), "h": random(H)}
    training = build_gradient_model(model, ["x"])
    nodes = fused(training)
    assert len(nodes) == 2 and all(node.input[6] for node in nodes)
    assert nodes[1].input[6] == nodes[0].output[0]
    expected = feeds["dy"] * (2 - np.tanh(feeds["x"].astype(np.float64)) ** 2)
    for gamma in ("g", "h"):
        expected = expected + layer_norm_gradient(feeds["x"], feeds[gamma], feeds["dy"])[0]
    np.testing.assert_allclose(run(training, feeds)["x_grad"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((B, S, H), (1, S, H)),
        ((1, S, H), (B, S, H)),
        ((B, S, H), (S, H)),
        ((B, S, H), (H,)),
        ((B, 1, H), (1, S, H)),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_broadcast_add_before_the_norm(
    left: tuple[int, ...], right: tuple[int, ...], dynamic: bool
) -> None:
    def dims(name: str, shape: tuple[int, ...]) -> str:
        return ",".join(
            f"{name}{axis}" if dynamic and axis < len(shape) - 1 else str(size)
            for axis, size in enumerate(shape)
        )

    model = parse(f"""g (float[{dims("a", left)}] a, float[{dims("b", right)}] b, float[{B},{S},{H}] dy, float[{H}] gamma) => (float loss) {{
        s = Add(a, b)  y = LayerNormalization(s, gamma)  p = Mul(y, dy)  loss = ReduceSum<keepdims=0>(p) }}""")
    feeds = {"a": random(*left), "b": random(*right), "dy": random(B, S, H), "gamma": random(H)}
    training = build_gradient_model(model, ["a", "b"])
    (node,) = fused(training)
    assert list(node.input[1:3]) == ["s", ""]  # the sum, so that the operator need not broadcast
    results = run(training, feeds)
    ds, _ = layer_norm_gradient(feeds["a"] + feeds["b"], feeds["gamma"], feeds["dy"])
    for name in ("a", "b"):
        shape = feeds[name].shape
        lead = 3 - len(shape)
        summed = ds.sum(axis=tuple(range(lead)))
        summed = summed.sum(axis=tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)
        assert results[f"{name}_grad"].shape == shape
        np.testing.assert_allclose(results[f"{name}_grad"], summed, rtol=0, atol=2e-5)


def test_a_sum_of_one_tensor_with_itself() -> None:
    model = parse(f"""g (float[{B},{S},{H}] x, float[{B},{S},{H}] dy, float[{H}] gamma) => (float loss) {{
        s = Add(x, x)  y = LayerNormalization(s, gamma)  p = Mul(y, dy)  loss = ReduceSum<keepdims=0>(p) }}""")
    feeds = {"x": random(B, S, H), "dy": random(B, S, H), "gamma": random(H)}
    dx, _ = layer_norm_gradient(2 * feeds["x"], feeds["gamma"], feeds["dy"])
    np.testing.assert_allclose(
        run(build_gradient_model(model, ["x"]), feeds)["x_grad"], 2 * dx, rtol=0, atol=2e-5
    )


def test_norms_that_share_one_scale_sum_its_gradients() -> None:
    model = parse(f"""g (float[{B},{S},{H}] x, float[{B},{S},{H}] dy, float[{H}] gamma) => (float loss) {{
        y = LayerNormalization(x, gamma)  z = LayerNormalization(y, gamma)  p = Mul(z, dy)  loss = ReduceSum<keepdims=0>(p) }}""")
    feeds = {"x": random(B, S, H), "dy": random(B, S, H), "gamma": random(H)}
    dy, xhat = layer_norm_gradient(feeds["x"], feeds["gamma"], feeds["dy"])
    y = xhat * feeds["gamma"]
    inner, yhat = layer_norm_gradient(y, feeds["gamma"], feeds["dy"])
    expected = (feeds["dy"] * yhat).sum(axis=(0, 1)) + (inner * xhat).sum(axis=(0, 1))
    np.testing.assert_allclose(
        run(build_gradient_model(model, ["gamma"]), feeds)["gamma_grad"], expected, rtol=0, atol=5e-5
    )


def test_only_the_scale_is_trained() -> None:
    model = parse(f"""g (float[{B},{S},{H}] x, float[{B},{S},{H}] dy, float[{H}] gamma, float[{H}] beta) => (float loss) {{
        y = LayerNormalization(x, gamma, beta)  p = Mul(y, dy)  loss = ReduceSum<keepdims=0>(p) }}""")
    training = build_gradient_model(model, ["gamma"])
    feeds = {"x": random(B, S, H), "dy": random(B, S, H), "gamma": random(H), "beta": random(H)}
    _, xhat = layer_norm_gradient(feeds["x"], feeds["gamma"], feeds["dy"])
    np.testing.assert_allclose(
        run(training, feeds)["gamma_grad"], (feeds["dy"] * xhat).sum(axis=(0, 1)), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("plugin", [True, False], ids=["kernel", "body"])
def test_16_bit_gradients_have_the_type_of_their_tensors(plugin: bool) -> None:
    model = parse(f"""g (float16[{B},{S},{H}] x, float16[{B},{S},{H}] dy, float16[{H}] gamma, float16[{H}] beta) => (float loss) {{
        y = LayerNormalization(x, gamma, beta)  p = Mul(y, dy)  q = Cast<to=1>(p)  loss = ReduceSum<keepdims=0>(q) }}""")
    training = build_gradient_model(model, ["x", "gamma", "beta"])
    onnx.checker.check_model(training, full_check=True)
    feeds = {
        name: random(*shape).astype(np.float16)
        for name, shape in {"x": (B, S, H), "dy": (B, S, H), "gamma": (H,), "beta": (H,)}.items()
    }
    results = run(training, feeds, plugin=plugin)
    dx, xhat = layer_norm_gradient(feeds["x"], feeds["gamma"], feeds["dy"])
    expected = {
        "x": dx,
        "gamma": (feeds["dy"] * xhat).sum(axis=(0, 1)),
        "beta": feeds["dy"].astype(np.float64).sum(axis=(0, 1)),
    }
    for name, reference in expected.items():
        gradient = results[f"{name}_grad"]
        assert gradient.dtype == np.float16
        # one rounding of the result to 11 bits, and the statistics in float32
        np.testing.assert_allclose(
            gradient.astype(np.float64), reference, rtol=2.0**-10, atol=1e-4, err_msg=name
        )


@pytest.mark.parametrize("opset", [17, 18, 20, 24])
@pytest.mark.parametrize("outputs", ["y", "y, , r", "y, m"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_default_axis_at_every_opset(opset: int, outputs: str, bias: bool) -> None:
    model = parse(
        f"""g (float[{B},{S},{H}] x, float[{B},{S},{H}] dy, float[{H}] gamma{f", float[{H}] beta" if bias else ""}) => (float loss, float[{B},{S},{H}] y) {{
        {outputs} = LayerNormalization(x, gamma{", beta" if bias else ""})
        p = Mul(y, dy)  loss = ReduceSum<keepdims=0>(p) }}""",
        opset,
    )
    names = ["x", "gamma", "beta"] if bias else ["x", "gamma"]
    training = build_gradient_model(model, names)
    onnx.checker.check_model(training, full_check=True)
    assert [value.name for value in training.graph.output] == [
        "loss",
        "y",
        *(f"{name}_grad" for name in names),
    ]
    (node,) = fused(training)
    norm = next(node for node in training.graph.node if node.op_type == "LayerNormalization")
    assert len(set(norm.output)) == 3 and list(node.input[3:5]) == [norm.output[2], norm.output[1]]
    if not bias:
        read = {name for other in training.graph.node for name in other.input} | {
            value.name for value in training.graph.output
        }
        assert not read.intersection(node.output[2:3])
    shapes = {"x": (B, S, H), "dy": (B, S, H), "gamma": (H,), "beta": (H,)}
    feeds = {name: random(*shape) for name, shape in shapes.items() if bias or name != "beta"}
    results = run(training, feeds)
    np.testing.assert_array_equal(results["y"], run(model, feeds)["y"])
    dx, xhat = layer_norm_gradient(feeds["x"], feeds["gamma"], feeds["dy"])
    np.testing.assert_allclose(results["x_grad"], dx, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        results["gamma_grad"], (feeds["dy"] * xhat).sum(axis=(0, 1)), rtol=0, atol=1e-5
    )
    if bias:
        expected = feeds["dy"].astype(np.float64).sum(axis=(0, 1))
        np.testing.assert_allclose(results["beta_grad"], expected, rtol=0, atol=1e-5)
