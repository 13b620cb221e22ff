"""What the built model looks like from outside: names, order, inputs, opsets, and that nothing is wasted or
changed."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from ort_ops.gradient import build_gradient_model

RUN = np.random.default_rng(0)


def parse(text: str, opset: int = 18, ir_version: int = 8) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}]> {text}')


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


X, W = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([1, -1, 2], np.float32)
SIMPLE = """g (float[2,3] x) => (float loss) <float[3] w = {1, -1, 2}, float[3] v = {3, 2, 1}> {
    y = Mul(x, w)  z = Add(y, v)  loss = ReduceSum<keepdims=0>(z) }"""


def test_default_is_every_initializer_that_reaches_the_loss() -> None:
    model = parse("""g (float[2,3] x, int64[1] i) => (float loss) <float[3] w = {1, 2, 3}, float[3] unread = {1, 2, 3},
        int64[1] axes = {1}, float[3] cut = {1, 2, 3}, float[3] v = {3, 2, 1}> {
        c = Greater(x, cut)  d = Cast<to=1>(c)  y = Mul(d, w)  z = Add(y, v)  s = ReduceSum<keepdims=0>(z, axes)
        loss = ReduceMean<keepdims=0>(s) }""")
    training = build_gradient_model(model)
    assert [value.name for value in training.graph.output] == ["loss", "w_grad", "v_grad"]
    assert [value.name for value in training.graph.input] == ["x", "i", "w", "v"]
    assert {tensor.name for tensor in training.graph.initializer} >= {"cut"}


def test_gradients_come_in_the_order_asked_for_and_after_the_original_outputs() -> None:
    model = parse(SIMPLE)
    model.graph.output.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3]))
    training = build_gradient_model(model, ["v", "w"])
    assert [value.name for value in training.graph.output] == ["loss", "y", "v_grad", "w_grad"]
    assert [value.name for value in training.graph.input] == ["x", "v", "w"]
    results = run(training, x=X, w=W, v=W)
    np.testing.assert_array_equal(results["w_grad"], X.sum(axis=0))
    np.testing.assert_array_equal(results["v_grad"], [2, 2, 2])


def test_a_graph_input_can_be_differentiated_by() -> None:
    training = build_gradient_model(parse(SIMPLE), ["x"])
    np.testing.assert_array_equal(run(training, x=X)["x_grad"], [W, W])


def test_weights_in_constant_nodes_can_be_differentiated_by() -> None:
    model = parse("""g (float[2,3] x) => (float loss) { w = Constant<value_floats=[1.0, 2.0, 3.0]>()
        y = Mul(x, w)  loss = ReduceSum<keepdims=0>(y) }""")
    training = build_gradient_model(model, ["w"])
    np.testing.assert_array_equal(run(training, x=X, w=W)["w_grad"], X.sum(axis=0))


def test_initializers_that_are_also_inputs_as_before_ir_version_4() -> None:
    model = parse(SIMPLE.replace("float[2,3] x", "float[2,3] x, float[3] w, float[3] v"), ir_version=3)
    training = build_gradient_model(model, ["w"])
    assert [value.name for value in training.graph.input] == ["x", "w"]
    np.testing.assert_array_equal(run(training, x=X, w=W)["w_grad"], X.sum(axis=0))


@pytest.mark.parametrize("taken", ["w_grad", "loss_grad", "grad_const_1", "Mul_grad/Mul_1"])
def test_names_that_the_model_uses_inside_do_not_clash(taken: str) -> None:
    model = parse(SIMPLE)
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = taken
    training = build_gradient_model(model, ["w"])
    onnx.checker.check_model(training, full_check=True)
    assert [value.name for value in training.graph.output] == ["loss", "w_grad"]
    np.testing.assert_array_equal(run(training, x=X, w=W)["w_grad"], X.sum(axis=0))


def test_a_taken_interface_name_stays_and_the_gradient_gets_a_number() -> None:
    model = parse(SIMPLE.replace("float[2,3] x", "float[2,3] w_grad").replace("Mul(x,", "Mul(w_grad,"))
    training = build_gradient_model(model, ["w"])
    assert [value.name for value in training.graph.output] == ["loss", "w_grad_1"]


def test_a_value_used_many_times_is_summed_once() -> None:
    model = parse("""g (float[2,3] x) => (float loss) <float[3] w = {1, 2, 3}> {
        a = Mul(x, w)  b = Mul(a, a)  c = Add(a, b)  d = Sum(c, a, a)  loss = ReduceSum<keepdims=0>(d) }""")
    training = build_gradient_model(model, ["w"])
    results = run(training, x=X, w=W)
    np.testing.assert_allclose(results["w_grad"], ((3 + 2 * X * W) * X).sum(axis=0), rtol=1e-6)
    assert operators(training).count("Sum") == 2  # the forward's, and one of all contributions to a


def test_two_parameters_with_one_gradient_have_two_outputs() -> None:
    model = parse("""g (float[2,3] x) => (float loss) <float[2,3] a = {1, 2, 3, 4, 5, 6}, float[2,3] b = {1, 2, 3, 4, 5, 6}> {
        s = Add(a, b)  y = Mul(s, x)  loss = ReduceSum<keepdims=0>(y) }""")
    training = build_gradient_model(model, ["a", "b"])
    results = run(training, x=X, a=X, b=X)
    np.testing.assert_array_equal(results["a_grad"], X)
    np.testing.assert_array_equal(results["b_grad"], X)


def test_an_equal_shape_add_passes_one_gradient_on_without_a_node() -> None:
    model = parse("""g (float[2,3] x) => (float loss) <float[2,3] w = {1, 2, 3, 4, 5, 6}> {
        s = Add(x, w)  t = Add(s, x)  y = Mul(t, x)  loss = ReduceSum<keepdims=0>(y) }""")
    training = build_gradient_model(model, ["w"])
    added = operators(training)[len(model.graph.node) :]
    assert sorted(added) == ["Expand", "Mul"]


def test_nothing_is_computed_below_the_lowest_parameter_or_for_frozen_weights() -> None:
    model = parse("""g (float[2,3] x) => (float loss) <float[3,3] w = {1,2,3,4,5,6,7,8,9}, float[3,3] v = {1,2,3,4,5,6,7,8,9},
        float[3] b = {1, 2, 3}> { a = MatMul(x, w)  t = Tanh(a)  y = MatMul(t, v)  z = Add(y, b)
        loss = ReduceSum<keepdims=0>(z) }""")
    added = operators(build_gradient_model(model, ["b"]))[len(model.graph.node) :]
    assert sorted(added) == ["Expand", "ReduceSum"]


def test_every_node_is_read() -> None:
    training = build_gradient_model(parse(SIMPLE), ["w"])
    read = {name for node in training.graph.node for name in node.input} | {
        value.name for value in training.graph.output
    }
    assert all(any(name in read for name in node.output) for node in training.graph.node)
    assert {tensor.name for tensor in training.graph.initializer} <= read


@pytest.mark.parametrize("opset", [11, 13, 15, 17, 18, 21, 24])
def test_opset_is_kept_or_raised_to_18_and_ir_version_is_10(opset: int) -> None:
    model = parse(SIMPLE, opset)
    training = build_gradient_model(model, ["w"])
    assert {(entry.domain, entry.version) for entry in training.opset_import} == {("", max(opset, 18))}
    assert training.ir_version == 10
    np.testing.assert_array_equal(run(training, x=X, w=W)["w_grad"], X.sum(axis=0))


def test_a_model_with_fused_nodes_imports_each_domain_once_and_carries_the_body() -> None:
    model = parse("""g (float[2,3] x) => (float loss) <float[3] w = {1, 2, 3}> {
        y = LayerNormalization(x, w)  z = Mul(y, x)  loss = ReduceSum<keepdims=0>(z) }""")
    training = build_gradient_model(model, ["w"])
    domains = [entry.domain for entry in training.opset_import]
    assert sorted(domains) == ["", "ai.onnx.contrib"]
    assert [function.name for function in training.functions] == ["AddLayerNormGrad"]


def test_functions_of_the_model_are_inlined_nested_ones_too() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "my": 1]>
        g (float[2,3] x) => (float loss) <float[3] w = {1, 2, 3}> { y = my.outer(x, w)  loss = ReduceSum<keepdims=0>(y) }
        <domain: "my", opset_import: ["": 18, "my": 1]> outer (a, b) => (c) { t = my.inner(a, b)  c = Mul(t, b) }
        <domain: "my", opset_import: ["": 18]> inner (a, b) => (c) { c = Mul(a, b) }""")
    training = build_gradient_model(model, ["w"])
    results = run(training, x=X, w=W)
    np.testing.assert_allclose(results["w_grad"], (2 * X * W).sum(axis=0), rtol=1e-6)


def test_building_twice_gives_the_same_bytes() -> None:
    first, second = (
        build_gradient_model(parse(SIMPLE)).SerializeToString(deterministic=True) for _ in range(2)
    )
    assert first == second


def test_a_loss_that_is_read_inside_and_outputs_that_are_too() -> None:
    model = parse("""g (float[2,3] x) => (float loss, float more, float[2,3] y) <float[3] w = {1, -1, 2}> {
        y = Mul(x, w)  z = Tanh(y)  loss = ReduceSum<keepdims=0>(z)  more = Mul(loss, loss) }""")
    training = build_gradient_model(model, ["w"], loss="loss")
    assert [value.name for value in training.graph.output] == ["loss", "more", "y", "w_grad"]
    slope = 1 - np.tanh((X * W).astype(np.float64)) ** 2
    np.testing.assert_allclose(
        run(training, x=X, w=W)["w_grad"], (X * slope).sum(axis=0), rtol=1e-5, atol=1e-6
    )


def test_a_model_that_returns_one_tensor_twice() -> None:
    model = parse(SIMPLE)
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3]) for _ in range(2)
    )
    training = build_gradient_model(model, ["w"])
    assert [value.name for value in training.graph.output] == ["loss", "y", "y", "w_grad"]
    _, *same, gradient = onnxruntime.InferenceSession(training.SerializeToString()).run(
        None, {"x": X, "w": W}
    )
    np.testing.assert_array_equal(same, [X * W] * 2)
    np.testing.assert_array_equal(gradient, X.sum(axis=0))


NAMES = ["/block.0/mul out", "a.b/c:0", "x_grad", "dx", "AddLayerNormGrad", "grad_const_1", "loss_grad"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("node_name", ["", "/layer.1/Mul 2", "Mul_grad/Mul_1"])
def test_any_name_of_tensors_and_nodes(name: str, node_name: str) -> None:
    model = parse(SIMPLE)
    for node in model.graph.node:
        node.name = node_name
        node_name = node_name and f"{node_name}_"
    model.graph.node[0].input[1] = model.graph.initializer[0].name = name
    training = build_gradient_model(model, [name])
    onnx.checker.check_model(training, full_check=True)
    produced = [output for node in training.graph.node for output in node.output]
    assert len(set(produced)) == len(produced)
    assert [value.name for value in training.graph.output] == ["loss", f"{name}_grad"]
    np.testing.assert_array_equal(run(training, x=X, **{name: W})[f"{name}_grad"], X.sum(axis=0))


def test_one_part_used_three_times_sums_its_gradients() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "my": 1]>
        g (float[2,3] x) => (float loss) <float[3] w = {1, 2, 3}> {
        a = my.part(x, w)  b = my.part(a, w)  c = my.part(b, w)  loss = ReduceSum<keepdims=0>(c) }
        <domain: "my", opset_import: ["": 18]> part (a, b) => (c) { t = Mul(a, b)  c = Add(t, b) }""")
    x, w = X.astype(np.float64), np.array([1.0, 2.0, 3.0])
    a = x * w + w
    b = a * w + w
    da = x + 1
    db = da * w + a + 1
    expected = (db * w + b + 1).sum(axis=0)
    results = run(build_gradient_model(model, ["w"]), x=X, w=w.astype(np.float32))
    np.testing.assert_allclose(results["w_grad"], expected, rtol=1e-5)


def test_a_product_and_a_norm_two_functions_deep() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "my": 1]>
        g (float[2,3] x, float[2,3] dy, float[3,3] w, float[3] s) => (float loss) {
        y = my.block(x, w, s)  z = Mul(y, dy)  loss = ReduceSum<keepdims=0>(z) }
        <domain: "my", opset_import: ["": 18, "my": 1]> block (a, b, c) => (d) { t = my.normed(a, b, c)  d = Add(t, a) }
        <domain: "my", opset_import: ["": 18]> normed (a, b, c) => (d) { t = MatMul(a, b)  d = LayerNormalization <axis=-1>(t, c) }""")
    training = build_gradient_model(model, ["w", "s", "x"])
    onnx.checker.check_model(training, full_check=True)
    assert operators(training).count("AddLayerNormGrad") == 1
    generator = np.random.default_rng(1)
    feeds = {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": (2, 3), "dy": (2, 3), "w": (3, 3), "s": (3,)}.items()
    }
    tensors = {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=name != "dy")
        for name, value in feeds.items()
    }
    y = torch.nn.functional.layer_norm(tensors["x"] @ tensors["w"], (3,), tensors["s"]) + tensors["x"]
    (y * tensors["dy"]).sum().backward()
    results = run(training, **feeds)
    for name in ("w", "s", "x"):
        expected = tensors[name].grad.numpy()
        np.testing.assert_allclose(
            results[f"{name}_grad"], expected, rtol=0, atol=2e-5 * max(1, np.abs(expected).max())
        )
