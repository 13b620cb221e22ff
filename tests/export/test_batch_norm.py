"""Batch statistics in training, running ones in evaluation, both as PyTorch has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainings import Batch, RuntimeTraining, TorchTraining, export, gaussian, integers

from ort_ops.export import load_into_torch

STEPS = 20


class FourNorms(nn.Module):
    """One that learns, one that the training leaves alone, one without affine parameters, one without running
    statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, bias=False)  # the norm takes a bias away again
        self.learning = nn.BatchNorm2d(4, momentum=0.3)
        self.frozen = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.stateless = nn.BatchNorm1d(4, track_running_stats=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(F.relu(self.learning(self.convolution(x)))).mean(dim=(2, 3))
        return self.head(self.plain(x) + self.stateless(torch.tanh(x)))


def batch(seed: int) -> dict[str, torch.Tensor]:
    rows = 4 + seed % 3
    return {"x": gaussian(seed, rows, 3, 6, 6) + 0.5, "target": integers(seed, 3, rows)}


def loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"]), batch["target"], label_smoothing=0.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, RuntimeTraining]:
    torch.manual_seed(0)
    module = FourNorms()
    module.frozen.running_mean.copy_(gaussian(5, 4))
    module.frozen.eval()
    training = export(
        module,
        batch(0)["x"],
        tmp_path_factory.mktemp("artifacts"),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        example_targets=batch(0)["target"],
    )
    reference = TorchTraining(module, loss)
    for step in range(STEPS):
        # float32: some hundred roundings in another order, of which few add up
        np.testing.assert_allclose(training.step(batch(step)), reference.step(batch(step)), rtol=1e-5)
    return module, training


def test_the_export_leaves_each_modules_mode(trained: tuple[nn.Module, RuntimeTraining]) -> None:
    module, _ = trained
    assert module.training and module.learning.training and not module.frozen.training


def test_running_statistics_are_pytorchs(trained: tuple[nn.Module, RuntimeTraining]) -> None:
    module, training = trained
    received = FourNorms()
    load_into_torch(received, training.save())
    state, expected = received.state_dict(), module.state_dict()
    for name in ("learning.running_mean", "learning.running_var", "plain.running_mean", "plain.running_var"):
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert state["learning.num_batches_tracked"] == state["plain.num_batches_tracked"] == STEPS
    np.testing.assert_array_equal(state["frozen.running_mean"], gaussian(5, 4))
    np.testing.assert_array_equal(state["frozen.running_var"], np.ones(4))


def test_evaluation_uses_them(trained: tuple[nn.Module, RuntimeTraining]) -> None:
    module, training = trained
    expected = TorchTraining(module, loss).evaluate(batch(77))
    np.testing.assert_allclose(training.evaluate(batch(77)), expected, rtol=1e-5)
