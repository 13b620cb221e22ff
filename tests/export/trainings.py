"""The same training twice: in the runtime, from the files that were exported, and in PyTorch. And seeded data
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ort_ops.export import training_model_from_torch
from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.optimizer import AdamW

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01

Batch = Mapping[str, torch.Tensor]


def export(module: nn.Module, example: Any, folder: Path, **arguments: Any) -> RuntimeTraining:
    """Export `module` for a training with AdamW and start that."""
    training_model_from_torch(
        module,
        example,
        optimizer=AdamW(weight_decay=WEIGHT_DECAY),
        artifact_directory=folder,
        **arguments,
    )
    return RuntimeTraining(folder)


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


class RuntimeTraining:
    """A training of the artifacts in `folder`. Losses come alone, or before the additional outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(LEARNING_RATE)

    def step(self, batch: Batch) -> Any:
        self.module.train()
        results = self.module(_numpy(batch))
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return results

    def evaluate(self, batch: Batch) -> Any:
        self.module.eval()
        return self.module(_numpy(batch))

    def save(self) -> Path:
        """Write a checkpoint of the moment; returns its path."""
        path = self.folder / "trained"
        CheckpointState.save_checkpoint(self.state, path)
        return path


class TorchTraining:
    """A training of `module`, where `loss_of(module, batch)` gives the loss."""

    def __init__(self, module: nn.Module, loss_of: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
        self.module = module
        self._loss_of = loss_of
        self._optimizer = torch.optim.AdamW(module.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step(self, batch: Batch) -> float:
        loss = self._loss_of(self.module, batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def evaluate(self, batch: Batch) -> float:
        before = {part: part.training for part in self.module.modules()}
        self.module.eval()
        with torch.no_grad():
            loss = self._loss_of(self.module, batch).item()
        for part, training in before.items():
            part.training = training
        return loss


def _numpy(batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in batch.items()}
