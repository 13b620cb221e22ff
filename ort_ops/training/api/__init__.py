"""Training with the concepts and names of `onnxruntime.training.api`, in the stock ONNX Runtime.

state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state, "eval_model.onnx")
optimizer = Optimizer("optimizer_model.onnx", module)
for inputs, labels in batches:
    loss = module(inputs, labels)
    optimizer.step()
    module.lazy_reset_grad()
"""

from ort_ops.training.api.checkpoint_state import CheckpointState, Parameter
from ort_ops.training.api.lr_scheduler import (
    ConstantLRScheduler,
    CosineLRScheduler,
    LinearLRScheduler,
    LRScheduler,
)
from ort_ops.training.api.module import Module
from ort_ops.training.api.optimizer import Optimizer

__all__ = [
    "CheckpointState",
    "ConstantLRScheduler",
    "CosineLRScheduler",
    "LRScheduler",
    "LinearLRScheduler",
    "Module",
    "Optimizer",
    "Parameter",
]
