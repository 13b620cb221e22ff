"""What an operator of the plugin is, as data, and what onnx's objects are made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx.helper
import onnx.parser
from onnx import defs
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference

DOMAIN = "ai.onnx.contrib"
"""The domain that onnxruntime-extensions registers its operators into."""

MIN_OPSET = 15
"""Oldest default-domain opset that the bodies can be written in: CastLike appeared with it."""

DATA_TYPES = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")

AttributeValue = float | int | str | tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One input or output: its name, its type (a type variable or a concrete type), and what it holds."""

    name: str
    type_str: str
    doc: str
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute: its name, its default, whose type is the attribute's, and what it says."""

    name: str
    default: AttributeValue
    doc: str


@dataclass(frozen=True)
class Operator:
    """An operator of the plugin.

    `body` writes the operator as a composition of standard operators, in ONNX's text format, for the set
    of inputs that are present and the values of the attributes. A text says what is computed, so each of its
    values has a body of its own; a body reads numbers by reference (`@epsilon`), so one serves all.
    `infer` is the operator's shape and type inference.
    """

    name: str
    doc: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    type_constraints: tuple[tuple[str, tuple[str, ...], str], ...]
    body: Callable[[frozenset[str], Mapping[str, AttributeValue]], str]
    infer: Callable[[Inference], None]
    reference: type[OpRun]
    attributes: tuple[Attribute, ...] = ()
    min_opset: int = MIN_OPSET
    domain: str = DOMAIN
    version: int = 1

    def overload(self, inputs: Sequence[str], attributes: Mapping[str, AttributeValue] | None = None) -> str:
        """Name of the body that serves a node with these input names (absent: empty, or left out at the end)
        and these attributes (absent: the default).

        "" when every input is there and every text the default, otherwise the attributes that differ, and
        `without_` and the absent optional inputs, e.g. `without_x2_and_dsum`, `approximate_tanh`.
        """
        words = [
            f"{attribute.name}_{value}"
            for attribute, value in zip(self.attributes, self._values(attributes), strict=True)
            if isinstance(value, str) and value != attribute.default
        ]
        absent = [
            slot.name
            for index, slot in enumerate(self.inputs)
            if slot.optional and not (index < len(inputs) and inputs[index])
        ]
        if absent:
            words.append(f"without_{'_and_'.join(absent)}")
        return "_".join(words)

    def function(
        self,
        inputs: Sequence[str],
        opset_version: int,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> onnx.FunctionProto:
        """The body for a node with these input names and attributes, for this version of the default domain.

        Raises ValueError when `opset_version` is older than `min_opset`.
        """
        self._check_opset(opset_version)
        present = frozenset(slot.name for slot, name in zip(self.inputs, inputs, strict=False) if name)
        values = {a.name: v for a, v in zip(self.attributes, self._values(attributes), strict=True)}
        signature = f"{self.name} ({_names(self.inputs)}) => ({_names(self.outputs)})"
        header = f'<domain: "{self.domain}", opset_import: ["" : {opset_version}]>'
        function = onnx.parser.parse_function(f"{header}\n{signature} {{{self.body(present, values)}}}")
        function.doc_string = self.doc
        function.attribute_proto.extend(
            onnx.helper.make_attribute(attribute.name, attribute.default) for attribute in self.attributes
        )
        overload = self.overload(inputs, attributes)
        if overload:
            function.overload = overload
        return function

    def attributes_of(self, node: onnx.NodeProto) -> dict[str, AttributeValue]:
        """The values of the operator's attributes that this node sets."""
        known = {attribute.name for attribute in self.attributes}
        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name in known}
        return {name: v.decode() if isinstance(v, bytes) else v for name, v in values.items()}

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
            attributes=[
                defs.OpSchema.Attribute(a.name, onnx.helper.make_attribute(a.name, a.default), a.doc)
                for a in self.attributes
            ],
        )

    def _values(self, attributes: Mapping[str, AttributeValue] | None) -> list[AttributeValue]:
        given = attributes or {}
        return [given.get(attribute.name, attribute.default) for attribute in self.attributes]

    def _check_opset(self, opset_version: int) -> None:
        if opset_version < self.min_opset:
            raise ValueError(
                f"The body of {self.domain}::{self.name} needs version {self.min_opset} or newer of ONNX's "
                f"default domain; the model imports version {opset_version}. Export the model with "
                f"opset_version={self.min_opset} or newer, or convert it with "
                f"onnx.version_converter.convert_version."
            )


def _names(slots: Iterable[Slot]) -> str:
    return ", ".join(slot.name for slot in slots)
