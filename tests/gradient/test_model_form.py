"""What the built model looks like from outside: names, order, inputs, opsets, and that nothing is wasted or
changed."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

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
