"""Puts the bodies of the plugin's operators into models, so that they run where the plugin is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
import onnx.helper
import onnx.inliner

from ort_ops.operators.catalogue import OPERATORS
from ort_ops.operators.operator import DOMAIN, MIN_OPSET, Operator

_OVERLOAD_IR_VERSION = 10
"""FunctionProto.overload and NodeProto.overload exist since this IR version."""


def embed_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that carries the bodies of the plugin's operators that it uses.

    With the plugin registered, ONNX Runtime runs the plugin's kernel for such a node; without it, the
    body is inlined and the same file still runs. Nodes are found in the graph, in subgraphs and in
    model-local functions. In the copy

    - there is one body for each combination of absent optional inputs and texts of attributes in use;
      nodes and bodies are matched through `overload` (see `Operator.overload`), for which the IR version
      is raised to 10, but only if a node leaves an optional input out or sets a text to another than its
      default;
    - a model-local function with such a node is inlined where it is called, because ONNX Runtime looks at
      no overload inside of functions;
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
    the operator's `min_opset`, or when a function that must be inlined imports other opset versions than the
    model.
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
            body = operator.function(node.input, opset_version, operator.attributes_of(node))
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
    """The model without those functions in which a node of the plugin needs an overload of its body.

    Inlining moves their nodes to their callers, which may be functions too; so it is done until none is left.
    """

    def needs_overload(function: onnx.FunctionProto) -> bool:
        return any(
            operator.overload(node.input, operator.attributes_of(node))
            for node, operator in _operator_nodes(function.node)
        )

    while concerned := [(f.domain, f.name) for f in model.functions if needs_overload(f)]:
        try:
            model = onnx.inliner.inline_selected_functions(model, concerned)
        except RuntimeError as error:
            names = ", ".join(f"{domain}::{name}" for domain, name in concerned)
            raise ValueError(
                f"The model-local functions {names} use an operator of the plugin without one of its "
                f"optional inputs, or with another text than the default, for which they must be inlined, "
                f"but onnx refuses: {error} Let them import the same opset versions as the model."
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
