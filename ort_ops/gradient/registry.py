"""The table of derivative rules: which operator has which rule, and which have no derivative by definition.

An operator is in one of four states, and each has its own behaviour:

* a **rule** (`@vjp`): a function that returns the gradients of the node's inputs;
* **zero** (`zero_gradient`): piecewise constant, so the gradient is zero wherever it exists (Floor, Sign);
* **not differentiable** (`non_differentiable`): no gradient flows through it (Shape, ArgMax, comparisons);
* unknown: **no rule**, which the driver reports as an error if the node lies between a parameter and the
loss.

Writing a rule
--------------
A rule is a small pure function of one `Vjp` (see driver.py). It returns one entry per input of the node: the
gradient as a value, or None where no gradient flows to that input::

    @vjp("Mul", broadcasts=True)
    def mul(c: Vjp) -> Grads:
        return c.op("Mul", c.dy(), c.x(1)), c.op("Mul", c.dy(), c.x(0))

The driver does the rest, once for all rules: it calls a rule only if the node lies on a path from a parameter
to the loss, drops what nobody asked for, sums contributions, sums away broadcast axes when `broadcasts` is
set (the rule then returns gradients of the *output's* shape), and fills in absent output gradients. So a rule
never looks at which inputs are trainable (except to avoid work that pruning cannot remove), never accumulates
and never undoes broadcasting.

Rules see opset 18 or newer: older models are raised first (passes/upgrade_opset.py). `since` tells two forms
of one operator apart where a later opset changed its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from ort_ops.gradient.driver import Vjp

Grads = Sequence[ir.Value | None]
"""What a rule returns: one gradient per input, None where there is none; missing ones at the end count as
None."""

RuleFunction = Callable[["Vjp"], Grads]

OLDEST_OPSET = 18
"""Rules read and write the forms of this opset of the default domain, or newer."""


@dataclass(frozen=True)
class Rule:
    """What is known about the derivative of one operator.

    Attributes:
        function: the rule, or None for operators whose gradient is zero or not defined.
        kind: "rule", "zero" or "not differentiable".
        since: first opset version of the operator's domain whose form the rule understands.
        inputs: indices of the inputs that a gradient can flow to; None means every floating-point input.
        broadcasts: the rule returns gradients of the output's shape; the driver sums them to each input's
            shape.
        absorbs: the rule can add a gradient of its first input that came by another way (`Vjp.absorb`), so
            the driver handles such nodes as late as the graph allows.
        limits: what the rule does not cover, in words, for the documentation.
    """

    op_type: str
    domain: str
    kind: str
    function: RuleFunction | None = None
    since: int = OLDEST_OPSET
    inputs: frozenset[int] | None = None
    broadcasts: bool = False
    absorbs: bool = False
    limits: str = ""


_RULES: dict[tuple[str, str], list[Rule]] = {}


def _add(rule: Rule) -> None:
    forms = _RULES.setdefault((rule.domain, rule.op_type), [])
    if any(form.since == rule.since for form in forms):
        raise ValueError(f"two rules for {rule.domain or 'ai.onnx'}::{rule.op_type} since {rule.since}")
    forms.append(rule)
    forms.sort(key=lambda form: form.since)


def vjp(
    *op_types: str,
    domain: str = "",
    since: int | None = None,
    inputs: Sequence[int] | None = None,
    broadcasts: bool = False,
    absorbs: bool = False,
    limits: str = "",
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the rule of `op_types`; the arguments are those of `Rule`."""
    first = since if since is not None else (OLDEST_OPSET if domain == "" else 1)

    def register(function: RuleFunction) -> RuleFunction:
        for op_type in op_types:
            _add(
                Rule(
                    op_type,
                    domain,
                    "rule",
                    function,
                    first,
                    None if inputs is None else frozenset(inputs),
                    broadcasts,
                    absorbs,
                    limits,
                )
            )
        return function

    return register


def zero_gradient(*op_types: str, domain: str = "") -> None:
    """Declare operators that are piecewise constant: a path through them gives a gradient of zeros."""
    for op_type in op_types:
        _add(Rule(op_type, domain, "zero", since=1))


def non_differentiable(*op_types: str, domain: str = "") -> None:
    """Declare operators that no gradient flows through: their outputs count as constants."""
    for op_type in op_types:
        _add(Rule(op_type, domain, "not differentiable", since=1))


def find_rule(domain: str, op_type: str, opset: int) -> Rule | None:
    """The rule for `op_type` as it is at version `opset` of its domain; None if there is none."""
    found = None
    for form in _RULES.get((domain, op_type), ()):
        if form.since <= opset:
            found = form
    return found


def all_rules() -> Iterator[Rule]:
    """Every registered rule, by domain, operator and opset; what the documentation's table is made from."""
    for key in sorted(_RULES):
        yield from _RULES[key]
