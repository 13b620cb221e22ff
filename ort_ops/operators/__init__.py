"""The plugin's operators as data, and everything that is derived from them.

An `Operator` says what an operator is: domain, name, version, slots with their types, attributes, its
composition of standard ONNX operators, its shape rule and its reference implementation. From it come

- the `onnx.defs.OpSchema`, registered with onnx when this package is imported, so that `onnx.checker` and
  `onnx.shape_inference` know the operator,
- the `onnx.FunctionProto` bodies that `embed_functions` puts into a model, so that the model also runs
  where the plugin is not,
- `REFERENCE_OPS` for `onnx.reference.ReferenceEvaluator(model, new_ops=REFERENCE_OPS)`.

Each operator has a module of its own; `catalogue` lists them.
"""

from __future__ import annotations

from onnx import defs

from ort_ops.operators.adamw import ADAMW, AdamW
from ort_ops.operators.add_layer_norm import ADD_LAYER_NORM, AddLayerNorm
from ort_ops.operators.add_layer_norm_grad import ADD_LAYER_NORM_GRAD, AddLayerNormGrad
from ort_ops.operators.attention import ATTENTION, ATTENTION_GRAD
from ort_ops.operators.batch_norm_grad import BATCH_NORM_GRAD, BatchNormGrad
from ort_ops.operators.catalogue import OPERATORS, REFERENCE_OPS
from ort_ops.operators.conv_grad import CONV_GRAD, ConvGrad
from ort_ops.operators.cross_entropy import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_GRAD,
    CrossEntropy,
    CrossEntropyGrad,
)
from ort_ops.operators.embedding import embed_functions
from ort_ops.operators.embedding_grad import EMBEDDING_GRAD, EmbeddingGrad
from ort_ops.operators.gelu_grad import GELU_GRAD, GeluGrad
from ort_ops.operators.inference import Inference
from ort_ops.operators.linear import LINEAR, LINEAR_GRAD, Linear, LinearGrad
from ort_ops.operators.max_pool_grad import MAX_POOL_GRAD, MaxPoolGrad
from ort_ops.operators.operator import DOMAIN, MIN_OPSET, Attribute, Operator, Slot
from ort_ops.operators.relu_grad import RELU_GRAD, ReluGrad

__all__ = [
    "ADAMW",
    "ADD_LAYER_NORM",
    "ADD_LAYER_NORM_GRAD",
    "ATTENTION",
    "ATTENTION_GRAD",
    "BATCH_NORM_GRAD",
    "CONV_GRAD",
    "CROSS_ENTROPY",
    "CROSS_ENTROPY_GRAD",
    "DOMAIN",
    "EMBEDDING_GRAD",
    "GELU_GRAD",
    "LINEAR",
    "LINEAR_GRAD",
    "MAX_POOL_GRAD",
    "MIN_OPSET",
    "OPERATORS",
    "REFERENCE_OPS",
    "RELU_GRAD",
    "AdamW",
    "AddLayerNorm",
    "AddLayerNormGrad",
    "Attribute",
    "BatchNormGrad",
    "ConvGrad",
    "CrossEntropy",
    "CrossEntropyGrad",
    "EmbeddingGrad",
    "GeluGrad",
    "Linear",
    "LinearGrad",
    "MaxPoolGrad",
    "Operator",
    "ReluGrad",
    "Slot",
    "embed_functions",
]


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
        schema.set_type_and_shape_inference_function(_inference_of(operator))
        defs.register_schema(schema)


def _inference_of(operator: Operator):
    """The operator's inference in the form that onnx calls."""
    names = [slot.name for slot in operator.inputs]
    return lambda context: operator.infer(Inference(context, names))


_register_schemas()
