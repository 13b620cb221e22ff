"""The page that says which operators can be differentiated, made from the registry so that it cannot be out
of date."""

from __future__ import annotations

from typing import Any

import onnx

from ort_ops.gradient import rules as rules  # registers the rules
from ort_ops.gradient.registry import Rule, all_rules

_INTRODUCTION = """# Operators that can be differentiated

Made by `python -m ort_ops.gradient.documentation > docs/operators.md` from the table of rules. Models below
opset 18 are raised to it first, so every older form of an operator is covered by its rule. "Through its
definition": the standard, here {version}, defines the operator by others, which have rules. Operators that
are not listed have no rule; a model with one of them between a parameter and the loss is refused with a
message that names every such node.

| operator | how | since opset | limits |
| --- | --- | --- | --- |
"""

_HOW = {"rule": "rule", "zero": "gradient is zero", "not differentiable": "no gradient flows through it"}


def operator_table() -> str:
    """The page, in Markdown."""
    rows = {(rule.domain, rule.op_type, rule.since): _row(rule) for rule in all_rules()}
    listed = {(domain, name) for domain, name, _ in rows}
    schemas: Any = onnx.defs.get_all_schemas_with_history()
    for schema in sorted(schemas, key=lambda schema: schema.since_version):
        defined = schema.has_function or schema.has_context_dependent_function
        if schema.domain == "" and defined and ("", schema.name) not in listed and not schema.deprecated:
            row = f"| {schema.name} | through its definition | {schema.since_version} |  |"
            rows.setdefault(("", schema.name, 0), row)
    return (
        _INTRODUCTION.format(version=definitions_version())
        + "\n".join(rows[key] for key in sorted(rows))
        + "\n"
    )


def definitions_version() -> str:
    """The onnx release, without its last number, whose definitions of operators the page is made from."""
    return "onnx " + ".".join(onnx.__version__.split(".")[:2])


def _row(rule: Rule) -> str:
    name = f"{rule.domain}::{rule.op_type}" if rule.domain else rule.op_type
    since = "any" if rule.kind != "rule" or (rule.domain == "" and rule.since <= 18) else str(rule.since)
    return f"| {name} | {_HOW[rule.kind]} | {since} | {rule.limits} |"


if __name__ == "__main__":
    print(operator_table(), end="")
