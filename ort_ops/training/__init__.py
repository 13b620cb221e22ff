"""Training in the stock ONNX Runtime.

`artifacts.generate_artifacts` makes the models and the checkpoint of a training from a forward model, `api`
runs them, `onnxblock` builds losses and optimizers of one's own. Who uses onnxruntime.training finds the same
names here.
"""

from __future__ import annotations

from ort_ops.training import api, artifacts, onnxblock, schedule
from ort_ops.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ort_ops.training.optimizer import build_optimizer_model

__all__ = [
    "Checkpoint",
    "api",
    "artifacts",
    "build_optimizer_model",
    "load_checkpoint",
    "onnxblock",
    "save_checkpoint",
    "schedule",
]
