"""The operators as data: schema, function body, reference implementation, and their embedding into models.

The body and the reference implementation are measured with the float64 oracle. No test here uses the
plugin: the body must run in a stock runtime.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.checker
import onnx.inliner
import onnx.parser
import onnx.shape_inference
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from operator_models import make_model, run_session
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, Inputs, assert_matches, make_inputs

from ort_ops import operators
from ort_ops.operators import ADD_LAYER_NORM_GRAD, DOMAIN, MIN_OPSET, REFERENCE_OPS, embed_functions

NEWEST_OPSET_IN_ONNXRUNTIME = 24
PRESENCE = [(True, True), (True, False), (False, True), (False, False)]
SHAPES = [
    pytest.param((5,), 1, id="rank 1"),
    pytest.param((1,), 1, id="one element"),
    pytest.param((9, 1), 1, id="one column"),
    pytest.param((6, 7), 1, id="rank 2"),
    pytest.param((2, 3, 5), 1, id="rank 3"),
    pytest.param((2, 3, 4, 5), 1, id="rank 4"),
    pytest.param((2, 1, 2, 3, 1, 2, 2, 5), 1, id="rank 8"),
    pytest.param((4, 8, 16), 2, id="two normalised axes"),
    pytest.param((2, 2, 1, 2, 3, 1, 2, 5), 3, id="rank 8, three normalised axes"),
    pytest.param((3, 4, 5), 3, id="every axis normalised"),
    pytest.param((0, 5), 1, id="no rows"),
    pytest.param((2, 0, 3, 4), 2, id="no rows, two normalised axes"),
    pytest.param((3, 4099), 1, id="wide"),
]


def onnxruntime_without_plugin(model: onnx.ModelProto, inputs: Inputs) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return run_session(session, inputs.arrays())


def onnx_reference_with_body(model: onnx.ModelProto, inputs: Inputs) -> dict[str, np.ndarray]:
    return _run_reference(ReferenceEvaluator(model), inputs)


def onnx_reference_with_implementation(model: onnx.ModelProto, inputs: Inputs) -> dict[str, np.ndarray]:
    return _run_reference(ReferenceEvaluator(model, new_ops=REFERENCE_OPS), inputs)


def onnx_inlined(model: onnx.ModelProto, inputs: Inputs) -> dict[str, np.ndarray]:
    inlined = onnx.inliner.inline_local_functions(model)
    assert not inlined.functions and DOMAIN not in {node.domain for node in inlined.graph.node}
    return _run_reference(ReferenceEvaluator(inlined), inputs)


def _run_reference(evaluator: ReferenceEvaluator, inputs: Inputs) -> dict[str, np.ndarray]:
    return dict(zip(evaluator.output_names, evaluator.run(None, inputs.arrays()), strict=True))


RUNNERS = [
    onnxruntime_without_plugin,
    onnx_reference_with_body,
    onnx_reference_with_implementation,
    onnx_inlined,
]


@pytest.mark.parametrize("runner", RUNNERS)
class TestNumbers:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("x2, dsum", PRESENCE)
    def test_presence_of_optional_inputs(self, runner, dtype, x2, dsum):
        inputs = make_inputs((4, 3, 37), dtype, x2=x2, dsum=dsum)
        results = runner(embed_functions(make_model(inputs)), inputs)
        assert_matches(inputs, **results)

    @pytest.mark.parametrize("shape, axes", SHAPES)
    @pytest.mark.parametrize("trailing_ones", [True, False])
    @pytest.mark.parametrize("symbolic", [True, False])
    def test_shapes(self, runner, shape, axes, trailing_ones, symbolic):
        inputs = make_inputs(shape, FLOAT, axes=axes, trailing_ones=trailing_ones)
        results = runner(embed_functions(make_model(inputs, symbolic=symbolic)), inputs)
        assert_matches(inputs, **results)

    @pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
    @pytest.mark.parametrize("shape, axes", [((6, 70), 1), ((3, 4, 5), 2)])
    def test_float_gamma_with_16_bit_data(self, runner, dtype, shape, axes):
        inputs = make_inputs(shape, dtype, axes=axes, gamma_dtype=FLOAT)
        assert np.any(inputs.gamma != inputs.gamma.astype(dtype)), "every gamma happens to fit 16 bits"
        results = runner(embed_functions(make_model(inputs)), inputs)
        assert_matches(inputs, **results)

    @pytest.mark.parametrize("dtype, big", [(BFLOAT16, 256.0), (FLOAT16, 2048.0)], ids=str)
    def test_sum_is_rounded_as_the_forward_add_rounds(self, runner, dtype, big):
        """big + 1 lies half way between two numbers of the type and rounds to big."""
        inputs = make_inputs((5, 64), dtype)
        x1, x2 = inputs.x1.copy(), inputs.x2.copy()
        x1[:, ::4], x2[:, ::4] = big, 1.0
        inputs = with_statistics(inputs.replace(x1=x1, x2=x2))
        results = runner(embed_functions(make_model(inputs)), inputs)
        assert_matches(inputs, **results)

        unrounded = inputs.replace(x1=x1.astype(FLOAT) + x2.astype(FLOAT), x2=None)
        with pytest.raises(AssertionError, match="dgamma"):
            assert_matches(unrounded, dgamma=results["dgamma"])

    @pytest.mark.parametrize(
        "outputs",
        [("dx",), ("dx", "dgamma"), ("dx", "", "dbeta"), ("dx", "", ""), ("", "dgamma"), ("", "", "dbeta")],
        ids=str,
    )
    @pytest.mark.parametrize("dsum", [True, False])
    def test_subset_of_outputs(self, runner, outputs, dsum):
        inputs = make_inputs((6, 9), FLOAT16, dsum=dsum)
        complete = runner(embed_functions(make_model(inputs)), inputs)
        results = runner(embed_functions(make_model(inputs, outputs)), inputs)
        assert list(results) == [name for name in outputs if name]
        for name, array in results.items():
            np.testing.assert_array_equal(array, complete[name])

    @pytest.mark.parametrize("where", ["dy", "x1", "x2", "rstd", "mean", "gamma", "dsum"])
    @pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
    def test_non_finite_values(self, runner, where, what):
        inputs = make_inputs((5, 8))
        array = getattr(inputs, where).copy()
        array.reshape(-1)[2] = what
        inputs = inputs.replace(**{where: array})
        with np.errstate(all="ignore"):
            results = runner(embed_functions(make_model(inputs)), inputs)
        assert_matches(inputs, **results)
        if where != "gamma":
            touched = 0 if array.shape == inputs.dy.shape else 2
            others = np.delete(results["dx"], touched, axis=0)
            assert np.isfinite(others).all()
            assert not np.isfinite(results["dx"][touched]).all()

    @pytest.mark.parametrize("opset", range(MIN_OPSET, NEWEST_OPSET_IN_ONNXRUNTIME + 1))
    def test_every_opset(self, runner, opset):
        inputs = make_inputs((4, 3, 8), FLOAT16, axes=2)
        model = embed_functions(make_model(inputs, opset=opset))
        assert {entry.version for entry in model.opset_import if entry.domain == ""} == {opset}
        assert model.functions[0].opset_import[0].version == opset
        assert_matches(inputs, **runner(model, inputs))


def with_statistics(inputs: Inputs) -> Inputs:
    """The same inputs with mean and rstd of the rounded sum."""
    total = (inputs.x1.astype(np.float64) + inputs.x2.astype(np.float64)).astype(inputs.x1.dtype)
    table = total.astype(np.float64).reshape(inputs.rows, inputs.cols)
    shape = inputs.mean.shape
    return inputs.replace(
        mean=table.mean(axis=1).astype(FLOAT).reshape(shape),
        rstd=(1 / np.sqrt(table.var(axis=1) + 1e-5)).astype(FLOAT).reshape(shape),
    )


class TestSchema:
    def test_registered_as_described(self):
        schema = onnx.defs.get_schema("AddLayerNormGrad", 1, DOMAIN)
        assert [p.name for p in schema.inputs] == ["dy", "x1", "x2", "rstd", "mean", "gamma", "dsum"]
        assert [p.name for p in schema.outputs] == ["dx", "dgamma", "dbeta"]
        optional = onnx.defs.OpSchema.FormalParameterOption.Optional
        assert [p.name for p in schema.inputs if p.option == optional] == ["x2", "dsum"]
        assert [p.name for p in schema.outputs if p.option == optional] == ["dgamma", "dbeta"]
        assert schema.since_version == 1
        assert not schema.attributes

    def test_importing_when_another_library_registered_the_operator(self):
        script = (
            "import onnx\n"
            "schema = onnx.defs.OpSchema('AddLayerNormGrad', 'ai.onnx.contrib', 1)\n"
            "onnx.defs.register_schema(schema)\n"
            "import importlib, ort_ops.operators\n"
            "importlib.reload(ort_ops.operators)\n"
            "print(len(onnx.defs.get_schema('AddLayerNormGrad', 1, 'ai.onnx.contrib').inputs))\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("x2, dsum", PRESENCE)
    @pytest.mark.parametrize("embedded", [True, False])
    def test_checker_accepts(self, dtype, x2, dsum, embedded):
        model = make_model(make_inputs((4, 6), dtype, x2=x2, dsum=dsum))
        onnx.checker.check_model(embed_functions(model) if embedded else model, full_check=True)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_types_and_shapes_are_inferred(self, dtype):
        inputs = make_inputs((4, 5, 6, 7), dtype, axes=2, gamma_dtype=FLOAT)
        model = make_model(inputs, symbolic=True, declare_outputs=False)
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        found = {
            output.name: (
                output.type.tensor_type.elem_type,
                [dim.dim_param for dim in output.type.tensor_type.shape.dim],
            )
            for output in inferred.graph.output
        }
        data_type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
        assert found == {
            "dx": (data_type, ["dy_0", "dy_1", "dy_2", "dy_3"]),
            "dgamma": (onnx.TensorProto.FLOAT, ["gamma_0", "gamma_1"]),
            "dbeta": (onnx.TensorProto.FLOAT, ["gamma_0", "gamma_1"]),
        }

    def test_inputs_of_unknown_shape_are_no_error(self):
        model = make_model(make_inputs((4, 6)), declare_outputs=False)
        for value in model.graph.input:
            value.type.tensor_type.ClearField("shape")
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        assert [o.type.tensor_type.elem_type for o in inferred.graph.output] == [onnx.TensorProto.FLOAT] * 3
        assert not any(o.type.tensor_type.HasField("shape") for o in inferred.graph.output)

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"dy": (np.float64, (4, 6))}, "dy typestr: T, has unsupported type: tensor(double)"),
            ({"dy": (np.int32, (4, 6))}, "dy typestr: T, has unsupported type: tensor(int32)"),
            ({"x1": (np.float16, (4, 6))}, "x1 has inconsistent type tensor(float16)"),
            ({"dsum": (np.float16, (4, 6))}, "dsum has inconsistent type tensor(float16)"),
            ({"rstd": (np.float16, (4, 1))}, "rstd typestr: tensor(float), has unsupported type"),
            ({"mean": (np.float64, (4, 1))}, "mean typestr: tensor(float), has unsupported type"),
            ({"gamma": (np.float64, (6,))}, "gamma must have dy's type or be float; got double."),
            ({"gamma": (np.float16, (6,))}, "gamma must have dy's type or be float; got float16."),
            ({"x1": (np.float32, (4, 5))}, "x1 must have dy's shape [4, 6]; got [4, 5]."),
            ({"x2": (np.float32, (6,))}, "x2 must have dy's shape [4, 6]; got [6]."),
            ({"dsum": (np.float32, (1, 4, 6))}, "dsum must have dy's shape [4, 6]; got [1, 4, 6]."),
            ({"gamma": (np.float32, (5,))}, "the shape of the last axes of dy [4, 6]; got [5]."),
            ({"gamma": (np.float32, (1, 4, 6))}, "the shape of the last axes of dy [4, 6]; got [1, 4, 6]."),
            ({"gamma": (np.float32, ())}, "gamma must have rank 1 or more"),
            ({"gamma": (np.float32, (0,))}, "gamma must have at least one element; got [0]."),
            ({"rstd": (np.float32, (6, 1))}, "rstd must be [4, 1] or [4]; got [6, 1]."),
            ({"mean": (np.float32, (6,))}, "mean must be [4, 1] or [4]; got [6]."),
            ({"dy": (np.float32, ())}, "dy must have rank 1 to 8; got rank 0."),
            ({"dy": (np.float32, (1,) * 7 + (4, 6))}, "dy must have rank 1 to 8; got rank 9."),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_checker_refuses(self, changes, message):
        inputs = make_inputs((4, 6))
        inputs = inputs.replace(**{name: np.zeros(shape, dtype) for name, (dtype, shape) in changes.items()})
        model = make_model(inputs, node_name="n12")
        with pytest.raises(Exception, match="n12") as caught:
            onnx.checker.check_model(model, full_check=True)
        assert message in str(caught.value)

    @pytest.mark.parametrize("missing", [0, 1, 3, 4, 5])
    def test_checker_refuses_a_missing_required_input(self, missing):
        model = make_model(make_inputs((4, 6)))
        model.graph.node[0].input[missing] = ""
        with pytest.raises(onnx.checker.ValidationError, match=f"input {missing} is marked single"):
            onnx.checker.check_model(model, full_check=True)


class TestFunction:
    def test_overload_names_the_absent_inputs(self):
        every = ["dy", "x1", "x2", "rstd", "mean", "gamma", "dsum"]
        assert ADD_LAYER_NORM_GRAD.overload(every) == ""
        assert ADD_LAYER_NORM_GRAD.overload(every[:-1]) == "without_dsum"
        assert ADD_LAYER_NORM_GRAD.overload([*every[:-1], ""]) == "without_dsum"
        assert ADD_LAYER_NORM_GRAD.overload(["a", "b", "", "c", "d", "e", "f"]) == "without_x2"
        assert ADD_LAYER_NORM_GRAD.overload(["a", "b", "", "c", "d", "e"]) == "without_x2_and_dsum"

    @pytest.mark.parametrize("x2, dsum", PRESENCE)
    def test_shapes_are_inferred_through_the_body_alone(self, x2, dsum):
        """Where the schema is not registered, the body says types and shapes."""
        inputs = make_inputs((4, 5, 6), FLOAT16, x2=x2, dsum=dsum)
        model = embed_functions(make_model(inputs))
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
        for function in model.functions:
            function.domain = "elsewhere"
        model.graph.node[0].domain = "elsewhere"
        model.opset_import.append(onnx.helper.make_opsetid("elsewhere", 1))
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        found = [
            (o.type.tensor_type.elem_type, [dim.dim_value for dim in o.type.tensor_type.shape.dim])
            for o in inferred.graph.output
        ]
        float_type = onnx.TensorProto.FLOAT
        assert found == [(onnx.TensorProto.FLOAT16, [4, 5, 6]), (float_type, [6]), (float_type, [6])]

    def test_old_opset_is_refused(self):
        model = make_model(make_inputs((4, 6)), opset=14)
        with pytest.raises(ValueError, match=r"version 15 or newer .* imports version 14"):
            embed_functions(model)

    def test_missing_default_domain_is_refused(self):
        model = make_model(make_inputs((4, 6)))
        del model.opset_import[0]
        with pytest.raises(ValueError, match="no version of ONNX's default domain"):
            embed_functions(model)

    def test_wrong_number_of_statistics_is_refused_by_the_body(self):
        inputs = make_inputs((4, 6))
        model = embed_functions(make_model(inputs, symbolic=True))
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        with pytest.raises(Exception, match="Reshape"):
            run_session(session, inputs.replace(mean=np.zeros((1, 1), FLOAT)).arrays())
        assert_matches(inputs, **run_session(session, inputs.arrays()))


NESTED = """ <ir_version: 8, opset_import: ["": 17, "ai.onnx.contrib": 1, "local": 1]> nested (bool
chosen, float[4, 6] dy, float[4, 6] x1, float[4, 6] x2, float[4] rstd, float[4] mean, float[6] gamma)
    => (float[4, 6] first, float[4, 6] second, float[4, 6] third)
{
    first = If (chosen) <
        then_branch = yes () => (float[4, 6] dx_yes) {
            dx_yes = ai.onnx.contrib.AddLayerNormGrad (dy, x1, x2, rstd, mean, gamma)
        },
        else_branch = no () => (float[4, 6] dx_no) {
            dx_no = ai.onnx.contrib.AddLayerNormGrad (dy, x1, , rstd, mean, gamma)
        }
    >
    second = local.twice (dy, x1, x2, rstd, mean, gamma)
    third = local.once (dy, x1, x2, rstd, mean, gamma)
}
<domain: "local", opset_import: ["": 17, "ai.onnx.contrib": 1]>
twice (dy, x1, x2, rstd, mean, gamma) => (dx)
{
    first = ai.onnx.contrib.AddLayerNormGrad (dy, x1, , rstd, mean, gamma, dy)
    dx = ai.onnx.contrib.AddLayerNormGrad (dy, x1, x2, rstd, mean, gamma, first)
}
<domain: "local", opset_import: ["": 17, "ai.onnx.contrib": 1]>
once (dy, x1, x2, rstd, mean, gamma) => (dx)
{
    dx = ai.onnx.contrib.AddLayerNormGrad (dy, x1, x2, rstd, mean, gamma, dy)
}
"""


class TestEmbedding:
    def test_model_without_the_operator_is_unchanged(self):
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 9]> g (float[2] x) => (float[2] y) { y = Relu (x) }'
        )
        assert embed_functions(model) == model

    def test_given_model_is_left_alone_and_embedding_is_idempotent(self):
        model = make_model(make_inputs((4, 6), x2=False))
        before = model.SerializeToString(deterministic=True)
        embedded = embed_functions(model)
        assert model.SerializeToString(deterministic=True) == before
        assert embed_functions(embedded) == embedded

    @pytest.mark.parametrize("x2, dsum", PRESENCE)
    def test_ir_version_is_raised_only_for_an_overload(self, x2, dsum):
        model = make_model(make_inputs((4, 6), x2=x2, dsum=dsum), ir_version=8)
        embedded = embed_functions(model)
        assert embedded.ir_version == (8 if x2 and dsum else 10)
        assert embedded.graph.node[0].overload == embedded.functions[0].overload
        newer = make_model(make_inputs((4, 6), x2=x2, dsum=dsum), ir_version=11)
        assert embed_functions(newer).ir_version == 11

    @pytest.mark.parametrize("imports", [[], [1], [2], [1, 1]], ids=str)
    def test_domain_is_imported_exactly_once_at_version_1(self, imports):
        model = make_model(make_inputs((4, 6)))
        del model.opset_import[1]
        model.opset_import.append(onnx.helper.make_opsetid("unused", 3))
        model.opset_import.extend(onnx.helper.make_opsetid(DOMAIN, version) for version in imports)
        embedded = embed_functions(model)
        found = [(entry.domain, entry.version) for entry in embedded.opset_import]
        assert sorted(found) == [("", 17), (DOMAIN, 1), ("unused", 3)]

    def test_stale_body_and_stale_overload_are_replaced(self):
        inputs = make_inputs((4, 6))
        model = embed_functions(make_model(inputs.replace(x2=None)))
        assert model.graph.node[0].overload == "without_x2"
        model.graph.node[0].input[2] = "x1"
        model.functions[0].overload = ""
        embedded = embed_functions(model)
        assert [f.overload for f in embedded.functions] == [""]
        assert embedded.graph.node[0].overload == ""
        doubled = inputs.replace(x2=inputs.x1)
        fed = inputs.replace(x2=None)
        assert_matches(doubled, **onnxruntime_without_plugin(embedded, fed))

    def test_only_functions_that_need_an_overload_are_inlined(self):
        model = embed_functions(onnx.parser.parse_model(NESTED))
        assert [(f.name, f.overload) for f in model.functions] == [
            ("once", ""),
            ("AddLayerNormGrad", ""),
            ("AddLayerNormGrad", "without_dsum"),
            ("AddLayerNormGrad", "without_x2"),
            ("AddLayerNormGrad", "without_x2_and_dsum"),
        ]

    def test_function_that_must_but_cannot_be_inlined_is_named(self):
        model = onnx.parser.parse_model(NESTED)
        assert model.functions[0].name == "twice"
        model.functions[0].opset_import[0].version = 16
        with pytest.raises(ValueError, match="functions local::twice use .* same opset versions"):
            embed_functions(model)

    @pytest.mark.parametrize("imports", [[], [1], [2]], ids=str)
    def test_functions_that_use_the_operator_import_its_domain_once(self, imports):
        model = onnx.parser.parse_model(NESTED)
        once = model.functions[1]
        assert once.name == "once"
        del once.opset_import[1]
        once.opset_import.extend(onnx.helper.make_opsetid(DOMAIN, version) for version in imports)
        embedded = embed_functions(model)
        assert [(e.domain, e.version) for e in embedded.functions[0].opset_import] == [("", 17), (DOMAIN, 1)]

    @pytest.mark.parametrize("chosen", [True, False])
    def test_nodes_in_subgraphs_and_functions_run_in_a_stock_runtime(self, chosen):
        model = embed_functions(onnx.parser.parse_model(NESTED))
        onnx.checker.check_model(model, full_check=True)
        inputs = make_inputs((4, 6), dsum=False, trailing_ones=False)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        results = run_session(session, {"chosen": np.array(chosen), **inputs.arrays()})
        assert_matches(inputs if chosen else inputs.replace(x2=None), dx=results["first"])
        once = _run_reference(
            ReferenceEvaluator(make_model(inputs.replace(x2=None, dsum=inputs.dy)), new_ops=REFERENCE_OPS),
            inputs.replace(x2=None, dsum=inputs.dy),
        )["dx"]
        assert_matches(inputs.replace(dsum=once), dx=results["second"])
        assert_matches(inputs.replace(dsum=inputs.dy), dx=results["third"])

    def test_external_data_stays_a_reference(self, tmp_path):
        inputs = make_inputs((4, 600))
        model = make_model(inputs)
        gamma = next(value for value in model.graph.input if value.name == "gamma")
        model.graph.input.remove(gamma)
        model.graph.initializer.append(onnx.numpy_helper.from_array(inputs.gamma, "gamma"))
        path = tmp_path / "model.onnx"
        onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
        embedded = embed_functions(onnx.load(path, load_external_data=False))
        assert embedded.graph.initializer[0].data_location == onnx.TensorProto.EXTERNAL
        assert not embedded.graph.initializer[0].raw_data
        onnx.save(embedded, path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        feeds = {name: array for name, array in inputs.arrays().items() if name != "gamma"}
        assert_matches(inputs, **run_session(session, feeds))


def test_every_operator_has_a_registered_schema_and_a_body() -> None:
    assert operators.OPERATORS
    for operator in operators.OPERATORS:
        assert onnx.defs.has(operator.name, domain=operator.domain)
        assert operator.min_opset >= MIN_OPSET
        function = operator.function([slot.name for slot in operator.inputs], operator.min_opset)
        assert list(function.input) == [slot.name for slot in operator.inputs]
        assert list(function.output) == [slot.name for slot in operator.outputs]
        assert set(function.output) <= set(_written(function))


def test_a_text_attribute_chooses_the_body() -> None:
    operator = operators.GELU_GRAD
    assert operator.overload(["dy", "x"]) == operator.overload(["dy", "x"], {"approximate": "none"}) == ""
    assert operator.overload(["dy", "x"], {"approximate": "tanh"}) == "approximate_tanh"
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18, "ai.onnx.contrib": 1]>
        g (float[2, 3] dy, float[2, 3] x) => (float[2, 3] a, float[2, 3] b)
        {
            a = ai.onnx.contrib.GeluGrad (dy, x)
            b = ai.onnx.contrib.GeluGrad <approximate = "tanh"> (dy, x)
        }
    """)
    embedded = embed_functions(model)
    assert [(f.name, f.overload) for f in embedded.functions] == [
        ("GeluGrad", ""),
        ("GeluGrad", "approximate_tanh"),
    ]
    assert [node.overload for node in embedded.graph.node] == ["", "approximate_tanh"]
    assert embedded.ir_version == 10
    used = [{node.op_type for node in function.node} for function in embedded.functions]
    assert "Erf" in used[0] and "Tanh" in used[1]


def _written(function: onnx.FunctionProto) -> Iterator[str]:
    for node in function.node:
        yield from node.output
