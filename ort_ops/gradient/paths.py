"""Which nodes lie between the parameters and the loss, and what to say if no gradient can pass there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from ort_ops.gradient.errors import GradientError
from ort_ops.gradient.registry import Rule, find_rule

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Element types that have gradients."""

NAMES_SHOWN = 5
"""How many parameters a message lists for each node that blocks them."""


def describe(node: ir.Node) -> str:
    """How messages name a node."""
    domain = f"{node.domain}::" if node.domain else ""
    name = f"node {node.name!r}" if node.name else f"the node that makes {node.outputs[0].name!r}"
    return f"{domain}{node.op_type} ({name})"


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a control-flow node carries."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def reachable(
    graph: ir.Graph, opsets: dict[str, int], loss: ir.Value, candidates: Sequence[ir.Value]
) -> list[ir.Value]:
    """Those of `candidates` that the loss depends on through operators that may have a derivative."""
    paths = Paths(graph, opsets, loss, candidates)
    return [value for value in candidates if value in paths.needed]


class Paths:
    """The part of a graph that gradients pass through.

    Attributes:
        rules: the rule of every node of the graph, None where there is none.
        carries: floating-point values that depend on a parameter in a way that a gradient could follow.
        active: the nodes that a gradient passes through, in the graph's order.
        needed: the values that a gradient passes through.
    """

    def __init__(
        self, graph: ir.Graph, opsets: dict[str, int], loss: ir.Value, parameters: Sequence[ir.Value]
    ) -> None:
        self.loss = loss
        self.parameters = parameters
        self.opsets = opsets
        self.nodes = list(graph)
        self.rules: dict[ir.Node, Rule | None] = {
            node: find_rule(node.domain, node.op_type, opsets.get(node.domain, 1)) for node in self.nodes
        }
        self.carries = self._forward_reach()
        self.needed = {loss} & self.carries
        self.active = self._backward_reach()

    def _forward_reach(self) -> set[ir.Value]:
        carries = set(self.parameters)
        for node in self.nodes:
            if any(value in carries for value in self.gradient_inputs(node)):
                carries.update(
                    value for value in node.outputs if value.dtype is None or value.dtype in FLOATS
                )
        return carries

    def gradient_inputs(self, node: ir.Node) -> Iterator[ir.Value]:
        """The inputs of `node` that a gradient can flow to; for a node without a rule, all, with what its
        bodies read."""
        rule = self.rules[node]
        if rule is not None and rule.kind == "not differentiable":
            return
        for index, value in enumerate(node.inputs):
            if value is not None and (rule is None or rule.inputs is None or index in rule.inputs):
                yield value
        if rule is None:
            yield from captured(node)

    def _backward_reach(self) -> list[ir.Node]:
        needed = self.needed
        active = []
        for node in reversed(self.nodes):
            if any(value in needed for value in node.outputs):
                active.append(node)
                needed.update(value for value in self.gradient_inputs(node) if value in self.carries)
        return active[::-1]

    @property
    def blocking(self) -> list[ir.Node]:
        """The nodes on the way that have no rule."""
        return [node for node in self.active if self.rules[node] is None]

    def refuse_unreachable(self) -> None:
        # whatever has no elements is folded away where it is read, and its gradient has no elements either
        lost = [value for value in self.parameters if value not in self.needed and not _is_empty(value)]
        if not lost:
            return
        names = ", ".join(repr(value.name) for value in lost)
        raise GradientError(
            f"requires_grad names {names}, but the loss {self.loss.name!r} does not depend on "
            f"{'it' if len(lost) == 1 else 'them'} through differentiable operators; take "
            f"{'it' if len(lost) == 1 else 'them'} out of requires_grad{self._where_paths_end(lost)}"
        )

    def _where_paths_end(self, lost: Iterable[ir.Value]) -> str:
        """Which not-differentiable operators read what depends on the lost parameters, for the message."""
        reached = set(lost)
        ends = []
        for node in self.nodes:
            if any(value in reached for value in node.inputs):
                rule = self.rules[node]
                if rule is not None and rule.kind == "not differentiable":
                    ends.append(describe(node))
                else:
                    reached.update(node.outputs)
        return f" (their paths end at {', '.join(ends[:5])})" if ends else ""

    def refuse_missing_rules(self) -> None:
        if not self.blocking:
            return
        lines = []
        for node in self.blocking:
            version = self.opsets.get(node.domain, 1)
            blocked = _listed(self._parameters_behind(node))
            why = " (control flow whose result depends on a parameter)" if bodies(node) else ""
            lines.append(f"  {describe(node)}, opset {version}{why}, blocks {blocked}")
        raise GradientError(
            f"no derivative rule for {len(self.blocking)} node{'s' if len(self.blocking) > 1 else ''} "
            f"between the parameters and the loss {self.loss.name!r}:\n"
            + "\n".join(lines)
            + "\nTake the blocked parameters out of requires_grad, "
            "write the model with other operators, or add a rule (ort_ops/gradient/registry.py says how)"
        )

    def _parameters_behind(self, node: ir.Node) -> list[str]:
        wanted = set(self.parameters)
        found: dict[str, None] = {}
        seen: set[ir.Node] = set()
        stack = [node]
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            for value in self.gradient_inputs(current):
                if value in wanted:
                    found[str(value.name)] = None
                producer = value.producer()
                if value in self.carries and producer is not None:
                    stack.append(producer)
        return list(found)


def _is_empty(value: ir.Value) -> bool:
    return value.shape is not None and 0 in value.shape


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def captured(node: ir.Node) -> Iterator[ir.Value]:
    """Values of the surrounding graph that the bodies of a control-flow node read."""
    for body in bodies(node):
        for inner in ir.traversal.RecursiveGraphIterator(body):
            yield from (value for value in inner.inputs if value is not None)
        yield from body.outputs
