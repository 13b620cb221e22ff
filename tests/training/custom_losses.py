"""Losses written for onnxruntime-training, in the ways that its users write them. Each function takes the
module `onnxblock`, its or ours, so that the very same source builds with both.

The forward model has the outputs `y` [N, 3] and `z` [N, 2].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser

FORWARD = """
<ir_version: 8, opset_import: ["" : 15]>
forward (float[N, 4] x) => (float[N, 3] y, float[N, 2] z)
{
    h = Gemm(x, w1, b1)
    t = Tanh(h)
    y = MatMul(t, w2)
    z = MatMul(t, w3)
}
"""

SHAPES = {"w1": (4, 5), "b1": (5,), "w2": (5, 3), "w3": (5, 2)}


def forward_model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(FORWARD)
    for seed, (name, shape) in enumerate(SHAPES.items()):
        value = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def batch() -> dict[str, np.ndarray]:
    """A value for every input that one of the losses has."""
    random = np.random.default_rng(9)
    return {
        "x": random.normal(size=(6, 4)).astype(np.float32),
        "target": random.normal(size=(6, 3)).astype(np.float32),
        "target2": random.normal(size=(6, 2)).astype(np.float32),
        "binary": random.integers(0, 2, size=(6, 3)).astype(np.float32),
        "labels": random.integers(0, 3, size=6),
        "codes": random.integers(10, 13, size=6),
    }


def weighted_sum(onnxblock: Any) -> Any:
    """Two losses of two outputs; like the published example, without a call of the base's __init__."""

    class WeightedAverageLoss(onnxblock.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            self._loss1 = onnxblock.loss.MSELoss()
            self._loss2 = onnxblock.loss.L1Loss()
            self._w1 = onnxblock.blocks.Constant(0.4)
            self._w2 = onnxblock.blocks.Constant(0.6)
            self._add = onnxblock.blocks.Add()
            self._mul = onnxblock.blocks.Mul()

        def build(self, y: str, z: str) -> str:
            return self._add(
                self._mul(self._w1(), self._loss1(y, target_name="target")),
                self._mul(self._w2(), self._loss2(z, target_name="target2")),
            )

    return WeightedAverageLoss()


def focal(onnxblock: Any) -> Any:
    """mean(-(b (1 - p)^2 log p + (1 - b) p^2 log(1 - p))) of p = sigmoid(y), out of elementary blocks."""
    blocks = onnxblock.blocks

    class FocalLoss(onnxblock.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._clip = blocks.Clip(1e-4, 1 - 1e-4)
            self._square, self._mean = blocks.Pow(2.0), blocks.ReduceMean(keepdims=False)
            self._add, self._sub, self._mul = blocks.Add(), blocks.Sub(), blocks.Mul()
            self._log, self._neg, self._one = blocks.Log(), blocks.Neg(), blocks.Constant(1.0)

        def build(self, y: str, z: str) -> str:
            binary = blocks.InputLike(y)("binary")
            p = self._clip(blocks.Sigmoid()(y))
            q = self._sub(self._one(), p)
            positive = self._mul(binary, self._mul(self._square(q), self._log(p)))
            negative = self._mul(self._sub(self._one(), binary), self._mul(self._square(p), self._log(q)))
            return self._mean(self._neg(self._add(positive, negative)))

    return FocalLoss()


def with_parameters(onnxblock: Any) -> Any:
    """A loss that projects the second output with weights of its own."""
    blocks = onnxblock.blocks

    class ProjectedLoss(onnxblock.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("projected_loss.onnx")
            self._project = blocks.Linear(2, 3, alpha=0.5)

        def build(self, y: str, z: str) -> str:
            target = blocks.InputLike(y)("target")
            distance = blocks.Sub()(blocks.Add()(self._project(z), y), target)
            return blocks.ReduceSum(keepdims=False)(blocks.Pow(2.0)(distance))

    return ProjectedLoss()


def regularised(onnxblock: Any) -> Any:
    """Cross entropy with a label that is ignored, plus the weights' absolute values."""
    blocks = onnxblock.blocks

    class Regularised(onnxblock.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._loss = onnxblock.loss.CrossEntropyLoss(ignore_index=2)

        def build(self, y: str, z: str) -> str:
            penalty = blocks.ReduceSum(keepdims=False)(blocks.Abs()("w1"))
            penalty = blocks.Div()(penalty, blocks.Constant(50.0)())
            return blocks.Add()(blocks.Mul()(self._loss(y), blocks.Constant(2.0)()), penalty)

    return Regularised()


def own_nodes(onnxblock: Any) -> Any:
    """Adds nodes, initializers and an input to the model itself."""

    class LogCosh(onnxblock.Block):  # type: ignore[misc]
        def build(self, y: str, z: str) -> str:
            new_name = onnxblock._graph_utils.generate_graph_name
            graph = self.base.graph
            target = onnxblock._graph_utils.get_output_from_output_name(self.base, y)
            graph.input.append(onnx.helper.make_tensor_value_info("target", 1, ["N", 3]))
            assert target.name == y
            assert onnxblock._graph_utils.node_arg_exists(self.base, "w1")
            half = onnx.helper.make_tensor(new_name("half"), 1, [], [0.5])
            graph.initializer.append(half)
            difference, up, down, both, mean, log, loss = (new_name("value") for _ in range(7))
            node = onnx.helper.make_node
            negative = new_name("value")
            graph.node.extend(
                [
                    node("Sub", [y, "target"], [difference], new_name("Sub")),
                    node("Exp", [difference], [up], new_name("Exp")),
                    node("Neg", [difference], [negative], new_name("Neg")),
                    node("Exp", [negative], [down], new_name("Exp")),
                    node("Add", [up, down], [both], new_name("Add")),
                    node("Mul", [both, half.name], [mean], new_name("Mul")),
                    node("Log", [mean], [log], new_name("Log")),
                    node("ReduceMean", [log], [loss], new_name("ReduceMean"), keepdims=0, axes=[0, 1]),
                ]
            )
            return loss

    return LogCosh()


def encoded_labels(onnxblock: Any) -> Any:
    """Labels in another code, of another type, and a second result that each step returns."""
    blocks = onnxblock.blocks

    class EncodedLabels(onnxblock.Block):  # type: ignore[misc]
        def build(self, y: str, z: str) -> tuple[str, str]:
            codes = onnx.helper.make_tensor_value_info("codes", onnx.TensorProto.INT64, ["N"])
            self.base.graph.input.append(codes)
            self.base.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
            encoder = blocks.LabelEncoder(keys_int64s=[10, 11, 12], values_int64s=[2, 1, 0])
            return onnxblock.loss.CrossEntropyLoss()(y, encoder("codes")), z

    return EncodedLabels()


LOSSES = {
    "weighted_sum": (weighted_sum, ["x", "target", "target2"], ["w1", "b1", "w2", "w3"]),
    "focal": (focal, ["x", "binary"], ["w1", "b1", "w2"]),
    "with_parameters": (with_parameters, ["x", "target"], ["w1", "b1", "w2", "w3"]),
    "regularised": (regularised, ["x", "labels"], ["w1", "b1", "w2"]),
    "own_nodes": (own_nodes, ["x", "target"], ["w1", "b1", "w2"]),
    "encoded_labels": (encoded_labels, ["x", "codes"], ["w1", "b1", "w2"]),
}
"""Each loss, the inputs of its models in their order, and the parameters that it depends on."""
