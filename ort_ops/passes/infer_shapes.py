"""Types and shapes of all values, inferred by onnx.

onnx knows nothing of the operators that ONNX Runtime's optimizer writes (domain com.microsoft), nor of
StopGradient. They are replaced, in the copy that is inferred and nowhere else, by standard operators whose
outputs have the same types and shapes.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ort_ops.operators import DOMAIN
from ort_ops.passes.data_free import ADDED_DOMAIN, data_free_proto
from ort_ops.passes.errors import PassError


def infer_shapes(model: ir.Model) -> None:
    """Fill in the types and shapes of the model's values, in place; what is known already is only made more
    precise.

    Raises:
        PassError: two operators disagree about a type or shape.
    """
    proto = data_free_proto(model)
    _put_stand_ins(proto)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise PassError(
            f"the types or shapes of the model's operators do not fit together: {error}"
        ) from error
    _refine_graph(model.graph, inferred.graph)


def _refine_graph(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    known = {info.name: info.type for info in [*inferred.value_info, *inferred.output]}
    bodies = {
        (tuple(node.output), attribute.name): attribute.g
        for node in inferred.node
        for attribute in node.attribute
        if attribute.HasField("g")
    }
    for node in graph:
        for value in node.outputs:
            if value.name in known:
                _refine(value, known[value.name])
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                _refine_graph(
                    attribute.as_graph(),
                    bodies[tuple(value.name or "" for value in node.outputs), attribute.name],
                )


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
    return any(
        not isinstance(was, int) and (isinstance(now, int) or was.value is None)
        for now, was in zip(new, old, strict=True)
    )


_DOMAINS = ("com.microsoft", ADDED_DOMAIN, DOMAIN)


def _put_stand_ins(proto: onnx.ModelProto) -> None:
    if not any(node.domain in _DOMAINS for node in proto.graph.node):
        return
    nodes = [stand_in for node in proto.graph.node for stand_in in _stand_ins(node)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def _stand_ins(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Standard nodes whose outputs have the types and shapes of the node's; the node itself where none are
    known."""
    make = onnx.helper.make_node
    inputs, outputs = list(node.input), list(node.output)
    if node.domain not in _DOMAINS:
        return [node]
    if node.op_type == "SimplifiedLayerNormalization":
        return [make("LayerNormalization", inputs[:2], [outputs[0], "", *outputs[1:]])]
    if node.op_type in ("Gelu", "QuickGelu", "FastGelu", "BiasGelu", "StopGradient"):
        return [make("Identity", inputs[:1], outputs)]
    if node.op_type == "FusedGemm":
        transposed = {a.name: a.i for a in node.attribute if a.name in ("transA", "transB")}
        return [make("Gemm", inputs, outputs, **transposed)]
    if node.op_type == "FusedMatMul":
        flags = {attribute.name: attribute.i for attribute in node.attribute}
        left = "...ji" if flags.get("transA") else "...ij"
        right = "...kj" if flags.get("transB") else "...jk"
        if (left, right) == ("...ij", "...jk"):
            return [make("MatMul", inputs, outputs)]
        return [make("Einsum", inputs, outputs, equation=f"{left},{right}->...ik")]
    if node.op_type in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        norm = make("LayerNormalization", [inputs[0], inputs[2]], outputs[:3])
        return [norm, make("Identity", inputs[:1], outputs[3:4])] if outputs[3:4] else [norm]
    return [node]
