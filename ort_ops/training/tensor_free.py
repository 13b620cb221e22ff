"""Functions of the onnx package on models in memory, called without the large tensors: they would copy them,
and could not pass more than 2 GB.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ort_ops.passes import infer_shapes
from ort_ops.passes.data_free import data_free_proto


def check(model: onnx.ModelProto) -> None:
    """onnx's checker, with shape inference. Raises what it raises.

    Outputs may be without shape, as some exporters leave them: the checker, which wants one, sees what can be
    inferred.
    """
    checked = ir.from_proto(model)
    if any(output.shape is None for output in checked.graph.outputs):
        infer_shapes(checked)
    onnx.checker.check_model(data_free_proto(checked), full_check=True)


def type_of(model: onnx.ModelProto, name: str) -> onnx.TypeProto | None:
    """Type and shape of a value of the main graph, inferred if they are not written down; None if unknown."""
    graph = model.graph
    for info in [*graph.input, *graph.output, *graph.value_info]:
        if info.name == name and info.type.tensor_type.HasField("shape"):
            return info.type
    for tensor in graph.initializer:
        if tensor.name == name:
            return onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    ir_model = ir.from_proto(model)
    infer_shapes(ir_model)
    values = (value for node in ir_model.graph for value in node.outputs)
    known = (value for value in [*ir_model.graph.inputs, *values] if value.type is not None)
    found = next((value for value in known if value.name == name), None)
    return None if found is None else ir.serde.serialize_value(found).type
