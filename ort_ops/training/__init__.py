"""Training on the stock ONNX Runtime: optimizers as graphs, the step that runs them, checkpoints,
schedules.
"""

from __future__ import annotations

from ort_ops.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ort_ops.training.optimizer import build_adamw_model
from ort_ops.training.runner import EvaluationRunner, TrainingRunner
from ort_ops.training.schedule import cosine_with_warmup

__all__ = [
    "Checkpoint",
    "EvaluationRunner",
    "TrainingRunner",
    "build_adamw_model",
    "cosine_with_warmup",
    "load_checkpoint",
    "save_checkpoint",
]
