"""The plugin's operators as data, and everything that is derived from them.

An `Operator` says what an operator is: domain, name, version, slots with their types, its composition of
standard ONNX operators, its shape rule and its reference implementation. From it come

- the `onnx.defs.OpSchema`, registered with onnx when this module is imported, so that `onnx.checker` and
  `onnx.shape_inference` know the operator,
- the `onnx.FunctionProto` bodies that `embed_functions` puts into a model, so that the model also runs
  where the plugin is not,
- `REFERENCE_OPS` for `onnx.reference.ReferenceEvaluator(model, new_ops=REFERENCE_OPS)`.

The formulas are those of a LayerNorm's backward pass (Ba, Kiros and Hinton, "Layer Normalization", 2016),
with the Add before it and the residual gradient after it folded in, input for input as in CANN's
aclnnAddLayerNormGrad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
from onnx import TensorProto, defs, shape_inference
from onnx.reference.op_run import OpRun

__all__ = [
    "ADD_LAYER_NORM_GRAD",
    "DOMAIN",
    "MIN_OPSET",
    "OPERATORS",
    "REFERENCE_OPS",
    "AddLayerNormGrad",
    "Operator",
    "Slot",
    "embed_functions",
]

DOMAIN = "ai.onnx.contrib"
"""The domain that onnxruntime-extensions registers its operators into."""

MIN_OPSET = 15
"""Oldest default-domain opset that the bodies can be written in: CastLike appeared with it."""

_OVERLOAD_IR_VERSION = 10
"""FunctionProto.overload and NodeProto.overload exist since this IR version."""

_DATA_TYPES = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")


@dataclass(frozen=True)
class Slot:
    """One input or output: its name, its type (a type variable or a concrete type), and what it holds."""

    name: str
    type_str: str
    doc: str
    optional: bool = False


@dataclass(frozen=True)
class Operator:
    """An operator of the plugin.

    `body` writes the operator as a composition of standard operators, in ONNX's text format, for the set
    of inputs that are present. `infer` is the operator's shape and type inference in the form that onnx
    calls.
    """

    name: str
    doc: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    type_constraints: tuple[tuple[str, tuple[str, ...], str], ...]
    body: Callable[[frozenset[str]], str]
    infer: Callable[[shape_inference.InferenceContext], None]
    reference: type[OpRun]
    domain: str = DOMAIN
    version: int = 1

    def overload(self, inputs: Sequence[str]) -> str:
        """Name of the body that serves a node with these input names (absent: empty, or left out at the end).

        "" when every input is there, otherwise `without_` and the absent optional inputs, e.g.
        `without_x2_and_dsum`.
        """
        absent = [
            slot.name
            for index, slot in enumerate(self.inputs)
            if slot.optional and not (index < len(inputs) and inputs[index])
        ]
        return f"without_{'_and_'.join(absent)}" if absent else ""

    def function(self, inputs: Sequence[str], opset_version: int) -> onnx.FunctionProto:
        """The body for a node with these input names, written for this version of the default domain.

        Raises ValueError when `opset_version` is older than `MIN_OPSET`.
        """
        _check_opset(opset_version)
        present = frozenset(slot.name for slot, name in zip(self.inputs, inputs, strict=False) if name)
        signature = f"{self.name} ({_names(self.inputs)}) => ({_names(self.outputs)})"
        header = f'<domain: "{self.domain}", opset_import: ["" : {opset_version}]>'
        function = onnx.parser.parse_function(f"{header}\n{signature} {{{self.body(present)}}}")
        function.doc_string = self.doc
        overload = self.overload(inputs)
        if overload:
            function.overload = overload
        return function

    def schema(self) -> defs.OpSchema:
        """The operator's schema, without its inference function (which onnx takes since 1.19)."""

        def parameter(slot: Slot) -> defs.OpSchema.FormalParameter:
            options = defs.OpSchema.FormalParameterOption
            option = options.Optional if slot.optional else options.Single
            return defs.OpSchema.FormalParameter(slot.name, slot.type_str, slot.doc, param_option=option)

        return defs.OpSchema(
            self.name,
            self.domain,
            self.version,
            self.doc,
            inputs=[parameter(slot) for slot in self.inputs],
            outputs=[parameter(slot) for slot in self.outputs],
            type_constraints=[(name, list(types), doc) for name, types, doc in self.type_constraints],
        )


def _names(slots: Iterable[Slot]) -> str:
    return ", ".join(slot.name for slot in slots)


def _check_opset(opset_version: int) -> None:
    if opset_version < MIN_OPSET:
        raise ValueError(
            f"The bodies of the plugin's operators need version {MIN_OPSET} or newer of ONNX's default "
            f"domain (they use CastLike); the model imports version {opset_version}. Export the model with "
            f"opset_version={MIN_OPSET} or newer, or convert it with onnx.version_converter.convert_version."
        )


# --------------------------------------------------------------------------------------------------------
# AddLayerNormGrad
# --------------------------------------------------------------------------------------------------------


def _add_layer_norm_grad_body(present: frozenset[str]) -> str:
    """The formulas on a table of [rows, cols].

    Flattening makes one text serve every rank and any number of normalised axes, and rstd and mean with
    or without their trailing ones. All arithmetic is in float32; the sum x1 + x2 is rounded to T on the
    way, because mean and rstd were computed from the rounded sum. (A float32 sum rounded to a 16-bit type
    equals the 16-bit sum.)
    """
    if "x2" in present:
        x = """
        x1_float = Cast <to = 1> (x1)
        x2_float = Cast <to = 1> (x2)
        x_exact = Add (x1_float, x2_float)
        x_rounded = CastLike (x_exact, x1)
        x = Cast <to = 1> (x_rounded)"""
    else:
        x = """
        x = Cast <to = 1> (x1)"""
    if "dsum" in present:
        dx = """
        dsum_float = Cast <to = 1> (dsum)
        dx_float = Add (dx_norm, dsum_float)"""
    else:
        dx = """
        dx_float = Identity (dx_norm)"""
    return f"""
        axis_rows = Constant <value_ints = [0]> ()
        axis_cols = Constant <value_ints = [1]> ()
        one = Constant <value_ints = [1]> ()
        any = Constant <value_ints = [-1]> ()

        dy_float = Cast <to = 1> (dy)
        gamma_float = Cast <to = 1> (gamma)
        dy_shape = Shape (dy)
        gamma_shape = Shape (gamma)
        gamma_size = Size (gamma_float)
        cols = Reshape (gamma_size, one)
        any_by_cols = Concat <axis = 0> (any, cols)
        dy_table = Reshape <allowzero = 1> (dy_float, any_by_cols)
        table_shape = Shape (dy_table)
        rows = Shape <start = 0, end = 1> (dy_table)
        column_shape = Concat <axis = 0> (rows, one)
        mean_column = Reshape <allowzero = 1> (mean, column_shape)
        rstd_column = Reshape <allowzero = 1> (rstd, column_shape)
{x}
        x_table = Reshape <allowzero = 1> (x, table_shape)
        centred = Sub (x_table, mean_column)
        xhat = Mul (centred, rstd_column)

        g_float = Mul (dy_float, gamma_float)
        g = Reshape <allowzero = 1> (g_float, table_shape)
        g_xhat = Mul (g, xhat)
        sum_g = ReduceSum <keepdims = 1> (g, axis_cols)
        sum_g_xhat = ReduceSum <keepdims = 1> (g_xhat, axis_cols)
        along_xhat = Mul (xhat, sum_g_xhat)
        projection = Add (sum_g, along_xhat)
        cols_float = Cast <to = 1> (cols)
        mean_projection = Div (projection, cols_float)
        residue = Sub (g, mean_projection)
        dx_table = Mul (residue, rstd_column)
        dx_norm = Reshape <allowzero = 1> (dx_table, dy_shape)
{dx}
        dx = CastLike (dx_float, dy)

        dy_xhat = Mul (dy_table, xhat)
        dgamma_flat = ReduceSum <keepdims = 0> (dy_xhat, axis_rows)
        dbeta_flat = ReduceSum <keepdims = 0> (dy_table, axis_rows)
        dgamma = Reshape (dgamma_flat, gamma_shape)
        dbeta = Reshape (dbeta_flat, gamma_shape)
    """


def _infer_add_layer_norm_grad(context: shape_inference.InferenceContext) -> None:
    """dx is as dy in type and shape, dgamma and dbeta are float and shaped as gamma; clashes are refused."""
    operator = ADD_LAYER_NORM_GRAD

    def fail(rule: str, got: str) -> None:
        raise shape_inference.InferenceError(f"{context.get_display_name()}: {rule}; got {got}.")

    tensors: dict[str, TensorProto | Any] = {}
    for index, slot in enumerate(operator.inputs):
        if index < context.get_num_inputs() and context.has_input(index):
            value_type = context.get_input_type(index)
            if value_type is not None and value_type.HasField("tensor_type"):
                tensors[slot.name] = value_type.tensor_type
    shapes = {name: _dims(tensor) for name, tensor in tensors.items() if tensor.HasField("shape")}

    dy = shapes.get("dy")
    gamma = shapes.get("gamma")
    if dy is not None and not 1 <= len(dy) <= 8:
        fail("dy must have rank 1 to 8", f"rank {len(dy)}")
    for name in ("x1", "x2", "dsum"):
        if dy is not None and name in shapes and not _agree(shapes[name], dy):
            fail(f"{name} must have dy's shape {_text(dy)}", _text(shapes[name]))
    if gamma is not None:
        if not gamma:
            fail("gamma must have rank 1 or more, one axis for each normalised axis", "a scalar")
        if 0 in gamma:
            fail("gamma must have at least one element", _text(gamma))
    if dy is not None and gamma is not None:
        if len(gamma) > len(dy) or not _agree(gamma, dy[len(dy) - len(gamma) :]):
            fail(f"gamma must have the shape of the last axes of dy {_text(dy)}", _text(gamma))
        leading = dy[: len(dy) - len(gamma)]
        with_ones = [*leading, *([1] * len(gamma))]
        for name in ("rstd", "mean"):
            if name in shapes and not (_agree(shapes[name], with_ones) or _agree(shapes[name], leading)):
                fail(f"{name} must be {_text(with_ones)} or {_text(leading)}", _text(shapes[name]))
    if "dy" in tensors and "gamma" in tensors:
        allowed = {tensors["dy"].elem_type, TensorProto.FLOAT}
        if tensors["gamma"].elem_type not in {*allowed, TensorProto.UNDEFINED}:
            got = TensorProto.DataType.Name(tensors["gamma"].elem_type).lower()
            fail("gamma must have dy's type or be float", got)

    def set_output(index: int, elem_type: int, dims: Sequence[int | str | None] | None) -> None:
        if index < context.get_num_outputs() and context.has_output(index):
            context.set_output_type(index, onnx.helper.make_tensor_type_proto(elem_type, dims))

    if "dy" in tensors:
        set_output(0, tensors["dy"].elem_type, dy)
    set_output(1, TensorProto.FLOAT, gamma)
    set_output(2, TensorProto.FLOAT, gamma)


def _dims(tensor: Any) -> list[int | str | None]:
    """Each axis as its length, its symbol, or None when nothing is known."""
    return [
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in tensor.shape.dim
    ]


def _agree(left: Sequence[int | str | None], right: Sequence[int | str | None]) -> bool:
    """Whether the two can be one shape: only two known, different lengths say no."""
    return len(left) == len(right) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(left, right, strict=True)
    )


def _text(dims: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


class AddLayerNormGrad(OpRun):
    """The operator for `onnx.reference`: float64 inside, each result rounded once.

    Shapes: dy, x1, x2, dsum and dx [..., *norm]; rstd and mean [..., 1 x rank(norm)] or [...]; gamma,
    dgamma and dbeta [*norm].
    """

    op_domain = DOMAIN

    def _run(
        self,
        dy: np.ndarray,
        x1: np.ndarray,
        x2: np.ndarray | None,
        rstd: np.ndarray,
        mean: np.ndarray,
        gamma: np.ndarray,
        dsum: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        def wide(array: np.ndarray) -> np.ndarray:
            return array.astype(np.float64)

        # The forward Add rounds to T, and mean and rstd belong to the rounded sum.
        x = x1 if x2 is None else (wide(x1) + wide(x2)).astype(x1.dtype)
        cols = gamma.size
        rows = dy.size // cols
        table, column = (rows, cols), (rows, 1)
        dy_table = wide(dy).reshape(table)
        rstd_column = wide(rstd).reshape(column)
        xhat = (wide(x).reshape(table) - wide(mean).reshape(column)) * rstd_column
        g = dy_table * wide(gamma).reshape(1, cols)
        sum_g = g.sum(axis=1, keepdims=True)
        sum_g_xhat = (g * xhat).sum(axis=1, keepdims=True)
        dx = (rstd_column * (g - (sum_g + xhat * sum_g_xhat) / cols)).reshape(dy.shape)
        if dsum is not None:
            dx = dx + wide(dsum)
        dgamma = (dy_table * xhat).sum(axis=0).reshape(gamma.shape)
        dbeta = dy_table.sum(axis=0).reshape(gamma.shape)
        return dx.astype(dy.dtype), dgamma.astype(np.float32), dbeta.astype(np.float32)


ADD_LAYER_NORM_GRAD = Operator(
    name="AddLayerNormGrad",
    doc=(
        "Backward pass of y = LayerNorm(x1 + x2), with the residual branch's gradient added to the result. "
        "With rows = product of the leading axes and cols = number of elements of gamma: "
        "x = round_T(x1 + x2), xhat = (x - mean) * rstd, g = dy * gamma, "
        "dx = round_T(rstd * (g - (sum_cols(g) + xhat * sum_cols(g * xhat)) / cols) + dsum), "
        "dgamma = sum_rows(dy * xhat), dbeta = sum_rows(dy)."
    ),
    inputs=(
        Slot("dy", "T", "[..., *norm]: gradient of the norm's output; rank 1 to 8"),
        Slot("x1", "T", "as dy: first addend of the forward Add"),
        Slot("x2", "T", "as dy: second addend; when absent, x = x1", optional=True),
        Slot("rstd", "tensor(float)", "[...] or [..., 1 for each axis of norm]: 1/sqrt(Var(x) + epsilon)"),
        Slot("mean", "tensor(float)", "as rstd: E(x)"),
        Slot("gamma", "G", "[*norm]: scale; its rank says how many trailing axes are normalised"),
        Slot("dsum", "T", "as dy: gradient that reaches x by another way; added last", optional=True),
    ),
    outputs=(
        Slot("dx", "T", "as dy: gradient of x, so of x1 and of x2 alike"),
        Slot("dgamma", "tensor(float)", "as gamma: its gradient", optional=True),
        Slot("dbeta", "tensor(float)", "as gamma: gradient of the forward pass's bias", optional=True),
    ),
    type_constraints=(
        ("T", _DATA_TYPES, "Type of the activations and their gradients."),
        ("G", _DATA_TYPES, "T, or float when T is 16 bits wide."),
    ),
    body=_add_layer_norm_grad_body,
    infer=_infer_add_layer_norm_grad,
    reference=AddLayerNormGrad,
)

OPERATORS: tuple[Operator, ...] = (ADD_LAYER_NORM_GRAD,)
"""Every operator of the plugin."""

REFERENCE_OPS: list[type[OpRun]] = [operator.reference for operator in OPERATORS]
"""For `onnx.reference.ReferenceEvaluator(model, new_ops=REFERENCE_OPS)`.

Needed even for a model that carries the bodies when its nodes differ in the optional inputs they leave
out: the evaluator does not tell functions apart by their overload.
"""


# --------------------------------------------------------------------------------------------------------
# Models and onnx's registry
# --------------------------------------------------------------------------------------------------------


def embed_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that carries the bodies of the plugin's operators that it uses.

    With the plugin registered, ONNX Runtime runs the plugin's kernel for such a node; without it, the
    body is inlined and the same file still runs. Nodes are found in the graph, in subgraphs and in
    model-local functions. In the copy

    - there is one body for each combination of absent optional inputs in use; nodes and bodies are
      matched through `overload` (see `Operator.overload`), for which the IR version is raised to 10, but
      only if a node leaves an optional input out;
    - a model-local function in which a node leaves an optional input out is inlined where it is called,
      because ONNX Runtime looks at no overload inside of functions;
    - these nodes name all their inputs and outputs, absent ones by the empty name also at the end,
      because function calls with fewer arguments than the function are refused by `onnx.reference` and,
      for outputs, by ONNX Runtime;
    - the plugin's domain is imported once, at version 1 (an import at another version is replaced: the
      domain's operators are all of version 1), by the model and by every function that uses it;
    - the default domain keeps its version, and the bodies are written for that version.

    A body already there is replaced, so the function is idempotent; a model that uses no operator of the
    plugin comes back as it was. The given model is left alone. The copy is a protobuf copy: initializers
    inside the model are copied once, those in external data files are only references and stay so, which
    is also how a model beyond protobuf's limit of 2 GiB gets through.

    Raises ValueError when the model uses an operator of the plugin and its default opset is older than
    `MIN_OPSET`, or when a function that must be inlined imports other opset versions than the model.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    users = [function for function in result.functions if any(_operator_nodes(function.node))]
    if not users and not any(_operator_nodes(result.graph.node)):
        return result

    for imports in (result.opset_import, *(function.opset_import for function in users)):
        _import_domain_once(imports)
    result = _inline_functions_with_overloads(result)
    opset_version = _default_opset(result)
    bodies: dict[tuple[str, str, str], onnx.FunctionProto] = {}
    for nodes in (result.graph.node, *(function.node for function in result.functions)):
        for node, operator in _operator_nodes(nodes):
            body = operator.function(node.input, opset_version)
            bodies[body.domain, body.name, body.overload] = body
            if node.overload != body.overload:
                node.overload = body.overload
            node.input.extend([""] * (len(operator.inputs) - len(node.input)))
            node.output.extend([""] * (len(operator.outputs) - len(node.output)))

    for index in reversed(range(len(result.functions))):
        function = result.functions[index]
        if (function.domain, function.name, function.overload) in bodies:
            del result.functions[index]
    result.functions.extend(bodies[key] for key in sorted(bodies))
    if any(overload for _, _, overload in bodies):
        result.ir_version = max(result.ir_version, _OVERLOAD_IR_VERSION)
    return result


def _inline_functions_with_overloads(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without those functions in which a node of the plugin leaves an optional input out.

    Inlining moves their nodes to their callers, which may be functions too; so it is done until none is left.
    """

    def needs_overload(function: onnx.FunctionProto) -> bool:
        return any(operator.overload(node.input) for node, operator in _operator_nodes(function.node))

    while concerned := [(f.domain, f.name) for f in model.functions if needs_overload(f)]:
        try:
            model = onnx.inliner.inline_selected_functions(model, concerned)
        except RuntimeError as error:
            names = ", ".join(f"{domain}::{name}" for domain, name in concerned)
            raise ValueError(
                f"The model-local functions {names} use an operator of the plugin without one of its "
                f"optional inputs, for which they must be inlined, but onnx refuses: {error} Let them import "
                f"the same opset versions as the model."
            ) from error
    return model


def _operator_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[onnx.NodeProto, Operator]]:
    """The plugin's nodes among these and in their subgraphs, each with its operator."""
    by_key = {(operator.domain, operator.name): operator for operator in OPERATORS}
    for node in nodes:
        operator = by_key.get((node.domain, node.op_type))
        if operator is not None:
            yield node, operator
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _operator_nodes(graph.node)


def _default_opset(model: onnx.ModelProto) -> int:
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            return entry.version
    raise ValueError(
        f"The model imports no version of ONNX's default domain; add an opset import with domain '' and "
        f"version {MIN_OPSET} or newer, in which the bodies of the plugin's operators are written."
    )


def _import_domain_once(imports: Any) -> None:
    """Leaves one import of the plugin's domain, at version 1, among the imports of a model or function."""
    for index in reversed(range(len(imports))):
        if imports[index].domain == DOMAIN:
            del imports[index]
    imports.append(onnx.helper.make_opsetid(DOMAIN, 1))


def _register_schemas() -> None:
    """Makes the operators known to `onnx.checker` and `onnx.shape_inference`, once for the process."""
    for operator in OPERATORS:
        schema = operator.schema()
        # onnx before 1.19 takes no inference function from Python. There, a schema would only hide the
        # embedded body from shape inference, which gives the same types and shapes.
        if not hasattr(schema, "set_type_and_shape_inference_function"):
            continue
        if defs.has(operator.name, max_inclusive_version=operator.version, domain=operator.domain):
            continue
        schema.set_type_and_shape_inference_function(operator.infer)
        defs.register_schema(schema)


_register_schemas()
