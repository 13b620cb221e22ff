"""Dropout that draws survives ONNX Runtime's optimizer where no gradient passes through it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from ort_ops.gradient import build_gradient_model

ROWS = 2000


def zeros_share(training_mode: str, read: str) -> float:
    """Share of zeros that a Dropout with ratio 0.4 makes of ones, in a gradient model where no gradient flows
    to it."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[n] x, float[n] w) => (float loss, float[n] {read}) {{
        squares = Mul(x, x)
        ratio = Constant<value = float {{0.4}}>()  mode = Constant<value = bool {{{training_mode}}}>()
        dropped = Dropout(squares, ratio, mode)
        scaled = Mul(dropped, dropped)
        weighted = Mul(scaled, w)
        loss = ReduceSum<keepdims = 0>(weighted) }}"""
    )
    gradients = build_gradient_model(model, ["w"])
    onnx.checker.check_model(gradients, full_check=True)
    session = onnxruntime.InferenceSession(gradients.SerializeToString(), providers=["CPUExecutionProvider"])
    ones = np.ones(ROWS, np.float32)
    result, w_grad = session.run([read, "w_grad"], {"x": ones, "w": ones})
    np.testing.assert_array_equal(w_grad == 0, result == 0)
    return float(np.mean(result == 0))


@pytest.mark.parametrize("read", ["dropped", "scaled"])
def test_it_draws(read: str) -> None:
    # five standard deviations of a share of 2000 draws
    assert abs(zeros_share("1", read) - 0.4) < 0.055


def test_one_that_does_not_draw_is_left_alone() -> None:
    assert zeros_share("0", "scaled") == 0.0
