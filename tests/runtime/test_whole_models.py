"""The operator inside of larger models: beside the forward pass, in subgraphs and functions, at any level."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from operator_models import make_model, run_session
from oracle import FLOAT, assert_matches, make_inputs
from plugin_sessions import executed_operators, plugin_session
from test_operators import NESTED

from ort_ops.operators import DOMAIN, embed_functions

LEVELS = onnxruntime.GraphOptimizationLevel

FORWARD_AND_BACKWARD = """
<ir_version: 9, opset_import: ["": 17, "ai.onnx.contrib": 1]>
block (float[b, s, 96] x1, float[b, s, 96] x2, float[96] gamma, float[96] beta, float[b, s, 96] dy)
    => (float[b, s, 96] y, float[b, s, 1] mean, float[b, s, 1] rstd, float[b, s, 96] dx, float[96] dgamma,
        float[96] dbeta)
{
    x = Add (x1, x2)
    y, mean, rstd = LayerNormalization <axis = -1, epsilon = 1e-12> (x, gamma, beta)
    dx, dgamma, dbeta = ai.onnx.contrib.AddLayerNormGrad (dy, x1, x2, rstd, mean, gamma, dy)
}
"""


@pytest.mark.parametrize(
    "level",
    [LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_BASIC, LEVELS.ORT_ENABLE_EXTENDED, LEVELS.ORT_ENABLE_ALL],
    ids=str,
)
@pytest.mark.parametrize("parallel", [True, False])
def test_forward_and_backward_in_one_graph(level, parallel):
    """Half of the rows are constant, so with this epsilon their rstd is 1e6."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    if parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    model = embed_functions(onnx.parser.parse_model(FORWARD_AND_BACKWARD))
    session = plugin_session(model, options=options)
    inputs = make_inputs((4, 8, 96))
    x1, x2 = inputs.x1.copy(), inputs.x2.copy()
    x1[:, ::2], x2[:, ::2] = 0.5, 0.25
    beta = np.full(96, 0.5, FLOAT)
    feeds = {"x1": x1, "x2": x2, "gamma": inputs.gamma, "beta": beta, "dy": inputs.dy}
    results = run_session(session, feeds)
    assert results["rstd"][:, ::2].min() > 9e5 and results["rstd"][:, 1::2].max() < 10
    inputs = inputs.replace(x1=x1, x2=x2, rstd=results["rstd"], mean=results["mean"], dsum=inputs.dy)
    assert_matches(inputs, **{name: results[name] for name in ("dx", "dgamma", "dbeta")})


@pytest.mark.parametrize("chosen", [True, False])
def test_kernel_runs_in_subgraphs_and_functions(chosen):
    model = embed_functions(onnx.parser.parse_model(NESTED))
    inputs = make_inputs((4, 6), dsum=False, trailing_ones=False)
    feeds = {"chosen": np.array(chosen), **inputs.arrays()}
    # One in the branch of the If, two in one function, one in the other.
    assert executed_operators(model, feeds) == {"AddLayerNormGrad": 4, "If": 1}
    results = run_session(plugin_session(model), feeds)
    assert_matches(inputs if chosen else inputs.replace(x2=None), dx=results["first"])
    assert_matches(inputs.replace(dsum=inputs.dy), dx=results["third"])


@pytest.mark.parametrize("opset", [13, 14, 15, 17, 18, 21, 24])
@pytest.mark.parametrize("ir_version", [7, 8, 10, 11])
def test_kernel_serves_every_opset_and_ir_version(opset, ir_version):
    inputs = make_inputs((4, 6), x2=False)
    session = plugin_session(make_model(inputs, opset=opset, ir_version=ir_version))
    assert_matches(inputs, **run_session(session, inputs.arrays()))


def test_model_that_imports_the_domain_at_another_version():
    inputs = make_inputs((4, 6))
    model = make_model(inputs)
    imports = {entry.domain: entry for entry in model.opset_import}
    imports[DOMAIN].version = 2
    assert_matches(inputs, **run_session(plugin_session(model), inputs.arrays()))


def test_optimised_model_keeps_the_operator_and_can_be_loaded_again(tmp_path):
    inputs = make_inputs((4, 6))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = LEVELS.ORT_ENABLE_EXTENDED
    plugin_session(embed_functions(make_model(inputs)), options=options)
    saved = onnx.load(options.optimized_model_filepath)
    assert [node.op_type for node in saved.graph.node] == ["AddLayerNormGrad"]
    assert_matches(inputs, **run_session(plugin_session(saved), inputs.arrays()))


def test_a_size_without_a_name_is_not_taken_for_a_number():
    # ONNX Runtime would fold Shape(dx) to -1 if the plugin passed on an unknown size that has no name.
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17, "ai.onnx.contrib": 1]>
        unnamed (float[n, 4] x, bool[k] kept, float[m, 1] statistic, float[4] gamma) => (int64[2] size)
        {
            dy = Compress <axis = 0> (x, kept)
            dx = ai.onnx.contrib.AddLayerNormGrad (dy, dy, , statistic, statistic, gamma)
            size = Shape (dx)
        }
    """)
    session = plugin_session(model)
    for rows in (1, 2, 3):
        feeds = {
            "x": np.ones((3, 4), np.float32),
            "kept": np.arange(3) < rows,
            "statistic": np.ones((rows, 1), np.float32),
            "gamma": np.ones(4, np.float32),
        }
        np.testing.assert_array_equal(session.run(["size"], feeds)[0], [rows, 4])
