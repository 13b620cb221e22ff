"""What a session does to a model before it runs on a GPU, and with tensors of the host there. The session
needs a GPU, but its model does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from optimizer_runs import LEARNING_RATES, SHAPES, STEPS, parameter_types, random_tensors, run_steps

from ort_ops.operators import DOMAIN, embed_functions
from ort_ops.training.api import session as session_module
from ort_ops.training.api.device import HOST, Device
from ort_ops.training.api.session import Session, without_cpu_operators
from ort_ops.training.optimizer import AdamW, LossScaling, build_optimizer_model


def test_operators_with_kernels_for_the_cpu_alone_become_their_bodies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session_module, "cuda_operators", set)
    rule = AdamW(no_decay=["norm.*"], max_gradient_norm=1.0)
    model = build_optimizer_model(parameter_types(), rule, loss_scaling=LossScaling(initial_scale=1.0))
    assert any(node.domain == DOMAIN for node in model.graph.node)
    onnx.save(model, tmp_path / "model.onnx")
    start, gradients = random_tensors(0), [random_tensors(1 + step) for step in range(STEPS)]
    expected, _ = run_steps(model, start, gradients, LEARNING_RATES)
    for source in (model, model.SerializeToString(), tmp_path / "model.onnx"):
        inlined = without_cpu_operators(source)
        assert isinstance(inlined, onnx.ModelProto)
        assert not inlined.functions and all(node.domain == "" for node in inlined.graph.node)
        got, _ = run_steps(inlined, start, gradients, LEARNING_RATES)
        for name in SHAPES:
            assert got[-1][name].tobytes() == expected[-1][name].tobytes()


def test_operators_with_kernels_for_cuda_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "cuda_operators", lambda: {"AddLayerNormGrad"})
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18, "ai.onnx.contrib" : 1]>
        f (float[2,3] dy, float[2,3] x, float[2] rstd, float[2] mean, float[3] gamma)
            => (float[2,3] dx, float[2,3] dy2)
        { dx = ai.onnx.contrib.AddLayerNormGrad(dy, x, , rstd, mean, gamma)
          dy2 = ai.onnx.contrib.GeluGrad(dy, x) }""")
    result = without_cpu_operators(embed_functions(model))
    assert isinstance(result, onnx.ModelProto)
    assert [node.op_type for node in result.graph.node if node.domain == DOMAIN] == ["AddLayerNormGrad"]
    assert [function.name for function in result.functions] == ["AddLayerNormGrad"]
    inputs = {
        "dy": np.ones((2, 3), np.float32),
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "rstd": np.ones(2, np.float32),
        "mean": np.ones(2, np.float32),
        "gamma": np.ones(3, np.float32),
    }
    ort.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, inputs)


def test_a_model_without_them_comes_back_as_it_is(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]> f (float[2] x) => (float[2] y) { y = Relu(x) }""")
    assert without_cpu_operators(model) is model
    onnx.save(model, tmp_path / "model.onnx")
    assert without_cpu_operators(tmp_path / "model.onnx") == tmp_path / "model.onnx"


class _CopyingBinding:
    """A binding that copies inputs when they are bound, as that of a GPU does with tensors of the host."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value.numpy().copy()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)


def test_what_is_written_into_a_tensor_of_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]> f (float[2] x) => (float[2] y) { y = Neg(x) }""")
    session = Session(model, HOST, ort.SessionOptions())
    monkeypatch.setattr(session, "_device", Device("cuda"))
    monkeypatch.setattr(session, "_binding", _CopyingBinding(session._binding))
    x = ort.OrtValue.ortvalue_from_numpy(np.array([1, 2], np.float32))
    np.testing.assert_array_equal(session.run({"x": x}, {"y": HOST})["y"].numpy(), [-1, -2])
    x.update_inplace(np.array([3, 4], np.float32))
    np.testing.assert_array_equal(session.run({"x": x}, {"y": HOST})["y"].numpy(), [-3, -4])
