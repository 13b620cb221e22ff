"""Types and shapes of all values, inferred by onnx."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ort_ops.passes.data_free import data_free_proto
from ort_ops.passes.errors import PassError


def infer_shapes(model: ir.Model) -> None:
    """Fill in the types and shapes of the model's values, in place; what is known already is only made more precise.

    Raises:
        PassError: two operators disagree about a type or shape.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(data_free_proto(model), data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise PassError(f"the types or shapes of the model's operators do not fit together: {error}") from error
    known = {info.name: info.type for info in [*inferred.graph.value_info, *inferred.graph.output]}
    for node in model.graph:
        for value in node.outputs:
            if value.name in known:
                _refine(value, known[value.name])


def _refine(value: ir.Value, found: onnx.TypeProto) -> None:
    kind = ir.serde.deserialize_type_proto_for_type(found)
    if kind is not None and value.type is None:
        value.type = kind
    shape = ir.serde.deserialize_type_proto_for_shape(found)
    if shape is not None and _knows_more(shape, value.shape):
        value.shape = shape


def _knows_more(new: ir.Shape, old: ir.Shape | None) -> bool:
    if old is None or len(old) != len(new):
        return old is None
    return any(not isinstance(was, int) and (isinstance(now, int) or was.value is None) for now, was in zip(new, old, strict=True))
