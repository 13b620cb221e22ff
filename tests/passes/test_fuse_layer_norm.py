"""A LayerNorm that is written out becomes one node, and only if it is exactly that."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ort_ops.passes import fuse_layer_norm, infer_shapes

HEAD = """
    axes = Constant<value_ints=[{axes}]>()  eps = Constant<value_float=0.001>()  two = Constant<value_float=2.0>()
    mean = ReduceMean<keepdims={keep}>(x, axes)  d = Sub(x, mean)
"""
CENTRED = {
    "pow, div": "sq = Pow(d, two)  var = ReduceMean(sq, axes)  sum = Add(var, eps)  std = Sqrt(sum)  n = Div(d, std)",
    "mul, reciprocal": "sq = Mul(d, d)  var = ReduceMean(sq, axes)  sum = Add(var, eps)  std = Sqrt(sum)  r = Reciprocal(std)  n = Mul(d, r)",
}
TENSORFLOW = """sq = Mul(d, d)  var = ReduceMean(sq, axes)  sum = Add(var, eps)  std = Sqrt(sum)  r = Reciprocal(std)
    f = Mul(r, gamma)  xf = Mul(x, f)  mf = Mul(mean, f)  shift = Sub(beta, mf)  y = Add(xf, shift)"""


def build(
    body: str, axes: str = "-1", keep: int = 1, norm: str = "4", kind: str = "float", extra: str = ""
) -> ir.Model:
    text = f"""<ir_version: 8, opset_import: ["": 18]> g ({kind}[2,3,4] x, {kind}[{norm}] gamma, {kind}[{norm}] beta) => ({kind}[2,3,4] y{extra}) {{
        {HEAD.format(axes=axes, keep=keep)} {body} }}"""
    if kind != "float":
        text = text.replace("value_float=0.001", f"value={kind} {{1}}").replace(
            "value_float=2.0", f"value={kind} {{2}}"
        )
    model = ir.from_proto(onnx.parser.parse_model(text))
    ir.passes.common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    infer_shapes(model)
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def run(model: ir.Model, norm: tuple[int, ...] = (4,)) -> np.ndarray:
    generator = np.random.default_rng(0)
    feeds = {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": (2, 3, 4), "gamma": norm, "beta": norm}.items()
    }
    return ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)[0]


@pytest.mark.parametrize("centred", CENTRED)
@pytest.mark.parametrize("scaled", ["m = Mul(n, gamma)", "m = Mul(gamma, n)"])
@pytest.mark.parametrize("shifted", ["y = Add(m, beta)", "y = Add(beta, m)", "y = Identity(m)"])
def test_written_out(centred: str, scaled: str, shifted: str) -> None:
    model = build(f"{CENTRED[centred]}  {scaled}  {shifted}")
    before = run(model)
    assert fuse_layer_norm(model)
    assert operators(model) == (
        ["LayerNormalization"] if "beta" in shifted else ["LayerNormalization", "Identity"]
    )
    assert not model.graph.initializers, "constants that nothing reads"
    np.testing.assert_allclose(run(model), before, rtol=1e-5, atol=1e-6)


def test_several_trailing_axes() -> None:
    model = build(CENTRED["pow, div"] + "  m = Mul(n, gamma)  y = Add(m, beta)", axes="1, -1", norm="3,4")
    before = run(model, (3, 4))
    assert fuse_layer_norm(model)
    assert operators(model) == ["LayerNormalization"]
    np.testing.assert_allclose(run(model, (3, 4)), before, rtol=1e-5, atol=1e-6)


def test_as_tensorflow_writes_it() -> None:
    model = build(TENSORFLOW)
    before = run(model)
    assert fuse_layer_norm(model)
    assert operators(model) == ["LayerNormalization"]
    np.testing.assert_allclose(run(model), before, rtol=1e-5, atol=1e-6)


AFFINE = "  m = Mul(n, gamma)  y = Add(m, beta)"
PLAIN = CENTRED["pow, div"]


@pytest.mark.parametrize(
    ("body", "form"),
    [
        (PLAIN.replace("Pow(d, two)", "Pow(d, eps)") + AFFINE, {}),
        (
            PLAIN.replace("ReduceMean(sq, axes)", "ReduceMean(sq, other)").replace(
                "sq =", "other = Constant<value_ints=[1]>()  sq ="
            )
            + AFFINE,
            {},
        ),
        (PLAIN + AFFINE, {"axes": "1"}),
        (PLAIN + AFFINE, {"norm": "1"}),
        (PLAIN + AFFINE, {"norm": "3,1"}),
        (PLAIN + AFFINE, {"kind": "float16"}),
        (PLAIN + AFFINE, {"extra": ", float[2,3,4] d"}),
        (PLAIN.replace("Add(var, eps)", "Sub(var, eps)") + AFFINE, {}),
        (PLAIN.replace("sq = Pow(d, two)", "sq = Pow(x, two)") + AFFINE, {}),
    ],
    ids=[
        "other exponent",
        "other axes",
        "not the last axis",
        "scale of one",
        "scale of another shape",
        "float16",
        "deviation is an output",
        "eps subtracted",
        "mean square, not variance",
    ],
)
def test_what_is_not_exactly_a_layer_norm_stays(body: str, form: dict[str, str]) -> None:
    model = build(body, **form)  # type: ignore[arg-type]
    before = operators(model)
    fuse_layer_norm(model)
    assert "LayerNormalization" not in operators(model)
    assert operators(model) == before


def test_a_bias_of_another_shape_stays_an_add() -> None:
    """A residual that is added to a norm without a bias is no bias."""
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[2,3,4] x, float[4] gamma, float[2,3,4] r) => (float[2,3,4] y) {
        s = Sqrt(r)  n = LayerNormalization(x, gamma)  y = Add(n, s) }""")
    )
    infer_shapes(model)
    fuse_layer_norm(model)
    assert operators(model) == ["Sqrt", "LayerNormalization", "Add"]
