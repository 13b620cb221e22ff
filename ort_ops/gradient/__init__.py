"""Reverse-mode differentiation of ONNX models.

    from ort_ops.gradient import build_gradient_model
    training_model = build_gradient_model(onnx.load("forward.onnx"), requires_grad=["w", "b"], loss="loss")

`all_rules` lists what is known about each operator, for the documentation.
"""

from ort_ops.gradient.builder import build_gradient_model
from ort_ops.gradient.errors import GradientError
from ort_ops.gradient.registry import all_rules

__all__ = ["GradientError", "all_rules", "build_gradient_model"]
