"""What cannot be differentiated is refused with one sentence that names it, why, and the way out."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import pytest

from ort_ops.gradient import GradientError, build_gradient_model

HEADER = '<ir_version: 8, opset_import: ["": 18, "my.domain": 1]>'


def model(
    body: str,
    inputs: str = "float[2,3] x",
    initializers: str = "float[3] w = {1, 2, 3}",
    loss: str = "float loss",
) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEADER} g ({inputs}) => ({loss}) <{initializers}> {{ {body} }}")


def refusal(*args: object, **kwargs: object) -> str:
    with pytest.raises(GradientError) as caught:
        build_gradient_model(*args, **kwargs)  # type: ignore[arg-type]
    return str(caught.value)


GOOD = "y = Mul(x, w)\n loss = ReduceSum<keepdims=0>(y)"


def test_one_error_lists_every_blocking_node_with_the_parameter_that_it_blocks() -> None:
    blocked = model(
        "[first] a = my.domain.Strange(x, w)\n [second] b = my.domain.Odd(a)\n c = Mul(b, v)\n loss = ReduceSum<keepdims=0>(c)",
        initializers="float[3] w = {1, 2, 3}, float[3] v = {1, 2, 3}",
    )
    message = refusal(blocked, ["w", "v"])
    assert "2 nodes" in message
    for line in (
        "my.domain::Strange (node 'first'), opset 1, blocks 'w'",
        "my.domain::Odd (node 'second'), opset 1, blocks 'w'",
    ):
        assert line in message
    assert "'v'" not in message


@pytest.mark.parametrize(
    "body",
    [
        "y = Mul(x, w)\n u = my.domain.Strange(x)\n z = Mul(y, u)\n loss = ReduceSum<keepdims=0>(z)",
        "y = Mul(x, w)\n loss = ReduceSum<keepdims=0>(y)\n other = my.domain.Strange(y)",
    ],
    ids=["branch without parameters", "after the loss"],
)
def test_operators_off_the_way_need_no_rule(body: str) -> None:
    training = build_gradient_model(model(body), ["w"])
    assert [output.name for output in training.graph.output] == ["loss", "w_grad"]


@pytest.mark.parametrize("operator", ["Floor", "Round", "Sign"])
def test_piecewise_constant_operators_give_zeros_not_an_error(operator: str) -> None:
    from onnx.reference import ReferenceEvaluator

    training = build_gradient_model(
        model(f"a = Mul(x, w)\n y = {operator}(a)\n loss = ReduceSum<keepdims=0>(y)"), ["w"]
    )
    _, gradient = ReferenceEvaluator(training).run(
        None, {"x": np.ones((2, 3), np.float32), "w": np.full(3, 0.3, np.float32)}
    )
    np.testing.assert_array_equal(gradient, np.zeros(3, np.float32))


def test_unknown_name() -> None:
    message = refusal(model(GOOD), ["ww"])
    assert "'ww'" in message and "did you mean 'w'" in message


def test_name_given_twice() -> None:
    assert "'w' more than once" in refusal(model(GOOD), ["w", "w"])


def test_integer_name() -> None:
    indexed = model(
        "y = Gather(w, i)\n loss = ReduceSum<keepdims=0>(y)",
        inputs="int64[2] i",
        initializers="float[3] w = {1, 2, 3}",
    )
    message = refusal(indexed, ["i"])
    assert "'i' (int64)" in message and "only float" in message


def test_unreachable_name_says_where_the_path_ends() -> None:
    message = refusal(
        model(
            "[cut] c = Greater(x, w)\n d = Cast<to=1>(c)\n y = Mul(d, v)\n loss = ReduceSum<keepdims=0>(y)",
            initializers="float[3] w = {1, 2, 3}, float[3] v = {1, 2, 3}",
        ),
        ["w", "v"],
    )
    assert "'w'" in message and "does not depend on it" in message and "Greater (node 'cut')" in message
    assert "'v'" not in message


def test_loss_that_is_not_a_scalar() -> None:
    message = refusal(model("loss = Mul(x, w)", loss="float[2,3] loss"), ["w"])
    assert "must be a scalar" in message and "[2,3]" in message.replace(" ", "")


def test_loss_that_is_missing() -> None:
    message = refusal(model(GOOD), ["w"], loss="cost")
    assert "no output 'cost'" in message and "'loss'" in message


def test_integer_loss() -> None:
    message = refusal(
        model("y = Mul(x, w)\n s = ReduceSum<keepdims=0>(y)\n loss = Cast<to=7>(s)", loss="int64 loss"), ["w"]
    )
    assert "floating-point" in message and "int64" in message


def test_model_that_the_checker_refuses() -> None:
    bad = model(GOOD)
    bad.graph.node[0].input[0] = "nowhere"
    message = refusal(bad, ["w"])
    assert "checker" in message and "nowhere" in message


def test_types_that_do_not_fit() -> None:
    bad = model("y = Mul(x, w)\n loss = ReduceSum<keepdims=0>(y)", inputs="double[2,3] x")
    assert "do not fit together" in refusal(bad, ["w"])


def test_model_that_has_gradients() -> None:
    normed = model(
        "y = LayerNormalization(x, w)\n loss = ReduceSum<keepdims=0>(y)",
    )
    training = build_gradient_model(normed, ["w"])
    message = refusal(training, ["x"])
    assert "already has gradients" in message and "AddLayerNormGrad" in message


def test_missing_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert "no model file" in refusal(tmp_path / "absent.onnx", ["w"])


CONTROL = {
    "If": "[choose] y = If(c) <then_branch = t () => (float[2,3] p) {p = Mul(x, w)}, else_branch = e () => (float[2,3] q) {q = Identity(x)}>",
    "Loop": """n = Constant<value_int=3>()
        [repeat] y = Loop(n, c, x) <body = b (int64 i, bool go, float[2,3] s) => (bool stay, float[2,3] t)
        {stay = Identity(go) t = Mul(s, w)}>""",
}


@pytest.mark.parametrize("operator", CONTROL)
def test_control_flow_on_the_way_is_refused_by_name(operator: str) -> None:
    message = refusal(
        model(f"{CONTROL[operator]}\n loss = ReduceSum<keepdims=0>(y)", inputs="float[2,3] x, bool c"), ["w"]
    )
    name = {"If": "choose", "Loop": "repeat"}[operator]
    assert f"{operator} (node '{name}')" in message and "control flow" in message and "'w'" in message


def test_a_scan_whose_body_reads_a_parameter_from_outside_is_refused() -> None:
    message = refusal(
        model(
            """[steps] y, z = Scan<num_scan_inputs=1, body = b (float[3] s, float[3] e) => (float[3] t, float[3] o)
            {t = Mul(s, w) o = Mul(t, e)}>(v, x)  loss = ReduceSum<keepdims=0>(y)""",
            initializers="float[3] w = {1, 2, 3}, float[3] v = {1, 2, 3}",
        ),
        ["v", "w"],
    )
    assert "'w'" in message


@pytest.mark.parametrize("operator", CONTROL)
def test_control_flow_off_the_way_is_left_alone(operator: str) -> None:
    frozen = model(
        f"{CONTROL[operator]}\n z = Mul(y, v)\n loss = ReduceSum<keepdims=0>(z)",
        inputs="float[2,3] x, bool c",
        initializers="float[3] w = {1, 2, 3}, float[3] v = {1, 2, 3}",
    )
    training = build_gradient_model(frozen, ["v"])
    assert operator in [node.op_type for node in training.graph.node]
    onnx.checker.check_model(training)


def test_if_with_a_constant_condition_becomes_its_branch() -> None:
    folded = model(
        CONTROL["If"] + "\n loss = ReduceSum<keepdims=0>(y)",
        initializers="float[3] w = {1, 2, 3}, bool c = {1}",
    )
    training = build_gradient_model(folded, ["w"])
    assert "If" not in [node.op_type for node in training.graph.node]


def test_nothing_to_differentiate() -> None:
    message = refusal(model("loss = ReduceSum<keepdims=0>(x)"))
    assert "nothing to differentiate" in message
