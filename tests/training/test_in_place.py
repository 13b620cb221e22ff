"""What may be updated in place: the checker's answers, and runs that write over their inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from operator_models import run_session, to_numpy, to_ort_value
from optimizer_runs import SHAPES, parameter_types, random_tensors

import ort_ops
from ort_ops.training.in_place import in_place_outputs
from ort_ops.training.optimizer import (
    SGD,
    Adam,
    AdamW,
    AdamWForm,
    Lion,
    LossScaling,
    UpdateRule,
    build_optimizer_model,
    initial_state,
)

HEADER = '<ir_version: 9, opset_import: ["" : 18]>'

SAFE = {
    "element by element": "x_updated = Add(x, g)",
    "read by an ancestor, through others": """
        square = Mul(x, x)
        total = ReduceSum <keepdims = 0> (square)
        inverse = Reciprocal(total)
        x_updated = Mul(x, inverse)""",
    "nobody reads it": "x_updated = Neg(g)",
    "read as a view, before": """
        flat = Identity(x)
        total = ReduceSum <keepdims = 0> (flat)
        x_updated = Sub(x, total)""",
}

UNSAFE = {
    # Lion as it is published: the parameter's direction and the new momentum both read the old momentum.
    "read by a node that may come later": """
        kept = Mul(x, beta2)
        x_updated = Add(kept, g)
        other = Mul(x, beta1)
        y_updated = Add(other, g)""",
    "written by a node before a view, which reads elsewhere first": """
        y_updated = Softmax <axis = 0> (x)
        x_updated = Identity(y_updated)""",
    "written by a node that reads elsewhere first": "x_updated = Softmax <axis = 0> (x)",
    "written where it was read from as a whole": """
        last = Slice(x, minus_one, end, zero)
        x_updated = Add(x, g)
        y_updated = Add(y, last)""",
    "a view of it is read later": """
        flat = Reshape(x, shape)
        x_updated = Add(flat, g)
        y_updated = Sub(flat, g)""",
    "a view of it is an output": """
        y_updated = Identity(x)
        x_updated = Add(y_updated, g)""",
    "read inside a branch": """
        x_updated = Add(x, g)
        y_updated = If(flag) <
            then_branch = yes () => (float[3] a) { a = Add(x, g) },
            else_branch = no () => (float[3] b) { b = Identity(y) }
        >""",
    "other shape": "x_updated = Concat <axis = 0> (g, beta1_1d)",
    "it is the input itself": "x_updated = Identity(x)",
}


def model_of(body: str, x_updated: str = "float[3]") -> onnx.ModelProto:
    outputs = [f"{x_updated} x_updated"] + (["float[3] y_updated"] if "y_updated" in body else [])
    return onnx.parser.parse_model(f"""
        {HEADER}
        update (float[3] x, float[3] y, float[3] g, bool flag) => ({", ".join(outputs)})
        <float beta1 = {{0.9}}, float[1] beta1_1d = {{0.9}}, float beta2 = {{0.99}},
         int64[1] minus_one = {{-1}}, int64[1] end = {{3}}, int64[1] zero = {{0}}, int64[1] shape = {{3}}>
        {{ {body} }}""")


@pytest.mark.parametrize("case", SAFE)
def test_allows(case: str) -> None:
    assert "x" in in_place_outputs(model_of(SAFE[case]))


@pytest.mark.parametrize("case", UNSAFE)
def test_refuses(case: str) -> None:
    shape = "float[4]" if case == "other shape" else "float[3]"
    model = model_of(UNSAFE[case], shape)
    onnx.checker.check_model(model)
    assert "x" not in in_place_outputs(model)


def test_refuses_what_has_no_known_shape_or_another_type() -> None:
    assert in_place_outputs(model_of("x_updated = Add(x, g)", "float[N]")) == set()
    half = model_of("half = Add(x, g)\n x_updated = Cast <to = 10> (half)", "float16[3]")
    assert in_place_outputs(half) == set()


def test_looks_into_functions() -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        update (float[3] x, float[3] y, float[3] g) => (float[3] x_updated, float[3] y_updated)
        { x_updated, y_updated = local.Step(x, y, g) }
        <domain: "local", opset_import: ["" : 18]>
        Step (x, y, g) => (new_x, new_y)
        { new_x = Add(x, g)
           new_y = Add(y, READ) }"""
    assert in_place_outputs(onnx.parser.parse_model(text.replace("READ", "g"))) == {"x", "y"}
    assert in_place_outputs(onnx.parser.parse_model(text.replace("READ", "x"))) == {"y"}


RULES: dict[str, UpdateRule] = {
    "adamw": AdamW(max_gradient_norm=1.0),
    "hugging_face": AdamW(form=AdamWForm.HUGGING_FACE),
    "adam": Adam(weight_decay=0.1),
    "nesterov": SGD(momentum=0.9, nesterov=True, weight_decay=0.1, max_gradient_norm=1.0),
    "lion": Lion(weight_decay=0.1, max_gradient_norm=1.0),
}


@pytest.mark.parametrize("plugin", [False, True], ids=["without_plugin", "with_plugin"])
@pytest.mark.parametrize("scaling", [None, LossScaling(initial_scale=4.0)], ids=["plain", "scaled"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_run_in_place_gives_the_same_bits(
    rule: UpdateRule, scaling: LossScaling | None, plugin: bool, tmp_path: Path
) -> None:
    model = build_optimizer_model(parameter_types(), rule, loss_scaling=scaling)
    plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    options = ort.SessionOptions()
    # Its sequential executor runs nodes in one order, which might happen to be harmless.
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    if plugin:
        ort_ops.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    # What the plugin's kernel runs is one node, what the body of its operator runs is inlined.
    nodes = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert ("AdamW" in nodes) == (plugin and isinstance(rule, AdamW))
    state = {**random_tensors(1), **initial_state(model)}
    memory = {name: to_ort_value(value.copy()) for name, value in state.items()}
    assert set(memory) == in_place_outputs(model)
    for step in range(5):
        gradients = random_tensors(10 + step)
        if step == 3:
            gradients["weight"][0, 0] = np.inf
        feeds = {f"{name}_grad": value for name, value in gradients.items()}
        feeds["learning_rate"] = np.array(0.1, np.float32)
        results = run_session(plain, {**state, **feeds})
        state = {name: results[f"{name}_updated"] for name in state}
        binding = session.io_binding()
        values = {name: to_ort_value(value) for name, value in feeds.items()}
        for name, value in {**memory, **values}.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in memory.items():
            binding.bind_ortvalue_output(f"{name}_updated", value)
        for output in session.get_outputs():
            if not output.name.endswith("_updated"):
                binding.bind_output(output.name, "cpu")
        session.run_with_iobinding(binding)
        for name, value in memory.items():
            assert to_numpy(value).tobytes() == state[name].tobytes(), (step, name)
    assert all(np.isfinite(state[name]).all() for name in SHAPES) == (scaling is not None)
