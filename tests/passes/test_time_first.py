"""Recurrent nodes with the batch first become nodes with the time first: same results, same names."""

# ruff: noqa: E501  (models in ONNX's text format read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from ort_ops.passes import time_first

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("used", ["y", "h"])
def test_computes_the_same(operator: str, used: str) -> None:
    gates, outputs = GATES[operator], "y, h" if used == "y" else ", h"
    shape = "[2,3,1,4]" if used == "y" else "[2,1,4]"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[2,3,5] x, float[1,{4 * gates},5] w, float[1,{4 * gates},4] r, float[2,1,4] start) => (float{shape} {used}) {{
        {outputs} = {operator}<hidden_size=4, layout=1>(x, w, r, , , start) }}""")
    rewritten = ir.from_proto(model)
    assert time_first(rewritten)
    result = ir.to_proto(rewritten)
    onnx.checker.check_model(result, full_check=True)
    assert [value.name for value in result.graph.output] == [used]
    generator = np.random.default_rng(0)
    feeds = {
        value.name: generator.standard_normal(
            [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }
    session = onnxruntime.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = ReferenceEvaluator(model).run(None, feeds)[0]
    # three steps of sums of nine products in float32
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=0, atol=1e-6)


def test_time_first_nodes_are_left_alone() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[3,2,5] x, float[1,4,5] w, float[1,4,4] r) => (float[3,1,2,4] y) { y = RNN<hidden_size=4>(x, w, r) }""")
    )
    assert not time_first(model)
    assert [node.op_type for node in model.graph] == ["RNN"]
