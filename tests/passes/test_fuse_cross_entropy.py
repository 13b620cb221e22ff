"""The loss operator of a table of scores becomes CrossEntropy and the reduction of its rows."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ort_ops import operators, passes

RNG = np.random.default_rng(5)
SCORES = RNG.standard_normal((6, 4)).astype(np.float32)
LABELS = np.array([0, 3, -100, 1, 1, 2])


def model(attributes: str, inputs: str = "float[6,4] scores, int64[6] labels", extra: str = "") -> ir.Model:
    operands = ", ".join(part.split()[1] for part in inputs.split(", "))
    shape = "[6]" if '"none"' in attributes else ""
    return passes.prepare(
        ir.from_proto(
            onnx.parser.parse_model(f"""
                <ir_version: 8, opset_import: ["": 18]>
                g ({inputs}) => (float{shape} loss) {{
                    loss{extra} = SoftmaxCrossEntropyLoss <{attributes}> ({operands})
                }}
            """)
        ),
        18,
    )


def loss(model: ir.Model, labels: np.ndarray) -> np.ndarray:
    evaluator = ReferenceEvaluator(ir.to_proto(model), new_ops=operators.REFERENCE_OPS)
    return np.asarray(evaluator.run(["loss"], {"scores": SCORES, "labels": labels})[0])


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ('reduction = "none"', ["CrossEntropy"]),
        ('reduction = "sum", ignore_index = -100', ["CrossEntropy", "ReduceSum"]),
        ('reduction = "mean"', ["CrossEntropy", "ReduceMean"]),
        (
            'reduction = "mean", ignore_index = -100',
            ["Cast", "CrossEntropy", "Div", "Equal", "Not", "ReduceSum", "ReduceSum"],
        ),
    ],
)
def test_every_reduction(attributes: str, expected: list[str]) -> None:
    labels = LABELS if "ignore" in attributes else np.maximum(LABELS, 0)
    before, after = model(attributes), model(attributes)
    assert passes.fuse_cross_entropy(after)
    assert sorted(node.op_type for node in after.graph) == expected
    np.testing.assert_allclose(loss(after, labels), loss(before, labels), rtol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "extra"),
    [
        ("float[6,4] scores, int64[6] labels, float[4] weights", ""),
        ("float[6,4,2] scores, int64[6,2] labels", ""),
        ("double[6,4] scores, int64[6] labels", ""),
    ],
    ids=["weights", "three axes", "float64"],
)
def test_what_the_operator_does_not_take_stays(inputs: str, extra: str) -> None:
    after = model('reduction = "mean"', inputs, extra)
    assert not passes.fuse_cross_entropy(after)
    assert [node.op_type for node in after.graph] == ["SoftmaxCrossEntropyLoss"]


def test_a_loss_whose_log_probabilities_are_read_stays() -> None:
    after = model('reduction = "mean"', extra=", log_probabilities")
    after.graph.outputs.append(after.graph.node(0).outputs[1])
    assert not passes.fuse_cross_entropy(after)
