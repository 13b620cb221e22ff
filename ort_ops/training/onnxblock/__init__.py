"""Blocks that build a loss or an optimizer on top of a model, with the names and calls of
onnxruntime.training.onnxblock.

A block takes names of values, adds nodes to the model that `base` holds and returns the names of its results.
`Block.base` is that model, an onnx.ModelProto, so that own blocks can add nodes themselves::

    class WeightedLoss(onnxblock.Block):
        def __init__(self):
            self.mse, self.l1 = onnxblock.loss.MSELoss(), onnxblock.loss.L1Loss()
            self.share, self.mul, self.add = blocks.Constant(0.3), blocks.Mul(), blocks.Add()

        def build(self, prediction):
            return self.add(self.mse(prediction), self.mul(self.share(), self.l1(prediction)))
"""

from __future__ import annotations

from ort_ops.training.onnxblock import blocks, loss, optim
from ort_ops.training.onnxblock.blocks import Block
from ort_ops.training.onnxblock.checkpoint_utils import load_checkpoint_to_model, save_checkpoint
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
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
