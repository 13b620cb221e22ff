"""Older opsets are raised to 18; the model computes the same, with the same names outside."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ort_ops.passes import PassError, upgrade_opset

F = np.float32
FORMS = {
    "Softmax-11": (11, "y = Softmax<axis=1>(x)", "float[2,3,4]"),
    "Split-11": (11, "y, z = Split<axis=1>(x)", "float[2,4]"),
    "Clip-6": (10, "y = Clip<min=-0.5, max=0.5>(x)", "float[2,3]"),
    "Pad-2": (10, "y = Pad<pads=[0, 1, 0, 1], value=1.5>(x)", "double[2,3]"),
    "Slice-1": (9, "y = Slice<starts=[1], ends=[2]>(x)", "float[2,3]"),
    "ReduceMean-11": (11, "y = ReduceMean<axes=[1], keepdims=0>(x)", "float[2,3]"),
    "ReduceSum-11": (11, "y = ReduceSum<axes=[1], keepdims=0>(x)", "float[2,3]"),
    "Squeeze-11": (11, "y = Squeeze<axes=[0]>(x)", "float[1,3]"),
    "Dropout-7": (9, "y = Dropout<ratio=0.5>(x)", "float[2,3]"),
    "Upsample-9": (9, "s = Constant<value=float[4] {1.0, 1.0, 2.0, 1.5}>()  y = Upsample<mode=\"linear\">(x, s)", "float[1,1,3,4]"),
    "Resize-10": (10, "s = Constant<value=float[4] {1.0, 1.0, 1.7, 0.6}>()  y = Resize<mode=\"linear\">(x, s)", "float[1,1,3,4]"),
    "If": (11, "c = Constant<value=bool {1}>()  y = If(c) <then_branch = t () => (float[2] p) {p = ReduceSum<axes=[1], keepdims=0>(x)}, else_branch = e () => (float[2] q) {q = ReduceSum<axes=[1], keepdims=0>(x)}>", "float[2,3]"),
}  # fmt: skip


def parse(opset: int, body: str, kind: str) -> onnx.ModelProto:
    element = kind.partition("[")[0]
    return onnx.parser.parse_model(
        f'<ir_version: 7, opset_import: ["": {opset}]> g ({kind} x) => ({element} y) {{ {body} }}'
    )


def run(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )


@pytest.mark.parametrize("form", FORMS)
def test_computes_the_same(form: str) -> None:
    opset, body, kind = FORMS[form]
    model = parse(opset, body, kind)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    shape = [int(size) for size in kind.partition("[")[2].rstrip("]").split(",")]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float64 if kind.startswith("double") else F)
    upgraded = upgrade_opset(ir.from_proto(model), 18)
    assert upgraded.opset_imports[""] == 18
    result = ir.to_proto(upgraded)
    onnx.checker.check_model(result)
    assert [value.name for value in result.graph.output] == ["y"]
    for before, after in zip(run(model, x), run(result, x), strict=True):
        np.testing.assert_array_equal(after, before)


def test_a_newer_model_is_left_alone() -> None:
    model = ir.from_proto(parse(20, "y = Gelu(x)", "float[2,3]"))
    assert upgrade_opset(model, 18) is model
    assert model.opset_imports[""] == 20


def test_batch_normalization_in_training_mode() -> None:
    text = """<ir_version: 7, opset_import: ["": 9]> g (float[4,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[4,3] y) {
        y, n, w, o, u = BatchNormalization<epsilon=0.1>(x, s, b, m, v) }"""
    upgraded = upgrade_opset(ir.from_proto(onnx.parser.parse_model(text)), 18)
    (node,) = upgraded.graph
    assert len(node.outputs) == 3 and node.attributes.get_int("training_mode") == 1


def test_saved_statistics_that_are_read_are_refused() -> None:
    text = """<ir_version: 7, opset_import: ["": 9]> g (float[4,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[4,3] y, float[3] o) {
        y, n, w, o, u = BatchNormalization(x, s, b, m, v) }"""
    with pytest.raises(PassError, match="saved statistics 'o'"):
        upgrade_opset(ir.from_proto(onnx.parser.parse_model(text)), 18)


def test_large_tensors_come_back_as_they_were() -> None:
    model = parse(11, "y = MatMul(x, w)", "float[2,600]")
    weight = np.random.default_rng(0).standard_normal((600, 4)).astype(F)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    upgraded = upgrade_opset(ir.from_proto(model), 18)
    np.testing.assert_array_equal(upgraded.graph.initializers["w"].const_value.numpy(), weight)
    assert [value.name for value in upgraded.graph.inputs] == ["x"]
