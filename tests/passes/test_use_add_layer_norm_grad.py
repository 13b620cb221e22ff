"""Training graphs in the form of onnxruntime-training: the exact nodes that come out, their numbers, and what
must stay.

The numbers are those of the graph before the rewrite, in which the norm's gradient is done by NumPy in
float64.
"""

# ruff: noqa: E501  (models in ONNX's text format read better on one line)

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from old_runtime import needs_old_runtime, run_in_old_runtime
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import ort_ops
from ort_ops.operators import embed_functions
from ort_ops.passes import use_add_layer_norm_grad
from ort_ops.passes.use_add_layer_norm_grad import Report

SHAPE = "[2,3,8]"

LEVELS_SCRIPT = Path(__file__).parents[1] / "gradient" / "old_runtime_levels_script.py"
"""Runs the models of a folder at every optimisation level."""


class LayerNormalizationGrad(OpRun):
    op_domain = "com.microsoft"

    def _run(self, dy, x, scale, mean, rstd, axis=-1):  # type: ignore[no-untyped-def]
        dy, x, wide, mean, rstd = (value.astype(np.float64) for value in (dy, x, scale, mean, rstd))
        axes = tuple(range(axis % x.ndim, x.ndim))
        xhat = (x - mean) * rstd
        g = dy * wide
        dx = rstd * (g - g.mean(axis=axes, keepdims=True) - xhat * (g * xhat).mean(axis=axes, keepdims=True))
        rows = tuple(range(axis % x.ndim))
        dscale, dbias = (dy * xhat).sum(axis=rows), dy.sum(axis=rows)
        return dx.astype(np.float32), dscale.astype(scale.dtype), dbias.astype(scale.dtype)


NORM = "y, mean, rstd = LayerNormalization(x, scale, bias)"
GRAD = "dx, dscale, dbias = com.microsoft.LayerNormalizationGrad(dy, x, scale, mean, rstd)"


def build(
    body: str,
    inputs: str = "",
    outputs: str = "",
    infos: str = "",
    opset: int = 17,
    scale: str = "float[8]",
) -> onnx.ModelProto:
    """A graph of inputs x, dy, r (gradients of other ways), scale and bias."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>
        g (float{SHAPE} x, float{SHAPE} dy, float{SHAPE} r, {scale} scale, {scale} bias{inputs}) => ({outputs}) <{infos}> {{ {body} }}"""
    return onnx.parser.parse_model(text)


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        value.name: generator.standard_normal(
            [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        ).astype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in model.graph.input
    }


def nodes(model: onnx.ModelProto) -> list[str]:
    """Each node as `operator(inputs) -> outputs`."""
    return [
        f"{node.op_type}({', '.join(node.input)}) -> {', '.join(name for name in node.output if name)}"
        for node in model.graph.node
    ]


def rewrite(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Report]:
    """The rewritten model, which is checked, run with and without the plugin, and compared with the given
    one."""
    before = model.SerializeToString(deterministic=True)
    result, report = use_add_layer_norm_grad(model)
    assert model.SerializeToString(deterministic=True) == before
    assert result.graph.input == model.graph.input and result.graph.output == model.graph.output
    options = onnxruntime.SessionOptions()
    ort_ops.register(options)
    values = feeds(model)
    expected = ReferenceEvaluator(model, new_ops=[LayerNormalizationGrad]).run(None, values)
    if not report.left:
        onnx.checker.check_model(result, full_check=True)
        for chosen in (options, onnxruntime.SessionOptions()):
            session = onnxruntime.InferenceSession(
                result.SerializeToString(), chosen, providers=["CPUExecutionProvider"]
            )
            # sums of six rows or eight columns of values of size 1 to 5 in float32
            for got, want in zip(session.run(None, values), expected, strict=True):
                assert got.dtype == want.dtype
                tolerance = 2e-3 if want.dtype == np.float16 else 1e-5
                np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return result, report


FUSED = "AddLayerNormGrad(dy, x, , rstd, mean, scale, r) -> total, dscale, dbias"
ALL = f"float{SHAPE} y, float{SHAPE} total, float[8] dscale, float[8] dbias"


@pytest.mark.parametrize(
    "after",
    [
        "total = Sum(r, dx)",
        "total = Sum(dx, r)",
        "total = Add(dx, r)",
        "i = Identity(dx)  total = Sum(r, i)",
        "i = Identity(dx)  j = Identity(i)  total = Sum(j, r)",
    ],
)
def test_the_residual_gradient_is_added_inside(after: str) -> None:
    model, report = rewrite(build(f"{NORM}  {GRAD}  {after}", outputs=ALL))
    assert nodes(model) == ["LayerNormalization(x, scale, bias) -> y, mean, rstd", FUSED]
    assert [(entry.why_no_sum, report.left) for entry in report.fused] == [("", ())]


def test_a_residual_gradient_behind_an_identity_stays_where_it_is() -> None:
    model, _ = rewrite(
        build(f"{NORM}  {GRAD}  i = Identity(r)  total = Sum(i, dx)", outputs=ALL, infos=f"float{SHAPE} i")
    )
    assert nodes(model)[1:] == ["Identity(r) -> i", FUSED.replace(", r)", ", i)")]


@pytest.mark.parametrize("order", ["dx, r, s, r", "r, dx, s, r", "r, s, r, dx"])
def test_one_of_four_addends(order: str) -> None:
    """As after the parallel branches of GPT-J."""
    model, _ = rewrite(build(f"{NORM}  {GRAD}  total = Sum({order})", f", float{SHAPE} s", ALL))
    assert nodes(model)[1] == "Sum(r, s, r) -> Sum_output"
    assert nodes(model)[2:] == [FUSED.replace(", r)", ", Sum_output)")]


def test_two_norms_whose_gradients_meet_in_one_sum() -> None:
    """x + f(norm1(x)) + g(norm2(x)): the Sum of three disappears."""
    body = f"""{NORM}  {GRAD}
        dx2, dscale2, dbias2 = com.microsoft.LayerNormalizationGrad(r, x, scale, mean, rstd)  total = Sum(dy, dx, dx2)"""
    outputs = f"{ALL}, float[8] dscale2, float[8] dbias2"
    model, report = rewrite(build(body, outputs=outputs, infos=f"float{SHAPE} dx2, float{SHAPE} dx"))
    assert nodes(model)[1:] == [
        "AddLayerNormGrad(r, x, , rstd, mean, scale, dy) -> Sum_output, dscale2, dbias2",
        "AddLayerNormGrad(dy, x, , rstd, mean, scale, Sum_output) -> total, dscale, dbias",
    ]
    assert len(report.fused) == 2


POST_NORM = (
    f"""{NORM}  {GRAD}  i = Identity(dx)  j = Identity(dx)  branch = MatMul(i, w)  total = Sum({{}})"""
)


@pytest.mark.parametrize("order", ["j, branch", "branch, j"])
def test_an_addend_that_depends_on_dx_stays_outside(order: str) -> None:
    """Post-norm: adding it inside would be a cycle."""
    model, report = rewrite(
        build(POST_NORM.format(order), ", float[8,8] w", ALL, f"float{SHAPE} branch, float{SHAPE} j")
    )
    assert nodes(model)[1:] == [
        "AddLayerNormGrad(dy, x, , rstd, mean, scale, ) -> dx, dscale, dbias",
        "Identity(dx) -> i",
        "Identity(dx) -> j",
        "MatMul(i, w) -> branch",
        f"Sum({order}) -> total",
    ]
    [entry] = report.fused
    assert entry.sum == "" and "a cycle" in entry.why_no_sum and "'branch'" in entry.why_no_sum


def test_of_several_addends_those_go_inside_that_do_not_depend_on_it() -> None:
    body = f"{NORM}  {GRAD}  late = Mul(r, dscale)  total = Sum(r, dx, late)"
    model, _ = rewrite(build(body, outputs=ALL, infos=f"float{SHAPE} late"))
    assert nodes(model)[1:] == [
        "AddLayerNormGrad(dy, x, , rstd, mean, scale, r) -> dx_and_residual, dscale, dbias",
        "Mul(r, dscale) -> late",
        "Sum(dx_and_residual, late) -> total",
    ]


def test_an_addend_that_depends_on_the_scales_gradient_is_a_cycle_too() -> None:
    body = f"{NORM}  {GRAD}  late = Mul(r, dscale)  total = Sum(late, dx)"
    model, report = rewrite(build(body, outputs=ALL, infos=f"float{SHAPE} late"))
    assert [node.op_type for node in model.graph.node] == [
        "LayerNormalization",
        "AddLayerNormGrad",
        "Mul",
        "Sum",
    ]
    assert "a cycle" in report.fused[0].why_no_sum


def test_an_addend_that_depends_on_dx_in_the_body_of_a_node_is_a_cycle_too() -> None:
    body = f"""{NORM}  {GRAD}  yes = Constant<value = bool {{1}}>()
        late = If(yes)<then_branch = g () => (float{SHAPE} t) {{ t = Mul(r, dscale) }}, else_branch = g () => (float{SHAPE} e) {{ e = Neg(r) }}>
        total = Sum(late, dx)"""
    model, report = rewrite(build(body, outputs=ALL, infos=f"float{SHAPE} late"))
    assert [node.op_type for node in model.graph.node][-2:] == ["If", "Sum"]
    assert "a cycle" in report.fused[0].why_no_sum


@pytest.mark.parametrize(
    ("body", "outputs", "why"),
    [
        ("total = Mul(dx, r)", "", "no sum"),
        ("total = Sum(dx, r)", f", float{SHAPE} dx", "output of the graph"),
        ("n = Neg(dx)  total = Sum(dx, r)", f", float{SHAPE} n", "is read by"),
        ("total = Sum(dx, dx)", "", "is read by"),
        ("total = Sum(dx, bias)", "", "shape of 'bias'"),
        ("total = Sum(dx, mean)", "", "shape of 'mean'"),
        ("total = Identity(dx)", "", "nothing reads"),
    ],
)
def test_no_such_sum(body: str, outputs: str, why: str) -> None:
    model, report = rewrite(build(f"{NORM}  {GRAD}  {body}", outputs=ALL + outputs))
    assert nodes(model)[1] == "AddLayerNormGrad(dy, x, , rstd, mean, scale, ) -> dx, dscale, dbias"
    assert why in report.fused[0].why_no_sum or report.fused[0].why_no_sum.endswith("an output of the graph")


def test_gradients_of_a_shared_scale_are_still_summed() -> None:
    body = f"""{NORM}  dx, dscale_0, dbias_0 = com.microsoft.LayerNormalizationGrad(dy, x, scale, mean, rstd)
        dx2, dscale_1, dbias_1 = com.microsoft.LayerNormalizationGrad(dx, x, scale, mean, rstd)
        total = Sum(dx2, r)  dscale = Sum(dscale_0, dscale_1)  dbias = Sum(dbias_0, dbias_1)"""
    model, _ = rewrite(build(body, outputs=ALL))
    assert nodes(model)[1:] == [
        "AddLayerNormGrad(dy, x, , rstd, mean, scale, ) -> dx, dscale_0, dbias_0",
        "AddLayerNormGrad(dx, x, , rstd, mean, scale, r) -> total, dscale_1, dbias_1",
        "Sum(dscale_0, dscale_1) -> dscale",
        "Sum(dbias_0, dbias_1) -> dbias",
    ]


@pytest.mark.parametrize(
    ("outputs", "left"),
    [
        ("total", "total"),
        ("total, dscale", "total, dscale"),
        ("total, dbias", "total, dbias"),
        ("dscale, dbias", "dx, dscale, dbias"),
    ],
)
def test_outputs_that_nobody_reads_are_left_out(outputs: str, left: str) -> None:
    """A frozen scale, bias or input."""
    types = {"total": f"float{SHAPE}", "dscale": "float[8]", "dbias": "float[8]"}
    declared = ", ".join(f"{types[name]} {name}" for name in outputs.split(", "))
    body = f"{NORM}  {GRAD}" + ("  total = Sum(dx, r)" if "total" in outputs else "")
    model, _ = rewrite(build(body, outputs=declared))
    assert (
        nodes(model)[1]
        == f"AddLayerNormGrad(dy, x, , rstd, mean, scale, {'r' if 'total' in outputs else ''}) -> {left}"
    )


def test_an_order_in_which_the_residual_gradient_comes_late() -> None:
    body = f"{NORM}  {GRAD}  n = Neg(dscale)  late = Mul(r, r)  total = Sum(dx, late)"
    model, _ = rewrite(build(body, outputs=f"{ALL}, float[8] n", infos=f"float{SHAPE} late"))
    assert [node.op_type for node in model.graph.node] == [
        "LayerNormalization",
        "Mul",
        "AddLayerNormGrad",
        "Neg",
    ]


def test_gradients_keep_the_type_of_a_16_bit_scale() -> None:
    """The operator gives them in float."""
    text = f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float16{SHAPE} x, float16{SHAPE} dy, float[2,3,1] mean, float[2,3,1] rstd, float16[8] scale) => (float16{SHAPE} dx, float16[8] dscale, float16[8] dbias)
        {{ {GRAD} }}"""
    model = onnx.parser.parse_model(text)
    result, report = use_add_layer_norm_grad(model)
    onnx.checker.check_model(result, full_check=True)
    assert nodes(result) == [
        "AddLayerNormGrad(dy, x, , rstd, mean, scale, ) -> dx, dscale_float, dbias_float",
        "Cast(dscale_float) -> dscale",
        "Cast(dbias_float) -> dbias",
    ]


ADDED = "x = Add(a, b)"


def added(body: str, infos: str = "", second: str = SHAPE) -> onnx.ModelProto:
    """A graph of inputs a, b and dy in which x is made."""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float{SHAPE} a, float{second} b, float{SHAPE} dy, float{SHAPE} r, float[8] scale, float[8] bias) => ({ALL}) <float{SHAPE} x{infos}> {{ {body} }}""")


def test_addends_that_are_kept_anyway_are_read_in_the_place_of_their_sum() -> None:
    model, report = rewrite(added(f"{ADDED}  {NORM}  {GRAD}  total = Sum(dx, r)"))
    assert nodes(model) == [
        "Sum(a, b) -> x",  # no Add: ONNX Runtime 1.19 would fuse it with the norm and lose the statistics
        "LayerNormalization(x, scale, bias) -> y, mean, rstd",
        "AddLayerNormGrad(dy, a, b, rstd, mean, scale, r) -> total, dscale, dbias",
    ]
    assert report.fused[0].why_no_add == "" and report.fused[0].why_no_sum == ""


@needs_old_runtime
def test_no_statistics_are_lost_in_the_old_runtime(tmp_path: Path) -> None:
    """ONNX Runtime 1.19 replaces an Add and a norm that alone reads it by a node without statistics."""
    given = added(f"{ADDED}  {NORM}  {GRAD}  total = Sum(dx, r)")
    model, report = use_add_layer_norm_grad(given)
    assert report.fused[0].add
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "model.inputs.npz", **feeds(given))
    run_in_old_runtime(LEVELS_SCRIPT, tmp_path)
    expected = ReferenceEvaluator(given, new_ops=[LayerNormalizationGrad]).run(None, feeds(given))
    results = sorted(tmp_path.glob("model.ORT_*.npz"))
    assert len(results) == 4
    for result in results:
        for got, want in zip(np.load(result).values(), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=result.name)


def test_an_addend_that_the_backward_pass_reads_later_is_kept_anyway() -> None:
    """x = a + exp(c): the gradient of exp reads its result."""
    body = f"""c = Neg(a)  b2 = Exp(c)  x = Add(a, b2)  {NORM}  {GRAD}  slope = Mul(dx, b2)  total = Sum(slope, r)"""
    model, _ = rewrite(added(body, f", float{SHAPE} b2"))
    assert "AddLayerNormGrad(dy, a, b2, rstd, mean, scale, ) -> dx, dscale, dbias" in nodes(model)


@pytest.mark.parametrize(
    ("body", "infos", "second", "why"),
    [
        ("c = Neg(b)  x = Add(a, c)", f", float{SHAPE} c", SHAPE, "'c' would have to be kept"),
        ("x = Add(a, b)", "", "[8]", "shape of 'b'"),
        ("x = Mul(a, b)", "", SHAPE, "not made by an Add"),
    ],
)
def test_addends_are_left_where_that_saves_nothing(body: str, infos: str, second: str, why: str) -> None:
    model, report = rewrite(added(f"{body}  {NORM}  {GRAD}  total = Sum(dx, r)", infos, second))
    assert nodes(model)[-1] == FUSED
    assert why in report.fused[0].why_no_add


def test_a_sum_that_the_backward_pass_reads_later_is_read_by_this_node_too() -> None:
    body = f"{ADDED}  {NORM}  {GRAD}  late = Mul(dx, x)  total = Sum(late, r)"
    model, report = rewrite(added(body, f", float{SHAPE} late"))
    assert "AddLayerNormGrad(dy, x, , rstd, mean, scale, ) -> dx, dscale, dbias" in nodes(model)
    assert "kept for" in report.fused[0].why_no_add


@pytest.mark.parametrize(
    ("node", "inputs", "why"),
    [
        (
            "dx, dscale, dbias = com.microsoft.LayerNormalizationGrad<axis=1>(dy, x, scale, mean, rstd)",
            "",
            "last 2 axes",
        ),
        (
            "dx, dscale = com.microsoft.SimplifiedLayerNormalizationGrad(dy, x, scale, rstd)  dbias = Identity(dscale)",
            "",
            "RMSNorm",
        ),
        (
            "dx, dscale, dbias = com.microsoft.InvertibleLayerNormalizationGrad(dy, y, scale, bias, rstd)",
            "",
            "output",
        ),
        (
            "w = Cast<to=11>(x)  dx, dscale, dbias = com.microsoft.LayerNormalizationGrad(dy, w, scale, mean, rstd)",
            ", double[2,3,8] w",
            "double",
        ),
        (
            "wide = Cast<to=11>(mean)  dx, dscale, dbias = com.microsoft.LayerNormalizationGrad(dy, x, scale, wide, rstd)",
            ", double[2,3,1] wide",
            "statistics must be float",
        ),
    ],
)
def test_what_is_another_formula_is_left_alone(node: str, inputs: str, why: str) -> None:
    model = build(f"{NORM}  {node}  total = Sum(dx, r)", outputs=ALL, infos=inputs.removeprefix(", "))
    result, report = use_add_layer_norm_grad(model)
    assert result == ir.to_proto(ir.from_proto(model))
    assert report.fused == () and why in report.left[0].reason


def test_unknown_types_are_asked_for() -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float{SHAPE} a, float[8] scale, float[2,3,1] mean, float[2,3,1] rstd) => (float[8] dscale) {{
        x = Neg(a) dy = Neg(x) {GRAD} }}""")
    result, report = use_add_layer_norm_grad(model)
    assert result == ir.to_proto(ir.from_proto(model))
    assert report.left[0].reason == "the type of 'x' is not known; add a value_info for it"


def test_old_opsets_get_no_bodies() -> None:
    """LayerNormalization is there in opset 14 only for ONNX Runtime."""
    model, report = use_add_layer_norm_grad(
        build(f"{NORM}  {GRAD}  total = Sum(dx, r)", outputs=ALL, opset=14)
    )
    assert nodes(model)[1] == FUSED
    assert not model.functions and model.opset_import[0].version == 14
    assert "needs opset 15" in report.notes[0]


def test_everything_else_is_untouched() -> None:
    model = build(
        f"{NORM}  {GRAD}  total = Sum(dx, r)  other = com.microsoft.GeluGrad(dy, x)",
        outputs=f"{ALL}, float{SHAPE} other",
    )
    model.graph.doc_string, model.producer_name = "what it is", "who made it"
    onnx.helper.set_model_props(model, {"key": "value"})
    for node in model.graph.node:
        node.doc_string = f"doc of {node.op_type}"
    result, _ = use_add_layer_norm_grad(model)
    assert (result.graph.doc_string, result.producer_name) == ("what it is", "who made it")
    assert result.metadata_props == model.metadata_props
    kept = [node for node in result.graph.node if node.op_type in ("LayerNormalization", "GeluGrad")]
    given = ir.to_proto(ir.from_proto(model)).graph.node
    assert kept == [node for node in given if node.op_type in ("LayerNormalization", "GeluGrad")]


def test_a_model_of_onnx_ir_may_be_given() -> None:
    model = build(f"{NORM}  {GRAD}  total = Sum(dx, r)", outputs=ALL)
    result, report = use_add_layer_norm_grad(ir.from_proto(model))
    assert isinstance(result, ir.Model) and len(report.fused) == 1
    assert embed_functions(ir.to_proto(result)) == use_add_layer_norm_grad(model)[0]


def test_a_model_without_norms_stays() -> None:
    model = build("total = Sum(x, r)", outputs=f"float{SHAPE} total")
    result, report = use_add_layer_norm_grad(model)
    assert result == ir.to_proto(ir.from_proto(model)) and report == Report((), (), ())
