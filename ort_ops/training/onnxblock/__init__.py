"""Blocks that build a loss or an optimizer on top of a model, with the names and calls of
onnxruntime.training.onnxblock.

A block takes names of values, adds nodes to the model that `base` holds and returns the names of its results.
`Block.base` is that model, an onnx.ModelProto, so that own blocks can add nodes themselves.
"""

from __future__ import annotations

from ort_ops.training.onnxblock import blocks, loss
from ort_ops.training.onnxblock.blocks import Block
from ort_ops.training.onnxblock.model_accessor import base, custom_op_library, empty_base
from ort_ops.training.onnxblock.onnxblock import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "loss",
]
