"""Raises the default domain's opset, so that later passes and rules know one form of each operator only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from ort_ops.passes.data_free import without_data
from ort_ops.passes.errors import PassError


def upgrade_opset(model: ir.Model, oldest: int) -> ir.Model:
    """The model at opset `oldest` of the default domain if it was older, else the model itself.

    The conversion is onnx's own; what its adapters leave wrong is put right here (`_mend`).

    Raises:
        PassError: onnx cannot convert one of the model's operators.
    """
    version = model.opset_imports.get("", oldest)
    model.opset_imports.setdefault("", version)
    if version >= oldest:
        return model
    old_forms = _note_old_forms(model, version)
    try:
        upgraded = without_data(model, lambda proto: onnx.version_converter.convert_version(proto, oldest))
    except RuntimeError as error:
        raise PassError(
            f"the model cannot be raised from opset {version} to {oldest}, the oldest that "
            f"gradients are built for: {error}; export it with opset_version={oldest} or newer"
        ) from error
    for node in list(upgraded.graph.all_nodes()):
        form = old_forms.get(_key(node.op_type, node))
        if form is not None:
            form(node)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(upgraded)
    return upgraded


Mend = Callable[[ir.Node], None]
Key = tuple[str, str | None]


def _key(op_type: str, node: ir.Node) -> Key:
    """What tells a node from others before and after the conversion: it gives the output of an Upsample
    another name."""
    if op_type == "Resize":
        return op_type, node.inputs[0].name if node.inputs[0] is not None else None
    return op_type, node.outputs[0].name if node.outputs else None


def _note_old_forms(model: ir.Model, version: int) -> dict[Key, Mend]:
    """What has to be put right after the conversion.

    1. Split with neither sizes nor a count (before 13): opset 18 wants the count.
    2. Clip (before 11) and Pad (before 11): numbers that were attributes become float32 tensors, whatever the
       data's type.
    3. BatchNormalization (before 14) in training mode, told by its extra outputs: those that hold the saved
       statistics have no successor, and the mode became an attribute.
    4. Resize (before 11) and Upsample: coordinates were scaled without a shift, and nearest meant the lower
    neighbour.
    """
    forms: dict[Key, Mend] = {}
    for node in list(model.graph.all_nodes()):
        if node.domain != "":
            continue
        if (
            node.op_type == "Split"
            and version < 18
            and len(node.inputs) == 1
            and "split" not in node.attributes
        ):
            forms[_key("Split", node)] = _count_outputs
        elif node.op_type == "Clip" and version < 11:
            forms[_key("Clip", node)] = partial(_cast_numbers, inputs=(1, 2))
        elif node.op_type == "Pad" and version < 11:
            forms[_key("Pad", node)] = partial(_cast_numbers, inputs=(2,))
        elif node.op_type == "BatchNormalization" and version < 14 and len(node.outputs) > 1:
            _drop_saved_statistics(node)
            forms[_key("BatchNormalization", node)] = _set_training_mode
        elif node.op_type in ("Resize", "Upsample") and version < 11:
            forms[_key("Resize", node)] = _old_coordinates
            _keep_output_name(node)
    return forms


def _keep_output_name(node: ir.Node) -> None:
    """Put an Identity between an Upsample and a graph output, whose name the conversion would change."""
    output, graph = node.outputs[0], node.graph
    if graph is None or not output.is_graph_output():
        return
    copy = ir.node("Identity", [output])
    copy.outputs[0].type, copy.outputs[0].shape = output.type, output.shape
    graph.insert_after(node, copy)
    graph.outputs[:] = [copy.outputs[0] if value is output else value for value in graph.outputs]
    name = output.name
    output.name = f"{name}_resized"
    copy.outputs[0].name = name


def _count_outputs(node: ir.Node) -> None:
    node.attributes.add(ir.AttrInt64("num_outputs", len(node.outputs)))


def _cast_numbers(node: ir.Node, inputs: tuple[int, ...]) -> None:
    assert node.graph is not None
    for index in inputs:
        number = node.inputs[index] if index < len(node.inputs) else None
        if number is not None:
            cast = ir.node("CastLike", [number, node.inputs[0]])
            cast.outputs[0].name = f"{node.outputs[0].name}_bound_{index}"
            node.graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])


def _drop_saved_statistics(node: ir.Node) -> None:
    saved = node.outputs[3:]
    read = [value.name for value in saved if value.uses() or value.is_graph_output()]
    if read:
        raise PassError(
            f"BatchNormalization (node {node.name!r}): the saved statistics {', '.join(map(repr, read))} are "
            "read, but opset 14 and newer have no such outputs; export the model with opset_version=14 or "
            "newer"
        )
    node.resize_outputs(3)


def _set_training_mode(node: ir.Node) -> None:
    node.attributes.add(ir.AttrInt64("training_mode", 1))


def _old_coordinates(node: ir.Node) -> None:
    node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
    node.attributes.add(ir.AttrString("nearest_mode", "floor"))
