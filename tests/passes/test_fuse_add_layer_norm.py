"""An Add and the LayerNormalization that reads it become AddLayerNorm where the training graph has both."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import ort_ops
from ort_ops import passes
from ort_ops.gradient import build_gradient_model

RNG = np.random.default_rng(7)


def norm_of_a_sum(
    left: str = "float[2,3,8]",
    right: str = "float[2,3,8]",
    scale: str = "float[8]",
    attributes: str = "axis = -1",
    output: str = "y",
) -> ir.Model:
    """LayerNormalization(a + b) with `output`, which is y or the sum s, as the graph's."""
    kind = left.split("[")[0]
    outputs = f"{kind}[2,3,8] y, {kind}[2,3,8] s" if output == "s" else f"{kind}[2,3,8] y"
    text = f"""<ir_version: 10, opset_import: ["": 18]>
        g ({left} a, {right} b, {scale} gamma, {scale} beta) => ({outputs}) {{
            s = Add(a, b)
            y = LayerNormalization <{attributes}> (s, gamma, beta)
        }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    passes.infer_shapes(model)
    return model


def test_a_sum_that_nobody_else_reads_is_not_written() -> None:
    model = norm_of_a_sum()
    assert passes.fuse_add_layer_norm(model)
    (node,) = model.graph
    assert [value.name for value in node.inputs if value] == ["a", "b", "gamma", "beta"]
    assert [value.name for value in node.outputs] == ["y"]


def test_a_sum_that_is_an_output_keeps_its_name() -> None:
    model = norm_of_a_sum(output="s", attributes="axis = 1, epsilon = 0.5", scale="float[3,8]")
    assert passes.fuse_add_layer_norm(model)
    (node,) = model.graph
    assert node.attributes["epsilon"].as_float() == 0.5
    assert [value.name for value in node.outputs] == ["y", "", "", "s"]
    assert [value.name for value in model.graph.outputs] == ["y", "s"]
    assert model.graph.outputs[1].producer() is node


@pytest.mark.parametrize(
    "parts",
    [
        {"right": "float[8]"},
        {"right": "float[2,1,8]"},
        {"right": "float"},
        {"right": "float[]"},
        {"right": "float[n,3,8]"},
        {"left": "double[2,3,8]", "right": "double[2,3,8]", "scale": "double[8]"},
        {"scale": "float[1]"},
        {"scale": "float[3,8]"},
        {"attributes": "axis = -1, stash_type = 10"},
    ],
    ids=[
        "rank",
        "one",
        "scalar",
        "unknown rank",
        "unknown size",
        "float64",
        "scale of one",
        "scale of more axes",
        "stash",
    ],
)
def test_what_the_operator_does_not_take_stays(parts: dict[str, str]) -> None:
    model = norm_of_a_sum(**parts)
    assert not passes.fuse_add_layer_norm(model)
    assert [node.op_type for node in model.graph] == ["Add", "LayerNormalization"]


def test_only_one_of_two_norms_of_a_sum_takes_it() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
            g (float[n,8] a, float[n,8] b, float[8] gamma) => (float[n,8] y, float[n,8] z) {
                s = Add(a, b)
                y = LayerNormalization(s, gamma)
                z = LayerNormalization <epsilon = 0.5> (s, gamma)
            }""")
    )
    passes.infer_shapes(model)
    assert passes.fuse_add_layer_norm(model)
    made, norm = model.graph
    assert (made.op_type, norm.op_type) == ("AddLayerNorm", "LayerNormalization")
    assert norm.inputs[0] is made.outputs[3]


BLOCK = """<ir_version: 10, opset_import: ["": 18]>
    block (float[n,3,8] x, float[n,3,8] weight) => (float loss)
        <float[8,8] w, float[8] gamma, float[8] beta, float[8] gamma2> {
        h = MatMul(x, w)
        s = Add(x, h)
        y = LayerNormalization <epsilon = 0.1> (s, gamma, beta)
        t = Tanh(y)
        r = Add(s, t)
        z = LayerNormalization <epsilon = 0.1> (r, gamma2)
        p = Mul(z, weight)
        loss = ReduceSum <keepdims = 0> (p)
    }"""


@pytest.mark.parametrize("plugin", [True, False], ids=["kernel", "body"])
def test_two_residual_branches_train_as_in_pytorch(plugin: bool) -> None:
    model = onnx.parser.parse_model(BLOCK)
    del model.graph.initializer[:]
    shapes = {"w": (8, 8), "gamma": (8,), "beta": (8,), "gamma2": (8,)}
    values = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in values.items()
    )

    training = build_gradient_model(model)

    onnx.checker.check_model(training, full_check=True)
    forward = [node.op_type for node in training.graph.node][:6]
    assert forward == ["Linear", "AddLayerNorm", "Tanh", "AddLayerNorm", "Mul", "ReduceSum"]
    assert {"AddLayerNorm", "AddLayerNormGrad"} <= {function.name for function in training.functions}
    first, second = (node for node in training.graph.node if node.op_type == "AddLayerNorm")
    assert list(first.input) == ["x", "h", "gamma", "beta"] and first.output[3] == "s"
    assert list(second.input) == ["s", "t", "gamma2", ""] and second.output[3] == "r"

    data = {name: RNG.standard_normal((2, 3, 8)).astype(np.float32) for name in ("x", "weight")}
    feeds = values | data
    options = onnxruntime.SessionOptions()
    if plugin:
        ort_ops.register(options)
    session = onnxruntime.InferenceSession(
        training.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    got = session.run(None, feeds)

    wide = {name: torch.tensor(value.astype(np.float64), requires_grad=True) for name, value in feeds.items()}
    s = wide["x"] + wide["x"] @ wide["w"]
    y = torch.nn.functional.layer_norm(s, (8,), wide["gamma"], wide["beta"], eps=0.1)
    z = torch.nn.functional.layer_norm(s + torch.tanh(y), (8,), wide["gamma2"], None, eps=0.1)
    loss = (z * wide["weight"]).sum()
    loss.backward()
    np.testing.assert_allclose(got[0], loss.item(), rtol=0, atol=1e-4)
    for name, gradient in zip(values, got[1:], strict=True):
        expected = wide[name].grad
        assert expected is not None
        # float32 rounding of sums of at most 48 terms of the gradient's magnitude
        np.testing.assert_allclose(gradient, expected.numpy(), rtol=0, atol=48 * 6e-8 * 10, err_msg=name)
