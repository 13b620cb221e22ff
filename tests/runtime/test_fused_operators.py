"""The fused operators in sessions: kernel, function body and reference agree, the kernel is what runs, its
bits do not depend on threads or buffers, and wrong inputs get a sentence that names the node.

Each operator is one row of CASES. What its numbers are worth is tested in tests/kernels against float64; here
it is enough that three implementations written in three ways give the same within a few roundings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx.checker
import onnx.helper
import onnx.shape_inference
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from operator_models import elem_type, run_session
from oracle import BFLOAT16, FLOAT16
from plugin_sessions import executed_operators, plugin_session

from ort_ops.operators import DOMAIN, OPERATORS, REFERENCE_OPS, Operator, embed_functions

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: np.dtype | type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


@dataclass(frozen=True)
class Case:
    """A node: its operator, its inputs by slot name in order (None: left out), and its outputs."""

    operator: str
    inputs: dict[str, np.ndarray | None]
    outputs: tuple[str, ...]
    attributes: dict[str, object] = field(default_factory=dict)
    # Relative to the largest magnitude of each output: how far float32 arithmetic in another order may be.
    tolerance: float = 1e-6
    # Inputs changed so that the call is wrong, and a part of the sentence.
    refused: tuple[tuple[dict[str, np.ndarray], str], ...] = ()
    # An output and the input whose buffer it takes over when nobody else reads it.
    in_place: tuple[tuple[str, str], ...] = ()

    @property
    def described(self) -> Operator:
        return next(operator for operator in OPERATORS if operator.name == self.operator)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self.inputs.items() if array is not None}

    def model(self, *, opset: int = 18, known_shapes: bool = True) -> onnx.ModelProto:
        node = onnx.helper.make_node(
            self.operator,
            [name if array is not None else "" for name, array in self.inputs.items()],
            list(self.outputs),
            "n12",
            domain=DOMAIN,
            **self.attributes,
        )
        graph = onnx.helper.make_graph(
            [node],
            "one_node",
            [
                onnx.helper.make_tensor_value_info(
                    name, elem_type(array.dtype), array.shape if known_shapes else None
                )
                for name, array in self.arrays().items()
            ],
            [onnx.ValueInfoProto(name=name) for name in self.outputs if name],
        )
        imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(DOMAIN, 1)]
        return onnx.helper.make_model(graph, opset_imports=imports, ir_version=9)


def gelu_grad(form: str, dtype: np.dtype | type, tolerance: float) -> Case:
    return Case(
        "GeluGrad",
        {"dy": normal(3, 50, 257, dtype=dtype), "x": normal(3, 50, 257, dtype=dtype)},
        ("dx",),
        {"approximate": form},
        tolerance,
        refused=(
            (
                {"x": normal(3, 50, 256, dtype=dtype)},
                "x must have the shape of dy, [3,50,257]; got [3,50,256]",
            ),
        ),
        in_place=(("dx", "dy"), ("dx", "x")),
    )


def attention(
    joined: bool, visibility: str, mask: np.ndarray | None, size: int = 26, keys: int = 37
) -> tuple[Case, Case]:
    """The forward pass and the backward pass, of heads whose sizes are no multiple of a vector's."""
    batch, queries, heads = 2, 37, 3
    if joined:
        operands = {"query": normal(batch, queries, 3, heads, size), "key": None, "value": None}
        refused = (
            {"query": normal(batch, queries, 2, heads, size)},
            "query must be [batch,tokens,3,heads,size]",
        )
    else:
        operands = {
            "query": normal(batch, queries, heads, size),
            "key": normal(batch, keys, heads, size),
            "value": normal(batch, keys, heads, size),
        }
        refused = (
            {"value": normal(batch, keys, heads, size + 1)},
            f"value must be [2,{keys},3,{size}]; got ",
        )
    operands["mask"] = mask
    attributes = {"scale": size**-0.5, "visibility": visibility}
    forward = Case(
        "ScaledDotProductAttention", operands, ("y", "log_sum_exp"), attributes, 2e-6, refused=(refused,)
    )
    reference = ReferenceEvaluator(forward.model(), new_ops=REFERENCE_OPS)
    y, log_sum_exp = reference.run(None, forward.arrays())
    inputs = {"dy": normal(*y.shape), **operands, "y": y, "log_sum_exp": log_sum_exp}
    outputs = ("dquery",) if joined else ("dquery", "dkey", "dvalue")
    backward = Case(
        "ScaledDotProductAttentionGrad",
        inputs,
        outputs,
        attributes,
        4e-6,
        refused=(refused, ({"dy": normal(*y.shape[:-1], 1)}, "dy must have the shape of y, ")),
    )
    return forward, backward


def add_layer_norm(
    dtype: np.dtype | type, gamma_dtype: np.dtype | type, tolerance: float, *, optional: bool = True
) -> Case:
    shape, norm = (5, 7, 4, 33), (4, 33)
    addend = normal(*shape, dtype=dtype)
    return Case(
        "AddLayerNorm",
        {
            "x1": normal(*shape, dtype=dtype),
            "x2": addend if optional else None,
            "gamma": normal(*norm, dtype=gamma_dtype),
            "beta": normal(*norm, dtype=gamma_dtype) if optional else None,
        },
        ("y", "mean", "rstd", "x") if optional else ("y",),
        {"epsilon": 1e-3},
        tolerance,
        refused=(
            (
                {"gamma": normal(4, 32, dtype=gamma_dtype)},
                "gamma must be [4,33], the last 2 axes of x1 [5,7,4,33]; got [4,32]",
            ),
            (
                {"x1": normal(5, 7, 4, 32, dtype=dtype)},
                "x2 must have the shape of x1, [5,7,4,32]; got " if optional else "gamma must be [4,32], ",
            ),
        ),
        in_place=(("y", "x1"), *((("y", "x2"), ("x", "x2")) if optional else ())),
    )


def cross_entropy(dtype: type, ignore_index: int) -> tuple[Case, Case]:
    """The forward pass and the backward pass."""
    scores, labels = normal(3, 40, 1001), RNG.integers(0, 1001, (3, 40)).astype(dtype)
    labels[1, 7:30] = ignore_index
    attributes = {"ignore_index": ignore_index}
    refused = (
        (
            {"labels": labels[:, :39]},
            "labels must be [3,40], scores [3,40,1001] without the last axis; got [3,39]",
        ),
        (
            {"labels": np.full_like(labels, 1001)},
            f"labels must be at least 0 and below 1001, the number of classes, or {ignore_index}, the ",
        ),
    )
    forward = Case(
        "CrossEntropy",
        {"scores": scores, "labels": labels},
        ("row_loss", "log_sum_exp"),
        attributes,
        refused=refused,
    )
    _, log_sum_exp = ReferenceEvaluator(forward.model(), new_ops=REFERENCE_OPS).run(None, forward.arrays())
    backward = Case(
        "CrossEntropyGrad",
        {"drow_loss": normal(3, 40), "scores": scores, "labels": labels, "log_sum_exp": log_sum_exp},
        ("dscores",),
        attributes,
        refused=refused,
        in_place=(("dscores", "scores"),),
    )
    return forward, backward


def relu_grad(dtype: np.dtype | type) -> Case:
    return Case(
        "ReluGrad",
        {"dy": normal(3, 50, 257, dtype=dtype), "y": np.maximum(normal(3, 50, 257, dtype=dtype), dtype(0))},
        ("dx",),
        {},
        0.0,
        refused=(({"y": normal(3, 50, 256, dtype=dtype)}, "y must have the shape of dy, [3,50,257]; got "),),
        in_place=(("dx", "dy"), ("dx", "y")),
    )


def batch_norm_grad(*shape: int) -> Case:
    return Case(
        "BatchNormGrad",
        {"dy": normal(*shape), "x": normal(*shape), "scale": normal(shape[1])},
        ("dx", "dscale", "dbias"),
        {"epsilon": 1e-2},
        2e-6,
        refused=(
            ({"x": normal(*shape[:-1], 1)}, "x must have the shape of dy, "),
            ({"scale": normal(shape[1] + 1)}, f"scale must be [{shape[1]}], the channels of dy "),
        ),
        in_place=(("dx", "dy"), ("dx", "x")),
    )


def linear(
    layout: str, rows: tuple[int, ...], inputs: int, outputs: int, *, bias: bool = True
) -> tuple[Case, Case]:
    """Forward and backward."""
    x, b = normal(*rows, inputs), normal(outputs)
    w = normal(*((inputs, outputs) if layout == "in_out" else (outputs, inputs)))
    attributes = {"weight_layout": layout}
    size = f"x's last axis, {inputs}, as in"
    forward = Case(
        "Linear",
        {"x": x, "w": w, "b": b if bias else None},
        ("y",),
        attributes,
        refused=(
            ({"w": normal(*w.shape, 1)}, "w must have rank 2; got "),
            (
                {"x": normal(*rows, inputs + 1)},
                f"w must be {layout_text(layout)} with x's last axis, {inputs + 1}, as",
            ),
            *(
                (({"b": normal(outputs + 1)}, f"b must be [{outputs}], as many as w has outputs; got "),)
                if bias
                else ()
            ),
        ),
    )
    backward = Case(
        "LinearGrad",
        {"dy": normal(*rows, outputs), "x": x, "w": w},
        ("dx", "db", "dw"),
        attributes,
        2e-6,
        refused=(
            ({"dy": normal(*rows, outputs + 1)}, "dy must be ["),
            ({"w": normal(inputs + 2, outputs + 2)}, size),
        ),
    )
    return forward, backward


def layout_text(layout: str) -> str:
    return "[in,out]" if layout == "in_out" else "[out,in]"


def conv_grad(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    positions: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: tuple[int, ...],
) -> Case:
    x, w = normal(5, 3, *size), normal(7, 3, *kernel)
    return Case(
        "ConvGrad",
        {"dy": normal(5, 7, *positions), "x": x, "w": w},
        ("dx", "db", "dw"),
        {"strides": strides, "dilations": dilations, "pads": pads, "group": 1},
        4e-6,
        refused=(
            ({"w": normal(7, 4, *kernel)}, "x must have 4 channels, group times those of w [7,4,"),
            ({"x": normal(5, 3, *size[:-1], 90)}, "dy must be [5,7,"),
        ),
    )


def max_pool_grad(windows: tuple[int, int], **attributes: object) -> Case:
    x = np.round(normal(5, 7, 20, 33) * 4) / 4  # with ties
    return Case(
        "MaxPoolGrad",
        {"dy": normal(5, 7, *windows), "x": x},
        ("dx",),
        attributes,
        refused=(
            ({"x": normal(5, 7, 40, 66)}, "dy must be [5,7,"),
            ({"x": normal(5, 6, 20, 33)}, "dy must be [5,6,"),
        ),
    )


ATTENTION_CASES = {
    "": attention(False, "all", None),
    "joined causal": attention(True, "causal", None),
    "joined mask": attention(True, "all", normal(2, 1, 1, 37)),
    "causal mask, fewer keys": attention(False, "causal", normal(37, 5), 64, 5),
}


LINEAR_CASES = {
    "": linear("in_out", (3, 50), 130, 70),
    " out_in": linear("out_in", (3, 50), 130, 70),
    " out_in without a bias": linear("out_in", (301,), 33, 17, bias=False),
}


def adamw(form: str, *, optional: bool = True, update: bool = True) -> Case:
    def scalar(value: float) -> np.ndarray:
        return np.array(value, np.float32)

    shape = (70, 1001)
    return Case(
        "AdamW",
        {
            "parameter": normal(*shape),
            "gradient": normal(*shape),
            "first_moment": normal(*shape),
            "second_moment": np.abs(normal(*shape)),
            "gradient_weight": scalar(0.05),
            "square_weight": scalar(0.002),
            "step_size": scalar(0.01),
            "inverse_root": scalar(3.0) if optional else None,
            "decay": scalar(0.98) if optional else None,
            "update": np.array(update) if optional else None,
        },
        ("parameter_updated", "first_moment_updated", "second_moment_updated"),
        {"form": form, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6},
        1e-6,
        refused=(
            (
                {"gradient": normal(70, 1000)},
                "gradient must have the shape of parameter, [70,1001]; got [70,1000]",
            ),
            ({"step_size": normal(2)}, "step_size must have one element; got [2]"),
        ),
        in_place=tuple((f"{name}_updated", name) for name in ("parameter", "first_moment", "second_moment")),
    )


def embedding_grad(dtype: type) -> Case:
    return Case(
        "EmbeddingGrad",
        {
            "dy": normal(4, 60, 5, 53),
            "indices": RNG.integers(-100, 100, (4, 60)).astype(dtype),
            "table": normal(100, 5, 53),
        },
        ("dtable",),
        refused=(
            ({"indices": np.full((4, 60), 100, dtype)}, "indices must be at least -100 and below 100"),
            ({"table": normal(100, 5, 52)}, "dy must be [4,60,5,52], the shape of indices and that of a row"),
        ),
    )


CASES = {
    "AdamW": adamw("pytorch"),
    "AdamW without the optional inputs": adamw("pytorch", optional=False),
    "AdamW of Hugging Face": adamw("hugging_face"),
    "AdamW of Hugging Face without the optional inputs": adamw("hugging_face", optional=False),
    "AdamW that is skipped": adamw("pytorch", update=False),
    "AddLayerNorm": add_layer_norm(np.float32, np.float32, 1e-6),
    "AddLayerNorm without the optional inputs": add_layer_norm(np.float32, np.float32, 1e-6, optional=False),
    "AddLayerNorm float16": add_layer_norm(FLOAT16, np.float32, 2.0**-11),
    "AddLayerNorm bfloat16": add_layer_norm(BFLOAT16, BFLOAT16, 2.0**-8),
    **{f"Attention {name}": forward for name, (forward, _) in ATTENTION_CASES.items()},
    **{f"AttentionGrad {name}": backward for name, (_, backward) in ATTENTION_CASES.items()},
    "BatchNormGrad": batch_norm_grad(6, 5, 11, 37),
    "BatchNormGrad without spatial axes": batch_norm_grad(40, 9),
    "BatchNormGrad of one spatial axis": batch_norm_grad(6, 5, 2100),
    "ConvGrad": conv_grad((12, 13), (3, 2), (12, 12), (1, 1), (1, 1), (1, 0, 1, 0)),
    "ConvGrad of one axis": conv_grad((40,), (4,), (19,), (2,), (2,), (1, 2)),
    "ConvGrad of three axes": conv_grad(
        (5, 6, 7), (2, 3, 2), (5, 3, 7), (1, 2, 1), (1, 1, 1), (1, 1, 0, 0, 1, 1)
    ),
    **{
        f"{case.operator} {dtype.__name__}": case
        for dtype, ignore_index in ((np.int64, -100), (np.int32, 5))
        for case in cross_entropy(dtype, ignore_index)
    },
    "EmbeddingGrad": embedding_grad(np.int64),
    "EmbeddingGrad int32": embedding_grad(np.int32),
    "GeluGrad": gelu_grad("none", np.float32, 1e-6),
    "GeluGrad tanh": gelu_grad("tanh", np.float32, 2e-6),
    "GeluGrad float16": gelu_grad("none", FLOAT16, 2.0**-11),
    "GeluGrad tanh bfloat16": gelu_grad("tanh", BFLOAT16, 2.0**-8),
    **{f"{case.operator}{name}": case for name, cases in LINEAR_CASES.items() for case in cases},
    "MaxPoolGrad": max_pool_grad(
        (10, 16), kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 0, 0], ceil_mode=0
    ),
    "MaxPoolGrad padded": max_pool_grad(
        (21, 17), kernel_shape=[3, 3], strides=[1, 2], pads=[1, 1, 2, 1], ceil_mode=1
    ),
    "ReluGrad": relu_grad(np.float32),
    "ReluGrad float16": relu_grad(np.float16),
    "ReluGrad bfloat16": relu_grad(BFLOAT16.type),
}

with_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def close(case: Case, actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(expected) == [name for name in case.outputs if name]
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype and actual[name].shape == array.shape, name
        wide = array.astype(np.float64)
        error = np.abs(actual[name].astype(np.float64) - wide).max(initial=0)
        assert error <= case.tolerance * np.abs(wide).max(initial=0), name


def same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert actual[name].tobytes() == array.tobytes(), name


@with_cases
def test_kernel_body_and_reference_agree(case: Case) -> None:
    model = case.model()
    kernel = run_session(plugin_session(model), case.arrays())
    reference = ReferenceEvaluator(model, new_ops=REFERENCE_OPS)
    expected = dict(zip(reference.output_names, reference.run(None, case.arrays()), strict=True))
    close(case, kernel, expected)

    embedded = embed_functions(model)
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(embedded), full_check=True)
    stock = onnxruntime.InferenceSession(embedded.SerializeToString(), providers=["CPUExecutionProvider"])
    close(case, run_session(stock, case.arrays()), expected)
    evaluator = ReferenceEvaluator(embedded)
    body = dict(zip(evaluator.output_names, evaluator.run(None, case.arrays()), strict=True))
    close(case, body, expected)


@with_cases
def test_the_kernel_runs_and_the_body_does_not(case: Case) -> None:
    assert executed_operators(embed_functions(case.model()), case.arrays()) == {case.operator: 1}


@with_cases
def test_the_same_bits_on_two_threads_and_in_later_runs(case: Case) -> None:
    alone = run_session(plugin_session(case.model(), threads=1), case.arrays())
    session = plugin_session(case.model(), threads=2)
    for _ in range(3):
        same_bits(run_session(session, case.arrays()), alone)


@with_cases
def test_shapes_are_inferred_alike_by_onnx_and_by_the_runtime(case: Case) -> None:
    inferred = onnx.shape_inference.infer_shapes(case.model(), check_type=True, strict_mode=True)
    results = run_session(plugin_session(case.model()), case.arrays())
    for output in inferred.graph.output:
        tensor = output.type.tensor_type
        assert tensor.elem_type == elem_type(results[output.name].dtype), output.name
        assert [dim.dim_value for dim in tensor.shape.dim] == list(results[output.name].shape), output.name


@with_cases
def test_what_is_wrong_is_said_and_the_session_stays_usable(case: Case) -> None:
    assert case.refused
    session = plugin_session(case.model(known_shapes=False))
    good = run_session(session, case.arrays())
    for changes, sentence in case.refused:
        with pytest.raises(Exception, match=re.escape(f"{case.operator} (node 'n12'): ")) as caught:
            run_session(session, case.arrays() | changes)
        assert sentence in str(caught.value)
        same_bits(run_session(session, case.arrays()), good)


@with_cases
def test_an_output_bound_to_an_inputs_own_buffer(case: Case) -> None:
    """As a training loop binds `p` and `p_updated` to one buffer."""
    expected = run_session(plugin_session(case.model()), case.arrays())
    for output, source in case.in_place:
        session = plugin_session(case.model(), threads=2)
        binding = session.io_binding()
        copies = {name: array.copy() for name, array in case.arrays().items()}
        for name, array in copies.items():
            binding.bind_input(name, "cpu", 0, elem_type(array.dtype), array.shape, array.ctypes.data)
        results = {}
        for name, array in expected.items():
            results[name] = copies[source] if name == output else np.empty_like(array)
            binding.bind_output(
                name, "cpu", 0, elem_type(array.dtype), array.shape, results[name].ctypes.data
            )
        session.run_with_iobinding(binding)
        same_bits(results, expected)


@with_cases
def test_an_attribute_of_the_wrong_type_or_value_is_refused_with_its_name(case: Case) -> None:
    kinds = {float: "a float", int: "an integer", str: "a string", tuple: "a list of integers"}
    for attribute in case.described.attributes:
        wrong: object = 1.5 if isinstance(attribute.default, str) else "text"
        model = case.model()
        node = model.graph.node[0]
        for given in [given for given in node.attribute if given.name == attribute.name]:
            node.attribute.remove(given)
        node.attribute.append(onnx.helper.make_attribute(attribute.name, wrong))
        rule = f"{attribute.name} must be {kinds[type(attribute.default)]}; got {kinds[type(wrong)]}"
        with pytest.raises(Exception, match=re.escape(f"{case.operator} (node 'n12'): the attribute {rule}")):
            plugin_session(model)


def test_every_operator_has_a_case() -> None:
    names = {operator.name for operator in OPERATORS}
    # AddLayerNormGrad has tests of its own for each of these.
    assert {case.operator for case in CASES.values()} == names - {"AddLayerNormGrad"}
