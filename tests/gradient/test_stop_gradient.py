"""StopGradient: a value that counts as a constant when gradients are built, and is a copy when models run."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

from ort_ops.gradient import build_gradient_model
from ort_ops.gradient.stop_gradient import DOMAIN, STOP_GRADIENT, stop_gradient_function

OPSET = 20


def test_the_gradient_stops_and_the_value_passes() -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": {OPSET}, "{DOMAIN}": 1]>
        g (float[2] x, float[2] w) => (float loss) {{
            product = Mul(x, w)
            constant = {DOMAIN}.{STOP_GRADIENT}(product)
            squares = Mul(product, constant)
            loss = ReduceSum<keepdims = 0>(squares) }}"""
    )
    model.functions.append(stop_gradient_function(OPSET))
    gradients = build_gradient_model(model, ["w"])
    onnx.checker.check_model(gradients, full_check=True)
    assert STOP_GRADIENT not in {node.op_type for node in gradients.graph.node}

    x, w = np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)
    for each in (model, gradients):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        assert session.run(["loss"], {"x": x, "w": w})[0] == 9.0 + 64.0
    # d/dw of sum(x w c) with c = x w held: x * c
    np.testing.assert_array_equal(session.run(["w_grad"], {"x": x, "w": w})[0], x * (x * w))
