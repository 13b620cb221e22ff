"""ort_ops: a plugin that lets the stock ONNX Runtime train transformers.

`register(session_options)` gives a session the operator ``ai.onnx.contrib::AddLayerNormGrad``;
`ort_ops.operators` describes the operators; `ort_ops.gradient.build_gradient_model` turns a forward
model into one that also computes gradients.
"""

from ort_ops.library import library_path, register

__all__ = ["__version__", "library_path", "register"]

__version__ = "0.1.0"
