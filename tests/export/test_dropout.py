"""Dropout, also that inside attention, draws in training and does nothing in evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainings import RuntimeTraining, export

RATE = 0.4
ROWS = 500


class TwoDropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 2.0))
        self.dropout = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        dropped = self.dropout(x * self.scale)
        # Attention of one head to one key, whose weight is 1, so that the result shows what was dropped.
        query, key = x[:, None, :, None], x[:, None, :1, None]
        attended = F.scaled_dot_product_attention(
            query, key, torch.ones_like(key), dropout_p=RATE if self.training else 0.0
        )
        return {"loss": dropped.sum() + attended.sum(), "dropped": dropped, "attended": attended}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> RuntimeTraining:
    return export(
        TwoDropouts(),
        torch.ones(4, 6),
        tmp_path_factory.mktemp("artifacts"),
        additional_output_names=["dropped", "attended"],
    )


def test_it_draws_in_training(training: RuntimeTraining) -> None:
    training.module.train()
    _, dropped, attended = training.module({"x": np.ones((ROWS, 6), np.float32)})
    for values, kept in ((dropped, 2.0 / (1.0 - RATE)), (attended, 1.0 / (1.0 - RATE))):
        np.testing.assert_allclose(values[values != 0], kept, rtol=1e-6)
        # Five standard deviations of the share of 3000 draws.
        assert abs(np.mean(values == 0) - RATE) < 5 * np.sqrt(RATE * (1 - RATE) / values.size)
    gradient = training.state.parameters["scale"].grad
    np.testing.assert_allclose(gradient, dropped.sum(axis=0) / 2.0, rtol=1e-5)


def test_each_step_draws_anew(training: RuntimeTraining) -> None:
    training.module.train()
    x = np.ones((ROWS, 6), np.float32)
    assert not np.array_equal(training.module({"x": x})[1], training.module({"x": x})[1])


def test_it_does_nothing_in_evaluation(training: RuntimeTraining) -> None:
    _, dropped, attended = training.evaluate({"x": torch.ones(ROWS, 6)})
    np.testing.assert_array_equal(dropped, np.full((ROWS, 6), 2.0, np.float32))
    np.testing.assert_array_equal(attended, np.ones((ROWS, 1, 6, 1), np.float32))
