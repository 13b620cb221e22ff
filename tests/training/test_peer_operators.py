"""Operators of onnxruntime-training in standard operators: the same numbers as that runtime's own kernels."""

# ruff: noqa: E501  (rows of tables read better on one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from old_runtime import needs_old_runtime, run_in_old_runtime

import ort_ops
from ort_ops import operators
from ort_ops.passes import infer_shapes
from ort_ops.training.peer_operators import (
    WITHOUT_REPLACEMENT,
    replace_peer_operators,
    replaced_operators,
)

SCRIPT = Path(__file__).with_name("peer_operators_script.py")


@dataclass(frozen=True)
class Case:
    """A graph of one node of onnxruntime-training: inputs and outputs in ONNX's text format, and the nodes.

    `values`: the inputs that are not random normal numbers. `names`: those of the nodes.
    """

    inputs: str
    outputs: str
    body: str
    values: Mapping[str, object] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def model(self) -> onnx.ModelProto:
        model = onnx.parser.parse_model(
            f"""<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
            g ({self.inputs}) => ({self.outputs}) {{ {self.body} }}"""
        )
        for node, name in zip(model.graph.node, self.names, strict=False):
            node.name = name
        return model

    def feeds(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(0)
        feeds = {}
        for value in self.model().graph.input:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            if value.name in self.values:
                feeds[value.name] = np.array(self.values[value.name], dtype)
            else:
                shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
                feeds[value.name] = generator.standard_normal(shape).astype(dtype)
        return feeds


def of_output(op_type: str, attributes: str = "", shape: str = "3,4") -> Case:
    """(dY, X or Y) -> dX, all of one shape."""
    return Case(
        f"float[{shape}] dy, float[{shape}] y",
        f"float[{shape}] dx",
        f"dx = com.microsoft.{op_type}{attributes}(dy, y)",
    )


def biased(op_type: str) -> Case:
    return Case(
        "float[3,4] dy, float[3,4] x, float[4] b",
        "float[3,4] dx",
        f"dx = com.microsoft.{op_type}(dy, x, b)",
    )


LABELS = {"labels": [[0, 4, 2], [-1, 2, 3]]}


def cross_entropy(
    dloss: str, attributes: str, weight: str = "", labels: Mapping[str, object] = LABELS
) -> Case:
    return Case(
        f"{dloss} dloss, float[2,5,3] log_prob, int64[2,3] labels{', float[5] w' if weight else ''}",
        "float[2,5,3] d",
        f"d = com.microsoft.SoftmaxCrossEntropyLossGrad{attributes}(dloss, log_prob, labels{weight})",
        labels,
    )


def slices(arguments: str, size: str, **values: object) -> Case:
    inputs = ", ".join(f"int64[{len(np.atleast_1d(value))}] {name}" for name, value in values.items())
    return Case(
        f"float[{size}] dy, int64[2] shape, {inputs}",
        "float[6,7] dx",
        f"dx = com.microsoft.SliceGrad(dy, shape, {arguments})",
        {"shape": [6, 7], **values},
    )


def convolution(attributes: str, w: str, y: str, x: str = "2,4,9,8", op_type: str = "ConvGrad") -> Case:
    return Case(
        f"float[{y}] dy, float[{x}] x, float[{w}] w",
        f"float[{x}] dx, float[{w}] dw, float[{y.split(',')[1]}] db",
        f"dx, dw, db = com.microsoft.{op_type}<{attributes}>(dy, x, w)",
    )


def maximum(attributes: str, y: str) -> Case:
    return Case(
        f"float[{y}] dy, float[2,3,9,8] x",
        "float[2,3,9,8] dx",
        f"y, places = MaxPool<{attributes}>(x) dx = MaxPoolGrad<{attributes}>(dy, places)",
    )


def average(attributes: str, y: str, name: str = "pool") -> Case:
    return Case(
        f"float[{y}] dy, float[2,3,9,8] x",
        f"float[2,3,9,8] dx, float[{y}] y",
        f"y = AveragePool<{attributes}>(x) dx = AveragePoolGrad<{attributes}>(dy)",
        names=(name, "pool_Grad/AveragePoolGrad_0"),
    )


def axes(a: list[int], b: list[int]) -> Case:
    return Case(
        f"int64[{len(a)}] a, int64[{len(b)}] b, float[{','.join(map(str, np.broadcast_shapes(a, b)))}] dy",
        f"float[{','.join(map(str, a))}] da, float[{','.join(map(str, b))}] db",
        """a_axes, b_axes = com.microsoft.BroadcastGradientArgs(a, b)
        sa = ReduceSum<keepdims=1, noop_with_empty_axes=1>(dy, a_axes)  da = Reshape(sa, a)
        sb = ReduceSum<keepdims=1, noop_with_empty_axes=1>(dy, b_axes)  db = Reshape(sb, b)""",
        {"a": a, "b": b},
    )


def quotient(a: str, b: str, y: str) -> Case:
    kind = f"float[{b}]" if b else "float"
    return Case(
        f"float[{y}] dy, float[{a}] a, {kind} b",
        f"float[{a}] da, {kind} db",
        "da, db = com.microsoft.DivGrad(dy, a, b)",
        {"b": np.random.default_rng(1).uniform(1, 2, [int(n) for n in b.split(",") if n])},
    )


def norm(
    op_type: str,
    between: str,
    operands: str,
    scale: str = "4",
    statistics: str = "2,3,1",
    attributes: str = "",
) -> Case:
    outputs = ["dx", "dscale", "dbias"][: 2 if op_type.startswith("Simplified") else 3]
    declared = ", ".join(f"float[{'2,3,4' if name == 'dx' else scale}] {name}" for name in outputs)
    rstd = f"float[{statistics}] rstd"
    return Case(
        f"float[2,3,4] dy, float[2,3,4] x, float[{scale}] scale, {between.format(statistics)}{rstd}",
        declared,
        f"{', '.join(outputs)} = com.microsoft.{op_type}{attributes}(dy, x, scale, {operands}rstd)",
    )


def recurrent(op_type: str, bias: str, last: str = "dh") -> Case:
    """Gradients of all inputs, from those of all steps and of the last one; the kernels go forward only."""
    lstm = op_type == "LSTM"
    rows = 16 if lstm else 12
    state = "float[1,2,4]"
    inputs = f"float[3,2,5] x, float[1,{rows},5] w, float[1,{rows},4] r, float[1,{2 * rows}] b, {state} h0, float[3,1,2,4] dy, {state} dh"
    outputs = f"float[3,1,2,4] y, {state} h, float[3,2,5] dx, float[1,{rows},5] dw, float[1,{rows},4] dr, {state} dh0"
    results = f"dx, dw, dr, {'db' if bias else ''}, dh0"
    if bias:
        outputs += f", float[1,{2 * rows}] db"
    if lstm:
        inputs += f", {state} c0, {state} dc"
        outputs += f", {state} dc0, {state} c"
        body = f"""y, h, c, cells, gates = com.microsoft.LSTMTraining<hidden_size=4>(x, w, r, {bias}, , h0, c0)
            {results}, dc0 = com.microsoft.LSTMGrad<hidden_size=4>(x, w, r, , h0, c0, y, cells, gates, dy, {last}, {"dc" if last else ""})"""
    else:
        body = f"""y, h, gates = com.microsoft.GRUTraining<hidden_size=4>(x, w, r, {bias}, , h0)
            {results} = com.microsoft.GRUGrad<hidden_size=4>(x, w, r, {bias}, , h0, y, gates, dy, {last})"""
    return Case(inputs, outputs, body)


BATCH_NORM = "float[3] scale, float[3] mean, float[3] var"

CASES: dict[str, Case] = {
    "ReluGrad": of_output("ReluGrad"),
    "LeakyReluGrad": of_output("LeakyReluGrad", "<alpha=0.3>"),
    "LeakyReluGrad default": of_output("LeakyReluGrad"),
    "TanhGrad": of_output("TanhGrad"),
    "SigmoidGrad": of_output("SigmoidGrad"),
    "GeluGrad": of_output("GeluGrad"),
    "FastGeluGrad": of_output("FastGeluGrad"),
    "QuickGeluGrad": of_output("QuickGeluGrad", "<alpha=1.5>"),
    "QuickGeluGrad default": of_output("QuickGeluGrad"),
    "BiasGeluGrad_dX": biased("BiasGeluGrad_dX"),
    "BiasFastGeluGrad_dX": biased("BiasFastGeluGrad_dX"),
    "SoftmaxGrad_13": of_output("SoftmaxGrad_13", "<axis=1>", "2,3,4"),
    "SoftmaxGrad_13 default": of_output("SoftmaxGrad_13", "<axis=-1>", "2,3,4"),
    "SoftmaxGrad": of_output("SoftmaxGrad", "<axis=1>", "2,3,4"),
    "SoftmaxGrad last": of_output("SoftmaxGrad", "<axis=-1>", "2,3,4"),
    "LogSoftmaxGrad_13": of_output("LogSoftmaxGrad_13", "<axis=1>", "2,3,4"),
    "LogSoftmaxGrad": of_output("LogSoftmaxGrad", "<axis=2>", "2,3,4"),
    "DropoutGrad": Case(
        "float[3,4] dy, bool[3,4] mask, float r",
        "float[3,4] dx",
        "dx = com.microsoft.DropoutGrad(dy, mask, r)",
        {"mask": np.eye(3, 4), "r": 0.25},
    ),
    "DropoutGrad mode": Case(
        "float[3,4] dy, bool[3,4] mask, float r, bool t",
        "float[3,4] dx",
        "dx = com.microsoft.DropoutGrad(dy, mask, r, t)",
        {"mask": np.eye(3, 4), "r": 0.25, "t": True},
    ),
    "DropoutGrad default": Case(
        "float[3,4] dy, bool[3,4] mask",
        "float[3,4] dx",
        "dx = com.microsoft.DropoutGrad(dy, mask)",
        {"mask": np.eye(3, 4)},
    ),
    "SoftmaxCrossEntropyLossGrad mean": cross_entropy("float", '<reduction="mean">'),
    "SoftmaxCrossEntropyLossGrad default": cross_entropy("float", ""),
    "SoftmaxCrossEntropyLossGrad sum": cross_entropy("float", '<reduction="sum">'),
    "SoftmaxCrossEntropyLossGrad none": cross_entropy("float[2,3]", '<reduction="none">'),
    "SoftmaxCrossEntropyLossGrad weight": cross_entropy("float", '<reduction="mean">', ", w"),
    "SoftmaxCrossEntropyLossGrad weight sum": cross_entropy("float", '<reduction="sum">', ", w"),
    "SoftmaxCrossEntropyLossGrad weight none": cross_entropy("float[2,3]", '<reduction="none">', ", w"),
    "SoftmaxCrossEntropyLossGrad ignored": cross_entropy(
        "float", '<reduction="mean", ignore_index=2>', ", w", {"labels": [[0, 4, 2], [1, 2, 3]]}
    ),
    "SoftmaxCrossEntropyLossGrad far": cross_entropy(
        "float", '<reduction="mean", ignore_index=-100>', "", {"labels": [[0, -100, 2], [1, 2, 3]]}
    ),
    "SoftmaxCrossEntropyLossGrad all ignored": cross_entropy(
        "float", '<reduction="mean">', "", {"labels": [[-1, -1, -1], [-1, -1, -1]]}
    ),
    "SoftmaxCrossEntropyGrad": Case(
        "float dloss, float[4,5] log_prob, float[4,5] labels",
        "float[4,5] d",
        "d = com.microsoft.SoftmaxCrossEntropyGrad(dloss, log_prob, labels)",
    ),
    "SoftmaxCrossEntropyGrad sum": Case(
        "float dloss, float[2,3,5] log_prob, float[2,3,5] labels",
        "float[2,3,5] d",
        'd = com.microsoft.SoftmaxCrossEntropyGrad<reduction="sum">(dloss, log_prob, labels)',
    ),
    "SoftmaxCrossEntropyGrad three axes": Case(
        "float dloss, float[2,3,5] log_prob, float[2,3,5] labels",
        "float[2,3,5] d",
        "d = com.microsoft.SoftmaxCrossEntropyGrad(dloss, log_prob, labels)",
    ),
    "ConcatTraining": Case(
        "float[2,3] a, float[2,1] b, float[2,4] c",
        "float[2,8] y, int64[3] n",
        "y, n = com.microsoft.ConcatTraining<axis=1>(a, b, c)",
    ),
    "ConcatTraining negative": Case(
        "float[2,3] a, float[2,1] b",
        "float[2,4] y, int64[2] n",
        "y, n = com.microsoft.ConcatTraining<axis=-1>(a, b)",
    ),
    "SplitTraining": Case(
        "float[2,8] x, int64[3] n",
        "float[2,3] a, float[2,1] b, float[2,4] c",
        "a, b, c = com.microsoft.SplitTraining<axis=1>(x, n)",
        {"n": [3, 1, 4]},
    ),
    "GatherGrad": Case(
        "int64[2] shape, int64[2,3] i, float[2,3,4] dy",
        "float[5,4] dx",
        "dx = com.microsoft.GatherGrad<axis=0>(shape, i, dy)",
        {"shape": [5, 4], "i": [[0, 3, 3], [4, 0, 3]]},
    ),
    "GatherGrad middle": Case(
        "int64[3] shape, int64[2,2] i, float[3,2,2,4] dy",
        "float[3,5,4] dx",
        "dx = com.microsoft.GatherGrad<axis=1>(shape, i, dy)",
        {"shape": [3, 5, 4], "i": [[0, 3], [3, 0]]},
    ),
    "GatherGrad last": Case(
        "int64[2] shape, int32[4] i, float[3,4] dy",
        "float[3,5] dx",
        "dx = com.microsoft.GatherGrad<axis=-1>(shape, i, dy)",
        {"shape": [3, 5], "i": [1, 1, 4, 0]},
    ),
    "GatherGrad one": Case(
        "int64[2] shape, int64 i, float[3] dy",
        "float[3,5] dx",
        "dx = com.microsoft.GatherGrad<axis=1>(shape, i, dy)",
        {"shape": [3, 5], "i": 2},
    ),
    "GatherGrad vector": Case(
        "int64[1] shape, int64[2,2] i, float[2,2] dy",
        "float[5] dx",
        "dx = com.microsoft.GatherGrad(shape, i, dy)",
        {"shape": [5], "i": [[1, 1], [4, 0]]},
    ),
    "GatherGrad of a shape": Case(
        "float[5,4] x, int64[3] i, float[3,4] dy",
        "float[5,4] dx",
        "s = Shape(x) dx = com.microsoft.GatherGrad(s, i, dy)",
        {"i": [1, 4, 1]},
    ),
    "GatherElementsGrad": Case(
        "float[2,3] dy, int64[2] shape, int64[2,3] i",
        "float[4,3] dx",
        "dx = com.microsoft.GatherElementsGrad<axis=0>(dy, shape, i)",
        {"shape": [4, 3], "i": [[0, 1, 2], [0, 3, 1]]},
    ),
    "GatherNDGrad": Case(
        "int64[3] shape, int64[2,2] i, float[2,4] dy",
        "float[3,5,4] dx",
        "dx = com.microsoft.GatherNDGrad(shape, i, dy)",
        {"shape": [3, 5, 4], "i": [[2, 4], [2, 4]]},
    ),
    "GatherNDGrad batch": Case(
        "int64[3] shape, int64[3,1] i, float[3,4] dy",
        "float[3,5,4] dx",
        "dx = com.microsoft.GatherNDGrad<batch_dims=1>(shape, i, dy)",
        {"shape": [3, 5, 4], "i": [[2], [0], [4]]},
    ),
    "SliceGrad": slices("starts, ends", "3,7", starts=[2], ends=[5]),
    "SliceGrad axes": slices("starts, ends, axes", "4,3", starts=[1, -3], ends=[5, 100], axes=[0, 1]),
    "SliceGrad steps": slices(
        "starts, ends, axes, steps", "6,3", starts=[1], ends=[100], axes=[1], steps=[2]
    ),
    "BroadcastGradientArgs": axes([2, 3, 4], [3, 1]),
    "BroadcastGradientArgs both": axes([2, 1, 4], [3, 1]),
    "BroadcastGradientArgs same": axes([2, 3], [2, 3]),
    "BroadcastGradientArgs shorter": axes([4], [2, 3, 4]),
    "DivGrad": quotient("2,3", "2,3", "2,3"),
    "DivGrad broadcast": quotient("2,1,4", "3,1", "2,3,4"),
    "DivGrad scalar": quotient("2,3", "", "2,3"),
    "ReduceSumTraining": Case(
        "float[2,3,4] x, int64[2] a",
        "float[1,3,1] y",
        "y = com.microsoft.ReduceSumTraining<keepdims=1>(x, a)",
        {"a": [0, -1]},
    ),
    "ReduceSumTraining no dims": Case(
        "float[2,3,4] x, int64[1] a",
        "float[2,4] y",
        "y = com.microsoft.ReduceSumTraining<keepdims=0>(x, a)",
        {"a": [1]},
    ),
    "ReduceSumTraining nothing": Case(
        "float[2,3] x, int64[0] a",
        "float[2,3] y",
        "y = com.microsoft.ReduceSumTraining<noop_with_empty_axes=1>(x, a)",
        {"a": []},
    ),
    "Scale": Case("float[2,3] x, float s", "float[2,3] y", "y = com.microsoft.Scale(x, s)"),
    "Scale down": Case(
        "float[2,3] x, int64 s", "float[2,3] y", "y = com.microsoft.Scale<scale_down=1>(x, s)", {"s": 3}
    ),
    "ReduceAllL2": Case(
        "float[2,3] a, float[4] b, float c", "float y", "y = com.microsoft.ReduceAllL2(a, b, c)"
    ),
    "FakeQuant": Case(
        "float[3,4] x, float[1] s, float[1] z",
        "float[3,4] y, bool[3,4] mask",
        "y, mask = com.microsoft.FakeQuant<quant_min=-4, quant_max=7>(x, s, z)",
        {"s": [0.15], "z": [2]},
    ),
    "FakeQuant default": Case(
        "float[3,4] x, float s, float z",
        "float[3,4] y, bool[3,4] mask",
        "y, mask = com.microsoft.FakeQuant(x, s, z)",
        {"s": 0.01, "z": 128},
    ),
    "FakeQuantGrad": Case(
        "float[3,4] dy, bool[3,4] mask",
        "float[3,4] dx",
        "dx = com.microsoft.FakeQuantGrad(dy, mask)",
        {"mask": np.eye(3, 4)},
    ),
    "LayerNormalizationGrad": norm("LayerNormalizationGrad", "float[{}] mean, ", "mean, "),
    "LayerNormalizationGrad two axes": norm(
        "LayerNormalizationGrad", "float[{}] mean, ", "mean, ", "3,4", "2,1,1", "<axis=1>"
    ),
    "InvertibleLayerNormalizationGrad": norm("InvertibleLayerNormalizationGrad", "float[4] bias, ", "bias, "),
    "SimplifiedLayerNormalizationGrad": norm("SimplifiedLayerNormalizationGrad", "", ""),
    "BatchNormInternal": Case(
        "float[4,3,2,2] x, float[3] scale, float[3] bias, float[3] mean, float[3] var",
        "float[4,3,2,2] y, float[3] m, float[3] v, float[3] saved_mean, float[3] saved_rstd",
        "y, m, v, saved_mean, saved_rstd = com.microsoft.BatchNormInternal<training_mode=1, momentum=0.7, epsilon=0.01>(x, scale, bias, mean, var)",
        {"var": [1, 2, 0.5]},
    ),
    "BatchNormInternal vector": Case(
        "float[4,3] x, float[3] scale, float[3] bias, float[3] mean, float[3] var",
        "float[4,3] y, float[3] m, float[3] v, float[3] saved_mean, float[3] saved_rstd",
        "y, m, v, saved_mean, saved_rstd = com.microsoft.BatchNormInternal<training_mode=1>(x, scale, bias, mean, var)",
        {"var": [1, 2, 0.5]},
    ),
    "BatchNormalizationGrad": Case(
        f"float[4,3,2,2] dy, float[4,3,2,2] x, {BATCH_NORM}",
        "float[4,3,2,2] dx, float[3] dscale, float[3] dbias",
        "dx, dscale, dbias = com.microsoft.BatchNormalizationGrad<epsilon=0.00001>(dy, x, scale, mean, var)",
        {"var": [1, 2, 0.5]},
    ),
    "ConvGrad": convolution(
        "kernel_shape=[3,3], pads=[1,1,1,1], strides=[1,1], dilations=[1,1], group=1", "5,4,3,3", "2,5,9,8"
    ),
    "ConvGrad strides": convolution(
        "kernel_shape=[3,2], pads=[0,0,0,0], strides=[2,3], dilations=[1,1], group=1", "5,4,3,2", "2,5,4,3"
    ),
    "ConvGrad dilated": convolution(
        "kernel_shape=[2,3], pads=[1,0,2,1], strides=[1,1], dilations=[2,1], group=1", "5,4,2,3", "2,5,10,7"
    ),
    "ConvGrad groups": convolution(
        "kernel_shape=[3,3], pads=[1,1,1,1], strides=[1,1], dilations=[1,1], group=2", "6,2,3,3", "2,6,9,8"
    ),
    "ConvGrad one axis": convolution(
        "kernel_shape=[3], pads=[1,1], strides=[2], dilations=[1], group=1", "5,4,3", "2,5,5", "2,4,9"
    ),
    "MaxPoolGrad": maximum("kernel_shape=[2,2], strides=[2,2]", "2,3,4,4"),
    "MaxPoolGrad overlapping": maximum("kernel_shape=[3,3], strides=[1,2], pads=[1,1,1,1]", "2,3,9,4"),
    "AveragePoolGrad": average("kernel_shape=[2,2], strides=[2,2]", "2,3,4,4"),
    "AveragePoolGrad padded": average("kernel_shape=[3,3], strides=[1,2], pads=[1,1,1,1]", "2,3,9,4"),
    "AveragePoolGrad padding counts": average(
        "kernel_shape=[3,3], strides=[1,2], pads=[1,1,1,1], count_include_pad=1", "2,3,9,4"
    ),
    "LSTMGrad": recurrent("LSTM", "b"),
    "LSTMGrad no bias": recurrent("LSTM", ""),
    "LSTMGrad all steps": recurrent("LSTM", "b", last=""),
    "GRUGrad": recurrent("GRU", "b"),
    "GRUGrad no bias": recurrent("GRU", ""),
    "GRUGrad all steps": recurrent("GRU", "b", last=""),
    "AveragePoolGrad nameless": average("kernel_shape=[2,2], strides=[2,2]", "2,3,4,4", "other"),
}

WITHOUT_KERNEL = {"ScaledSum", "ConvTransposeGrad"}
"""Replaced operators that the peer has no CPU kernel for."""


def replaced(model: onnx.ModelProto) -> onnx.ModelProto:
    result = ir.from_proto(model)
    infer_shapes(result)
    replace_peer_operators(result)
    assert {node.domain for node in result.graph} <= {"", operators.DOMAIN}
    result.opset_imports.pop("com.microsoft", None)
    proto = operators.embed_functions(ir.to_proto(result))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], plugin: bool = False
) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    if plugin:
        ort_ops.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


def test_every_replacement_has_a_case() -> None:
    covered = {node.op_type for case in CASES.values() for node in case.model().graph.node}
    assert set(replaced_operators()) - covered == WITHOUT_KERNEL


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the peer makes of every case."""
    folder = tmp_path_factory.mktemp("peer_operators")
    for name, case in CASES.items():
        onnx.save(case.model(), folder / f"{name}.onnx")
        np.savez(folder / f"{name}.inputs.npz", **case.feeds())
    run_in_old_runtime(SCRIPT, folder)
    return folder


@needs_old_runtime
@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_the_peers_kernel(expected: Path, name: str, plugin: bool) -> None:
    error = expected / f"{name}.error"
    assert not error.exists(), error.read_text()
    results, case = np.load(expected / f"{name}.outputs.npz"), CASES[name]
    got = run(replaced(case.model()), case.feeds(), plugin)
    assert set(got) == set(results.files)
    for output, value in got.items():
        assert value.dtype == results[output].dtype
        # sums of up to 144 products of numbers of size 1 to 3 in float32, in another order
        np.testing.assert_allclose(value, results[output], rtol=1e-5, atol=1e-5, err_msg=output)


def test_a_slice_backwards() -> None:
    """The peer's kernel takes no negative steps."""
    case = slices("starts, ends, axes, steps", "6,4", starts=[-1], ends=[-100], axes=[1], steps=[-2])
    feeds = case.feeds()
    expected = np.zeros((6, 7), np.float32)
    expected[:, ::-2] = feeds["dy"]
    np.testing.assert_array_equal(run(replaced(case.model()), feeds)["dx"], expected)


def test_conv_transpose_grad() -> None:
    """The peer has no kernel: compared with the sum of y * dy, which is linear in x and in w."""
    case = convolution(
        "kernel_shape=[3,2], pads=[1,0,1,1], strides=[2,1], dilations=[1,1], group=1",
        "4,5,3,2",
        "2,5,17,8",
        op_type="ConvTransposeGrad",
    )
    feeds = case.feeds()
    got = run(replaced(case.model()), feeds)
    forward = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[2,4,9,8] x, float[4,5,3,2] w) => (float[2,5,17,8] y) {
        y = ConvTranspose<kernel_shape=[3,2], pads=[1,0,1,1], strides=[2,1]>(x, w) }""")
    y = run(forward, {"x": feeds["x"], "w": feeds["w"]})["y"]
    total = (y.astype(np.float64) * feeds["dy"]).sum()
    for operand in ("x", "w"):
        np.testing.assert_allclose(
            (got[f"d{operand}"].astype(np.float64) * feeds[operand]).sum(), total, rtol=1e-4
        )
    np.testing.assert_allclose(got["db"], feeds["dy"].sum(axis=(0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_nodes_without_a_replacement_are_all_named() -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[2,3] x) => (float[2,3] y) {
        [first] a = com.microsoft.ReluGrad(x, x) [second] b = com.microsoft.PythonOp(a)
        [third] c = com.microsoft.UnheardOfGrad(b) [fourth] y = com.microsoft.QuickGelu(c) }""")
    with pytest.raises(ValueError, match="2 nodes of onnxruntime-training cannot be written") as error:
        replace_peer_operators(ir.from_proto(model))
    assert "com.microsoft::PythonOp (node 'second')" in str(error.value)
    assert "com.microsoft::UnheardOfGrad (node 'third')" in str(error.value)
    assert "first" not in str(error.value) and "fourth" not in str(error.value)


def test_no_operator_is_both_replaced_and_not() -> None:
    assert not WITHOUT_REPLACEMENT & set(replaced_operators())


def test_a_pool_whose_input_cannot_be_told() -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N,3,4,4] dy) => (float[N,3,8,8] dx) { [pool] dx = AveragePoolGrad<kernel_shape=[2,2], strides=[2,2]>(dy) }""")
    with pytest.raises(ValueError, match="'dx' a known shape"):
        replace_peer_operators(ir.from_proto(model))


def test_names_and_what_stands_around_stay() -> None:
    """Outputs that nobody reads are left out, and constants are shared."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[2,3] dy, float[2,3] a, float[2,3] b) => (float[2,3] da, float[2,3] e) {
        da, db = com.microsoft.DivGrad(dy, a, b)  d = com.microsoft.TanhGrad(da, a)  e = com.microsoft.TanhGrad(d, b) }""")
    result = replaced(model)
    assert [node.op_type for node in result.graph.node] == ["Div", "Mul", "Sub", "Mul", "Mul", "Sub", "Mul"]
    assert len(result.graph.initializer) == 1
    assert [value.name for value in result.graph.output] == ["da", "e"]


def test_scaled_sum() -> None:
    case = Case(
        "float[2,3] a, float[2,3] b, float[2,3] c",
        "float[2,3] y",
        "y = com.microsoft.ScaledSum<scale_0=0.5, scale_1=2.0, scale_2=-1.0>(a, b, c)",
    )
    feeds = case.feeds()
    np.testing.assert_allclose(
        run(replaced(case.model()), feeds)["y"], feeds["a"] / 2 + 2 * feeds["b"] - feeds["c"], rtol=1e-6
    )
