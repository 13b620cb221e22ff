"""The list of the plugin's operators."""

from __future__ import annotations

from onnx.reference.op_run import OpRun

from ort_ops.operators.adamw import ADAMW
from ort_ops.operators.add_layer_norm import ADD_LAYER_NORM
from ort_ops.operators.add_layer_norm_grad import ADD_LAYER_NORM_GRAD
from ort_ops.operators.attention import ATTENTION, ATTENTION_GRAD
from ort_ops.operators.batch_norm_grad import BATCH_NORM_GRAD
from ort_ops.operators.conv_grad import CONV_GRAD
from ort_ops.operators.cross_entropy import CROSS_ENTROPY, CROSS_ENTROPY_GRAD
from ort_ops.operators.embedding_grad import EMBEDDING_GRAD
from ort_ops.operators.gelu_grad import GELU_GRAD
from ort_ops.operators.linear import LINEAR, LINEAR_GRAD
from ort_ops.operators.max_pool_grad import MAX_POOL_GRAD
from ort_ops.operators.operator import Operator
from ort_ops.operators.relu_grad import RELU_GRAD

OPERATORS: tuple[Operator, ...] = (
    ADAMW,
    ADD_LAYER_NORM,
    ADD_LAYER_NORM_GRAD,
    ATTENTION,
    ATTENTION_GRAD,
    BATCH_NORM_GRAD,
    CONV_GRAD,
    CROSS_ENTROPY,
    CROSS_ENTROPY_GRAD,
    EMBEDDING_GRAD,
    GELU_GRAD,
    LINEAR,
    LINEAR_GRAD,
    MAX_POOL_GRAD,
    RELU_GRAD,
)
"""Every operator of the plugin."""

REFERENCE_OPS: list[type[OpRun]] = [operator.reference for operator in OPERATORS]
"""For `onnx.reference.ReferenceEvaluator(model, new_ops=REFERENCE_OPS)`.

Needed even for a model that carries the bodies when its nodes differ in the optional inputs they leave
out: the evaluator does not tell functions apart by their overload.
"""
